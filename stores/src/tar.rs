//! The members of a tar archive: where their content is, and whether an archive of podman's may have them.
//!
//! ```text
//!   │ header, 512 │ content, padded to blocks of 512 │ header │ content │ … │ two blocks of zeros │ zeros │
//! ```
//!
//! Read are what Go's `archive/tar` and GNU tar write: POSIX's headers with pax records, and GNU's with long names, large numbers
//! and sparse files. Whoever unpacks the archive reads it again by its own rules, so nothing is accepted that two readers could
//! take for two things, or that leads out of the directory that it is unpacked to.

use std::collections::HashMap;
use std::io::{self, Read};

/// The length of a block.
const BLOCK: usize = 512;
const LONGEST_PATH: usize = 4095;
/// The most bytes in extended headers of one member: names, times, extended attributes.
const LONGEST_EXTENDED: u64 = 1 << 20;
/// The most bytes of all paths together, so that an archive that expands without end fills no memory.
const ALL_PATHS: usize = 64 << 20;

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Folder,
    File,
    Link,
}

/// A member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    /// Relative, without a slash at its end.
    pub(crate) path: String,
    pub(crate) kind: Kind,
    /// Where in the archive its content begins.
    pub(crate) begin: u64,
    /// The length of the content.
    pub(crate) size: u64,
}

/// Why an archive cannot be read.
#[derive(Debug)]
pub(crate) enum TarError {
    /// It is none, or none that is accepted.
    Bad(String),
    Io(io::Error),
}

impl From<io::Error> for TarError {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::UnexpectedEof { bad("it was cut off") } else { Self::Io(error) }
    }
}

/// What an archive is read from.
pub(crate) trait Source: Read {
    /// Goes on behind so many bytes, which are there.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;
}

impl Source for &[u8] {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let rest = usize::try_from(bytes).ok().and_then(|it| self.get(it..));
        *self = rest.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(())
    }
}

/// Is told of a member, and of its content if that was wanted.
pub(crate) type Tell<'a> = dyn FnMut(&Member, Option<Vec<u8>>) -> Result<(), TarError> + 'a;

/// Reads an archive up to its end, and returns its length. Each member is told before its content is skipped; of those whose content
/// `wanted` asks for, that is told too.
pub(crate) fn read(
    source: &mut dyn Source,
    wanted: &dyn Fn(&Member) -> bool,
    tell: &mut Tell<'_>,
) -> Result<u64, TarError> {
    let mut reader = Reader { source, at: 0 };
    let mut paths = Paths::default();
    while let Some(member) = next(&mut reader, &mut paths)? {
        let content = wanted(&member).then(|| reader.content(member.size)).transpose()?;
        if content.is_none() {
            reader.skip(member.size)?;
        }
        tell(&member, content)?;
    }
    reader.only_zeros()
}

/// The next member, and None at the end.
fn next(reader: &mut Reader<'_>, paths: &mut Paths) -> Result<Option<Member>, TarError> {
    let mut extended = Extended::default();
    loop {
        let block = reader.block()?;
        if block == [0; BLOCK] {
            let is_end = !extended.is_used && reader.block()? == [0; BLOCK];
            return if is_end { Ok(None) } else { Err(bad("it ends in its middle")) };
        }
        let header = Header::of(&block)?;
        match header.kind {
            b'x' => extended.add_records(&reader.extended(header.size)?)?,
            // Its records would count for all that follow: those that matter here are refused, so the others do not.
            b'g' => Extended { is_global: true, ..Extended::default() }.add_records(&reader.extended(header.size)?)?,
            b'L' => set(&mut extended.path, until_zero(&reader.extended(header.size)?))?,
            b'K' => set(&mut extended.target, until_zero(&reader.extended(header.size)?))?,
            kind => return member(reader, paths, &header, kind, extended).map(Some),
        }
        extended.is_used |= header.kind != b'g';
    }
}

fn member(
    reader: &mut Reader<'_>,
    paths: &mut Paths,
    header: &Header<'_>,
    kind: u8,
    extended: Extended,
) -> Result<Member, TarError> {
    let path = extended.path.unwrap_or_else(|| header.path());
    let size = extended.size.unwrap_or(header.size);
    let is_folder = path.ends_with(b"/");
    let path = plain(&path)?;
    let kind = match kind {
        b'5' => Kind::Folder,
        // Before POSIX, a slash told a folder.
        0 if is_folder => Kind::Folder,
        b'0' | b'7' | 0 if !is_folder => Kind::File,
        b'S' if !is_folder => {
            // The map of a sparse file goes on in blocks behind its header.
            let mut more = header.block[482] != 0;
            while more {
                more = reader.block()?[504] != 0;
            }
            Kind::File
        }
        b'1' | b'2' => Kind::Link,
        b'3' | b'4' | b'6' => return Err(bad(format!("{path:?} is a device or a pipe"))),
        other => return Err(bad(format!("{path:?} is of a kind that is not known, {other}"))),
    };
    // Some readers skip it, and others do not.
    if kind != Kind::File && size != 0 {
        return Err(bad(format!("{path:?} has content, and is no file")));
    }
    if kind == Kind::Link {
        let target = extended.target.unwrap_or_else(|| until_zero(&header.block[157..257]));
        paths.link(&path, &target, header.kind == b'1')?;
    }
    if let Some(name) = extended.sparse {
        // Under this name some readers unpack it.
        paths.add(&plain(&name)?, kind)?;
    }
    paths.add(&path, kind)?;
    Ok(Member { path, kind, begin: reader.at, size })
}

/// The members so far, and what they are.
#[derive(Default)]
struct Paths {
    known: HashMap<String, Kind>,
    bytes: usize,
}

impl Paths {
    fn add(&mut self, path: &str, kind: Kind) -> Result<(), TarError> {
        let mut above = path;
        while let Some((parent, _)) = above.rsplit_once('/') {
            match self.known.get(parent) {
                Some(Kind::Folder) => break,
                Some(_) => return Err(bad(format!("{path:?} is in {parent:?}, which is no folder"))),
                // Whoever unpacks it makes it.
                None => self.insert(parent, Kind::Folder)?,
            };
            above = parent;
        }
        match self.insert(path, kind)? {
            // What is below it may be there already.
            Some(Kind::Folder) if kind == Kind::Folder => Ok(()),
            Some(_) => Err(bad(format!("{path:?} is there twice"))),
            None => Ok(()),
        }
    }

    fn insert(&mut self, path: &str, kind: Kind) -> Result<Option<Kind>, TarError> {
        self.bytes += path.len() + 64;
        if self.bytes > ALL_PATHS {
            return Err(bad("it has too many members"));
        }
        Ok(self.known.insert(path.to_owned(), kind))
    }

    /// Whether a link leads to something in the archive: a hard one to a file before it, another one to any place in it. Since it goes up
    /// first and then only down, and the folders that it goes up are no links, this holds also if it goes down by other links.
    fn link(&self, path: &str, target: &[u8], is_hard: bool) -> Result<(), TarError> {
        let outside = || bad(format!("the link {path:?} leads out of it"));
        if is_hard {
            let target = plain(target).map_err(|_| outside())?;
            return if self.known.get(&target) == Some(&Kind::File) { Ok(()) } else { Err(outside()) };
        }
        let target = std::str::from_utf8(target).map_err(|_| outside())?;
        let (mut depth, mut goes_down) = (path.matches('/').count(), false);
        if target.is_empty() || target.starts_with('/') || target.len() > LONGEST_PATH || target.contains('\0') {
            return Err(outside());
        }
        for part in target.split('/') {
            match part {
                "" | "." => {}
                ".." if goes_down => return Err(outside()),
                ".." => depth = depth.checked_sub(1).ok_or_else(outside)?,
                _ => goes_down = true,
            }
        }
        Ok(())
    }
}

/// A path in its shortest form, if it leads nowhere else.
fn plain(path: &[u8]) -> Result<String, TarError> {
    let shown = String::from_utf8_lossy(path).into_owned();
    let text = std::str::from_utf8(path).map_err(|_| bad(format!("the name {shown:?} is not UTF-8")))?;
    let text = text.strip_suffix('/').unwrap_or(text);
    let text = text.strip_prefix("./").unwrap_or(text);
    // The directory itself.
    if text == "." {
        return Ok(text.to_owned());
    }
    let is_plain = |part: &str| !matches!(part, "" | "." | "..") && part.len() <= 255 && !part.contains('\0');
    if text.len() > LONGEST_PATH || !text.split('/').all(is_plain) {
        return Err(bad(format!("{shown:?} is no path below the directory that it is unpacked to")));
    }
    Ok(text.to_owned())
}

/// What stands before a member's header, and counts instead of what is in that.
#[derive(Default)]
struct Extended {
    is_global: bool,
    is_used: bool,
    path: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    sparse: Option<Vec<u8>>,
    size: Option<u64>,
}

impl Extended {
    /// Reads records of pax: `LENGTH KEY=VALUE\n`.
    fn add_records(&mut self, mut records: &[u8]) -> Result<(), TarError> {
        let wrong = || bad("an extended header cannot be read");
        while !records.is_empty() {
            let blank = records.iter().position(|it| *it == b' ').ok_or_else(wrong)?;
            let length = decimal(&records[..blank]).and_then(|it| usize::try_from(it).ok()).ok_or_else(wrong)?;
            let record = records.get(blank + 1..length).and_then(|it| it.strip_suffix(b"\n")).ok_or_else(wrong)?;
            records = &records[length..];
            let equals = record.iter().position(|it| *it == b'=').ok_or_else(wrong)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" | b"linkpath" | b"size" | b"GNU.sparse.name" if self.is_global => return Err(wrong()),
                b"path" => set(&mut self.path, value.to_vec())?,
                b"linkpath" => set(&mut self.target, value.to_vec())?,
                b"GNU.sparse.name" => set(&mut self.sparse, value.to_vec())?,
                b"size" => set(&mut self.size, decimal(value).ok_or_else(wrong)?)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Sets what must not be said twice.
fn set<T>(place: &mut Option<T>, value: T) -> Result<(), TarError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(bad("two extended headers say different things")),
    }
}

/// A member's header.
struct Header<'a> {
    block: &'a [u8; BLOCK],
    kind: u8,
    size: u64,
}

impl<'a> Header<'a> {
    fn of(block: &'a [u8; BLOCK]) -> Result<Self, TarError> {
        // The sum of all bytes, with blanks in its own place.
        let own = 148..156;
        let sum: u64 =
            block.iter().enumerate().map(|(at, it)| u64::from(if own.contains(&at) { b' ' } else { *it })).sum();
        if number(&block[own]) != Some(sum) {
            return Err(bad("it does not look like a tar archive, or a header in it was changed"));
        }
        // Go's reader, podman's, takes these for headers with other prefixes of the name: of GNU where the times are none, and of `star`.
        let is_time = |field: &[u8]| field[0] == 0 || number(field).is_some();
        let is_gnu = &block[257..265] == b"ustar  \0";
        let is_star = &block[257..263] == b"ustar\0" && &block[508..512] == b"tar\0";
        if is_star || (is_gnu && !(is_time(&block[345..357]) && is_time(&block[357..369]))) {
            return Err(bad("a member's name can be read in two ways"));
        }
        let size = number(&block[124..136]).filter(|it| *it <= i64::MAX as u64);
        let size = size.ok_or_else(|| bad("a member has a length that cannot be"))?;
        Ok(Self { block, kind: block[156], size })
    }

    fn path(&self) -> Vec<u8> {
        let name = until_zero(&self.block[..100]);
        let prefix = until_zero(&self.block[345..500]);
        // GNU's own headers have other things there.
        let is_posix = &self.block[257..263] == b"ustar\0";
        if is_posix && !prefix.is_empty() { [&prefix, &b"/"[..], &name].concat() } else { name }
    }
}

/// A number in a header: octal digits, or GNU's binary form.
fn number(field: &[u8]) -> Option<u64> {
    if let [0x80, rest @ ..] = field {
        return rest.iter().try_fold(0_u64, |sum, it| Some(sum.checked_mul(256)? + u64::from(*it)));
    }
    let digits = field.trim_ascii_start();
    let end = digits.iter().position(|it| matches!(it, 0 | b' ')).unwrap_or(digits.len());
    let (digits, rest) = digits.split_at(end);
    if rest.iter().any(|it| !matches!(it, 0 | b' ')) {
        return None;
    }
    digits.iter().try_fold(0_u64, |sum, it| match it {
        b'0'..=b'7' => Some(sum.checked_mul(8)? + u64::from(it - b'0')),
        _ => None,
    })
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |sum, it| match it {
        b'0'..=b'9' => sum.checked_mul(10)?.checked_add(u64::from(it - b'0')),
        _ => None,
    })
}

fn until_zero(field: &[u8]) -> Vec<u8> {
    field.split(|it| *it == 0).next().unwrap_or_default().to_vec()
}

fn bad(what: impl Into<String>) -> TarError {
    TarError::Bad(what.into())
}

struct Reader<'a> {
    source: &'a mut dyn Source,
    at: u64,
}

impl Reader<'_> {
    fn block(&mut self) -> Result<[u8; BLOCK], TarError> {
        let mut block = [0; BLOCK];
        self.source.read_exact(&mut block)?;
        self.at += BLOCK as u64;
        Ok(block)
    }

    /// Content with its padding.
    fn padded(size: u64) -> Result<u64, TarError> {
        size.checked_next_multiple_of(BLOCK as u64).ok_or_else(|| bad("a member has a length that cannot be"))
    }

    fn skip(&mut self, size: u64) -> Result<(), TarError> {
        let padded = Self::padded(size)?;
        self.at = self.at.checked_add(padded).ok_or_else(|| bad("a member has a length that cannot be"))?;
        Ok(self.source.skip(padded)?)
    }

    /// Content that is wanted, which is not long.
    fn content(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        let mut content = Vec::new();
        // Not more memory than there are bytes.
        (&mut *self.source).take(size).read_to_end(&mut content)?;
        if content.len() as u64 != size {
            return Err(bad("it was cut off"));
        }
        let padded = Self::padded(size)?;
        self.source.skip(padded - size)?;
        self.at += padded;
        Ok(content)
    }

    fn extended(&mut self, size: u64) -> Result<Vec<u8>, TarError> {
        if size > LONGEST_EXTENDED {
            return Err(bad("an extended header is too long"));
        }
        self.content(size)
    }

    /// Reads what is behind the end, which means nothing. Returns where all ends.
    fn only_zeros(mut self) -> Result<u64, TarError> {
        let mut rest = vec![0; 64 << 10];
        loop {
            match self.source.read(&mut rest) {
                Ok(0) => return Ok(self.at),
                Ok(read) if rest[..read].iter().all(|it| *it == 0) => self.at += read as u64,
                Ok(_) => return Err(bad("there is something behind its end")),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of a member.
    fn header(path: &str, size: u64, kind: u8, target: &str) -> Vec<u8> {
        let mut block = vec![0; BLOCK];
        block[..path.len()].copy_from_slice(path.as_bytes());
        block[157..157 + target.len()].copy_from_slice(target.as_bytes());
        block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        block[156] = kind;
        block[257..263].copy_from_slice(b"ustar\0");
        summed(block)
    }

    fn summed(mut block: Vec<u8>) -> Vec<u8> {
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|it| u64::from(*it)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        block
    }

    fn file(path: &str, kind: u8, content: &[u8]) -> Vec<u8> {
        let mut all = header(path, content.len() as u64, kind, "");
        all.extend_from_slice(content);
        all.resize(all.len().next_multiple_of(BLOCK), 0);
        all
    }

    fn ended(parts: &[Vec<u8>]) -> Vec<u8> {
        [parts.concat(), vec![0; 2 * BLOCK]].concat()
    }

    fn members(archive: &[u8]) -> Result<Vec<(String, u64, u64)>, String> {
        let mut found = Vec::new();
        let length = read(&mut { archive }, &|it| it.path == "wanted", &mut |it, content| {
            let wanted = archive.get(it.begin as usize..(it.begin + it.size) as usize);
            assert!(content.is_none_or(|it| Some(it.as_slice()) == wanted));
            found.push((it.path.clone(), it.begin, it.size));
            Ok(())
        });
        match length {
            Ok(length) => assert_eq!(length, archive.len() as u64),
            Err(TarError::Bad(what)) => return Err(what),
            Err(TarError::Io(error)) => panic!("{error}"),
        }
        Ok(found)
    }

    fn of(parts: &[Vec<u8>]) -> Result<Vec<(String, u64, u64)>, String> {
        members(&ended(parts))
    }

    #[test]
    fn members_are_found_with_their_content() {
        let long = "d/".repeat(120) + "file";
        let found = of(&[
            header("d/", 0, b'5', ""),
            file("wanted", b'0', &[7; 700]),
            file("old", 0, b"x"),
            file("x", b'x', format!("{} path={long}\n", long.len() + 10).as_bytes()),
            file("short", b'0', b"of a long name"),
            file("././@LongLink", b'L', format!("{long}2\0").as_bytes()),
            file("short", b'0', b""),
            header("hard", 0, b'1', "wanted"),
            header("d/soft", 0, b'2', "../wanted"),
            file("x", b'g', b"18 comment=of all\n"),
        ]);
        let found = found.unwrap_or_else(|why| panic!("{why}"));
        let names: Vec<_> = found.iter().map(|it| (it.0.as_str(), it.2)).collect();
        let long2 = format!("{long}2");
        assert_eq!(
            names,
            [("d", 0), ("wanted", 700), ("old", 1), (&long, 14), (&long2, 0), ("hard", 0), ("d/soft", 0)]
        );
        assert_eq!(found[1].1, 1024);
        // Sizes that octal digits do not reach, and that pax says.
        let mut big = header("big", 0, b'0', "");
        big[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
        let big = [summed(big), vec![1; 512]].concat();
        assert_eq!(of(&[big]).unwrap(), [("big".to_owned(), 512, 512)]);
        let sized = [file("x", b'x', b"12 size=600\n"), header("sized", 0, b'0', ""), vec![1; 1024]].concat();
        assert_eq!(of(&[sized]).unwrap(), [("sized".to_owned(), 1536, 600)]);
        assert_eq!(of(&[]).unwrap(), []);
    }

    #[test]
    fn what_leads_out_of_an_archive_is_refused() {
        for path in ["/etc/passwd", "../x", "a/../../x", "a//b", "..", "a/./b", ""] {
            assert!(of(&[file(path, b'0', b"")]).is_err(), "{path:?}");
            let record = format!(" path={path}\n");
            let record = format!("{}{record}", record.len() + if record.len() < 9 { 1 } else { 2 });
            let extended = [file("x", b'x', record.as_bytes()), file("plain", b'0', b"")];
            let why = of(&extended).unwrap_err();
            assert!(why.contains("is no path below"), "{path:?}: {why}");
            let long = [file("././@LongLink", b'L', format!("{path}\0").as_bytes()), file("plain", b'0', b"")];
            assert!(of(&long).is_err(), "{path:?}");
            let sparse = format!(" GNU.sparse.name={path}\n");
            let sparse = format!("{}{sparse}", sparse.len() + 2);
            let sparse = [file("x", b'x', sparse.as_bytes()), file("plain", b'0', b"")];
            assert!(of(&sparse).is_err(), "{path:?}");
        }
        for target in ["/etc", "../x", "a/../../x", "a/../x", ""] {
            assert!(of(&[header("link", 0, b'2', target)]).unwrap_err().contains("leads out"), "{target:?}");
        }
        // By way of a link, also one that does not lead out.
        let through = [header("d/", 0, b'5', ""), header("link", 0, b'2', "d"), file("link/x", b'0', b"")];
        assert!(of(&through).unwrap_err().contains("is no folder"));
        let later = [file("link/x", b'0', b""), header("link", 0, b'2', "d")];
        assert!(of(&later).unwrap_err().contains("is there twice"));
        assert!(of(&[header("hard", 0, b'1', "later"), file("later", b'0', b"")]).is_err());
        assert!(of(&[header("soft", 0, b'2', "x"), header("hard", 0, b'1', "soft")]).is_err());
        for kind in [b'3', b'4', b'6', b'D', b'M', b'V', b'X', 0xff] {
            assert!(of(&[header("odd", 0, kind, "")]).is_err(), "{kind}");
        }
    }

    #[test]
    fn what_two_readers_would_take_for_two_things_is_refused() {
        let refused = |parts: &[Vec<u8>], why: &str| {
            let found = of(parts);
            assert!(found.as_ref().is_err_and(|it| it.contains(why)), "{why}: {found:?}");
        };
        refused(&[file("a", b'0', b"1"), file("a", b'0', b"2")], "is there twice");
        refused(&[file("a", b'0', b"1"), file("./a", b'0', b"2")], "is there twice");
        refused(&[[header("d/", 512, b'5', ""), vec![0; 512]].concat()], "is no file");
        refused(&[[header("l", 512, b'2', "x"), vec![0; 512]].concat()], "is no file");
        refused(
            &[file("x", b'x', b"9 path=a\n"), file("x", b'x', b"9 path=b\n"), file("c", b'0', b"")],
            "different things",
        );
        refused(&[file("x", b'x', b"9 path=a\n9 path=b\n"), file("c", b'0', b"")], "different things");
        refused(&[file("x", b'g', b"9 path=a\n"), file("c", b'0', b"")], "cannot be read");
        for records in [
            "",
            "9 path=a",
            "99 path=a\n",
            "9path=a\n\n",
            "1 \n",
            "0 path=a\n",
            "10 size=-5\n",
            "18446744073709551616 a=b\n",
        ] {
            let wrong = of(&[file("x", b'x', records.as_bytes()), file("c", b'0', b"")]);
            assert_eq!(wrong.is_err(), !records.is_empty(), "{records:?}: {wrong:?}");
        }
        refused(&[file("a", b'0', b""), vec![0; BLOCK], file("b", b'0', b"")], "ends in its middle");
        let behind = [ended(&[file("a", b'0', b"")]), file("b", b'0', b"")].concat();
        assert!(members(&behind).unwrap_err().contains("behind its end"));
    }

    /// Go's reader takes what is there for a part of the name.
    #[test]
    fn a_name_that_another_reader_would_begin_otherwise_is_refused() {
        let with = |changes: &[(usize, &[u8])]| {
            let mut block = header("a", 0, b'0', "");
            changes.iter().for_each(|(at, bytes)| block[*at..at + bytes.len()].copy_from_slice(bytes));
            of(&[summed(block)])
        };
        let (gnu, time): ((usize, &[u8]), &[u8]) = ((257, b"ustar  \0"), b"14712345671\0");
        assert!(with(&[]).is_ok() && with(&[gnu]).is_ok() && with(&[gnu, (345, time), (357, time)]).is_ok());
        let ambiguous: [&[(usize, &[u8])]; 3] =
            [&[gnu, (345, b"../../etc")], &[gnu, (345, time), (357, b"d/link")], &[(345, b"d/"), (508, b"tar\0")]];
        for changes in ambiguous {
            assert!(with(changes).is_err_and(|it| it.contains("in two ways")), "{changes:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(at in 0_usize..4000, by: Vec<u8>, sum: bool) {
            let mut whole = ended(&[
                header("d/", 0, b'5', ""),
                file("x", b'x', b"15 path=d/long\n"),
                file("short", b'0', &[1; 600]),
                header("d/link", 0, b'2', "long"),
            ]);
            let at = at % whole.len();
            let until = (at + by.len()).min(whole.len());
            whole[at..until].copy_from_slice(&by[..until - at]);
            if sum {
                let block = at / BLOCK * BLOCK;
                let summed = summed(whole[block..block + BLOCK].to_vec());
                whole[block..block + BLOCK].copy_from_slice(&summed);
            }
            if let Ok(found) = members(&whole) {
                for (path, begin, size) in found {
                    proptest::prop_assert!(begin + size <= whole.len() as u64);
                    proptest::prop_assert!(!path.starts_with('/') && !path.split('/').any(|it| it == ".."), "{path}");
                }
            }
        }
    }

    #[test]
    fn an_archive_that_was_cut_or_changed_is_refused() {
        let whole = ended(&[file("a", b'0', &[1; 600]), file("b", b'0', b"2")]);
        for length in 0..whole.len() {
            assert!(members(&whole[..length]).is_err(), "{length}");
        }
        for at in (0..BLOCK).chain(3 * BLOCK..4 * BLOCK) {
            let mut changed = whole.clone();
            changed[at] ^= 0x11;
            assert!(members(&changed).is_err(), "{at}");
        }
        let mut long = header("a", 0, b'0', "");
        long[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        assert!(of(&[summed(long.clone())]).is_err());
        long[124..136].fill(0xff);
        assert!(of(&[summed(long)]).is_err());
        let many: Vec<_> = (0..1000).map(|it| header(&format!("{it}"), 0, b'0', "")).collect();
        assert_eq!(of(&many).unwrap().len(), 1000);
    }
}
