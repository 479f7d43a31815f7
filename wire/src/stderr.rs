//! Lines on stderr from a library in somebody else's process.
//!
//! The standard library's print macros panic where stderr takes nothing: its reader is gone, or its disk is full. In a
//! handler that runs at exit or at the end of a thread a panic aborts the process. So libraries that applications load
//! write by this, and the print macros are denied there (`clippy::print_stderr`).

use std::os::fd::RawFd;

/// Writes a line to stderr. What stderr does not take is lost: this neither fails nor panics, and the process gets no
/// SIGPIPE.
pub fn line(text: &str) {
    write_line(libc::STDERR_FILENO, text);
}

fn write_line(to: RawFd, text: &str) {
    // In one piece, so that lines of several threads stay whole.
    let line = format!("{text}\n");
    without_sigpipe(|| {
        let mut left = line.as_bytes();
        while !left.is_empty() {
            // SAFETY: the kernel reads at most the bytes that are there.
            let written = unsafe { libc::write(to, left.as_ptr().cast(), left.len()) };
            match usize::try_from(written) {
                Ok(0) => return,
                Ok(written) => left = left.get(written..).unwrap_or_default(),
                Err(_) if std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    });
}

/// Keeps SIGPIPE from this thread while it writes, and takes away the one that it has caused.
fn without_sigpipe(write: impl FnOnce()) {
    // SAFETY: all sets are locals, which are initialised before they are read; the mask is this thread's own and comes
    // back as it was. A write sends SIGPIPE to the thread that writes, so one that was not pending before is its own.
    unsafe {
        let [mut pipe, mut before, mut pending] = [std::mem::zeroed::<libc::sigset_t>(); 3];
        libc::sigemptyset(&raw mut pipe);
        libc::sigaddset(&raw mut pipe, libc::SIGPIPE);
        libc::sigpending(&raw mut pending);
        let was_pending = libc::sigismember(&raw const pending, libc::SIGPIPE) == 1;
        let masked = libc::pthread_sigmask(libc::SIG_BLOCK, &raw const pipe, &raw mut before) == 0;
        write();
        if masked {
            if !was_pending {
                let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                libc::sigtimedwait(&raw const pipe, std::ptr::null_mut(), &raw const at_once);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, pipe};
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

    /// The thread that has handled a SIGPIPE last.
    static HANDLED_BY: AtomicI64 = AtomicI64::new(0);

    fn thread() -> i64 {
        // SAFETY: no arguments.
        unsafe { libc::syscall(libc::SYS_gettid) }
    }

    extern "C" fn handle(_signal: libc::c_int) {
        HANDLED_BY.store(thread(), SeqCst);
    }

    #[test]
    fn a_line_arrives_whole_and_with_its_end() {
        let (mut reader, writer) = pipe().unwrap();
        write_line(writer.as_raw_fd(), "one");
        write_line(writer.as_raw_fd(), "");
        drop(writer);
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!(read, "one\n\n");
    }

    #[test]
    fn a_line_that_nobody_takes_is_lost_without_a_panic() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        write_line(full.as_raw_fd(), "lost");
        write_line(-1, "lost");
    }

    #[test]
    fn a_line_whose_reader_is_gone_sends_no_signal() {
        // SAFETY: the handler stores to an atomic, and makes a system call.
        unsafe { libc::signal(libc::SIGPIPE, handle as *const () as libc::sighandler_t) };
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        write_line(writer.as_raw_fd(), "lost");
        assert_ne!(HANDLED_BY.load(SeqCst), thread());
        // Any other write does.
        // SAFETY: the kernel reads one byte.
        assert_eq!(unsafe { libc::write(writer.as_raw_fd(), b"x".as_ptr().cast(), 1) }, -1);
        assert_eq!(HANDLED_BY.load(SeqCst), thread());
    }

    #[test]
    fn a_sigpipe_that_was_pending_stays_pending() {
        std::thread::spawn(|| {
            let (reader, writer) = pipe().unwrap();
            drop(reader);
            // SAFETY: locals, and this thread's own mask and signal.
            let pending = unsafe {
                let [mut set, mut pending] = [std::mem::zeroed::<libc::sigset_t>(); 2];
                libc::sigemptyset(&raw mut set);
                libc::sigaddset(&raw mut set, libc::SIGPIPE);
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
                libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE);
                write_line(writer.as_raw_fd(), "lost");
                libc::sigpending(&raw mut pending);
                libc::sigismember(&raw const pending, libc::SIGPIPE)
            };
            assert_eq!(pending, 1);
        })
        .join()
        .unwrap();
    }
}
