//! What a cut consists of: a manifest where it was made, and a note in each part.
//!
//! ```text
//!   DIR/cut.json                  the manifest: the cut's name, and for each part the host, the directory and the hash of its note
//!   DIR/HOST/rekindle-cut.json    the note: the cut's name, the processes, their connections, and the sizes of all files
//! ```
//!
//! A part without a manifest that has its hash belongs to no cut. So parts of two cuts are never restored together.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::failure::Failure;
use crate::network::connection::Connection;

/// The version of manifests and notes, and of the messages about them. All hosts must have the same.
pub(super) const VERSION: u32 = 1;
/// The manifest, in the cut's directory.
const MANIFEST: &str = "cut.json";
/// The note, in a part's.
pub(super) const NOTE: &str = "rekindle-cut.json";
/// The ends of names of files that change after the dump.
const CHANGES: [&str; 2] = [".log", ".new"];

/// A cut.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    /// The cut's name.
    pub(super) cut: String,
    /// When it was made, in seconds since 1970.
    pub(super) made: u64,
    /// Whether the trees were to be killed with it.
    pub(super) stopped: bool,
    pub(super) parts: Vec<Entry>,
}

/// A part of a cut, as the others know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) index: usize,
    pub(super) host: String,
    /// The directory of the part on its host.
    pub(super) dir: PathBuf,
    /// The root of its tree.
    pub(super) root: i32,
    /// The number of its processes.
    pub(super) processes: usize,
    /// The hash of its note.
    pub(super) note: u64,
}

/// A process at the time of its dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Dumped {
    pub(super) pid: i32,
    /// When it started, in clock ticks since the machine did.
    pub(super) start: u64,
}

/// What a part says of itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Note {
    pub(super) version: u32,
    pub(super) cut: String,
    pub(super) index: usize,
    pub(super) host: String,
    pub(super) root: i32,
    /// The start of the machine on which it was dumped.
    pub(super) boot: String,
    pub(super) processes: Vec<Dumped>,
    /// Those of them that somebody had stopped.
    pub(super) stopped: Vec<i32>,
    pub(super) connections: Vec<Connection>,
    /// The ports at which they listen.
    pub(super) ports: Vec<u16>,
    /// Options for `criu restore`.
    pub(super) options: Vec<String>,
    /// All files of the part, and their sizes.
    pub(super) files: Vec<(String, u64)>,
}

impl Manifest {
    /// Reads it.
    pub(super) fn read(dir: &Path) -> Result<Self, Failure> {
        let path = dir.join(MANIFEST);
        let text = fs::read(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Failure::refused(anyhow!(
                "there is no {}: no cut was completed there, or it was made from another host",
                path.display()
            )),
            _ => anyhow!(error).context(format!("cannot read {}", path.display())).into(),
        })?;
        let bad = |what: String| Failure::bad_image(anyhow!("bad {}: {what}", path.display()));
        let manifest: Self = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
        if manifest.version != VERSION {
            return Err(bad(format!("it is of version {}, and this is version {VERSION}", manifest.version)));
        }
        let is_good = |(at, it): (usize, &Entry)| it.index == at && super::options::is_host(&it.host);
        if manifest.parts.is_empty() || !manifest.parts.iter().enumerate().all(is_good) || !is_name(&manifest.cut) {
            return Err(bad("its parts are not those of a cut".to_owned()));
        }
        Ok(manifest)
    }

    /// Writes it: from now on the cut is good.
    pub(super) fn write(&self, dir: &Path) -> Result<(), Failure> {
        write(dir, MANIFEST, self).map(drop)
    }

    /// Whether the directory has one.
    pub(super) fn is_in(dir: &Path) -> bool {
        dir.join(MANIFEST).exists()
    }
}

impl Note {
    /// Writes it: from now on the part is complete. Returns its hash.
    pub(super) fn write(&self, dir: &Path) -> Result<u64, Failure> {
        write(dir, NOTE, self)
    }

    /// Reads it, and compares it with the manifest and the files.
    pub(super) fn read(cut: &str, part: &Entry) -> Result<Self, Failure> {
        let (path, dir) = (part.dir.join(NOTE), part.dir.display());
        let text = fs::read(&path).map_err(|error| {
            Failure::bad_image(anyhow!("there is no whole part of the cut in {dir}: {}: {error}", path.display()))
        })?;
        let other = || Failure::bad_image(anyhow!("the part in {dir} is of another cut, or was changed"));
        let note: Self = serde_json::from_slice(&text).map_err(|_| other())?;
        if xxh3_64(&text) != part.note || note.version != VERSION || note.cut != cut || note.index != part.index {
            return Err(other());
        }
        for (name, size) in &note.files {
            let there = fs::symlink_metadata(part.dir.join(name)).map(|it| it.len());
            if there.as_ref().ok() != Some(size) {
                let there = there.map_or_else(|error| error.to_string(), |it| format!("it has {it} bytes"));
                return Err(Failure::bad_image(anyhow!(
                    "the part in {dir} is not whole: {name} had {size} bytes: {there}"
                )));
            }
        }
        Ok(note)
    }
}

/// Whether it may be the name of a cut.
pub(super) fn is_name(cut: &str) -> bool {
    cut.len() == 32 && cut.chars().all(|it| it.is_ascii_hexdigit())
}

/// The files of a part that do not change any more, and their sizes. They are on the disk when this returns.
pub(super) fn files(dir: &Path) -> Result<Vec<(String, u64)>, Failure> {
    let read = || -> std::io::Result<Vec<(String, u64)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if CHANGES.iter().any(|it| name.ends_with(it)) || name == NOTE {
                continue;
            }
            if entry.file_type()?.is_file() {
                File::open(entry.path())?.sync_data()?;
            }
            files.push((name, entry.metadata()?.len()));
        }
        files.sort();
        Ok(files)
    };
    Ok(read().with_context(|| format!("cannot make {} durable", dir.display()))?)
}

/// Writes a file so that it is there whole or not at all. Returns its hash.
fn write(dir: &Path, name: &str, what: &impl Serialize) -> Result<u64, Failure> {
    let path = dir.join(name);
    let written = || -> anyhow::Result<u64> {
        let (text, new) = (serde_json::to_vec_pretty(what)?, path.with_extension("new"));
        let mut file = File::create(&new)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        File::open(dir)?.sync_all()?;
        Ok(xxh3_64(&text))
    };
    Ok(written().with_context(|| format!("cannot write {}", path.display()))?)
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    const CUT: &str = "00112233445566778899aabbccddeeff";

    fn part(dir: &Path) -> (Note, Entry) {
        fs::write(dir.join("pages-1.img"), "pages").unwrap();
        fs::write(dir.join("dump.log"), "said").unwrap();
        let note = Note {
            version: VERSION,
            cut: CUT.to_owned(),
            index: 0,
            host: "a".to_owned(),
            root: 7,
            boot: String::new(),
            processes: vec![Dumped { pid: 7, start: 1 }],
            stopped: Vec::new(),
            connections: vec![Connection { own: "10.0.0.1:5".parse().unwrap(), other: "[fe80::1]:6".parse().unwrap() }],
            ports: Vec::new(),
            options: Vec::new(),
            files: files(dir).unwrap(),
        };
        let hash = note.write(dir).unwrap();
        let dir = dir.to_owned();
        (note, Entry { index: 0, host: "a".to_owned(), dir, root: 7, processes: 1, note: hash })
    }

    #[test]
    fn a_part_that_is_missing_or_damaged_or_of_another_cut_is_found() {
        let dir = TempDir::new().unwrap();
        let (note, entry) = part(dir.path());
        assert_eq!(note.files, [("pages-1.img".to_owned(), 5)]);
        assert_eq!(Note::read(CUT, &entry).unwrap().connections, note.connections);
        let said = |cut: &str, entry: &Entry| Note::read(cut, entry).unwrap_err().to_string();
        assert!(said(&CUT.replace('0', "1"), &entry).contains("another cut"));
        assert!(said(CUT, &Entry { note: 1, ..entry.clone() }).contains("another cut"));
        assert!(said(CUT, &Entry { index: 1, ..entry.clone() }).contains("another cut"));
        fs::write(dir.path().join("dump.log"), "said more").unwrap();
        Note::read(CUT, &entry).unwrap();
        fs::write(dir.path().join("pages-1.img"), "page").unwrap();
        assert!(said(CUT, &entry).contains("pages-1.img had 5 bytes"));
        fs::remove_file(dir.path().join("pages-1.img")).unwrap();
        assert!(said(CUT, &entry).contains("not whole"));
        fs::remove_file(dir.path().join(NOTE)).unwrap();
        assert!(said(CUT, &entry).contains("no whole part"));
    }

    #[test]
    fn a_manifest_is_whole_or_not_there() {
        let dir = TempDir::new().unwrap();
        assert!(Manifest::read(dir.path()).unwrap_err().to_string().contains("no cut was completed"));
        let (_, entry) = part(dir.path());
        let manifest =
            Manifest { version: VERSION, cut: CUT.to_owned(), made: 1, stopped: false, parts: vec![entry.clone()] };
        manifest.write(dir.path()).unwrap();
        assert_eq!(Manifest::read(dir.path()).unwrap().parts, std::slice::from_ref(&entry));
        let bad = [
            Manifest { version: 2, ..manifest.clone() },
            Manifest { parts: Vec::new(), ..manifest.clone() },
            Manifest { parts: vec![Entry { host: "../a".to_owned(), ..entry }], ..manifest.clone() },
            Manifest { cut: "../../etc".to_owned(), ..manifest },
        ];
        for bad in bad {
            bad.write(dir.path()).unwrap();
            assert!(Manifest::read(dir.path()).unwrap_err().to_string().contains("bad "), "{bad:?}");
        }
    }
}
