//! A TCP connection under TLS that carries frames. It blocks only where a deadline says for how long.

use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::Connection;
use rustls::pki_types::CertificateDer;
use thiserror::Error;

use super::frames::{self, FrameError, Kind, Parser};

/// The bytes that are read at once.
const BUFFER: usize = 256 << 10;

/// Why nothing more comes or goes.
#[derive(Debug, Error)]
pub(super) enum Lost {
    #[error("the connection has closed")]
    Closed,
    #[error("the connection has failed: {0}")]
    Io(#[from] io::Error),
    #[error("{0}")]
    Tls(#[from] rustls::Error),
    #[error("the other end has said {0}")]
    Frame(#[from] FrameError),
    #[error("the other end takes too long")]
    Slow,
}

impl From<rustix::io::Errno> for Lost {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Io(error.into())
    }
}

/// A connection.
pub(super) struct Secured {
    socket: TcpStream,
    tls: Connection,
    parser: Parser,
    buffer: Box<[u8]>,
    /// Whether the other end has said that nothing more comes.
    is_closed: bool,
}

impl Secured {
    /// Begins TLS on a socket.
    pub(super) fn new(socket: TcpStream, tls: impl Into<Connection>) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let mut tls = tls.into();
        // `is_full` limits it.
        tls.set_buffer_limit(None);
        let buffer = vec![0; BUFFER].into();
        Ok(Self { socket, tls, parser: Parser::default(), buffer, is_closed: false })
    }

    /// Waits until both ends know the keys.
    pub(super) fn shake_hands(&mut self, deadline: Instant) -> Result<(), Lost> {
        while self.tls.is_handshaking() {
            self.flush()?;
            if self.tls.is_handshaking() {
                self.wait(deadline)?;
            }
        }
        self.flush()
    }

    /// The certificate of the other end, once hands are shaken.
    pub(super) fn certificate(&self) -> Option<&CertificateDer<'static>> {
        self.tls.peer_certificates()?.first()
    }

    /// Waits for a frame.
    pub(super) fn hear(&mut self, deadline: Instant) -> Result<(Kind, Vec<u8>), Lost> {
        loop {
            if let Some((kind, content)) = self.parser.next()? {
                return Ok((kind, content.to_vec()));
            }
            self.wait(deadline)?;
        }
    }

    /// A frame that has come.
    pub(super) fn next(&mut self) -> Result<Option<(Kind, &[u8])>, FrameError> {
        self.parser.next()
    }

    /// Says something. It may be sent later: when [`Secured::flush`] is called.
    pub(super) fn say(&mut self, kind: Kind, content: &[u8]) -> Result<(), Lost> {
        let mut writer = self.tls.writer();
        io::Write::write_all(&mut writer, &frames::head(kind, content.len()))?;
        io::Write::write_all(&mut writer, content)?;
        self.flush()
    }

    /// Whether the socket takes no more, so nothing more should be said.
    pub(super) fn is_full(&self) -> bool {
        self.tls.wants_write()
    }

    /// Sends what the socket takes.
    pub(super) fn flush(&mut self) -> Result<(), Lost> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.socket) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    // The other end may have said why before.
                    while self.read()? {}
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Reads what has come, if something has: then there may be frames.
    pub(super) fn read(&mut self) -> Result<bool, Lost> {
        if self.is_closed {
            return Ok(false);
        }
        let length = match self.socket.read(&mut self.buffer) {
            // Without a word: what was said before may be less than the other end wanted to say.
            Ok(0) => return Err(Lost::Closed),
            Ok(length) => length,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        };
        let mut sealed = self.buffer.get(..length).unwrap_or_default();
        let mut plain = [0; 16 << 10];
        while !sealed.is_empty() {
            self.tls.read_tls(&mut sealed)?;
            let processed = self.tls.process_new_packets();
            // Also what has come before something that is no TLS.
            while let Ok(read @ 1..) = self.tls.reader().read(&mut plain) {
                self.parser.push(plain.get(..read).unwrap_or_default());
            }
            match processed {
                Ok(state) => self.is_closed |= state.peer_has_closed(),
                Err(error) => {
                    // The other end hears why.
                    let _ = self.tls.write_tls(&mut self.socket);
                    return Err(error.into());
                }
            }
            if self.is_closed {
                break;
            }
        }
        Ok(true)
    }

    /// Whether nothing more comes, apart from frames that are here.
    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Waits until something comes or goes.
    fn wait(&mut self, deadline: Instant) -> Result<(), Lost> {
        if self.is_closed {
            return Err(Lost::Closed);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Lost::Slow);
        }
        let flags = self.interest();
        match poll(&mut [PollFd::new(&self.socket, flags)], Some(&timespec(left))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        self.read()?;
        self.flush()
    }

    /// What to wait for.
    pub(super) fn interest(&self) -> PollFlags {
        if self.tls.wants_write() { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
    }

    /// Says that nothing more comes, and waits until the other end has heard all: what a socket has that is closed with unread bytes may be
    /// lost on its way.
    pub(super) fn close(mut self, deadline: Instant) {
        self.tls.send_close_notify();
        let mut sent = self.flush();
        while sent.is_ok() && self.tls.wants_write() {
            sent = self.wait(deadline);
        }
        let _ = self.socket.shutdown(Shutdown::Write);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let ready = poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&timespec(left)));
            match self.socket.read(&mut self.buffer) {
                Ok(1..) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && ready.is_ok_and(|it| it > 0) => {}
                _ => return,
            }
            if left.is_zero() {
                return;
            }
        }
    }
}

impl AsFd for Secured {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: time.subsec_nanos().into() }
}
