//! Doing something to this process's memory while none of its threads runs.
//!
//! A helper process that shares the memory (as a thread does) stops the other threads with ptrace, works, and lets them
//! go. The calling thread sleeps meanwhile as in `vfork`. So threads that block signals stop too, and no system call is
//! interrupted as by a signal. Nothing that the helper does may allocate or lock: a stopped thread may hold any lock.
//!
//! A thread has one tracer. Where another process traces one, the helper lets all threads go, and the caller tries again:
//! CRIU lets the threads of a process go one after the other, and a sampling profiler holds each for a moment. A debugger
//! stays, so after [`ATTEMPTS`] the caller gives up, and does not wait for the same tracer again.

use std::ffi::{c_int, c_void};
use std::io;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::text::Text;

/// The most threads that are stopped.
const THREADS: usize = 4096;
const STACK: usize = 256 << 10;

/// How often threads are stopped in vain while another process traces one, and the time between two attempts. The attempts are
/// counted, and not their time: this process may be frozen between two.
const ATTEMPTS: u32 = 1000;
const PAUSE: Duration = Duration::from_millis(1);

/// The process that was tracing this one through all attempts: [`Outcome::Traced`], or -1 for none.
static STAYS: AtomicI32 = AtomicI32::new(-1);

/// The helper's data; the caller creates it, since the helper must not allocate.
struct Job<'a> {
    work: &'a mut dyn FnMut(),
    /// The directory of this process's threads.
    tasks: c_int,
    caller: i32,
    /// Stopped threads, and the signal that each was about to get.
    stopped: &'a mut [(i32, c_int)],
    outcome: Outcome,
}

/// How an attempt to stop the threads ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All stood still, and the work is done.
    Worked,
    /// This process traces one of them. 0 where that is outside of this process's pid namespace, or none of them may be traced.
    Traced(i32),
    /// The kernel's error.
    Failed(c_int),
}

/// Runs `work` in a process that shares this one's memory, while this process's threads stand still. `work` must not
/// allocate, lock or panic. An error means that it did not run.
pub(crate) fn while_stopped(work: &mut dyn FnMut()) -> io::Result<()> {
    let _one = ONE.lock().map_err(|_| io::Error::other("an earlier attempt broke"))?;
    let mut attempts = 0;
    loop {
        attempts += 1;
        match attempt(work)? {
            Outcome::Worked => return Ok(()),
            Outcome::Failed(code) => return Err(io::Error::from_raw_os_error(code)),
            Outcome::Traced(tracer) if attempts >= ATTEMPTS || STAYS.load(Relaxed) == tracer => {
                STAYS.store(tracer, Relaxed);
                return Err(io::Error::other(match tracer {
                    0 => "a process outside traces this one, or it may not be traced".to_owned(),
                    tracer => format!("process {tracer} traces this one"),
                }));
            }
            Outcome::Traced(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// Stops all other threads once, if they can be stopped, and does the work.
fn attempt(work: &mut dyn FnMut()) -> io::Result<Outcome> {
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
    let mut job = Job { work, tasks, caller, stopped: &mut stopped, outcome: Outcome::Failed(libc::ECHILD) };
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
    Ok(job.outcome)
}

static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

extern "C" fn helper(job: *mut c_void) -> c_int {
    // SAFETY: the caller's job, which lives until the helper has ended.
    let job = unsafe { &mut *job.cast::<Job<'_>>() };
    let mut count = 0;
    job.outcome = match stop_all(job, &mut count) {
        Ok(()) => {
            (job.work)();
            Outcome::Worked
        }
        Err(why) => why,
    };
    for &(thread, signal) in job.stopped.iter().take(count) {
        // SAFETY: lets a thread go that was stopped here, with the signal that it was about to get.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, thread, 0, signal as libc::c_long) };
    }
    // SAFETY: ends the helper alone.
    unsafe { libc::_exit(0) }
}

/// Stops threads until there are no new ones.
fn stop_all(job: &mut Job<'_>, count: &mut usize) -> Result<(), Outcome> {
    loop {
        let before = *count;
        // SAFETY: the directory is open.
        unsafe { libc::lseek(job.tasks, 0, libc::SEEK_SET) };
        let mut entries = [0_u8; 4096];
        loop {
            // SAFETY: the kernel writes at most the buffer.
            let got = unsafe { libc::syscall(libc::SYS_getdents64, job.tasks, entries.as_mut_ptr(), entries.len()) };
            if got < 0 {
                return Err(Outcome::Failed(errno()));
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
fn stop(job: &mut Job<'_>, thread: i32, count: &mut usize) -> Result<(), Outcome> {
    const EVENT_STOP: c_int = 128;
    if !seize(job.tasks, thread)? {
        return Ok(());
    }
    // SAFETY: plain system calls about a thread of this process.
    unsafe {
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
                return Err(Outcome::Failed(libc::EMFILE));
            }
        }
        *count += 1;
    }
    Ok(())
}

/// Begins to trace a thread. False if it has ended: the kernel refuses that with `ESRCH`, and with `EPERM` while the thread is
/// not reaped, as a main thread is that called `pthread_exit`.
fn seize(tasks: c_int, thread: i32) -> Result<bool, Outcome> {
    // SAFETY: a plain system call about a thread of this process.
    if unsafe { libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) } == 0 {
        return Ok(true);
    }
    match errno() {
        libc::ESRCH => Ok(false),
        libc::EPERM => match look(tasks, thread)? {
            Some(Thread { has_ended: false, tracer }) => Err(Outcome::Traced(tracer)),
            _ => Ok(false),
        },
        code => Err(Outcome::Failed(code)),
    }
}

/// A thread's state in `/proc/PID/task/TID/status`.
#[derive(Debug, PartialEq, Eq)]
struct Thread {
    /// It runs no more, and only its number is left.
    has_ended: bool,
    /// Its tracer; 0 where that is outside of this process's pid namespace, or there is none.
    tracer: i32,
}

/// Looks at a thread. None if it is gone.
fn look(tasks: c_int, thread: i32) -> Result<Option<Thread>, Outcome> {
    let name = Text::<32>::of(format_args!("{thread}/status\0")).ok_or(Outcome::Failed(libc::ENAMETOOLONG))?;
    let mut text = [0_u8; 2048];
    // SAFETY: the path ends in a NUL; the kernel writes at most the buffer; the descriptor is this function's own.
    let (got, code) = unsafe {
        let file = libc::openat(tasks, name.bytes().as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
        let got = if file < 0 { -1 } else { libc::read(file, text.as_mut_ptr().cast(), text.len()) };
        let code = errno();
        if file >= 0 {
            libc::close(file);
        }
        (got, code)
    };
    match usize::try_from(got) {
        Ok(got) => Ok(Some(text.get(..got).and_then(parse).ok_or(Outcome::Failed(libc::EIO))?)),
        Err(_) if matches!(code, libc::ENOENT | libc::ESRCH) => Ok(None),
        Err(_) => Err(Outcome::Failed(code)),
    }
}

fn parse(status: &[u8]) -> Option<Thread> {
    let field = |name: &[u8]| {
        let line = status.split(|c| *c == b'\n').find_map(|line| line.strip_prefix(name))?;
        Some(line.trim_ascii())
    };
    let state = *field(b"State:")?.first()?;
    Some(Thread { has_ended: matches!(state, b'Z' | b'X'), tracer: number(field(b"TracerPid:")?) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

    /// A process has one of these tests at a time: each stops the threads of all.
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

    #[test]
    fn threads_stand_still_while_the_work_runs_and_continue_afterwards() {
        let _alone = ALONE.lock();
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

    /// A process that traces a thread of this one, as CRIU does, until it is told to end.
    struct Tracer(i32);

    impl Tracer {
        fn of(thread: i32, stays: Duration) -> Self {
            // SAFETY: the child makes system calls only, and ends.
            let child = unsafe { libc::fork() };
            if child != 0 {
                return Self(child);
            }
            // SAFETY: as above. A tracer that ends lets its threads go.
            unsafe {
                let seized = libc::ptrace(libc::PTRACE_SEIZE, thread, 0, 0) == 0;
                libc::kill(libc::getpid(), if seized { libc::SIGSTOP } else { libc::SIGKILL });
                let stays = libc::timespec { tv_sec: 0, tv_nsec: libc::c_long::from(stays.subsec_nanos() as i32) };
                libc::nanosleep(&raw const stays, std::ptr::null_mut());
                libc::_exit(0);
            }
        }

        /// Waits until it traces, or cannot.
        fn traces(&self) -> bool {
            let mut status = 0;
            // SAFETY: the kernel writes one number into the local.
            unsafe { libc::waitpid(self.0, &raw mut status, libc::WUNTRACED) };
            libc::WIFSTOPPED(status)
        }

        fn goes_on(&self) {
            // SAFETY: a signal to a child that is not reaped.
            unsafe { libc::kill(self.0, libc::SIGCONT) };
        }
    }

    impl Drop for Tracer {
        fn drop(&mut self) {
            // SAFETY: as above.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, std::ptr::null_mut(), 0);
            }
        }
    }

    #[test]
    fn a_thread_that_another_process_traces_for_a_moment_is_stopped_after_it() {
        let _alone = ALONE.lock();
        static END: AtomicBool = AtomicBool::new(false);
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: no pointers.
            tell.send(unsafe { libc::syscall(libc::SYS_gettid) } as i32).unwrap();
            while !END.load(SeqCst) {
                std::thread::park_timeout(Duration::from_millis(10));
            }
        });
        let traced = told.recv().unwrap();
        // SAFETY: no pointers; the child may trace its parent where Yama restricts that.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
        let tracer = Tracer::of(traced, Duration::from_millis(50));
        if tracer.traces() {
            tracer.goes_on();
            let mut worked = 0;
            while_stopped(&mut || worked += 1).unwrap();
            assert_eq!(worked, 1);
            drop(tracer);

            // One that stays: all attempts are in vain, and the next time none is made.
            let tracer = Tracer::of(traced, Duration::ZERO);
            assert!(tracer.traces());
            let why = while_stopped(&mut || worked += 1).unwrap_err().to_string();
            assert_eq!(why, format!("process {} traces this one", tracer.0));
            assert_eq!((worked, STAYS.load(Relaxed)), (1, tracer.0));
            drop(tracer);
            while_stopped(&mut || worked += 1).unwrap();
            assert_eq!(worked, 2);
        } else {
            eprintln!("skipped: processes cannot be traced here");
        }
        END.store(true, SeqCst);
        thread.join().unwrap();
    }

    #[test]
    fn a_status_tells_a_tracer_and_an_end() {
        let parsed = |state, tracer| {
            parse(format!("Name:\tx y\nState:\t{state}\nTgid:\t7\nTracerPid:\t{tracer}\nUid:\t0\n").as_bytes())
        };
        assert_eq!(parsed("S (sleeping)", 0), Some(Thread { has_ended: false, tracer: 0 }));
        assert_eq!(parsed("t (tracing stop)", 4711), Some(Thread { has_ended: false, tracer: 4711 }));
        assert_eq!(parsed("Z (zombie)", 0), Some(Thread { has_ended: true, tracer: 0 }));
        assert_eq!(parse(b"State:\tS"), None);
        assert_eq!(parse(b""), None);
    }
}
