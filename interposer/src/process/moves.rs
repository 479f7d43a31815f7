//! Moving whole pages of the application into a memfd that the worker maps too, and back, unnoticed by the application.
//!
//! ```text
//!   home   ── private pages ──move_in──> the memfd, mapped over the same place, rights as before
//!                 ^                         │  its other mapping lies in the pinned window (alias)
//!                 └───────move_out──────────┘
//!   fork   ── the child gets private copies, as of pages that had never been moved
//! ```

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

use rekindle_wire::layout::PINNED_NAME;

use super::text::Text;
use super::{maps, stop};

/// Why pages stay where they are.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// Not all of the range is mapped.
    Unmapped,
    /// The memory is one mapping that is shared with other processes, and writable.
    Shared,
    /// The memory is shared with other processes otherwise, or unreadable.
    Kind,
    /// Other threads could not be stopped, or mappings not made.
    System(std::io::Error),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unmapped => f.write_str("not all of it is mapped"),
            Self::Shared => f.write_str("it is shared memory"),
            Self::Kind => f.write_str("it is memory that is shared for reading or in parts, or unreadable"),
            Self::System(error) => write!(f, "threads or mappings: {error}"),
        }
    }
}

/// Moved pages. Never freed, so that a forked child finds all of them without a lock.
struct Moved {
    home: AtomicU64,
    size: AtomicU64,
    serial: AtomicU64,
    live: AtomicBool,
    next: *const Moved,
}

static ALL: AtomicPtr<Moved> = AtomicPtr::new(std::ptr::null_mut());

fn all() -> impl Iterator<Item = &'static Moved> {
    let mut next: *const Moved = ALL.load(Acquire);
    std::iter::from_fn(move || {
        // SAFETY: null, or a leaked record.
        let moved = unsafe { next.as_ref() }?;
        next = moved.next;
        Some(moved)
    })
}

/// A record that is not in use. The callers hold the lock of their own (see `api::register`).
fn record(home: &Range<u64>, serial: u64) -> &'static Moved {
    let moved = all().find(|m| !m.live.load(Acquire)).unwrap_or_else(|| {
        let moved = Box::leak(Box::new(Moved {
            home: AtomicU64::new(0),
            size: AtomicU64::new(0),
            serial: AtomicU64::new(0),
            live: AtomicBool::new(false),
            next: ALL.load(Acquire),
        }));
        ALL.store(moved, Release);
        moved
    });
    moved.home.store(home.start, Release);
    moved.size.store(home.end - home.start, Release);
    moved.serial.store(serial, Release);
    moved
}

/// Whether a range meets pages that have been moved.
pub(crate) fn meets(range: &Range<u64>) -> bool {
    all().any(|m| {
        let start = m.home.load(Acquire);
        m.live.load(Acquire) && start < range.end && range.start < start + m.size.load(Acquire)
    })
}

/// The mappings that cover a range; `Unmapped` if they do not cover all of it.
fn parts(range: &Range<u64>) -> Result<Vec<(Range<u64>, i32)>, Refusal> {
    const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
    let (mut parts, mut at, mut kind, mut shared) = (Vec::new(), range.start, true, true);
    maps::each(|mapping| {
        if let Some(part) = mapping.within(range) {
            kind &= !mapping.shared && mapping.protection & libc::PROT_READ != 0;
            shared &= mapping.shared && mapping.protection & READ_WRITE == READ_WRITE;
            at = if part.start == at { part.end } else { at };
            parts.push((part, mapping.protection));
        }
    })
    .map_err(Refusal::System)?;
    match (at == range.end, kind) {
        (true, true) => Ok(parts),
        (true, false) if shared && parts.len() == 1 => Err(Refusal::Shared),
        (true, false) => Err(Refusal::Kind),
        (false, _) => Err(Refusal::Unmapped),
    }
}

/// Whether pages lie in one mapping that is shared with other processes, and writable: they cannot be moved.
pub(crate) fn are_shared(pages: &Range<u64>) -> bool {
    matches!(parts(pages), Err(Refusal::Shared))
}

/// Moves the pages of `home` into a memfd of that size, whose mapping at `alias` is readable and writable.
pub(crate) fn move_in(home: Range<u64>, alias: u64, file: &OwnedFd, serial: u64) -> Result<(), Refusal> {
    static FORKS: Once = Once::new();
    let parts = parts(&home)?;
    // SAFETY: the handlers only make system calls and look at records that are never freed.
    FORKS.call_once(|| unsafe {
        libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child));
    });
    let moved = record(&home, serial);
    let mut result = Ok(());
    stop::while_stopped(&mut || {
        // SAFETY: the alias is a mapping of this size, which nothing else uses yet. The kernel reads
        // `home`, and reports an error if it cannot.
        if !unsafe { copy(alias, home.start, home.end - home.start) } {
            result = Err(libc::EFAULT);
            return;
        }
        for (part, protection) in &parts {
            let (length, offset) = ((part.end - part.start) as usize, (part.start - home.start) as i64);
            let flags = libc::MAP_SHARED | libc::MAP_FIXED;
            // SAFETY: the same bytes take the place of these pages, while no thread runs that could see the difference.
            let got = unsafe { libc::mmap(part.start as *mut _, length, *protection, flags, file.as_raw_fd(), offset) };
            if got == libc::MAP_FAILED {
                result = Err(libc::ENOMEM);
                return;
            }
        }
        moved.live.store(true, Release);
    })
    .map_err(Refusal::System)?;
    result.map_err(|code| {
        // Pages that were moved must not depend on the memfd, which the caller frees.
        moved.live.store(true, Release);
        let _ = move_out(&home, alias, serial);
        Refusal::System(std::io::Error::from_raw_os_error(code))
    })
}

/// Copies bytes; `false` if they are not readable.
///
/// # Safety
/// `target` has room for `length` bytes, which nothing else uses.
unsafe fn copy(target: u64, source: u64, length: u64) -> bool {
    let mut at = 0;
    while at < length {
        let part = |base: u64| libc::iovec { iov_base: (base + at) as *mut _, iov_len: (length - at) as usize };
        let (to, from) = (part(target), part(source));
        // SAFETY: the kernel writes into the target alone, by the caller's promise.
        let got = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
        if got <= 0 {
            return false;
        }
        at += got as u64;
    }
    true
}

/// Whether a mapping is of the memfd of moved pages, at the place that they had.
fn is_moved(mapping: &maps::Mapping<'_>, home: u64, serial: u64) -> bool {
    let name = Text::<64>::of(format_args!("/memfd:{PINNED_NAME}{serial} (deleted)"));
    mapping.start.checked_sub(home) == Some(mapping.offset) && name.is_some_and(|it| it.bytes() == mapping.path)
}

/// Gives pages back as private ones, with their content; of what the application has put there since, nothing is
/// touched.
pub(crate) fn move_out(home: &Range<u64>, alias: u64, serial: u64) -> std::io::Result<()> {
    let Some(moved) = all().find(|m| m.live.load(Acquire) && m.serial.load(Acquire) == serial) else { return Ok(()) };
    let mut parts = Vec::new();
    maps::each(|mapping| {
        if let Some(part) = mapping.within(home).filter(|_| is_moved(mapping, home.start, serial)) {
            parts.push((part, mapping.protection, std::ptr::null_mut()));
        }
    })?;
    for (part, _, fresh) in &mut parts {
        *fresh = private(part.end - part.start)?;
    }
    let mut lost = false;
    stop::while_stopped(&mut || {
        for (part, protection, fresh) in &parts {
            let length = (part.end - part.start) as usize;
            let source = (alias + (part.start - home.start)) as *const u8;
            // SAFETY: the alias holds all of the memfd, the fresh mapping as much as the part; it then takes the place of
            // the same bytes, while no thread runs that could see the difference.
            unsafe {
                std::ptr::copy_nonoverlapping(source, fresh.cast::<u8>(), length);
                libc::mprotect(*fresh, length, *protection);
                let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
                lost |=
                    libc::mremap(*fresh, length, length, flags, part.start as *mut libc::c_void) == libc::MAP_FAILED;
            }
        }
        moved.live.store(lost, Release);
    })?;
    if lost { Err(std::io::Error::from_raw_os_error(libc::ENOMEM)) } else { Ok(()) }
}

fn private(length: u64) -> std::io::Result<*mut libc::c_void> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, which replaces none.
    let got = unsafe { libc::mmap(std::ptr::null_mut(), length as usize, protection, flags, -1, 0) };
    if got == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(got) }
}

thread_local! {
    /// Ends of a pipe through which a forked child says that it has its copies.
    static PIPE: Cell<[i32; 2]> = const { Cell::new([-1; 2]) };
}

extern "C" fn before_fork() {
    let mut pipe = [-1; 2];
    if all().any(|m| m.live.load(Acquire)) {
        // SAFETY: the kernel writes two numbers into the local.
        unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) };
    }
    PIPE.set(pipe);
}

/// The parent continues when the child has its copies, so that the child does not see later writes of the parent.
extern "C" fn after_fork() {
    let [read, write] = PIPE.replace([-1; 2]);
    if read < 0 {
        return;
    }
    let mut byte = 0_u8;
    // SAFETY: this thread's own descriptors; without a child, or when it dies, the read ends at once.
    unsafe {
        libc::close(write);
        while libc::read(read, (&raw mut byte).cast(), 1) < 0 && *libc::__errno_location() == libc::EINTR {}
        libc::close(read);
    }
}

/// The child's pages become private. Runs in a process of one thread that may not allocate.
extern "C" fn in_child() {
    for moved in all().filter(|m| m.live.load(Acquire)) {
        let (start, serial) = (moved.home.load(Acquire), moved.serial.load(Acquire));
        let home = start..start + moved.size.load(Acquire);
        // Replacing a mapping changes the list that is being read, so each pass replaces one.
        while copy_first(&home, serial) {}
        moved.live.store(false, Release);
    }
    let [read, write] = PIPE.replace([-1; 2]);
    if write >= 0 {
        // SAFETY: this process's own descriptors.
        unsafe {
            libc::write(write, (&raw const *b"c").cast(), 1);
            libc::close(write);
            libc::close(read);
        }
    }
}

/// Replaces the first moved mapping of a range by a private copy; `false` if there is none, or it cannot be done.
fn copy_first(home: &Range<u64>, serial: u64) -> bool {
    let mut first = None;
    let read = maps::each(|mapping| {
        if first.is_none() && is_moved(mapping, home.start, serial) {
            first = mapping.within(home).map(|part| (part, mapping.protection));
        }
    });
    let (Ok(()), Some((part, protection))) = (read, first) else { return false };
    let length = part.end - part.start;
    let Ok(fresh) = private(length) else { return false };
    // SAFETY: the fresh mapping is as large as the part, and takes its place; there is one thread.
    unsafe {
        if protection & libc::PROT_READ == 0 {
            libc::mprotect(part.start as *mut _, length as usize, libc::PROT_READ);
        }
        let copied = copy(fresh as u64, part.start, length);
        libc::mprotect(fresh, length as usize, protection);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        let there = part.start as *mut libc::c_void;
        copied && libc::mremap(fresh, length as usize, length as usize, flags, there) != libc::MAP_FAILED
    }
}
