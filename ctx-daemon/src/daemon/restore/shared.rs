//! The memory that a restored process shares with its worker, taken from its mappings.
//!
//! CRIU gives a process new memfds. The daemon may open anything through `/proc/PID/map_files`, and could then write to it. So
//! the daemon hands on only files that are mapped shared and writable. They are memfds with the names of ours, and have our seals
//! and size; or the process has them mapped in the pinned window, where interposers map files that programs register, and they are
//! the very files that the list of mappings names, and lie in memory. So no process, and no image, can have the daemon open a file
//! that the process could not write itself, or that somebody's file system can keep it waiting for.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use rekindle_wire::attach::Pinned;
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::layout::{MANAGED_NAME, PINNED_NAME, SHARED_NAME, STAGING_NAME, VARIABLES_NAME};
use rekindle_wire::window;
use thiserror::Error;

use super::super::managed;
use super::super::memfd::{self, MemfdError};

const PAGE: u64 = 4096;
/// The beginning of the names of all memfds that interposers make.
const OURS: &str = "/memfd:rekindle-";

/// Why a process's shared memory cannot be taken.
#[derive(Debug, Error)]
pub(in crate::daemon) enum SharedError {
    #[error("its mappings cannot be read: {0}")]
    Maps(io::Error),
    #[error("{0} is mapped more than once, or not at all")]
    Count(&'static str),
    #[error("cannot open {what}: {source}")]
    Open { what: &'static str, source: io::Error },
    #[error(transparent)]
    Memory(#[from] MemfdError),
    #[error("pinned memory at {0:#x} is not what was dumped")]
    Pinned(u64),
    #[error("managed memory at {0:#x} is not what was dumped")]
    Managed(u64),
    #[error("its userfaultfd cannot be taken: {0}")]
    Userfault(io::Error),
    #[error("no file in memory is mapped shared and writable at {0:#x}")]
    NoFile(u64),
}

impl Failing for SharedError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Maps(error) | Self::Userfault(error) => Failing::kind(error),
            Self::Open { source, .. } => Failing::kind(source),
            Self::Count(_) | Self::Pinned(_) | Self::Managed(_) => FailureKind::BadImage,
            Self::NoFile(_) => FailureKind::Refused,
            Self::Memory(error) => error.kind(),
        }
    }
}

/// The memory that a process shares with its worker.
#[derive(Debug)]
pub(in crate::daemon) struct SharedMemory {
    pub(super) ring: File,
    pub(super) staging: File,
    /// Pinned memory, and the pages of managed memory.
    pub(super) pinned: Vec<(Pinned, File)>,
    /// The process's userfaultfd, if it has managed memory that moves.
    pub(super) userfault: Option<OwnedFd>,
}

/// Whether a process has a ring, valid or not.
pub(super) fn has_ring(pid: i32) -> Result<bool, SharedError> {
    let maps = read_maps(pid)?;
    Ok(maps.iter().any(|it| it.is(SHARED_NAME)))
}

/// Takes a process's shared memory. `dumped` is the pinned memory that it had, address and size.
pub(in crate::daemon) fn take(pid: i32, dumped: &[(u64, u64)]) -> Result<SharedMemory, SharedError> {
    let maps = read_maps(pid)?;
    let one = |name, what| {
        let mut files = files(&maps, |it| it.is(name)).into_values();
        match (files.next(), files.next()) {
            (Some(mappings), None) => mappings[0].open(pid, what),
            _ => Err(SharedError::Count(what)),
        }
    };
    let ring = one(SHARED_NAME, "the ring")?;
    memfd::check_ring(&ring)?;
    let staging = one(STAGING_NAME, "the staging")?;
    memfd::check_staging(&staging)?;
    let mut pinned = Vec::new();
    for mappings in files(&maps, |it| it.pinned_serial().is_some()).into_values() {
        pinned.push(take_pinned(pid, &mappings)?);
    }
    for mapping in maps.iter().filter(|it| it.is_registered()) {
        pinned.push(mapping.registered(pid, &maps)?);
    }
    let managed = files(&maps, |it| it.managed_serial().is_some());
    let userfault = match managed.is_empty() {
        true => None,
        false => Some(managed::userfault_of(pid).map_err(SharedError::Userfault)?),
    };
    for mappings in managed.into_values() {
        pinned.push(take_managed(pid, &mappings)?);
    }
    let found = |(address, size): &&(u64, u64)| {
        let mut found = pinned.iter().map(|(it, _)| it);
        !found.any(|it| it.address == *address && it.size == *size)
    };
    if let Some((address, _)) = dumped.iter().find(found) {
        return Err(SharedError::Pinned(*address));
    }
    Ok(SharedMemory { ring, staging, pinned, userfault })
}

/// The file that a process has mapped shared and writable at an address of the pinned window.
pub(in crate::daemon) fn registered(pid: i32, address: u64, size: u64) -> Result<(Pinned, File), SharedError> {
    let maps = read_maps(pid)?;
    let is_it = |it: &&Mapping| it.is_registered() && it.start == address && it.end.checked_sub(it.start) == Some(size);
    maps.iter().find(is_it).ok_or(SharedError::NoFile(address))?.registered(pid, &maps)
}

/// One memfd of pinned memory. Its mapping may be in parts, where the process has changed the protection of some.
fn take_pinned(pid: i32, mappings: &[&Mapping]) -> Result<(Pinned, File), SharedError> {
    let file = mappings[0].open(pid, "pinned memory")?;
    let size = file.metadata().map_err(SharedError::Maps)?.len();
    memfd::check(&file, "pinned memory", size)?;
    let addresses = mappings.iter().filter_map(|it| it.start.checked_sub(it.offset));
    // A process may map the memfd a second time elsewhere. The worker uses the address that the device knows.
    let address = addresses
        .filter(|address| window::pinned().contains(address))
        .min()
        .ok_or(SharedError::Pinned(mappings[0].start))?;
    let fits = size <= window::PINNED_SIZE && address + size <= window::pinned().end;
    if size == 0 || !fits || !size.is_multiple_of(PAGE) || !address.is_multiple_of(PAGE) {
        return Err(SharedError::Pinned(address));
    }
    let serial = mappings[0].pinned_serial().unwrap_or_default();
    Ok((Pinned { address, size, serial, file_offset: None }, file))
}

/// One memfd of managed memory. As pinned memory, it may be mapped in parts.
fn take_managed(pid: i32, mappings: &[&Mapping]) -> Result<(Pinned, File), SharedError> {
    let file = mappings[0].open(pid, "managed memory")?;
    let size = file.metadata().map_err(SharedError::Maps)?.len();
    memfd::check(&file, "managed memory", size)?;
    let addresses = mappings.iter().filter_map(|it| it.start.checked_sub(it.offset));
    let device = |address: u64| Some(window::device(window::device_of(address)?));
    // The driver has placed variables anywhere; the worker knows where.
    let of_variables = mappings[0].name().is_some_and(|it| it.starts_with(VARIABLES_NAME));
    let inside = |address: &u64| of_variables || device(*address).is_some_and(|it| it.end - address >= size);
    let address = addresses.filter(inside).min().ok_or(SharedError::Managed(mappings[0].start))?;
    if size == 0 || !size.is_multiple_of(PAGE) || !address.is_multiple_of(PAGE) {
        return Err(SharedError::Managed(address));
    }
    let serial = mappings[0].managed_serial().unwrap_or_default();
    Ok((Pinned { address, size, serial, file_offset: None }, file))
}

/// The mappings of each memfd among those that are wanted.
fn files(maps: &[Mapping], wanted: impl Fn(&Mapping) -> bool) -> BTreeMap<(&str, u64), Vec<&Mapping>> {
    let mut files = BTreeMap::<_, Vec<_>>::new();
    for mapping in maps.iter().filter(|it| wanted(it)) {
        let file = (mapping.device.as_str(), mapping.inode);
        files.entry(file).or_default().push(mapping);
    }
    files
}

/// A shared, writable mapping.
#[derive(Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    device: String,
    inode: u64,
    path: String,
}

impl Mapping {
    /// The memfd's name; none for other files.
    fn name(&self) -> Option<&str> {
        self.path.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")
    }

    fn is(&self, name: &std::ffi::CStr) -> bool {
        self.name().is_some_and(|it| it.as_bytes() == name.to_bytes())
    }

    /// The serial number of pinned memory.
    fn pinned_serial(&self) -> Option<u64> {
        self.name()?.strip_prefix(PINNED_NAME)?.parse().ok()
    }

    /// The serial number of managed memory.
    fn managed_serial(&self) -> Option<u64> {
        let name = self.name()?;
        name.strip_prefix(VARIABLES_NAME).or_else(|| name.strip_prefix(MANAGED_NAME))?.parse().ok()
    }

    /// Whether it is a mapping of a file that the program has registered: all other mappings there are of our memfds.
    fn is_registered(&self) -> bool {
        let window = window::pinned();
        self.start >= window.start && self.end <= window.end && !self.path.starts_with(OURS)
    }

    /// Whether the file lies in memory: as the ring does, like all shared memory without a name, or in a file system of that kind.
    fn is_in_memory(&self, pid: i32, maps: &[Mapping]) -> Result<bool, SharedError> {
        if maps.iter().any(|it| it.is(SHARED_NAME) && it.device == self.device) {
            return Ok(true);
        }
        let mounts = std::fs::read(format!("/proc/{pid}/mountinfo")).map_err(SharedError::Maps)?;
        let mounts = String::from_utf8_lossy(&mounts);
        Ok(mounts.lines().any(|line| is_mounted_memory(line, &self.device)))
    }

    fn registered(&self, pid: i32, maps: &[Mapping]) -> Result<(Pinned, File), SharedError> {
        let (address, size) = (self.start, self.end - self.start);
        if !self.is_in_memory(pid, maps)? {
            return Err(SharedError::NoFile(address));
        }
        let file = self.open(pid, "registered memory")?;
        let about = file.metadata().map_err(SharedError::Maps)?;
        // Another file may be mapped there by now, for reading only.
        let device = format!("{:02x}:{:02x}", libc::major(about.dev()), libc::minor(about.dev()));
        if !about.is_file() || about.ino() != self.inode || device != self.device {
            return Err(SharedError::NoFile(address));
        }
        Ok((Pinned { address, size, serial: 0, file_offset: Some(self.offset) }, file))
    }

    fn open(&self, pid: i32, what: &'static str) -> Result<File, SharedError> {
        let path = format!("/proc/{pid}/map_files/{:x}-{:x}", self.start, self.end);
        // A memfd opens at once. A FIFO in its place, if that were possible, would not.
        let file = File::options().read(true).write(true).open(path);
        file.map_err(|source| SharedError::Open { what, source })
    }
}

/// Whether a line of `mountinfo` is of a file system in memory with this device number, which the list of mappings has in
/// hexadecimal digits.
fn is_mounted_memory(line: &str, device: &str) -> bool {
    let hex = |digits| u32::from_str_radix(digits, 16).ok();
    let wanted = device.split_once(':').and_then(|(major, minor)| Some((hex(major)?, hex(minor)?)));
    let Some((before, behind)) = line.split_once(" - ") else { return false };
    let found = before.split(' ').nth(2).and_then(|it| it.split_once(':'));
    let found = found.and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
    wanted.is_some() && wanted == found && matches!(behind.split(' ').next(), Some("tmpfs" | "hugetlbfs" | "ramfs"))
}

fn read_maps(pid: i32) -> Result<Vec<Mapping>, SharedError> {
    let text = std::fs::read(format!("/proc/{pid}/maps")).map_err(SharedError::Maps)?;
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(parse).collect())
}

/// Parses `start-end rw-s offset device inode   path`; none for mappings that are not shared and writable.
fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    if fields.next()? != "rw-s" {
        return None;
    }
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        offset: hex(fields.next()?)?,
        device: fields.next()?.to_owned(),
        inode: fields.next()?.parse().ok()?,
        path: fields.next()?.trim_start().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::memfd::tests::memfd;
    use super::*;
    use rekindle_wire::layout::{SEALS, SHARED_SIZE, STAGING_SIZE};
    use std::os::fd::AsRawFd;

    #[test]
    fn only_shared_writable_mappings_of_memfds_by_our_names_count() {
        let line = "6000-8000 rw-s 00001000 00:01 77                       /memfd:rekindle-pinned-5 (deleted)";
        let mapping = parse(line).unwrap();
        assert_eq!((mapping.start, mapping.end), (0x6000, 0x8000));
        assert_eq!((mapping.offset, mapping.inode), (0x1000, 77));
        assert!(mapping.pinned_serial() == Some(5) && !mapping.is(SHARED_NAME));
        assert_eq!(parse(&line.replace("rw-s", "r--s")), None);
        assert_eq!(parse(&line.replace("rw-s", "rw-p")), None);
        for path in [
            "/tmp/memfd:rekindle-pinned-5 (deleted)",
            "/memfd:rekindle-pinned-5",
            "/memfd:rekindle-pinned-5x (deleted)",
        ] {
            let other = line.replace("/memfd:rekindle-pinned-5 (deleted)", path);
            assert_eq!(parse(&other).unwrap().pinned_serial(), None, "{path}");
        }
        assert_eq!(parse("nonsense"), None);
        assert_eq!(parse("1-2 rw-s 0 00:01 0"), None);
    }

    #[test]
    fn file_systems_in_memory_are_known_by_their_device() {
        let line = "36 35 0:45 / /dev/shm rw,nosuid shared:17 - tmpfs tmpfs rw,size=64k";
        assert!(is_mounted_memory(line, "00:2d"));
        assert!(!is_mounted_memory(line, "00:45") && !is_mounted_memory(line, "00:2e") && !is_mounted_memory(line, ""));
        assert!(!is_mounted_memory(&line.replace("- tmpfs", "- fuse.tmpfs"), "00:2d"));
        assert!(!is_mounted_memory("nonsense", "00:2d"));
    }

    /// Maps into this process, at an address if one is given.
    fn map(file: &File, size: usize, address: u64) {
        let flags = libc::MAP_SHARED | if address == 0 { 0 } else { libc::MAP_FIXED_NOREPLACE };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: without MAP_FIXED a mapping replaces nothing.
        let at = unsafe { libc::mmap(address as *mut _, size, protection, flags, file.as_raw_fd(), 0) };
        assert!(at != libc::MAP_FAILED);
        assert!(address == 0 || at as u64 == address);
    }

    /// Maps a file from its second page on.
    fn map_part(file: &File, size: usize, address: u64, protection: i32) {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        // SAFETY: this flag replaces nothing.
        let at = unsafe { libc::mmap(address as *mut _, size, protection, flags, file.as_raw_fd(), 4096) };
        assert!(at as u64 == address);
    }

    /// A single test, since all cases use the mappings of this process.
    #[test]
    fn a_process_is_taken_with_its_ring_staging_and_pinned_memory() {
        let own = std::process::id() as i32;
        assert!(!has_ring(own).unwrap());
        let ring = memfd(SHARED_NAME, SHARED_SIZE as u64, SEALS);
        map(&ring, SHARED_SIZE, 0);
        assert!(has_ring(own).unwrap());
        assert!(matches!(take(own, &[]), Err(SharedError::Count("the staging"))));
        let staging = memfd(STAGING_NAME, STAGING_SIZE as u64, SEALS);
        map(&staging, STAGING_SIZE, 0);
        let Ok(none) = take(own, &[]) else {
            return eprintln!("skipped: map_files may not be opened here");
        };
        assert!(none.pinned.is_empty());

        let address = window::PINNED_BASE + (1 << 30);
        let pinned = memfd(c"rekindle-pinned-7", 3 * PAGE, SEALS);
        map(&pinned, 3 * 4096, address);
        // SAFETY: the middle page of the mapping just made, which nobody uses.
        unsafe { libc::mprotect((address + PAGE) as *mut _, 4096, libc::PROT_READ) };
        let taken = take(own, &[(address, 3 * PAGE)]).unwrap();
        let what: Vec<_> = taken.pinned.iter().map(|it| it.0).collect();
        let size = 3 * PAGE;
        assert_eq!(what, [Pinned { address, size, serial: 7, file_offset: None }]);
        // The result is the same file, not a copy.
        use std::os::unix::fs::MetadataExt;
        let inode = |file: &File| file.metadata().unwrap().ino();
        assert_eq!(inode(&taken.ring), inode(&ring));

        let missing = take(own, &[(address + (1 << 20), PAGE)]);
        assert!(matches!(missing, Err(SharedError::Pinned(_))));

        // Any memory that the process may write, from its second page on.
        let file = memfd(c"of-the-program", 3 * PAGE, 0);
        let at = address + (3 << 20);
        map_part(&file, 4096, at, libc::PROT_READ | libc::PROT_WRITE);
        let expected = Pinned { address: at, size: PAGE, serial: 0, file_offset: Some(PAGE) };
        let (pinned, taken) = registered(own, at, PAGE).unwrap();
        assert_eq!((pinned, inode(&taken)), (expected, inode(&file)));
        assert!(take(own, &[(at, PAGE)]).unwrap().pinned.iter().any(|it| it.0 == expected));
        assert!(matches!(registered(own, at, 2 * PAGE), Err(SharedError::NoFile(_))));
        // SAFETY: the mapping made above, which nobody uses.
        unsafe { libc::munmap(at as *mut _, 4096) };
        map_part(&file, 4096, at, libc::PROT_READ);
        assert!(matches!(registered(own, at, PAGE), Err(SharedError::NoFile(_))));
        // Another place is none of ours.
        map_part(&file, 4096, 0x4000_0000, libc::PROT_READ | libc::PROT_WRITE);
        assert!(matches!(registered(own, 0x4000_0000, PAGE), Err(SharedError::NoFile(_))));

        let unsealed = memfd(c"rekindle-pinned-8", PAGE, 0);
        map(&unsealed, 4096, address + (2 << 20));
        assert!(matches!(take(own, &[]), Err(SharedError::Memory(_))));
    }
}
