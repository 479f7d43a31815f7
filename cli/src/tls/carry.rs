//! Carries bytes between a connection and pipes: the input and output of the program that opened it, or those of the program that it runs.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::frames::{FrameError, Kind, LONGEST, WINDOW};
use super::orphan::Orphan;
use super::pipes::{self, Sink, Source};
use super::secured::{Lost, Secured};

/// What carries.
pub(super) struct Carrier {
    connection: Secured,
    sources: Vec<Source>,
    sink: Sink,
    /// What gets the program's errors, at the host that connects.
    errors: Option<Sink>,
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
        Self { errors: Some(Sink::blocking(errors)), ..Self::new(connection, sources, Sink::blocking(output), None) }
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
    pub(super) fn until_status(mut self) -> Result<u8, Lost> {
        let lost = loop {
            match self.take() {
                // Nothing comes after either.
                Ok(()) if self.status.is_some() || self.connection.is_closed() => break Lost::Closed,
                Ok(()) => {}
                Err(lost) => break lost,
            }
            if let Err(lost) = self.step() {
                break lost;
            }
        };
        self.take_the_last(&lost);
        // Nothing more comes: who reads the output hears that without waiting for who reads the errors.
        self.sink.end();
        while self.sink.wanted().or(self.errors.as_ref().and_then(Sink::wanted)).is_some() {
            self.write_out()?;
        }
        self.status.ok_or(lost)
    }

    /// Carries until the program has ended and all that it has said is on its way. After a loss the program has no caller any more.
    pub(super) fn until_ended(mut self) -> Result<Secured, (Lost, Box<Orphan>)> {
        let lost = loop {
            if self.has_ended && self.sources.is_empty() {
                return Ok(self.connection);
            }
            match self.take() {
                Ok(()) if self.connection.is_closed() => break Lost::Closed,
                Ok(()) => {}
                Err(lost) => break lost,
            }
            if let Err(lost) = self.step() {
                break lost;
            }
        };
        self.take_the_last(&lost);
        let program = self.program.filter(|_| !self.has_ended);
        Err((lost, Box::new(Orphan { program, input: self.sink, sources: self.sources })))
    }

    /// Takes what has come before the connection was lost: its end is often read with it, and it may be the word that decides.
    fn take_the_last(&mut self, lost: &Lost) {
        if !matches!(lost, Lost::Frame(_)) {
            // That nothing can be said any more is known.
            let _ = self.take();
        }
    }

    /// Writes what waits, without the connection.
    fn write_out(&mut self) -> Result<(), Errno> {
        let (sink, errors) = (self.sink.wanted(), self.errors.as_ref().and_then(Sink::wanted));
        let (has_sink, has_errors) = (sink.is_some(), errors.is_some());
        let polled = errors.into_iter().chain(sink).map(|it| PollFd::new(it, PollFlags::OUT)).collect();
        let mut ready = pipes::ready(polled, None)?;
        let mut next = |is_there: bool| is_there && ready.next() == Some(true);
        let (on_errors, on_sink) = (next(has_errors), next(has_sink));
        self.write(on_errors, on_sink);
        Ok(())
    }

    /// Writes to a sink that is ready. Both may be one pipe that blocks, so the other is looked at anew.
    fn write(&mut self, on_errors: bool, on_sink: bool) {
        match &mut self.errors {
            Some(errors) if on_errors => self.passed += errors.write(),
            _ if on_sink => self.passed += self.sink.write(),
            _ => {}
        }
    }

    /// Takes the frames that have come.
    fn take(&mut self) -> Result<(), Lost> {
        let Self { connection, sink, errors, room, passed, status, .. } = self;
        while let Some((kind, content)) = connection.next()? {
            let waiting = sink.waiting() + errors.as_ref().map_or(0, Sink::waiting);
            let is_too_much = waiting + content.len() > WINDOW;
            match (kind, &mut *errors) {
                (Kind::Data, _) if sink.is_over() => return Err(FrameError::OutOfTurn(kind).into()),
                (Kind::Data | Kind::Errors, _) if is_too_much => return Err(FrameError::TooMuch.into()),
                (Kind::Data, _) => *passed += sink.push(content),
                (Kind::End, _) => sink.end(),
                (Kind::Room, _) => {
                    let more = content.try_into().map_or(usize::MAX, |it| u32::from_le_bytes(it) as usize);
                    *room = room.checked_add(more).filter(|it| *it <= WINDOW).ok_or(FrameError::TooMuch)?;
                }
                (Kind::Errors, Some(errors)) => *passed += errors.push(content),
                (Kind::Status, Some(_)) => *status = Some(content.first().copied().unwrap_or(1)),
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
        let mut polled = vec![PollFd::new(&self.connection, self.connection.interest())];
        let (errors, sink) = (self.errors.as_ref().and_then(Sink::wanted), self.sink.wanted());
        polled.extend(errors.into_iter().chain(sink).map(|it| PollFd::new(it, PollFlags::OUT)));
        let program = self.program.as_ref().filter(|_| !self.has_ended);
        polled.extend(program.map(|it| PollFd::new(it, PollFlags::IN)));
        let can_send = self.room > 0 && !self.connection.is_full();
        let sources = self.sources.iter().filter(|_| can_send);
        polled.extend(sources.map(|it| PollFd::new(&it.from, PollFlags::IN)));
        // What a program has said that has ended is there already.
        let timeout = (self.has_ended && can_send).then(Timespec::default);
        let mut ready = pipes::ready(polled, timeout.as_ref())?;
        let mut next = |is_there: bool| is_there && ready.next() == Some(true);
        let (on_socket, on_errors, on_sink) = (next(true), next(errors.is_some()), next(sink.is_some()));
        let on_program = next(program.is_some());
        let on_sources: Vec<_> = self.sources.iter().map(|_| next(can_send)).collect();
        if on_socket {
            self.connection.read()?;
            self.connection.flush()?;
        }
        self.write(on_errors, on_sink);
        self.send(&on_sources)?;
        if on_program {
            // What it has said is in its pipes by now. Processes that it has left may have them, and say more; nobody waits for that.
            self.has_ended = true;
            self.sink.close();
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
