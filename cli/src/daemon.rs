//! Questions to the daemon.

use std::io::ErrorKind;
use std::os::fd::RawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::frame;

use crate::failure::Failure;

const VARIABLE: &str = "REKINDLE_SOCKET";
const TIMEOUT: Duration = Duration::from_secs(30);

/// The option of the verbs that ask the daemon.
#[derive(Clone, Debug, Args)]
pub(crate) struct At {
    /// The daemon's socket [default: $REKINDLE_SOCKET, or /run/rekindle/rekindled.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl At {
    /// The path that the option names, if it was given.
    pub(crate) fn given(&self) -> Option<String> {
        self.socket.as_ref().map(|it| it.display().to_string())
    }

    /// The absolute path of the daemon's socket: from the option, the environment, or the default.
    pub(crate) fn socket(&self) -> anyhow::Result<PathBuf> {
        let path = self.socket.clone().or_else(|| std::env::var_os(VARIABLE).map(PathBuf::from));
        let path = path.unwrap_or_else(|| rekindle_wire::control::DEFAULT_SOCKET.into());
        std::path::absolute(path).context("cannot tell the current directory")
    }
}

/// Asks one question.
pub(crate) fn ask(socket: &Path, request: &Request) -> Result<Reply, Failure> {
    Session::open(socket, request).map(|(_, reply)| reply)
}

/// Asks one question that takes as long as it takes: the daemon gives up what makes no progress. Descriptors come with it.
pub(crate) fn ask_long(socket: &Path, request: &Request, fds: &[RawFd]) -> Result<Reply, Failure> {
    let stream = connect(socket)?;
    let asked = || -> anyhow::Result<Reply> {
        frame::send(&stream, &Opening::new(request)?, &[], fds)?;
        Ok(frame::receive(&stream)?.body)
    };
    accepted(asked().with_context(|| format!("the daemon at {} does not answer", socket.display()))?)
}

/// A connection for several questions. An order that it has placed with the daemon ends with it.
pub(crate) struct Session(UnixStream);

impl Session {
    /// Connects and asks the first question.
    pub(crate) fn open(socket: &Path, request: &Request) -> Result<(Self, Reply), Failure> {
        let stream = connect(socket)?;
        let opened = stream.set_read_timeout(Some(TIMEOUT)).map_err(anyhow::Error::from);
        let asked = opened.and_then(|()| Ok(frame::send(&stream, &Opening::new(request)?, &[], &[])?));
        let session = Self(stream);
        let reply = asked.and_then(|()| session.hear());
        let reply = reply.with_context(|| format!("the daemon at {} does not answer", socket.display()))?;
        Ok((session, accepted(reply)?))
    }

    /// Asks a first question that takes as long as it takes, without waiting for the answer. A descriptor comes with it.
    pub(crate) fn begin(socket: &Path, request: &Request, fd: RawFd) -> Result<Self, Failure> {
        let session = Self(connect(socket)?);
        let opening = Opening::new(request).map_err(anyhow::Error::from)?;
        frame::send(&session.0, &opening, &[], &[fd]).map_err(anyhow::Error::from)?;
        Ok(session)
    }

    /// Asks again. A descriptor comes with it. The answer may be a refusal.
    pub(crate) fn ask_with(&self, request: &Request, fd: RawFd) -> anyhow::Result<Reply> {
        frame::send(&self.0, request, &[], &[fd])?;
        self.hear()
    }

    /// The connection.
    pub(crate) fn stream(&self) -> &UnixStream {
        &self.0
    }

    /// Asks again.
    pub(crate) fn ask(&self, request: &Request) -> Result<Reply, Failure> {
        frame::send(&self.0, request, &[], &[]).map_err(anyhow::Error::from)?;
        accepted(self.hear()?)
    }

    /// Waits for an answer, which may be a refusal.
    pub(crate) fn hear(&self) -> anyhow::Result<Reply> {
        Ok(frame::receive(&self.0)?.body)
    }
}

fn accepted(reply: Reply) -> Result<Reply, Failure> {
    match reply {
        Reply::Failed(failure) => Err(Failure::of_kind(failure.kind, anyhow!("the daemon refuses: {failure}"))),
        reply => Ok(reply),
    }
}

fn connect(socket: &Path) -> Result<UnixStream, Failure> {
    UnixStream::connect(socket).map_err(|error| {
        let hint = match error.kind() {
            ErrorKind::PermissionDenied => {
                "you may not use its socket: be root, or a member of the group that its configuration names"
            }
            _ => "is rekindled running, and is --socket the same for both?",
        };
        let said = format!("cannot reach the daemon at {}; {hint}", socket.display());
        match error.kind() {
            ErrorKind::PermissionDenied => Failure::refused(anyhow!(error).context(said)),
            _ => anyhow!(error).context(said).into(),
        }
    })
}

/// An answer that does not fit the question.
pub(crate) fn unexpected_answer() -> anyhow::Error {
    anyhow!("the daemon gave an unexpected answer: install one version of Rekindle")
}
