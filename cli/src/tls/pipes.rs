//! The pipes between which and a connection bytes are carried.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::vec;

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use super::frames::{Kind, WINDOW};

/// What a pipe that is ready takes without blocking (PIPE_BUF).
const SURE: usize = 4096;

/// Waits until one of these is ready, and tells of each, in their order, whether it is.
pub(super) fn ready(mut polled: Vec<PollFd<'_>>, timeout: Option<&Timespec>) -> Result<vec::IntoIter<bool>, Errno> {
    while let Err(error) = poll(&mut polled, timeout) {
        if error != Errno::INTR {
            return Err(error);
        }
    }
    Ok(polled.iter().map(|it| !it.revents().is_empty()).collect::<Vec<_>>().into_iter())
}

/// A pipe whose content is sent.
pub(super) struct Source {
    pub(super) from: OwnedFd,
    /// `Data` or `Errors`.
    pub(super) kind: Kind,
}

/// A pipe that gets what has come.
pub(super) struct Sink {
    /// None once it is closed.
    to: Option<OwnedFd>,
    queue: VecDeque<u8>,
    /// The most bytes that are written at once.
    most: usize,
    /// Whether it is to be closed when the queue is empty.
    is_over: bool,
}

impl Sink {
    /// One that blocks, since others have it, too.
    pub(super) fn blocking(to: OwnedFd) -> Self {
        Self { to: Some(to), queue: VecDeque::new(), most: SURE, is_over: false }
    }

    /// One that does not.
    pub(super) fn nonblocking(to: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&to, true)?;
        Ok(Self { most: WINDOW, ..Self::blocking(to) })
    }

    /// More has come. Returns the bytes of it that nobody has to keep: all, if the pipe is closed.
    pub(super) fn push(&mut self, bytes: &[u8]) -> usize {
        if self.to.is_none() {
            return bytes.len();
        }
        self.queue.extend(bytes);
        0
    }

    /// The bytes that wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// The pipe, if something waits for it.
    pub(super) fn wanted(&self) -> Option<&OwnedFd> {
        self.to.as_ref().filter(|_| !self.queue.is_empty())
    }

    /// Writes what the pipe takes. Returns the bytes that nobody has to keep any more.
    pub(super) fn write(&mut self) -> usize {
        let before = self.queue.len();
        if let Some(to) = &self.to {
            let next = self.queue.as_slices().0;
            match rustix::io::write(to, next.get(..self.most.min(next.len())).unwrap_or_default()) {
                Ok(written) => drop(self.queue.drain(..written)),
                Err(Errno::AGAIN | Errno::INTR) => {}
                // Nobody reads it any more.
                Err(_) => self.to = None,
            }
        }
        self.settle();
        before - self.queue.len()
    }

    /// Nothing more comes: it is closed when all that waits is written.
    pub(super) fn end(&mut self) {
        self.is_over = true;
        self.settle();
    }

    /// Whether its end has been said.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Nobody reads it any more.
    pub(super) fn close(&mut self) {
        self.to = None;
        self.settle();
    }

    fn settle(&mut self) {
        if self.queue.is_empty() && self.is_over {
            self.to = None;
        }
        if self.to.is_none() {
            self.queue.clear();
        }
    }
}
