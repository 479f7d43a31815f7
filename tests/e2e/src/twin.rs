//! Dumps without CRIU, which take milliseconds: this process sends the requests of CRIU's plugin. Each dump is made
//! together with an image that `stop` writes at the same quiesce, and both are compared.
//!
//! ```text
//!   Pause (two directories) ─► quiesced ─► Frozen ─► `stop` into the second, whole ─► copying into the first ─► Socket
//!                                                                                                                │
//!   compared: every region's bytes and its description  ◄───────────── Durable ◄── Finish: the program goes on ◄─┘
//! ```

use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rekindle_images::{Client, Image};
use rekindle_wire::control::{Failure, FailureKind, Opening, Reply, Request};
use rekindle_wire::frame;

use crate::{App, Node, Result};

/// The number that the test, in the role of CRIU, gives the socket.
const SOCKET: u32 = 7;

/// The result of a dump.
#[derive(Debug)]
pub enum Taken {
    /// An image, and the image that `stop` wrote at the same quiesce.
    Both(PathBuf, PathBuf),
    /// The dump failed with this failure.
    Failed(Failure),
    /// The test gave the dump up.
    GivenUp,
    /// The program is not a client any more.
    Gone,
}

/// The manner in which a dump is made.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// The value of `leave_running` in the request; the program goes on in any case.
    pub leave_running: bool,
    /// The time that the test, in the role of CRIU, waits after the copy has begun.
    pub pause: Duration,
    /// The number of answered questions, of three, after which the dump is given up. With three, the dump is given up
    /// while the last question is being answered.
    pub give_up: Option<usize>,
}

impl Manner {
    /// A dump that leaves the program running, without a pause, to its end.
    pub const PLAIN: Self = Self { leave_running: true, pause: Duration::ZERO, give_up: None };
}

/// A program that is dumped repeatedly.
#[derive(Debug)]
pub struct Source<'a> {
    node: &'a Node,
    app: &'a App,
    cookie: u64,
}

impl<'a> Source<'a> {
    /// Waits until the program is a client.
    pub fn new(node: &'a Node, app: &'a App) -> Result<Self> {
        node.client(app.pid())?;
        Ok(Self { node, app, cookie: cookie_of(app.pid(), node.socket())? })
    }

    /// Dumps the program into `dir`, which exists, and by `stop` into a second directory beside it.
    pub fn take(&self, dir: &Path, manner: Manner) -> Result<Taken> {
        self.take_while(dir, manner, || Ok(()))
    }

    /// Like [`take`](Self::take). `meanwhile` is called when the program may go on, before the answer that says whether
    /// the image is whole.
    pub fn take_while(&self, dir: &Path, manner: Manner, meanwhile: impl FnOnce() -> Result) -> Result<Taken> {
        let Manner { leave_running, pause, give_up } = manner;
        let mut meanwhile = Some(meanwhile);
        let stop = dir.with_extension("stop");
        fs::create_dir(&stop)?;
        let (root, pid) = (self.app.pid(), self.app.pid());
        let stream = UnixStream::connect(self.node.socket())?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let dirs = [File::open(dir)?, File::open(&stop)?];
        let opening = Opening::new(&Request::Pause { root, leave_running, traceparent: None })?;
        frame::send(&stream, &opening, &[], &dirs.each_ref().map(AsRawFd::as_raw_fd))?;
        match frame::receive(&stream)?.body {
            Reply::Paused { pids } if pids.is_empty() => return Ok(Taken::Gone),
            Reply::Paused { .. } => {}
            Reply::Failed(failure) => return self.failed(failure),
            other => bail!("Pause was answered by {other:?}"),
        }
        let questions = [Request::Frozen { pid }, Request::Socket { id: SOCKET, cookie: self.cookie }, Request::Finish];
        let mut answers = Vec::new();
        for (i, question) in questions.iter().enumerate() {
            match give_up {
                Some(3) if i == 2 => {
                    frame::send(&stream, question, &[], &[])?;
                    std::thread::sleep(pause);
                    return Ok(Taken::GivenUp);
                }
                Some(at) if at == i => return Ok(Taken::GivenUp),
                _ => {}
            }
            frame::send(&stream, question, &[], &[])?;
            if let Some(meanwhile) = meanwhile.take_if(|_| i == 2) {
                meanwhile()?;
            }
            answers.push(frame::receive::<Reply>(&stream)?.body);
            if i == 0 {
                std::thread::sleep(pause);
            }
        }
        match answers.as_slice() {
            [Reply::Frozen { ours: true }, Reply::Socket { ours: true, .. }, Reply::Durable] => {
                Ok(Taken::Both(dir.to_owned(), stop))
            }
            answers => {
                match answers.iter().find_map(|it| if let Reply::Failed(failure) = it { Some(failure) } else { None }) {
                    Some(failure) => self.failed(failure.clone()),
                    None => bail!("answered by {answers:?}"),
                }
            }
        }
    }

    /// Handles a failed dump. A client that ended by itself during the dump, and its worker with it, is no failure: its
    /// exit status shows how it ended.
    fn failed(&self, failure: Failure) -> Result<Taken> {
        if failure.kind != FailureKind::LostPeer {
            return Ok(Taken::Failed(failure));
        }
        self.app.end()?;
        Ok(Taken::Gone)
    }
}

/// Checks that two images of one quiesce hold the same state, byte by byte. Returns the number of bytes compared.
pub fn same(one: &Path, other: &Path) -> Result<u64> {
    let (one, other) = (Image::open(one)?, Image::open(other)?);
    let (of_one, of_other) = (&one.manifest().clients, &other.manifest().clients);
    ensure!(of_one.len() == of_other.len(), "{} clients, and {}", of_one.len(), of_other.len());
    let mut compared = 0;
    for (a, b) in of_one.iter().zip(of_other) {
        let (said, said_other) = (format!("{:#?}", without_content(a)), format!("{:#?}", without_content(b)));
        let differs = said.lines().zip(said_other.lines()).find(|(a, b)| a != b);
        ensure!(said == said_other, "what is said of the state differs: {differs:?}");
        let (reader, reader_other) = (one.data_reader()?, other.data_reader()?);
        for (region, region_other) in a.regions().zip(b.regions()) {
            // The content of this region is the processes' own memory, which is in CRIU's image.
            if region.pieces.is_empty() && region_other.pieces.is_empty() {
                continue;
            }
            let what = format!("{:?} of {} bytes", region.what, region.size);
            let (mut bytes, mut bytes_other) = (vec![0; region.size as usize], vec![0; region.size as usize]);
            reader.read_all(region.pieces, &mut bytes, NonZeroUsize::MIN).with_context(|| what.clone())?;
            reader_other.read_all(region_other.pieces, &mut bytes_other, NonZeroUsize::MIN)?;
            let at = bytes.iter().zip(&bytes_other).position(|(a, b)| a != b);
            ensure!(at.is_none(), "{what} differs at byte {at:?}");
            compared += region.size;
        }
        for code in a.objects.iter().flat_map(|it| &it.code) {
            ensure!(one.read_code(*code)? == other.read_code(*code)?, "code {code} differs");
        }
    }
    Ok(compared)
}

/// The description of a client in an image, without the places of content, the socket ids, and the values that depend
/// on time.
fn without_content(client: &Client) -> Client {
    let mut said = client.clone();
    said.socket_ids.clear();
    said.shared_state.clear();
    // The worker's state contains the ages of events among others: the length is the same, and the numbers differ.
    said.worker_state.iter_mut().for_each(|byte| *byte = 0);
    said.allocations.iter_mut().for_each(|it| it.pieces.clear());
    said.globals.iter_mut().for_each(|it| it.pieces.clear());
    said.blobs.iter_mut().for_each(|it| it.pieces.clear());
    said
}

/// The cookie of the socket that connects a process to the daemon.
pub(crate) fn cookie_of(pid: i32, daemon: &Path) -> Result<u64> {
    // SAFETY: no pointers; the descriptor is new and owned here.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    ensure!(process >= 0, "process {pid}: {}", io::Error::last_os_error());
    // SAFETY: as above.
    let process = unsafe { OwnedFd::from_raw_fd(process as i32) };
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let name = entry?.file_name();
        let number: i32 = name.to_str().context("a descriptor's number")?.parse()?;
        // SAFETY: no pointers.
        let got = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
        if got < 0 {
            continue;
        }
        // SAFETY: new and owned here.
        let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(got as i32) });
        let Ok(peer) = socket.peer_addr() else { continue };
        if peer.as_pathname() != Some(daemon) {
            continue;
        }
        let (mut cookie, mut length) = (0_u64, size_of::<u64>() as libc::socklen_t);
        // SAFETY: the kernel writes at most `length` bytes into the local.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_COOKIE,
                (&raw mut cookie).cast(),
                &raw mut length,
            )
        };
        ensure!(result == 0, "{}", io::Error::last_os_error());
        return Ok(cookie);
    }
    bail!("process {pid} has no socket that leads to {}", daemon.display())
}
