//! A daemon for the tests, which replies as the protocol requires and records its requests. It manages no GPU; its image
//! contains the sockets.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use rekindle_wire::attach::{Answer, Attached};
use rekindle_wire::control::{Failure, Opening, Reply, Request, RestoredSocket, StatusInfo};
use rekindle_wire::frame;
use serde::{Deserialize, Serialize};

use crate::application::{ANSWER, COUNT, QUESTION};

/// The behaviour of the daemon. It refuses a request that has a reason here, with that reason.
#[derive(Clone, Default)]
pub(crate) struct Script {
    pub(crate) status: Option<String>,
    pub(crate) hang: bool,
    pub(crate) pause: Option<String>,
    pub(crate) pause_takes: Duration,
    pub(crate) finish: Option<String>,
    /// The daemon replies to `Finish` when this becomes false.
    pub(crate) hold_finish: Option<Arc<AtomicBool>>,
    pub(crate) prepare: Option<String>,
    /// The number of the first `Resume` that is refused, and the reason.
    pub(crate) resume: Option<(usize, String)>,
    /// Whether the daemon does not know the processes that CRIU resumes.
    pub(crate) forgetful: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    Pause { root: i32, leave_running: bool },
    Frozen { pid: i32, ours: bool },
    Socket { ours: bool },
    Finish,
    DumpClosed,
    Restore,
    Reattach,
    Resume { pid: i32, ours: bool },
    RestoreClosed,
}

#[derive(Clone, Debug)]
struct Client {
    pid: i32,
    /// The pid in the process's own namespace, which CRIU restores; in a container the other pid changes.
    inner: i32,
    cookie: u64,
    path: String,
}

#[derive(Default)]
struct State {
    script: Script,
    events: Vec<(Instant, Event)>,
    clients: Vec<Client>,
    prepared: Vec<Saved>,
    /// Open connections: the worker's ends.
    connections: Vec<UnixStream>,
    resumed: Vec<Resumed>,
}

/// A client in an image.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Saved {
    inner: i32,
    socket: RestoredSocket,
    /// The count in the client's shared memory when it was frozen.
    count: u64,
}

/// A process that continues after a restore.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resumed {
    pub(crate) pid: i32,
    /// The count in the process's shared memory.
    pub(crate) count: u64,
    /// The count when the process was frozen.
    pub(crate) frozen: u64,
}

#[derive(Clone)]
pub(crate) struct Daemon {
    state: Arc<Mutex<State>>,
    pub(crate) path: PathBuf,
}

impl Daemon {
    pub(crate) fn start(path: &Path) -> Self {
        let daemon = Self { state: Arc::default(), path: path.into() };
        let listener = UnixListener::bind(path).unwrap();
        let serve = daemon.clone();
        thread::spawn(move || {
            for socket in listener.incoming() {
                let daemon = serve.clone();
                thread::spawn(move || daemon.serve(socket.unwrap()));
            }
        });
        daemon
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn script(&self, script: Script) {
        self.state().script = script;
    }

    fn note(&self, event: Event) {
        self.state().events.push((Instant::now(), event));
    }

    /// Whether the event has happened since the last call of [`Daemon::events`].
    pub(crate) fn is_asked(&self, what: &Event) -> bool {
        self.state().events.iter().any(|(_, event)| event == what)
    }

    /// The events since the last call.
    pub(crate) fn events(&self) -> Vec<Event> {
        self.timed_events().into_iter().map(|(_, event)| event).collect()
    }

    pub(crate) fn timed_events(&self) -> Vec<(Instant, Event)> {
        std::mem::take(&mut self.state().events)
    }

    /// The restored processes that have continued since the last call.
    pub(crate) fn resumed(&self) -> Vec<Resumed> {
        std::mem::take(&mut self.state().resumed)
    }

    fn serve(&self, socket: UnixStream) {
        let Ok(message) = frame::receive::<Opening>(&socket) else {
            return;
        };
        let request: Request = serde_json::from_value(message.body.request).unwrap();
        match request {
            Request::Status => self.status(&socket),
            Request::Attach(attach) => {
                assert_eq!(message.fds.len(), 2);
                frame::send(&socket, &attached(), &[], &[]).unwrap();
                let mut state = self.state();
                state.clients.push(Client {
                    pid: peer(&socket),
                    inner: attach.pid,
                    cookie: attach.cookie,
                    path: attach.socket,
                });
                state.connections.push(socket);
            }
            Request::Reattach { restore, socket: id, cookie } => {
                assert_eq!(restore, 7);
                let mut state = self.state();
                let Saved { inner, socket: dumped, .. } =
                    state.prepared.iter().find(|saved| saved.socket.id == id).cloned().unwrap();
                let pid = peer(&socket);
                state.clients.retain(|client| client.pid != pid);
                state.clients.push(Client { pid, inner, cookie, path: dumped.path });
                state.connections.push(socket);
                state.events.push((Instant::now(), Event::Reattach));
            }
            Request::Pause { root, leave_running, .. } => {
                self.note(Event::Pause { root, leave_running });
                self.dump(&socket, root, message.fds.into_iter().next().unwrap());
                self.note(Event::DumpClosed);
            }
            Request::AreNatives => frame::send(&socket, &Reply::AreNatives(false), &[], &[]).unwrap(),
            Request::Restore => {
                self.note(Event::Restore);
                self.restore(&socket, message.fds.into_iter().next().unwrap());
                self.note(Event::RestoreClosed);
            }
            other => panic!("{other:?}"),
        }
    }

    fn status(&self, socket: &UnixStream) {
        let script = self.state().script.clone();
        if script.hang {
            thread::sleep(Duration::from_secs(60));
        }
        let reply = match script.status {
            Some(reason) => Reply::Failed(Failure::internal(reason)),
            None => Reply::Status(StatusInfo {
                version: "test".into(),
                wire: rekindle_wire::CONTROL_VERSION,
                cuda_driver: String::new(),
                spare: 0,
                used: 0,
                max: None,
                problem: None,
                driver_version: None,
                gpus: Vec::new(),
                sandbox: None,
                kinds: Vec::new(),
                protect: None,
            }),
        };
        frame::send(socket, &reply, &[], &[]).unwrap();
    }

    fn dump(&self, socket: &UnixStream, root: i32, image_dir: OwnedFd) {
        let script = self.state().script.clone();
        let tree = crate::stage::tree(root);
        let mut clients = self.state().clients.clone();
        clients.retain(|client| tree.contains(&client.pid));
        thread::sleep(script.pause_takes);
        let reply = match script.pause {
            Some(reason) => Reply::Failed(Failure::internal(reason)),
            None => Reply::Paused { pids: clients.iter().map(|client| client.pid).collect() },
        };
        frame::send(socket, &reply, &[], &[]).unwrap();

        let (mut saved, mut counts) = (Vec::new(), BTreeMap::new());
        while let Ok(message) = frame::receive::<Request>(socket) {
            let reply = match message.body {
                Request::Frozen { pid } => {
                    let client = clients.iter().find(|client| client.pid == pid);
                    let ours = client.is_some();
                    if let Some(client) = client {
                        counts.insert(client.inner, crate::stage::count(pid).unwrap());
                    }
                    self.note(Event::Frozen { pid, ours });
                    Reply::Frozen { ours }
                }
                Request::Socket { id, cookie } => {
                    let client = clients.iter().find(|client| client.cookie == cookie);
                    let ours = client.is_some();
                    if let Some(client) = client {
                        let (inner, path) = (client.inner, client.path.clone());
                        saved.push(Saved { inner, socket: RestoredSocket { id, path }, count: counts[&inner] });
                    }
                    self.note(Event::Socket { ours });
                    Reply::Socket { ours, again: false }
                }
                Request::Finish => {
                    self.note(Event::Finish);
                    if let Some(hold) = &script.hold_finish {
                        crate::stage::until("the case goes on", || !hold.load(Ordering::Relaxed));
                    }
                    match script.finish.clone() {
                        Some(reason) => Reply::Failed(Failure::internal(reason)),
                        None if clients.is_empty() => Reply::Durable,
                        None => {
                            let image = serde_json::to_vec(&saved).unwrap();
                            fs::write(in_dir(&image_dir, "rekindle.img"), image).unwrap();
                            Reply::Durable
                        }
                    }
                }
                other => panic!("{other:?}"),
            };
            // CRIU may have been killed.
            let _ = frame::send(socket, &reply, &[], &[]);
        }
    }

    fn restore(&self, socket: &UnixStream, image_dir: OwnedFd) {
        let script = self.state().script.clone();
        let image = fs::read(in_dir(&image_dir, "rekindle.img")).unwrap();
        let prepared: Vec<Saved> = serde_json::from_slice(&image).unwrap();
        let mut state = self.state();
        state.prepared.clone_from(&prepared);
        // The processes that are restored now had ended.
        state.clients.retain(|client| !prepared.iter().any(|saved| saved.inner == client.inner));
        drop(state);
        let reply = match script.prepare {
            Some(reason) => Reply::Failed(Failure::internal(reason)),
            None => {
                Reply::Prepared { restore: 7, sockets: prepared.iter().map(|saved| saved.socket.clone()).collect() }
            }
        };
        frame::send(socket, &reply, &[], &[]).unwrap();

        let (mut asked, mut done) = (0, 0);
        while let Ok(message) = frame::receive::<Request>(socket) {
            let Request::Resume { pid } = message.body else {
                panic!("{:?}", message.body);
            };
            asked += 1;
            let saved = prepared.iter().find(|saved| !script.forgetful && saved.inner == inner_pid(pid));
            let ours = saved.is_some();
            if ours {
                // The process has sent its message before this request, but on another connection.
                crate::stage::until("the process has a connection", || {
                    self.state().clients.iter().any(|client| client.pid == pid)
                });
            }
            self.note(Event::Resume { pid, ours });
            let reply = match &script.resume {
                Some((from, reason)) if asked >= *from => Reply::Failed(Failure::internal(reason.clone())),
                _ => {
                    if let Some(saved) = saved {
                        let count = take_memory(pid);
                        self.state().resumed.push(Resumed { pid, count, frozen: saved.count });
                        done += 1;
                    }
                    let open = ours && done == prepared.len();
                    Reply::Resumed { ours, open }
                }
            };
            frame::send(socket, &reply, &[], &[]).unwrap();
        }
    }
}

fn attached() -> Answer {
    Answer::Attached(Attached {
        driver_version: 13000,
        driver_build: String::new(),
        api_version: 4,
        devices: Vec::new(),
    })
}

/// The pid of the process at the other end.
fn peer(socket: &UnixStream) -> i32 {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut size = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `peer` has the type that SO_PEERCRED asks for.
    let result = unsafe {
        let peer = (&raw mut peer).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, peer, &raw mut size)
    };
    assert_eq!(result, 0);
    peer.pid
}

/// The pid that a process has in its innermost namespace.
fn inner_pid(pid: i32) -> i32 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap();
    pids.split_whitespace().last().unwrap().parse().unwrap()
}

fn in_dir(dir: &OwnedFd, name: &str) -> PathBuf {
    format!("/proc/self/fd/{}/{name}", dir.as_raw_fd()).into()
}

/// Opens the shared memory of a restored process as the daemon does, since the memfd is a new one, and writes a question into
/// it. The process answers when it runs.
fn take_memory(pid: i32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let line = maps.lines().find(|line| line.contains("/memfd:ring")).unwrap();
    let mut fields = line.split_whitespace();
    let range = fields.next().unwrap();
    assert_eq!(fields.next(), Some("rw-s"));
    let path = format!("/proc/{pid}/map_files/{range}");
    let memory: File = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let word = |index: usize| {
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, index as u64 * 8).unwrap();
        u64::from_ne_bytes(bytes)
    };
    let count = word(COUNT);
    let question = word(ANSWER) + 1;
    memory.write_all_at(&question.to_ne_bytes(), QUESTION as u64 * 8).unwrap();
    thread::sleep(Duration::from_millis(20));
    assert_eq!(word(COUNT), count, "it runs already");
    count
}
