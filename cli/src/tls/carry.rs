//! Carries bytes between a connection and pipes: the input and output of the program that opened it, or those of the program that it runs.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::frames::{FrameError, Kind, LONGEST, WINDOW};
use super::secured::{Lost, Secured};

/// What a pipe that is ready takes without blocking (PIPE_BUF).
const SURE: usize = 4096;

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

    /// Writes what the pipe takes. Returns the bytes that nobody has to keep any more.
    fn write(&mut self) -> usize {
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

    fn settle(&mut self) {
        if self.queue.is_empty() && self.is_over {
            self.to = None;
        }
        if self.to.is_none() {
            self.queue.clear();
        }
    }
}

/// What carries.
pub(super) struct Carrier {
    connection: Secured,
    sources: Vec<Source>,
    sink: Sink,
    /// What gets the program's errors, at the host that connects.
    errors: Option<File>,
    /// The program that is run (a pidfd), at the host where it is.
    program: Option<OwnedFd>,
    has_ended: bool,
    /// The bytes that the other end takes.
    room: usize,
    /// The bytes that were passed on since that was said.
    passed: usize,
    /// How the other host's program has ended.
    status: Option<u8>,
    piece: Box<[u8]>,
}

impl Carrier {
    /// At the host that connects.
    pub(super) fn of_caller(connection: Secured, input: OwnedFd, output: OwnedFd, errors: OwnedFd) -> Self {
        let sources = vec![Source { from: input, kind: Kind::Data }];
        Self { errors: Some(errors.into()), ..Self::new(connection, sources, Sink::blocking(output), None) }
    }

    /// At the host that runs a program.
    pub(super) fn of_program(
        connection: Secured,
        program: OwnedFd,
        input: OwnedFd,
        sources: Vec<Source>,
    ) -> io::Result<Self> {
        for it in &sources {
            rustix::io::ioctl_fionbio(&it.from, true)?;
        }
        Ok(Self::new(connection, sources, Sink::nonblocking(input)?, Some(program)))
    }

    fn new(connection: Secured, sources: Vec<Source>, sink: Sink, program: Option<OwnedFd>) -> Self {
        let piece = vec![0; LONGEST].into();
        let (has_ended, room, passed, status) = (false, WINDOW, 0, None);
        Self { connection, sources, sink, errors: None, program, has_ended, room, passed, status, piece }
    }

    /// Carries until the other host's program has ended and all that it has said is here. Returns how it has ended.
    pub(super) fn until_status(mut self) -> Result<(u8, Secured), Lost> {
        loop {
            self.take()?;
            match self.status {
                Some(status) if self.sink.queue.is_empty() => return Ok((status, self.connection)),
                Some(_) => {}
                None if self.connection.is_closed() => return Err(Lost::Closed),
                None => {}
            }
            self.step()?;
        }
    }

    /// Carries until the program has ended and all that it has said is on its way. After a loss the program's input has ended, and what it
    /// says is the caller's.
    pub(super) fn until_ended(mut self) -> Result<Secured, (Lost, Vec<Source>)> {
        let carried = loop {
            if self.has_ended && self.sources.is_empty() {
                break Ok(());
            }
            match self.take() {
                Ok(()) if self.connection.is_closed() => break Err(Lost::Closed),
                Ok(()) => {}
                Err(lost) => break Err(lost),
            }
            if let Err(lost) = self.step() {
                break Err(lost);
            }
        };
        match carried {
            Ok(()) => Ok(self.connection),
            Err(lost) => Err((lost, self.sources)),
        }
    }

    /// Takes the frames that have come.
    fn take(&mut self) -> Result<(), Lost> {
        let Self { connection, sink, errors, room, passed, status, .. } = self;
        while let Some((kind, content)) = connection.next()? {
            match kind {
                Kind::Data if sink.is_over => return Err(FrameError::OutOfTurn(kind).into()),
                Kind::Data if sink.queue.len() + content.len() > WINDOW => return Err(FrameError::TooMuch.into()),
                Kind::Data if sink.to.is_none() => *passed += content.len(),
                Kind::Data => sink.queue.extend(content),
                Kind::End => {
                    sink.is_over = true;
                    sink.settle();
                }
                Kind::Room => {
                    let more = content.try_into().map_or(WINDOW, |it| u32::from_le_bytes(it) as usize);
                    *room = room.checked_add(more).filter(|it| *it <= WINDOW).ok_or(FrameError::TooMuch)?;
                }
                Kind::Errors | Kind::Status => match errors {
                    None => return Err(FrameError::OutOfTurn(kind).into()),
                    Some(_) if kind == Kind::Status => *status = Some(content.first().copied().unwrap_or(1)),
                    Some(errors) => {
                        // If nobody reads it, nobody misses it.
                        let _ = errors.write_all(content);
                        *passed += content.len();
                    }
                },
                _ => return Err(FrameError::OutOfTurn(kind).into()),
            }
        }
        if *passed >= WINDOW / 4 && !connection.is_closed() {
            let more = (*passed as u32).to_le_bytes();
            *passed = 0;
            connection.say(Kind::Room, &more)?;
        }
        Ok(())
    }

    /// Waits until something can be carried, and carries it.
    fn step(&mut self) -> Result<(), Lost> {
        let is_open = !self.connection.is_closed();
        let mut polled = Vec::new();
        polled.extend(is_open.then(|| PollFd::new(&self.connection, self.connection.interest())));
        let sink = self.sink.to.as_ref().filter(|_| !self.sink.queue.is_empty());
        polled.extend(sink.map(|it| PollFd::new(it, PollFlags::OUT)));
        let program = self.program.as_ref().filter(|_| !self.has_ended);
        polled.extend(program.map(|it| PollFd::new(it, PollFlags::IN)));
        let can_send = self.room > 0 && !self.connection.is_full();
        let sources = self.sources.iter().filter(|_| can_send);
        polled.extend(sources.map(|it| PollFd::new(&it.from, PollFlags::IN)));
        // What a program has said that has ended is there already.
        let timeout = (self.has_ended && can_send).then(Timespec::default);
        match poll(&mut polled, timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(()),
            polled => polled?,
        };
        let mut ready = polled.iter().map(|it| !it.revents().is_empty());
        let mut next = |is_there: bool| is_there && ready.next() == Some(true);
        let (on_socket, on_sink, on_program) = (next(is_open), next(sink.is_some()), next(program.is_some()));
        let on_sources: Vec<_> = self.sources.iter().map(|_| next(can_send)).collect();
        drop(polled);
        if on_socket {
            self.connection.read()?;
            self.connection.flush()?;
        }
        if on_sink {
            self.passed += self.sink.write();
        }
        self.send(&on_sources)?;
        if on_program {
            // What it has said is in its pipes by now. Processes that it has left may have them, and say more; nobody waits for that.
            self.has_ended = true;
            self.sink.to = None;
            self.sink.settle();
        }
        Ok(())
    }

    /// Sends what the sources have that are ready.
    fn send(&mut self, ready: &[bool]) -> Result<(), Lost> {
        let mut over = Vec::new();
        for (at, source) in self.sources.iter().enumerate() {
            // A program that has ended makes its pipes ready for the last time.
            let is_last = self.has_ended && ready.get(at).is_none_or(|it| !it);
            if self.room == 0 || self.connection.is_full() || (!is_last && ready.get(at) != Some(&true)) {
                continue;
            }
            let most = self.room.min(self.piece.len());
            match rustix::io::read(&source.from, self.piece.get_mut(..most).unwrap_or_default()) {
                Ok(length @ 1..) => {
                    self.room -= length;
                    self.connection.say(source.kind, self.piece.get(..length).unwrap_or_default())?;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if !self.has_ended => {}
                _ => {
                    over.push(at);
                    if source.kind == Kind::Data {
                        self.connection.say(Kind::End, &[])?;
                    }
                }
            }
        }
        for at in over.into_iter().rev() {
            self.sources.remove(at);
        }
        Ok(())
    }
}

/// Passes on what a program says whose caller is lost, and throws away what it answers, until it has ended or says nothing more.
pub(super) fn drain(sources: &mut Vec<Source>) {
    let mut piece = vec![0; LONGEST];
    while !sources.is_empty() {
        let mut polled: Vec<_> = sources.iter().map(|it| PollFd::new(&it.from, PollFlags::IN)).collect();
        match poll(&mut polled, None) {
            Err(Errno::INTR) => continue,
            Err(_) => return,
            Ok(_) => {}
        }
        let ready: Vec<_> = polled.iter().map(|it| !it.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        sources.retain(|it| {
            if ready.next() != Some(true) {
                return true;
            }
            match rustix::io::read(it.from.as_fd(), &mut piece) {
                Ok(0) => false,
                Ok(length) => {
                    if it.kind == Kind::Errors {
                        let _ = io::stderr().write_all(piece.get(..length).unwrap_or_default());
                    }
                    true
                }
                Err(error) => matches!(error, Errno::AGAIN | Errno::INTR),
            }
        });
    }
}
