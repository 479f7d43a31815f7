//! The memory that all processes of the machine have on its devices: with `SIMGPU_MACHINE` set to a file, processes that name
//! the same file have the same devices, as with a real GPU.
//!
//! ```text
//!   the file    row 0: bytes on device 0, 1, ...    row 1: ...        one row a process, written by that process only
//!   locks       byte N of LIVING: the process of row N lives          byte CHANGING: held while a process takes memory
//! ```
//!
//! The kernel releases a dead process's locks, so its row does not count any more. The file is opened and mapped when the
//! library is loaded, since a worker may open no files later.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

const ROWS: usize = 256;
/// Devices with higher numbers are not counted.
const DEVICES: usize = 16;
const LIVING: i64 = 1 << 32;
const CHANGING: i64 = 1 << 33;

/// The table, and this process's row.
pub(super) struct Machine {
    file: File,
    rows: &'static [[AtomicU64; DEVICES]; ROWS],
    own: usize,
    /// Locks of the file are the process's, and this one is the threads'.
    changing: Mutex<()>,
}

static MACHINE: OnceLock<Option<Machine>> = OnceLock::new();

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    machine();
}

/// The machine's table, if processes share their devices.
pub(super) fn machine() -> Option<&'static Machine> {
    let open = || {
        let path = std::env::var_os("SIMGPU_MACHINE")?;
        let machine = Machine::open(path.as_ref());
        if let Err(error) = &machine {
            eprintln!("simgpu: SIMGPU_MACHINE {}: {error}", path.display());
        }
        machine.ok()
    };
    MACHINE.get_or_init(open).as_ref()
}

impl Machine {
    fn open(path: &std::path::Path) -> std::io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        let size = size_of::<[[AtomicU64; DEVICES]; ROWS]>();
        file.set_len(size as u64)?;
        // Opened again: a mapping keeps the locks that belong to its open file.
        let mapped = File::options().read(true).write(true).open(path)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: maps the file, at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size, access, libc::MAP_SHARED, mapped.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: the mapping has this size and stays; all processes access it by atomic operations only.
        let rows = unsafe { &*at.cast::<[[AtomicU64; DEVICES]; ROWS]>() };
        let own = (0..ROWS).find(|row| lock(&file, libc::F_OFD_SETLK, libc::F_WRLCK, LIVING + *row as i64).is_ok());
        let own = own.ok_or_else(|| std::io::Error::other("too many processes"))?;
        rows[own].iter().for_each(|bytes| bytes.store(0, Ordering::SeqCst));
        Ok(Self { file, rows, own, changing: Mutex::new(()) })
    }

    /// The bytes that other processes have on a device.
    pub(super) fn others(&self, device: usize) -> u64 {
        if device >= DEVICES {
            return 0;
        }
        let rows = self.rows.iter().enumerate().filter(|(row, _)| *row != self.own);
        let used = rows.map(|(row, bytes)| (row, bytes[device].load(Ordering::SeqCst)));
        used.filter(|(row, bytes)| *bytes > 0 && self.lives(*row)).map(|(_, bytes)| bytes).sum()
    }

    fn lives(&self, row: usize) -> bool {
        lock(&self.file, libc::F_OFD_GETLK, libc::F_WRLCK, LIVING + row as i64).is_ok_and(|kind| kind != libc::F_UNLCK)
    }

    /// Notes that this process has so many bytes more, or less, on a device.
    pub(super) fn note(&self, device: usize, change: i64) {
        if device < DEVICES {
            self.rows[self.own][device].fetch_add(change as u64, Ordering::SeqCst);
        }
    }

    /// Runs the action while no other process and no other thread takes memory.
    pub(super) fn alone<R>(&self, action: impl FnOnce() -> R) -> R {
        let _alone = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        // A lock that cannot be had makes the count less exact, and nothing else.
        let _ = lock(&self.file, libc::F_OFD_SETLKW, libc::F_WRLCK, CHANGING);
        let result = action();
        let _ = lock(&self.file, libc::F_OFD_SETLK, libc::F_UNLCK, CHANGING);
        result
    }
}

/// An operation on the lock of one byte (fcntl(2), open file description locks). Returns the kind of lock that it reports.
fn lock(file: &File, operation: i32, kind: i32, at: i64) -> std::io::Result<i32> {
    let mut wanted =
        libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: at, l_len: 1, l_pid: 0 };
    // SAFETY: the structure is a local.
    match unsafe { libc::fcntl(file.as_raw_fd(), operation, &raw mut wanted) } {
        0 => Ok(i32::from(wanted.l_type)),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_count_together_as_long_as_they_live() {
        let path = std::env::temp_dir().join(format!("simgpu-machine-{}", std::process::id()));
        // Each opens the file for itself, as processes do.
        let one = Machine::open(&path).unwrap();
        let other = Machine::open(&path).unwrap();
        one.note(3, 4096);
        other.note(3, 100);
        other.note(3, -50);
        assert_eq!((one.others(3), other.others(3), other.others(2), one.others(DEVICES)), (50, 4096, 0, 0));
        drop(one);
        assert_eq!(other.others(3), 0);
        let next = Machine::open(&path).unwrap();
        assert_eq!((next.own, other.others(3), next.others(3)), (0, 0, 50));
        std::fs::remove_file(path).unwrap();
    }
}
