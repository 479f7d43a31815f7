//! The helper that asks the machine's NVML: a process of its own, since a library that hangs or crashes must not take the
//! daemon with it. The daemon starts the helper for a question, and again when the helper has ended.
//!
//! ```text
//!            asked               Ready               asked
//!   none ───────────► starting ────────► idle ◄──────────────► busy
//!    ▲  again after a while  │ Failed, or nothing said           │ hangs, or ends (again at once)
//!    └───────────────────────┴──────────────────────────────────┘
//! ```

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::nvml::{Answer, HelperQuestion, HelperReady};
use thiserror::Error;
use tracing::{info, warn};

use super::spawn::become_helper;
use super::{lock, wait_timeout};
use crate::config::Config;

/// The name of the machine's library.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// How long NVML may take to start, and how long to answer.
const START_TIMEOUT: Duration = Duration::from_secs(20);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the daemon leaves NVML alone after the helper could not be started, or hung.
const BACK_OFF: Duration = Duration::from_secs(30);

/// The machine's NVML, if it has one.
pub(crate) struct Nvml {
    program: io::Result<PathBuf>,
    library: Option<PathBuf>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    helper: Option<Helper>,
    /// A thread has the helper, or starts one.
    busy: bool,
    not_before: Option<Instant>,
}

struct Helper {
    child: Child,
    channel: UnixStream,
}

/// Why there is no helper.
#[derive(Debug, Error)]
enum HelperError {
    #[error("the helper cannot be started: {0}")]
    Start(#[from] io::Error),
    #[error("the helper does not answer: {0}")]
    Channel(#[from] FrameError),
    /// The helper's own words.
    #[error("{0}")]
    Library(String),
}

impl Nvml {
    /// The NVML of the configured driver library: the one beside it or, where the loader finds the driver by its name, the one
    /// that the loader finds.
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            program: std::env::current_exe(),
            library: beside(&config.workers.cuda_driver),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Asks. None where the machine has no NVML, or where NVML does not answer.
    pub(crate) fn ask(&self, question: &HelperQuestion) -> Option<Answer> {
        let library = self.library.as_deref()?;
        let helper = match self.take()? {
            Some(helper) => helper,
            None => match self.start(library) {
                Ok(helper) => helper,
                Err(error) => {
                    warn!("cannot use {}: {error}; NVML answers fewer queries", library.display());
                    self.give(None, Some(BACK_OFF));
                    return None;
                }
            },
        };
        match helper.ask(question) {
            Ok(answer) => {
                self.give(Some(helper), None);
                Some(answer)
            }
            Err(error) => {
                warn!(function = question.question.function, "NVML does not answer: {error}");
                helper.end();
                // A helper that has ended over a question may answer others; a helper that hangs will hang again.
                let hangs = matches!(&error, FrameError::Io(e) if e.kind() == io::ErrorKind::WouldBlock);
                self.give(None, hangs.then_some(BACK_OFF));
                None
            }
        }
    }

    /// Waits until the helper is free. None if it is not to be used now; an inner none if there is no helper yet.
    fn take(&self) -> Option<Option<Helper>> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut state = lock(&self.state);
        while state.busy {
            let left = deadline.checked_duration_since(Instant::now())?;
            state = wait_timeout(&self.changed, state, left);
        }
        if state.not_before.is_some_and(|it| it > Instant::now()) {
            return None;
        }
        state.busy = true;
        Some(state.helper.take())
    }

    fn give(&self, helper: Option<Helper>, pause: Option<Duration>) {
        let mut state = lock(&self.state);
        *state = State { helper, busy: false, not_before: pause.map(|it| Instant::now() + it) };
        drop(state);
        self.changed.notify_all();
    }

    fn start(&self, library: &Path) -> Result<Helper, HelperError> {
        let program = self.program.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
        let (channel, theirs) = UnixStream::pair()?;
        let fd = theirs.as_raw_fd();
        let mut command = Command::new(program);
        command.args(["nvml", "--channel-fd", &fd.to_string(), "--library"]).arg(library);
        command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
        become_helper(&mut command, fd);
        let child = command.spawn()?;
        drop(OwnedFd::from(theirs));
        let helper = Helper { child, channel };
        match helper.ready() {
            Ok(()) => {
                info!(helper = helper.child.id(), "NVML queries go through {}", library.display());
                Ok(helper)
            }
            Err(error) => {
                helper.end();
                Err(error)
            }
        }
    }
}

impl Helper {
    fn ready(&self) -> Result<(), HelperError> {
        self.channel.set_read_timeout(Some(START_TIMEOUT))?;
        match frame::receive::<HelperReady>(&self.channel)?.body {
            HelperReady::Ready => Ok(self.channel.set_read_timeout(Some(ANSWER_TIMEOUT))?),
            HelperReady::Failed { reason } => Err(HelperError::Library(reason)),
        }
    }

    fn ask(&self, question: &HelperQuestion) -> Result<Answer, FrameError> {
        frame::send(&self.channel, question, &[], &[])?;
        Ok(frame::receive::<Answer>(&self.channel)?.body)
    }

    /// Kills the helper. A helper that cannot die, because a driver hangs, delays no thread.
    fn end(mut self) {
        let _ = self.child.kill();
        std::thread::spawn(move || self.child.wait());
    }
}

/// The NVML library beside a driver library; none where there is none.
fn beside(driver: &Path) -> Option<PathBuf> {
    match driver.parent() {
        Some(folder) if folder != Path::new("") => Some(folder.join(LIBRARY)).filter(|library| library.exists()),
        _ => Some(LIBRARY.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_that_of_the_driver_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let driver = dir.path().join("libcuda.so.1");
        assert_eq!(beside(&driver), None);
        std::fs::write(dir.path().join(LIBRARY), "").unwrap();
        assert_eq!(beside(&driver), Some(dir.path().join(LIBRARY)));
        assert_eq!(beside(Path::new("libcuda.so.1")), Some(LIBRARY.into()));
    }
}
