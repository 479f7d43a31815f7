//! Serving the metrics: the sockets, and a thread for each peer.
//!
//! ```text
//!   accepted ──► asks ──► is answered ──► over
//!                  │          │ room is needed for another: those that have not asked first, the oldest first
//!                  └──────────┴────────► closed
//! ```
//!
//! A peer may say nothing, send its request byte by byte, or read no answer. Each has little time and little memory, there are few
//! at a time, and one more takes the place of the oldest. So such peers hold up nobody: a scraper asks at once.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use prometheus_client::encoding::prometheus_text;
use prometheus_client::registry::Registry;
use thiserror::Error;
use tracing::{debug, error, info, warn};

use super::super::stale_socket::{self, Stale};
use super::super::{Daemon, lock, sys, thread, wait_timeout};
use super::families::{Metrics, PREFIX};
use super::gauges::Gauges;
use super::http::{self, HEAD_MAX, Head, Status};
use crate::config::{MetricsConfig, MetricsSocket};

/// The most peers at a time. There are one or two scrapers.
const MOST: usize = 16;
/// How long a peer may take to send its request, and to take the answer.
const ASK_TIME: Duration = Duration::from_secs(5);
const ANSWER_TIME: Duration = Duration::from_secs(10);
/// The mode of the socket. Who may use the GPUs need not see the programs of others, so this is not the control socket's.
const MODE: u32 = 0o660;
/// How long to wait after an error before another connection is accepted.
const ERROR_PAUSE: Duration = Duration::from_millis(100);

/// Why the metrics cannot be served where the configuration says.
#[derive(Debug, Error)]
pub(crate) enum MetricsError {
    #[error("metrics.socket: cannot {action} {}: {source}", .path.display())]
    Socket { action: &'static str, path: PathBuf, source: io::Error },
    #[error("metrics.socket: another process serves {}: name another path, or \"\" for none", .0.display())]
    Taken(PathBuf),
    #[error("metrics.socket_group: {0}")]
    Group(io::Error),
    #[error("metrics.listen: cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
}

/// The sockets for the metrics.
#[derive(Debug)]
pub(in crate::daemon) struct Listeners {
    socket: Option<(UnixListener, PathBuf)>,
    tcp: Option<TcpListener>,
}

impl Listeners {
    /// Makes the sockets, in place of one that a dead daemon left.
    ///
    /// # Errors
    /// A place that the configuration names cannot be used. If that is so of the default place, the log says so.
    pub(in crate::daemon) fn bind(config: &MetricsConfig) -> Result<Self, MetricsError> {
        let group = config.socket_group.as_deref().map(sys::group).transpose().map_err(MetricsError::Group)?;
        let bind = |path: &PathBuf| Ok(Some((bind_socket(path, group)?, path.clone())));
        let socket = match &config.socket {
            MetricsSocket::None => None,
            MetricsSocket::Given(path) => bind(path)?,
            MetricsSocket::Default(path) => bind(path).unwrap_or_else(|error: MetricsError| {
                warn!("no socket for metrics: {error}");
                None
            }),
        };
        let listen = |address| {
            let socket = TcpListener::bind(address);
            socket.map_err(|source| MetricsError::Listen { address, source })
        };
        Ok(Self { socket, tcp: config.listen.map(listen).transpose()? })
    }

    /// Removes the Unix socket.
    pub(in crate::daemon) fn remove(&self) {
        if let Some((_, path)) = &self.socket
            && let Err(error) = std::fs::remove_file(path)
        {
            debug!(path = %path.display(), %error, "cannot remove the socket");
        }
    }
}

fn bind_socket(path: &Path, group: Option<u32>) -> Result<UnixListener, MetricsError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| MetricsError::Socket { action, path, source }
    };
    if let Some(parent) = path.parent()
        && !parent.is_dir()
    {
        std::fs::create_dir_all(parent).map_err(failed("make the directory", parent))?;
        // A scraper need not be root; the socket's own mode decides.
        std::fs::set_permissions(parent, PermissionsExt::from_mode(0o755))
            .map_err(failed("set the mode of", parent))?;
    }
    stale_socket::remove(path).map_err(|stale| match stale {
        Stale::Taken => MetricsError::Taken(path.to_owned()),
        Stale::Io { action, source } => failed(action, path)(source),
    })?;
    let socket = UnixListener::bind(path).map_err(failed("listen on", path))?;
    if let Some(group) = group {
        chown(path, None, Some(group)).map_err(failed("set the group of", path))?;
    }
    std::fs::set_permissions(path, PermissionsExt::from_mode(MODE)).map_err(failed("set the mode of", path))?;
    Ok(socket)
}

/// Serves the metrics in the background, as long as the daemon lives.
///
/// # Errors
/// There is no thread for it.
pub(in crate::daemon) fn serve(daemon: &Arc<Daemon>, listeners: &Listeners) -> io::Result<()> {
    let mut registry = Registry::with_prefix(PREFIX);
    daemon.metrics.register(&mut registry);
    registry.register_collector(Box::new(Gauges::new(daemon)));
    let server = Arc::new(Server { registry, metrics: Arc::clone(&daemon.metrics), peers: Arc::default() });
    if let Some((socket, path)) = &listeners.socket {
        let (server, socket) = (Arc::clone(&server), socket.try_clone()?);
        thread("metrics", move || server.accept_all(|| Ok(Peer::Unix(socket.accept()?.0))))?;
        info!(socket = %path.display(), "metrics are served");
    }
    if let Some(tcp) = &listeners.tcp {
        let (server, socket) = (Arc::clone(&server), tcp.try_clone()?);
        // The port that the kernel has chosen, if the configuration says 0.
        let address = tcp.local_addr()?;
        info!(%address, "metrics are served");
        if !address.ip().is_loopback() {
            warn!("whoever reaches {address} may read the metrics, which name all programs (metrics.listen)");
        }
        thread("metrics", move || server.accept_all(|| Ok(Peer::Tcp(socket.accept()?.0))))?;
    }
    Ok(())
}

/// A connection of either kind.
#[derive(Debug)]
enum Peer {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Peer {
    fn try_clone(&self) -> io::Result<Self> {
        Ok(match self {
            Self::Unix(stream) => Self::Unix(stream.try_clone()?),
            Self::Tcp(stream) => Self::Tcp(stream.try_clone()?),
        })
    }

    /// Ends it: whoever reads or writes wakes up.
    fn close(&self) {
        let closed = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
        };
        if let Err(error) = closed {
            debug!(%error, "its other end has closed it");
        }
    }

    /// Reads until the deadline.
    fn read(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<usize> {
        let left = Some(left(deadline)?);
        match self {
            Self::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
            Self::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
        }
    }

    /// Writes some of the bytes until the deadline.
    fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<usize> {
        let left = Some(left(deadline)?);
        match self {
            Self::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
            Self::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
        }
    }
}

/// The time until a deadline, which must not be over.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

struct Server {
    registry: Registry,
    metrics: Arc<Metrics>,
    peers: Arc<Peers>,
}

impl Server {
    fn accept_all(self: &Arc<Self>, mut accept: impl FnMut() -> io::Result<Peer>) {
        loop {
            match accept().and_then(|peer| self.begin(peer)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Most likely the daemon is out of descriptors, or a peer was gone at once.
                    error!(%error, "cannot serve metrics to a peer");
                    std::thread::sleep(ERROR_PAUSE);
                }
            }
        }
    }

    fn begin(self: &Arc<Self>, peer: Peer) -> io::Result<()> {
        let place = self.peers.open(peer.try_clone()?);
        let server = Arc::clone(self);
        thread("metrics-peer", move || {
            if let Err(error) = server.answer(peer, &place) {
                debug!(%error, "a peer that asked for metrics is given up");
            }
        })
        .map(drop)
    }

    fn answer(&self, mut peer: Peer, place: &Place) -> io::Result<()> {
        let Some(head) = read_head(&mut peer)? else { return Ok(()) };
        place.has_asked();
        let (status, answer) = match head {
            Head::Metrics { body } => {
                let mut text = String::new();
                match prometheus_text::encode(&mut text, &self.registry) {
                    Ok(()) => (Status::Ok, http::metrics(&text, body)),
                    Err(_) => (Status::Internal, http::refusal(Status::Internal)),
                }
            }
            Head::Other(status) => (status, http::refusal(status)),
            Head::Partial => return Ok(()),
        };
        self.metrics.scrapes.get_or_create(&[("code", status.code())]).inc();
        let deadline = Instant::now() + ANSWER_TIME;
        let mut rest = answer.as_slice();
        while !rest.is_empty() {
            match peer.write(rest, deadline) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads the head of a request. None where the peer closes before the head has ended.
fn read_head(peer: &mut Peer) -> io::Result<Option<Head>> {
    let deadline = Instant::now() + ASK_TIME;
    let mut buffer = [0; HEAD_MAX];
    let mut filled = 0;
    loop {
        match peer.read(&mut buffer[filled..], deadline) {
            Ok(0) => return Ok(None),
            Ok(more) => filled += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        // A full buffer is never partial.
        match http::parse(&buffer[..filled]) {
            Head::Partial => {}
            head => return Ok(Some(head)),
        }
    }
}

/// The peers that are being served.
#[derive(Debug, Default)]
struct Peers {
    open: Mutex<Open>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Open {
    /// In the order in which they came.
    peers: BTreeMap<u64, Served>,
    next: u64,
}

#[derive(Debug)]
struct Served {
    peer: Peer,
    has_asked: bool,
    is_closed: bool,
}

impl Peers {
    /// Adds a peer, and closes another for it if there are too many. Waits until that one's thread has ended, so there are never
    /// more threads than peers.
    fn open(self: &Arc<Self>, peer: Peer) -> Place {
        let mut open = lock(&self.open);
        if open.peers.len() >= MOST {
            let mut victims: Vec<_> = open.peers.values_mut().filter(|it| !it.is_closed).collect();
            victims.sort_by_key(|it| it.has_asked);
            if let Some(victim) = victims.first_mut() {
                victim.is_closed = true;
                victim.peer.close();
            }
        }
        while open.peers.len() >= MOST {
            open = wait_timeout(&self.changed, open, ASK_TIME);
        }
        let number = open.next;
        open.next += 1;
        open.peers.insert(number, Served { peer, has_asked: false, is_closed: false });
        Place { peers: Arc::clone(self), number }
    }
}

/// The place of a peer, until it is dropped.
struct Place {
    peers: Arc<Peers>,
    number: u64,
}

impl Place {
    fn has_asked(&self) {
        if let Some(served) = lock(&self.peers.open).peers.get_mut(&self.number) {
            served.has_asked = true;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.peers.open).peers.remove(&self.number);
        self.peers.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Peer, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (Peer::Unix(ours), theirs)
    }

    fn is_closed(mut stream: &UnixStream) -> bool {
        stream.read(&mut [0]).is_ok_and(|bytes| bytes == 0)
    }

    #[test]
    fn one_more_takes_the_place_of_the_oldest_that_has_not_asked() {
        let peers = Arc::new(Peers::default());
        let (mut places, others): (Vec<_>, Vec<_>) = (0..MOST)
            .map(|_| {
                let (ours, theirs) = pair();
                (Some(peers.open(ours)), theirs)
            })
            .unzip();
        places[0].as_ref().unwrap().has_asked();
        let (ours, _theirs) = pair();
        std::thread::scope(|scope| {
            let opened = scope.spawn(|| peers.open(ours));
            while !is_closed(&others[1]) {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert!(!opened.is_finished(), "the thread of the closed one has not ended");
            drop(places[1].take());
            opened.join().unwrap();
        });
        assert!(others.iter().enumerate().all(|(place, it)| is_closed(it) == (place == 1)));
    }

    #[test]
    fn a_path_that_cannot_be_bound_is_an_error_only_if_it_was_given() {
        let dir = tempfile::TempDir::new().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let config = |socket| MetricsConfig { socket, socket_group: None, listen: None };
        let error = Listeners::bind(&config(MetricsSocket::Given(file.clone()))).unwrap_err().to_string();
        assert!(error.starts_with("metrics.socket: ") && error.contains("no socket"), "{error}");
        assert!(Listeners::bind(&config(MetricsSocket::Default(file))).unwrap().socket.is_none());
        let path = dir.path().join("folder/s");
        let first = Listeners::bind(&config(MetricsSocket::Given(path.clone()))).unwrap();
        let error = Listeners::bind(&config(MetricsSocket::Given(path.clone()))).unwrap_err().to_string();
        assert!(error.starts_with("metrics.socket: another process"), "{error}");
        // A daemon that was killed leaves its socket.
        drop(first);
        let again = Listeners::bind(&config(MetricsSocket::Given(path.clone()))).unwrap();
        again.remove();
        assert!(!path.exists());
        let odd = MetricsConfig { socket_group: Some("no such group".to_owned()), ..config(MetricsSocket::None) };
        assert!(Listeners::bind(&odd).unwrap_err().to_string().starts_with("metrics.socket_group: "));
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = Some(taken.local_addr().unwrap());
        let error = Listeners::bind(&MetricsConfig { listen, ..config(MetricsSocket::None) }).unwrap_err();
        assert!(error.to_string().starts_with("metrics.listen: cannot listen on 127.0.0.1:"), "{error}");
    }
}
