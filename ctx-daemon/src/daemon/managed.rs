//! Clients' managed memory that moves: its pages are in memfds that the client has mapped in a device window, and its worker serves
//! the client's faults by a userfaultfd that the client keeps open (`ctx-worker/src/resources/managed.rs`).

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rekindle_wire::control::{Failure, Reply};
use rekindle_wire::layout::{MANAGED_NAME, VARIABLES_NAME};
use rekindle_wire::userfault::{self, Userfault};
use rekindle_wire::window;
use tracing::{debug, error, warn};

use super::process::Process;
use super::{message, sys};

/// The file by which a process makes a userfaultfd that also waits for the kernel's own accesses.
const DEVICE: &str = "/dev/userfaultfd";

/// The most managed memory of a process, in bytes.
const MOST: u64 = 16 << 40;

/// Opens that file for a client, if the configuration allows it.
pub(super) fn serve(allowed: bool, stream: &UnixStream, process: Process) {
    let opened = match allowed {
        true => fs::File::options().read(true).write(true).open(DEVICE).map_err(|why| format!("{DEVICE}: {why}")),
        false => Err("the daemon's configuration gives clients no userfaultfd (`limits.userfaultfd`)".to_owned()),
    };
    match opened {
        Ok(file) => message::reply_with(stream, &Reply::Userfaultfd, &[file.as_raw_fd()]),
        Err(why) => {
            debug!(pid = process.pid, "managed memory of the process does not move: {why}");
            message::fail(stream, Failure::refused(why));
        }
    }
}

/// Copies of the userfaultfds that a process has open.
fn userfaults(pid: i32) -> io::Result<Vec<OwnedFd>> {
    let process = sys::pidfd_open(pid)?;
    let numbers = userfault::open_in(pid)?.into_iter();
    numbers.map(|number| sys::pidfd_getfd(process.as_fd(), number)).collect()
}

/// The userfaultfd of a process with managed memory. If the program has others of its own, nobody can tell which is ours.
pub(super) fn userfault_of(pid: i32) -> io::Result<OwnedFd> {
    let mut found = userfaults(pid)?;
    match (found.pop(), found.is_empty()) {
        (Some(one), true) => Ok(one),
        (Some(_), false) => Err(io::Error::other("the process has userfaultfds of its own")),
        (None, _) => Err(io::Error::other("the process has closed the userfaultfd of its managed memory")),
    }
}

/// The addresses of a process's managed memory that moves.
fn ranges(pid: i32) -> io::Result<Vec<Range<u64>>> {
    let text = fs::read(format!("/proc/{pid}/maps"))?;
    let (name, of_variables) = (format!("/memfd:{MANAGED_NAME}"), format!("/memfd:{VARIABLES_NAME}"));
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let range = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        // A process may call anything by that name. Variables lie where the driver has placed them.
        let is_ours = |it: &Range<u64>| window::device_of(it.start).is_some() || line.contains(&of_variables);
        Some(hex(start)?..hex(end)?).filter(is_ours)
    };
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter(|line| line.contains(&name)).filter_map(range).collect())
}

/// A process has lost its worker, and with it what the device had of its managed memory. Its threads that touch this get SIGBUS from
/// here on, and those that wait for it get that now. Otherwise they would wait for ever, or, once nobody has the userfaultfd any
/// more, find zeros: where pages cannot be poisoned, the process is killed.
pub(super) fn lose(process: Process) {
    let pid = process.pid;
    let lost = ranges(pid).and_then(|ranges| {
        if ranges.is_empty() {
            return Ok(());
        }
        if ranges.iter().map(|it| it.end - it.start).sum::<u64>() > MOST {
            return Err(io::Error::other("it has more managed memory than a machine's GPUs have"));
        }
        let userfault = Userfault::from(userfault_of(pid)?);
        ranges.into_iter().try_for_each(|range| {
            // Protected pages are the process's, too.
            userfault.protect(&range, false)?;
            userfault.poison(range.clone())?;
            userfault.wake(&range)?;
            warn!(
                pid,
                at = format_args!("{:#x}", range.start),
                "managed memory is lost: threads that touch it get SIGBUS"
            );
            Ok(())
        })
    });
    match lost {
        Ok(()) => {}
        Err(_) if !process.is_alive() => {}
        Err(why) => {
            error!(pid, "killing the process, which would take lost managed memory for zeros: {why}");
            process.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    #[test]
    fn managed_memory_is_found_by_its_name_and_the_only_userfaultfd_is_its() {
        let pid = std::process::id() as i32;
        // SAFETY: makes a file and maps it where nothing else is.
        let (_file, at) = unsafe {
            let file = OwnedFd::from_raw_fd(libc::memfd_create(c"rekindle-managed-3".as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(file.as_raw_fd(), 8192), 0);
            let at = libc::mmap(
                window::DEVICE_BASE as *mut _,
                8192,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE,
                file.as_raw_fd(),
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            (file, at)
        };
        let found = ranges(pid).unwrap();
        assert!(found.len() == 1 && found[0] == (at as u64..at as u64 + 8192), "{found:?}");
        assert!(window::device_of(at as u64).is_some());
        // SAFETY: mapped above, and not used.
        assert_eq!(unsafe { libc::munmap(at, 8192) }, 0);
        assert!(ranges(pid).unwrap().is_empty());
        // SAFETY: makes a file and maps it at an address of the kernel's choice, as that of a variable.
        let variables = unsafe {
            let name = c"rekindle-managed-variables-3";
            let file = OwnedFd::from_raw_fd(libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(file.as_raw_fd(), 4096), 0);
            libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        let found = ranges(pid).unwrap();
        assert!(found.len() == 1 && found[0] == (variables as u64..variables as u64 + 4096), "{found:?}");
        // SAFETY: mapped above, and not used.
        assert_eq!(unsafe { libc::munmap(variables, 4096) }, 0);
        assert!(userfault_of(pid).unwrap_err().to_string().contains("has closed"));
        let Ok(_one) = Userfault::new() else { return };
        assert!(userfault_of(pid).is_ok());
        let _other = Userfault::new().unwrap();
        assert!(userfault_of(pid).unwrap_err().to_string().contains("of its own"));
    }
}
