//! The report of a worker that crashes: which access failed, in which library and thread. A worker leaves no core file (see
//! [`crate::serve::sandbox`]), so a user's report has no other information.
//!
//! The crash is not hidden: earlier handlers of the signal, such as the standard library's check for a stack overflow, run
//! afterwards, and the signal ends the process.

use std::ffi::{CStr, c_int, c_void};
use std::fmt::{self, Write};
use std::io;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::OnceLock;

use crate::signal_stack::SignalStack;

/// The signals of a crash, with their names.
const SIGNALS: [(c_int, &str); 4] =
    [(libc::SIGSEGV, "SIGSEGV"), (libc::SIGBUS, "SIGBUS"), (libc::SIGILL, "SIGILL"), (libc::SIGFPE, "SIGFPE")];
/// How many words of the stack are searched for callers.
const STACK_WORDS: usize = 512;
const CALLERS: usize = 12;
const LINE: usize = 1024;
/// An access this near to the stack's end may be a stack overflow.
const STACK_NEAR: u64 = 1 << 20;

/// Code of a library or the program: its addresses, the base of offsets, and its file name.
struct Code {
    start: u64,
    end: u64,
    base: u64,
    name: String,
}

/// The data that a handler needs, made before: a handler may neither allocate nor lock.
struct Known {
    log: c_int,
    code: Vec<Code>,
    before: [libc::sigaction; SIGNALS.len()],
}

static KNOWN: OnceLock<Known> = OnceLock::new();

/// Writes the place of a crash into the log from now on. To be called when libraries are loaded and the log is still stderr, by
/// the thread that becomes the executor.
pub(crate) fn say() -> io::Result<()> {
    // The stack belongs to this thread until the process ends.
    std::mem::forget(SignalStack::install()?);
    let log = io::stderr().as_fd().try_clone_to_owned()?;
    // SAFETY: all zero is a valid action: the default one.
    let mut before = [unsafe { std::mem::zeroed::<libc::sigaction>() }; SIGNALS.len()];
    for ((signal, _), before) in SIGNALS.iter().zip(&mut before) {
        // SAFETY: writes the action, changes nothing.
        if unsafe { libc::sigaction(*signal, std::ptr::null(), before) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    if KNOWN.set(Known { log: log.as_raw_fd(), code: loaded(), before }).is_err() {
        return Ok(());
    }
    // The handler owns the log from here on.
    let _ = log.into_raw_fd();
    for (signal, _) in SIGNALS {
        // SAFETY: the handler does only what one may.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = crashed as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(signal, &raw const action, std::ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// The currently loaded code.
fn loaded() -> Vec<Code> {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _size: usize, list: *mut c_void) -> c_int {
        // SAFETY: the list is the caller's, the description is the loader's.
        let (list, info) = unsafe { (&mut *list.cast::<Vec<Code>>(), &*info) };
        // SAFETY: a C string, or null for the program.
        let path = if info.dlpi_name.is_null() { c"" } else { unsafe { CStr::from_ptr(info.dlpi_name) } };
        let path = path.to_string_lossy();
        let name = match path.rsplit('/').next() {
            None | Some("") => "rekindled",
            Some(name) => name,
        };
        // SAFETY: the loader has so many headers there.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        for header in headers.iter().filter(|it| it.p_type == libc::PT_LOAD && it.p_flags & libc::PF_X != 0) {
            let start = info.dlpi_addr + header.p_vaddr;
            list.push(Code { start, end: start + header.p_memsz, base: info.dlpi_addr, name: name.to_owned() });
        }
        0
    }
    let mut list: Vec<Code> = Vec::new();
    // SAFETY: the callback takes the list, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut list).cast()) };
    list
}

/// A line that is formatted without allocating; text that does not fit is omitted.
struct Line {
    bytes: [u8; LINE],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One byte is reserved for the end of the line.
        let left = &mut self.bytes[self.length..LINE - 1];
        let count = text.len().min(left.len());
        left[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
        Ok(())
    }
}

/// An address, shown as a place in a library if it is one.
struct Place<'a>(&'a [Code], u64);

impl Place<'_> {
    fn code(&self) -> Option<&Code> {
        self.0.iter().find(|it| (it.start..it.end).contains(&self.1))
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code() {
            Some(code) => write!(f, "{}+{:#x}", code.name, self.1 - code.base),
            None => write!(f, "{:#x}, no library's", self.1),
        }
    }
}

extern "C" fn crashed(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let at = SIGNALS.iter().position(|it| it.0 == signal);
    if let (Some(known), Some(at)) = (KNOWN.get(), at) {
        let mut line = Line { bytes: [0; LINE], length: 0 };
        // SAFETY: the kernel has made both for this handler.
        let (info, registers) = unsafe { (&*info, (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs) };
        let [code, stack] = [libc::REG_RIP, libc::REG_RSP].map(|it| registers[it as usize] as u64);
        // SAFETY: it is read as a number; what was sent by a process has none.
        let address = if info.si_code > 0 { unsafe { info.si_addr() as u64 } } else { 0 };
        let mut thread = [0_u8; 16];
        // SAFETY: writes 16 bytes at most, the last of them 0.
        unsafe { libc::prctl(libc::PR_GET_NAME, thread.as_mut_ptr()) };
        let thread = CStr::from_bytes_until_nul(&thread).ok().and_then(|it| it.to_str().ok()).unwrap_or("");
        let (name, place) = (SIGNALS[at].1, Place(&known.code, code));
        let _ = write!(
            line,
            "the worker crashes: {name} (code {}) for address {address:#x} at {place}, thread \"{thread}\"",
            info.si_code
        );
        if !(stack.saturating_sub(STACK_NEAR)..stack.saturating_add(4096)).contains(&address) {
            let _ = line.write_str(", called by what is on the stack:");
            // SAFETY: where the stack has less, the process ends here, by the same signal.
            let words = unsafe { std::slice::from_raw_parts((stack & !7) as *const u64, STACK_WORDS) };
            let places = words.iter().map(|word| Place(&known.code, *word)).filter(|it| it.code().is_some());
            known.write(&line);
            line.length = 0;
            for place in places.take(CALLERS) {
                let _ = write!(line, " {place}");
            }
        }
        line.bytes[line.length] = b'\n';
        line.length += 1;
        known.write(&line);
        known.hand_on(at, signal, info, context);
        return;
    }
    by_default(signal);
}

impl Known {
    fn write(&self, line: &Line) {
        // The reader of the log may hang, and a crash must not.
        let mut takes = libc::pollfd { fd: self.log, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one description; the next call as below.
        if unsafe { libc::poll(&raw mut takes, 1, 0) } != 1 {
            return;
        }
        // SAFETY: a descriptor that is kept open, and bytes that are there.
        unsafe { libc::write(self.log, line.bytes.as_ptr().cast(), line.length) };
    }

    /// Hands the signal on, as if this handler had never been installed.
    fn hand_on(&self, at: usize, signal: c_int, info: &libc::siginfo_t, context: *mut c_void) {
        let before = &self.before[at];
        if before.sa_flags & libc::SA_SIGINFO != 0 && before.sa_sigaction > libc::SIG_IGN {
            // SAFETY: it was installed as one of this kind.
            let handler: extern "C" fn(c_int, *const libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(before.sa_sigaction) };
            handler(signal, info, context);
        } else {
            by_default(signal);
        }
        if info.si_code <= 0 {
            // The signal does not come again by itself.
            // SAFETY: no pointers; it comes when this handler has returned.
            unsafe { libc::raise(signal) };
        }
    }
}

/// Restores the default action: the failed access fails again when the handler returns, which ends the process.
fn by_default(signal: c_int) {
    // SAFETY: sets the default action.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    const CRASH: &str = "REKINDLE_TEST_CRASH";

    /// Run by the tests below in a separate process.
    #[test]
    #[ignore = "ends its process"]
    fn crashes() {
        say().unwrap();
        match std::env::var(CRASH).as_deref() {
            // SAFETY: it is not, which is the point.
            Ok("write") => unsafe { (0x10 as *mut u8).write_volatile(1) },
            // Sent to this thread: the test program's main thread has no signal stack of a worker.
            // SAFETY: the thread is this one.
            Ok("sent") => assert_eq!(unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGSEGV) }, 0),
            Ok("overflow") => assert_ne!(overflow(1), 0),
            _ => {}
        }
    }

    #[allow(unconditional_recursion, reason = "the point")]
    fn overflow(depth: u64) -> u64 {
        let here = std::hint::black_box([depth; 64]);
        overflow(depth + 1) + here[depth as usize % 64]
    }

    /// The exit status and the output of the process.
    fn crash(how: &str) -> (Option<i32>, String) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command.args(["--ignored", "--exact", "serve::crash::tests::crashes", "--nocapture"]);
        let output = command.env(CRASH, how).output().unwrap();
        (output.status.signal(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn a_crash_says_where_it_was_and_stays_one() {
        let (signal, said) = crash("write");
        assert_eq!(signal, Some(libc::SIGSEGV), "{said}");
        let line = said.lines().find(|it| it.starts_with("the worker crashes: SIGSEGV (code 1)")).expect(&said);
        assert!(line.contains("for address 0x10 at rekindled+0x"), "{line}");
        assert!(line.contains("on the stack: rekindled+0x"), "{line}");
    }

    #[test]
    fn one_that_was_sent_ends_the_process_too() {
        let (signal, said) = crash("sent");
        assert_eq!(signal, Some(libc::SIGSEGV), "{said}");
        assert!(said.contains("the worker crashes: SIGSEGV (code -6)"), "{said}");
    }

    #[test]
    fn a_stack_that_was_too_small_is_still_said() {
        let (signal, said) = crash("overflow");
        assert_eq!(signal, Some(libc::SIGABRT), "{said}");
        assert!(said.contains("has overflowed its stack"), "{said}");
    }
}
