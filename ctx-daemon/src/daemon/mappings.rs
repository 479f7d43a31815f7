//! The mappings of processes that matter to the daemon: the memory of clients, and the driver's devices.

use std::collections::HashSet;
use std::io;

use rekindle_wire::layout::SHARED_NAME;

/// The prefix of the names of all memfds of clients.
const OURS: &str = "/memfd:rekindle-";

/// The mappings of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Mappings {
    /// Whether a ring is mapped: the process has, or had, a worker.
    pub(crate) ring: bool,
    /// The memory of clients, as device and inode.
    pub(crate) shared: HashSet<(String, u64)>,
    /// A device file of the driver.
    pub(crate) device: Option<String>,
}

/// Reads the mappings. A process that is gone has none.
///
/// `devices` is how the paths of the driver's device files begin.
pub(crate) fn of(pid: i32, devices: &str) -> io::Result<Mappings> {
    // Read as bytes: a file's name may have any.
    let text = std::fs::read(format!("/proc/{pid}/maps"))?;
    Ok(parse(&String::from_utf8_lossy(&text), devices))
}

/// Whether a process has a ring mapped. A process that is gone, or has executed another program, has none.
pub(crate) fn has_ring(pid: i32) -> bool {
    of(pid, "/dev/nvidia").is_ok_and(|it| it.ring)
}

fn parse(maps: &str, devices: &str) -> Mappings {
    let ring = format!("/memfd:{} ", SHARED_NAME.to_string_lossy());
    let mut found = Mappings::default();
    for line in maps.lines() {
        // Fields: address permissions offset device inode path
        let Some(at) = line.find('/') else { continue };
        let (fields, path) = line.split_at(at);
        if path.starts_with(devices) {
            found.device = Some(path.to_owned());
        }
        if !path.starts_with(OURS) {
            continue;
        }
        found.ring |= path.starts_with(&ring);
        let mut fields = fields.split_ascii_whitespace().skip(3);
        if let (Some(device), Some(Ok(inode))) = (fields.next(), fields.next().map(str::parse)) {
            found.shared.insert((device.to_owned(), inode));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_clients_and_devices_are_told_from_the_rest() {
        let maps = "\
555500000000-555500001000 r-xp 00000000 fe:01 77                         /usr/bin/python3 with / in it\n\
600000000000-600000200000 rw-s 00000000 00:01 2049                       /memfd:rekindle-pinned-3 (deleted)\n\
7f0000000000-7f0000200000 rw-s 00000000 00:01 2050                       /memfd:rekindle-ring (deleted)\n\
7f0000300000-7f0000400000 rw-s 00000000 00:06 431                        /dev/nvidia0\n\
7f0000500000-7f0000501000 rw-p 00000000 00:00 0 \n";
        let found = parse(maps, "/dev/nvidia");
        assert!(found.ring);
        assert_eq!(found.shared, HashSet::from([("00:01".to_owned(), 2049), ("00:01".to_owned(), 2050)]));
        assert_eq!(found.device.as_deref(), Some("/dev/nvidia0"));
        assert_eq!(parse(maps, "/dev/other").device, None);
        assert!(!parse("7f00-7f01 rw-s 0 00:01 1 /memfd:rekindle-ringer (deleted)\n", "/dev/nvidia").ring);
    }

    #[test]
    fn this_process_is_no_client() {
        assert!(!has_ring(std::process::id() as i32));
        assert!(!has_ring(0));
    }
}
