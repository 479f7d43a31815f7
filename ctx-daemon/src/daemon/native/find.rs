//! Finding the processes that use NVIDIA's own driver library.
//!
//! Such a process has the driver's devices open, and mapped once it has a context. Others may have them open too: a child of such a
//! process, or a program that only looks. The driver decides: it has a thread in each process that uses it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;

use tracing::debug;

use super::super::{mappings, process};

/// A device of the driver that a process has mapped or open.
pub(crate) fn device_of(pid: i32, devices: &str) -> Option<String> {
    mappings::of(pid, devices).ok().and_then(|it| it.device).or_else(|| open_device_of(pid, devices))
}

fn open_device_of(pid: i32, devices: &str) -> Option<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.map(|it| it.to_string_lossy().into_owned()).find(|it| it.starts_with(devices))
}

/// Whether a process of this machine other than the daemon's own has a device of the driver.
pub(crate) fn any(devices: &str) -> bool {
    let own = |file: io::Result<fs::Metadata>| file.ok().map(|it| (it.dev(), it.ino()));
    let program = own(File::open("/proc/self/exe").and_then(|it| it.metadata()));
    let is_ours = |pid: i32| own(fs::metadata(format!("/proc/{pid}/exe"))) == program;
    let found =
        process::all().unwrap_or_default().into_iter().find(|pid| device_of(*pid, devices).is_some() && !is_ours(*pid));
    debug!(?found, "processes with the driver's devices");
    found.is_some()
}

/// The thread of a process, as the daemon numbers it, that the process itself numbers so.
pub(crate) fn thread_by_its_own_number(pid: i32, number: u32) -> Option<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let tids = threads.flatten().filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    let own = |tid: &i32| process::namespace_pids(*tid).ok().and_then(|it| it.last().copied());
    tids.into_iter().find(|tid| own(tid).map(i32::unsigned_abs) == Some(number))
}

/// Whether a thread belongs to a process: the driver's word is not enough to let a thread run.
pub(crate) fn has_thread(pid: i32, tid: i32) -> bool {
    fs::metadata(format!("/proc/{pid}/task/{tid}")).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_only_open_is_found_too() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("nvidia0");
        let prefix = dir.path().join("nvidia").display().to_string();
        let own = std::process::id() as i32;
        assert_eq!(device_of(own, &prefix), None);
        let file = File::create(&device).unwrap();
        assert_eq!(device_of(own, &prefix), Some(device.display().to_string()));
        drop(file);
        assert_eq!(device_of(own, &prefix), None);
    }

    #[test]
    fn a_thread_is_found_by_its_number_and_only_in_its_process() {
        let own = std::process::id();
        let number = process::namespace_pids(own as i32).unwrap().last().copied().unwrap().unsigned_abs();
        assert_eq!(thread_by_its_own_number(own as i32, number), Some(own as i32));
        assert_eq!(thread_by_its_own_number(own as i32, u32::MAX), None);
        assert!(has_thread(own as i32, own as i32) && !has_thread(own as i32, 1));
    }
}
