//! Doing something to this process's memory while none of its threads runs.
//!
//! A helper process that shares the memory (as a thread does) stops the other threads with ptrace, works, and lets them
//! go. The calling thread sleeps meanwhile as in `vfork`. So threads that block signals stop too, and no system call is
//! interrupted as by a signal. Nothing that the helper does may allocate or lock: a stopped thread may hold any lock.

use std::ffi::{c_int, c_void};
use std::io;

/// The most threads that are stopped.
const THREADS: usize = 4096;
const STACK: usize = 256 << 10;

/// The helper's data; the caller creates it, since the helper must not allocate.
struct Job<'a> {
    work: &'a mut dyn FnMut(),
    /// The directory of this process's threads.
    tasks: c_int,
    caller: i32,
    /// Stopped threads, and the signal that each was about to get.
    stopped: &'a mut [(i32, c_int)],
    failure: c_int,
    worked: bool,
}

/// Runs `work` in a process that shares this one's memory, while this process's threads stand still. `work` must not
/// allocate, lock or panic. An error means that it did not run.
pub(crate) fn while_stopped(work: &mut dyn FnMut()) -> io::Result<()> {
    let _one = ONE.lock().map_err(|_| io::Error::other("an earlier attempt broke"))?;
    let mut stopped = vec![(0, 0); THREADS];
    // SAFETY: plain system calls; the mapping is new.
    let (tasks, caller, stack) = unsafe {
        let tasks = libc::open(c"/proc/self/task".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC);
        if tasks < 0 {
            return Err(io::Error::last_os_error());
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let stack = libc::mmap(std::ptr::null_mut(), STACK, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
        if stack == libc::MAP_FAILED {
            libc::close(tasks);
            return Err(io::Error::last_os_error());
        }
        (tasks, libc::syscall(libc::SYS_gettid) as i32, stack)
    };
    let mut job = Job { work, tasks, caller, stopped: &mut stopped, failure: 0, worked: false };
    // SAFETY: the helper runs on a stack of its own, with all signals blocked, while this thread sleeps in the kernel
    // until the helper has ended (CLONE_VFORK), so everything that it was given lives. It is reaped by its number; as it
    // sends no signal, no other wait finds it.
    let helper = unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        // Yama may allow only ancestors to trace, so the helper needs this permission. Without Yama the call fails, which does
        // no harm.
        libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0);
        let top = stack.cast::<u8>().add(STACK - 64).cast::<c_void>();
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_UNTRACED;
        let helper = libc::clone(helper, top, flags, (&raw mut job).cast());
        let error = io::Error::last_os_error();
        if helper > 0 {
            libc::waitpid(helper, std::ptr::null_mut(), libc::__WALL);
        }
        libc::prctl(libc::PR_SET_PTRACER, 0, 0, 0, 0);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        libc::munmap(stack, STACK);
        libc::close(tasks);
        if helper > 0 { Ok(()) } else { Err(error) }
    };
    helper?;
    match (job.worked, job.failure) {
        (true, _) => Ok(()),
        (false, code) => Err(io::Error::from_raw_os_error(code)),
    }
}

static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

extern "C" fn helper(job: *mut c_void) -> c_int {
    // SAFETY: the caller's job, which lives until the helper has ended.
    let job = unsafe { &mut *job.cast::<Job<'_>>() };
    let mut count = 0;
    match stop_all(job, &mut count) {
        Ok(()) => {
            (job.work)();
            job.worked = true;
        }
        Err(code) => job.failure = code,
    }
    for &(thread, signal) in job.stopped.iter().take(count) {
        // SAFETY: lets a thread go that was stopped here, with the signal that it was about to get.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, 0, signal as libc::c_long) };
    }
    // SAFETY: ends the helper alone.
    unsafe { libc::_exit(0) }
}

/// Stops threads until there are no new ones.
fn stop_all(job: &mut Job<'_>, count: &mut usize) -> Result<(), c_int> {
    loop {
        let before = *count;
        // SAFETY: the directory is open.
        unsafe { libc::lseek(job.tasks, 0, libc::SEEK_SET) };
        let mut entries = [0_u8; 4096];
        loop {
            // SAFETY: the kernel writes at most the buffer.
            let got = unsafe { libc::syscall(libc::SYS_getdents64, job.tasks, entries.as_mut_ptr(), entries.len()) };
            if got < 0 {
                return Err(errno());
            }
            if got == 0 {
                break;
            }
            let mut rest = entries.get(..got as usize).unwrap_or_default();
            // inode and offset, 8 bytes each, a length of 2, a type of 1, and the name with its zero.
            while let (Some(length), Some(name)) = (rest.get(16..18), rest.get(19..)) {
                let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
                let thread = number(name);
                let known = job.stopped.iter().take(*count).any(|(t, _)| *t == thread);
                if thread != 0 && thread != job.caller && !known {
                    stop(job, thread, count)?;
                }
                rest = rest.get(length.max(1)..).unwrap_or_default();
            }
        }
        if *count == before {
            return Ok(());
        }
    }
}

fn number(name: &[u8]) -> i32 {
    name.iter()
        .take_while(|c| c.is_ascii_digit())
        .fold(0_i32, |n, c| n.wrapping_mul(10).wrapping_add(i32::from(c - b'0')))
}

fn errno() -> c_int {
    // SAFETY: the calling thread's own; the helper uses the sleeping caller's.
    unsafe { *libc::__errno_location() }
}

/// Stops one thread; one that has ended meanwhile counts as stopped.
fn stop(job: &mut Job<'_>, thread: i32, count: &mut usize) -> Result<(), c_int> {
    const EVENT_STOP: c_int = 128;
    // SAFETY: plain system calls about a thread of this process.
    unsafe {
        if libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) != 0 {
            return if errno() == libc::ESRCH { Ok(()) } else { Err(errno()) };
        }
        let mut status = 0;
        let waited = libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0) == 0
            && loop {
                let waited = libc::waitpid(thread, &raw mut status, libc::__WALL);
                if waited >= 0 || errno() != libc::EINTR {
                    break waited >= 0;
                }
            };
        if !waited || !libc::WIFSTOPPED(status) {
            return Ok(());
        }
        let signal = if status >> 16 == EVENT_STOP { 0 } else { libc::WSTOPSIG(status) };
        match job.stopped.get_mut(*count) {
            Some(place) => *place = (thread, signal),
            None => {
                libc::ptrace(libc::PTRACE_DETACH, thread, 0, signal as libc::c_long);
                return Err(libc::EMFILE);
            }
        }
        *count += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

    #[test]
    fn threads_stand_still_while_the_work_runs_and_continue_afterwards() {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        static END: AtomicBool = AtomicBool::new(false);
        let threads: Vec<_> = (0..3)
            .map(|_| {
                std::thread::spawn(|| {
                    while !END.load(SeqCst) {
                        COUNT.fetch_add(1, SeqCst);
                    }
                })
            })
            .collect();
        while COUNT.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        let (mut first, mut second) = (0, 1);
        let stopped = while_stopped(&mut || {
            first = COUNT.load(SeqCst);
            for _ in 0..1_000_000 {
                std::hint::spin_loop();
            }
            second = COUNT.load(SeqCst);
        });
        if let Err(error) = stopped {
            END.store(true, SeqCst);
            return eprintln!("skipped: processes cannot be traced here ({error})");
        }
        assert_eq!(first, second);
        while COUNT.load(SeqCst) == second {
            std::thread::yield_now();
        }
        END.store(true, SeqCst);
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}
