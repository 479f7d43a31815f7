//! Output of kernels that print, and of failed assertions. The driver writes both to this process's stdout and stderr when
//! something synchronises; they belong on the application's. So once there is code that prints, both are memfds here. The
//! worker makes the driver write, and reads the memfds. The text then waits until the interposer fetches it.
//!
//! ```text
//!   kernel ──driver's buffer──> synchronisation ──> memfd ──> pending ──PRINTS──> the application's stdout
//! ```
//!
//! A quiesce makes the driver write before the quiesce ends, and the text that is pending then is saved with the client.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use rekindle_cuda_abi::types::*;
use rekindle_images::BlobKind;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command;
use rekindle_wire::layout::REPLY_BYTES;
use tracing::{error, warn};

use crate::gpu::driver::is_sticky;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::session::Session;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};
use crate::session::state::StateError;
use crate::session::waiting::{PRINT_STREAM, StreamKey};

/// This process's stderr from before it was replaced with a memfd: the process's own log goes there.
static LOG: OnceLock<File> = OnceLock::new();

/// The destination of this process's log.
pub fn log_writer() -> Box<dyn Write> {
    match LOG.get() {
        Some(file) => Box::new(file),
        None => Box::new(io::stderr()),
    }
}

/// Stdout and stderr.
const OUTPUTS: usize = 2;

/// A memfd that replaces stdout or stderr.
///
/// The driver may write at any moment, from threads of its own too. So the file is never truncated, which could lose text
/// that has come since it was read. Instead the part that has been read becomes a hole, which takes no memory.
struct Output {
    file: File,
    /// The number of bytes that have been read.
    read: u64,
}

impl Output {
    fn new(file: File) -> Self {
        Self { file, read: 0 }
    }

    /// Appends the text that has come since the last time.
    fn take(&mut self, to: &mut Vec<u8>) -> io::Result<()> {
        let written = self.file.metadata()?.len();
        let Some(fresh) = written.checked_sub(self.read).filter(|fresh| *fresh > 0) else { return Ok(()) };
        let had = to.len();
        to.resize(had + fresh as usize, 0);
        if let Err(error) = self.file.read_exact_at(&mut to[had..], self.read) {
            to.truncate(had);
            return Err(error);
        }
        self.read = written;
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain system call on a descriptor of ours. Where it fails the text takes memory, and nothing else.
        unsafe { libc::fallocate(self.file.as_raw_fd(), flags, 0, written as libc::off_t) };
        Ok(())
    }
}

/// Text on its way from the driver to the application.
#[derive(Default)]
pub(crate) struct Prints {
    /// The files that replace stdout and stderr, once there is code that prints.
    files: Option<[Output; OUTPUTS]>,
    /// The text that the application has not fetched.
    pending: [Vec<u8>; OUTPUTS],
}

impl Prints {
    /// Keeps what the driver writes from here on, since there is code that prints.
    pub(crate) fn capture(&mut self) {
        if self.files.is_some() {
            return;
        }
        match capture() {
            Ok(files) => self.files = Some(files.map(Output::new)),
            Err(error) => warn!("what kernels print will be lost: {error}"),
        }
    }

    /// Reads what the driver has written.
    fn read(&mut self) {
        let Some(files) = &mut self.files else { return };
        // SAFETY: writes out C's own streams, in whose buffers the driver may have left something.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        for (output, pending) in files.iter_mut().zip(&mut self.pending) {
            if let Err(error) = output.take(pending) {
                error!("what kernels have printed cannot be read now, and stays where it is: {error}");
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.pending.iter().all(Vec::is_empty)
    }
}

/// Text that kernels have printed and the application has not fetched, by output: 0 for stdout, 1 for stderr.
impl Saved for Prints {
    const KIND: BlobKind = BlobKind::Printed;
    type With<'a> = ();

    fn save(&self) -> Result<Vec<Part>, StateError> {
        Ok((0..).zip(&self.pending).map(|(handle, text)| Part { handle, bytes: text.clone() }).collect())
    }

    fn load(&mut self, part: Part, (): ()) -> Result<(), NotLoaded> {
        let pending = usize::try_from(part.handle).ok().and_then(|output| self.pending.get_mut(output));
        *pending.ok_or(NotLoaded::Image("the image has text for an output that there is not"))? = part.bytes;
        Ok(())
    }
}

fn capture() -> io::Result<[File; OUTPUTS]> {
    let result = |code: libc::c_int| if code < 0 { Err(io::Error::last_os_error()) } else { Ok(code) };
    // SAFETY: duplicates a descriptor; the new one is nobody else's.
    let log = unsafe { File::from_raw_fd(result(libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, 3))?) };
    LOG.get_or_init(|| log);
    let replace = |output: libc::c_int| -> io::Result<File> {
        // SAFETY: makes a descriptor that is nobody else's. O_APPEND, so that all that is written comes behind what is there.
        let file =
            unsafe { File::from_raw_fd(result(libc::memfd_create(c"rekindle-print".as_ptr(), libc::MFD_CLOEXEC))?) };
        // SAFETY: sets a flag of our descriptor, and makes stdout or stderr lead to it.
        unsafe {
            result(libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND))?;
            result(libc::dup2(file.as_raw_fd(), output))?;
        }
        Ok(file)
    };
    Ok([replace(libc::STDOUT_FILENO)?, replace(libc::STDERR_FILENO)?])
}

impl Prints {
    /// Collects text after a synchronisation: the driver writes what kernels have printed so far, and the client learns
    /// that there is text.
    pub(crate) fn collect(&mut self, call: &mut Call) {
        if self.files.is_none() {
            return;
        }
        for context in call.session.objects.contexts() {
            if call.enter(context).is_ok() {
                flush_driver(call, context);
            }
        }
        let _ = call.enter_own();
        self.read();
        self.announce(&call.session);
    }

    /// Notes the launch of a kernel, at which the driver may have written what other kernels have printed.
    pub(crate) fn notice(&mut self, session: &Session) {
        if self.files.is_some() {
            self.read();
            self.announce(session);
        }
    }

    /// Tells the client whether there is text to fetch.
    fn announce(&self, session: &Session) {
        if let Some(shared) = session.shared {
            shared.header().printed.store(u32::from(!self.is_empty()), Ordering::Release);
        }
    }

    /// Gives the client a part of the pending text.
    pub(crate) fn fetch(
        &mut self,
        session: &Session,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        command::Prints::read(args)?;
        let output = self.pending.iter().position(|p| !p.is_empty());
        let part = match output {
            Some(output) => {
                let pending = &mut self.pending[output];
                let room = pending.len().min(REPLY_BYTES - 32);
                pending.drain(..room).collect()
            }
            None => Vec::new(),
        };
        self.announce(session);
        reply.word(output.unwrap_or(0) as u64);
        reply.word(u64::from(!self.is_empty()));
        reply.blob(&part);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

/// Makes the driver write what a context's kernels have printed. The driver does so whenever a stream is waited for, and
/// this stream is always idle.
fn flush_driver(call: &mut Call, context: u64) {
    let driver = call.driver();
    let key = StreamKey { context, handle: PRINT_STREAM, thread: 0 };
    const NON_BLOCKING: u32 = 1;
    let stream = call.session.waiting.stream(key, || {
        let mut stream = 0;
        // SAFETY: the out parameter is a local; the context is current.
        match unsafe { (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING) } {
            CUDA_SUCCESS => Ok(stream),
            error => Err(error),
        }
    });
    let stream = match stream {
        Ok(stream) => stream,
        // A broken context makes no stream. Its kernels' text comes by its default stream, in which nothing runs any more.
        Err(error) if is_sticky(error) => CU_STREAM_LEGACY,
        Err(_) => return,
    };
    // SAFETY: the stream is the driver's own. Its result is that of what the client has enqueued elsewhere.
    unsafe { (driver.cuStreamSynchronize)(stream) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    /// A memfd, and another description of it that appends, as the description that the driver writes to does.
    fn appended() -> (Output, File) {
        // SAFETY: the name is a C string, the descriptor new.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let writer = File::options().append(true).open(path).unwrap();
        (Output::new(file), writer)
    }

    #[test]
    fn text_that_comes_while_other_text_is_taken_is_not_lost() {
        const LINES: usize = 200_000;
        let (mut output, mut writer) = appended();
        let writing = std::thread::spawn(move || {
            for line in 0..LINES {
                writeln!(writer, "{line}").unwrap();
            }
        });
        let mut text = Vec::new();
        while !writing.is_finished() {
            output.take(&mut text).unwrap();
        }
        writing.join().unwrap();
        output.take(&mut text).unwrap();
        let lines = String::from_utf8(text).unwrap();
        let wrong = lines.lines().enumerate().find(|(number, line)| *line != number.to_string());
        assert_eq!(wrong, None);
        assert_eq!(lines.lines().count(), LINES);
    }

    #[test]
    fn text_that_was_taken_takes_no_memory() {
        let (mut output, mut writer) = appended();
        let mut text = Vec::new();
        for _ in 0..100 {
            writer.write_all(&[b'x'; 64 << 10]).unwrap();
            text.clear();
            output.take(&mut text).unwrap();
            assert!(text.len() == 64 << 10 && text.iter().all(|byte| *byte == b'x'));
        }
        assert!(output.file.metadata().unwrap().blocks() * 512 <= 4096);
    }

    #[test]
    fn text_that_cannot_be_read_now_stays_to_be_read_later() {
        let (mut output, mut writer) = appended();
        writer.write_all(b"text").unwrap();
        // This file can only be written.
        let readable = std::mem::replace(&mut output.file, writer);
        let mut text = b"before".to_vec();
        assert!(output.take(&mut text).is_err());
        assert_eq!(text, b"before");
        output.file = readable;
        output.take(&mut text).unwrap();
        assert_eq!(text, b"beforetext");
    }

    #[test]
    fn saved_text_comes_back_where_it_was() {
        let mut prints = Prints::default();
        assert!(prints.is_empty());
        prints.load(Part { handle: 1, bytes: b"said".to_vec() }, ()).unwrap();
        assert!(prints.load(Part { handle: 2, bytes: Vec::new() }, ()).is_err());
        assert_eq!(&prints.pending, &[Vec::new(), b"said".to_vec()]);
        assert!(!prints.is_empty());
    }
}
