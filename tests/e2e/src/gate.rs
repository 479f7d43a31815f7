//! Holds a dump or a restore at a known moment, so that a test can act on it there.
//!
//! ```text
//!   criu ── plugin ── Gate ── rekindled      messages are passed on one by one, and held where a test wants it
//!      └── action script                     CRIU waits for its scripts, so a script that waits holds CRIU
//! ```
//!
//! The tested programs do not know of the gate. Messages of a restored process do not pass through it, since the daemon
//! identifies a process by its connection.

use std::fs;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::ensure;
use rekindle_wire::frame::{self, Message};
use serde_json::Value;

use crate::criu::{Running, Setting};
use crate::{Result, stage, until};

/// A moment of a dump or a restore. Requests are named as in `rekindle_wire::control::Request`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// CRIU's plugin has sent this request, and the daemon has not received it.
    Before(&'static str),
    /// The daemon has received this request, and cannot answer: the worker that it asks is stopped.
    During(&'static str),
    /// The daemon has answered this request, and the plugin has not received the answer.
    After(&'static str),
    /// CRIU runs its action script for this step.
    Script(&'static str),
}

impl Moment {
    /// The moment at which the gate holds first, on the way to this one.
    pub fn held_at(self) -> Self {
        if let Self::During(request) = self { Self::Before(request) } else { self }
    }
}

/// A gate. While it is open, it passes every message on unchanged.
#[derive(Debug)]
pub struct Gate {
    socket: PathBuf,
    script: PathBuf,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    stopping: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// The moment to hold at, and the number of such moments to let pass before.
    hold: Option<(Moment, usize)>,
    held: bool,
    /// The request that the daemon is working on.
    asked: Option<String>,
}

impl Gate {
    /// Starts a gate to the daemon that listens at `daemon`, with its own socket and script in `dir`, which exists.
    pub fn start(dir: &Path, daemon: &Path) -> Result<Self> {
        let (socket, script) = (dir.join("gate.sock"), dir.join("gate.sh"));
        let listener = UnixListener::bind(&socket)?;
        let shared = Arc::<Shared>::default();
        let (of_thread, daemon) = (Arc::clone(&shared), daemon.to_owned());
        let thread = std::thread::spawn(move || {
            while let Ok((plugin, _)) = listener.accept() {
                if of_thread.stopping.load(Ordering::Acquire) {
                    return;
                }
                let (shared, daemon) = (Arc::clone(&of_thread), daemon.clone());
                // When either side closes or fails, both connections are closed.
                std::thread::spawn(move || UnixStream::connect(daemon).ok().map(|it| relay(&plugin, &it, &shared)));
            }
        });
        let gate = Self { socket, script, shared, thread: Some(thread) };
        gate.write_script("")?;
        Ok(gate)
    }

    /// The setting with which CRIU passes through this gate.
    pub fn setting(&self, criu: Setting) -> Setting {
        Setting { socket: self.socket.clone(), script: Some(self.script.clone()), ..criu }
    }

    /// Holds the next dump or restore at this moment.
    pub fn hold(&self, moment: Moment) -> Result {
        self.hold_nth(moment, 0)
    }

    /// Like [`hold`](Self::hold), after `passed` such moments were let pass.
    pub fn hold_nth(&self, moment: Moment, passed: usize) -> Result {
        let mut state = self.state();
        *state = State { hold: Some((moment, passed)), ..State::default() };
        let action = if let Moment::Script(action) = moment { action } else { "" };
        self.write_script(action)
    }

    /// Waits until `criu` is held.
    pub fn reached(&self, criu: &mut Running) -> Result {
        until("CRIU comes to where it is held", || {
            let held = self.state().held || self.sign("reached").exists();
            // A CRIU that ends after it was held has been killed.
            ensure!(held || criu.is_running()?, "CRIU has ended before: {}", criu.log());
            Ok(held.then_some(()))
        })
    }

    /// Waits until the daemon has received this request and has not answered.
    pub fn is_asked(&self, request: &str) -> Result {
        until(&format!("the daemon is asked for {request}"), || {
            Ok((self.state().asked.as_deref() == Some(request)).then_some(()))
        })
    }

    /// Opens the gate: the held message or script goes on, and later ones are not held.
    pub fn open(&self) -> Result {
        let mut state = self.state();
        state.hold = None;
        state.held = false;
        fs::write(self.sign("open"), "")?;
        self.shared.changed.notify_all();
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    fn sign(&self, name: &str) -> PathBuf {
        self.script.with_extension(name)
    }

    fn write_script(&self, action: &str) -> Result {
        let (reached, open) = (self.sign("reached"), self.sign("open"));
        for sign in [&reached, &open] {
            let _ = fs::remove_file(sign);
        }
        let script = format!(
            "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = '{action}' ] || exit 0\n\
             : >'{}'\nuntil [ -e '{}' ]; do sleep 0.01; done\n",
            reached.display(),
            open.display()
        );
        stage::write_script(&self.script, &script)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.open();
        self.shared.stopping.store(true, Ordering::Release);
        let woken = UnixStream::connect(&self.socket).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits if the gate holds at this moment. Returns `None` if the plugin disconnects meanwhile.
    fn pass(&self, moment: Moment, plugin: &UnixStream) -> Option<()> {
        let mut state = self.state();
        match &mut state.hold {
            Some((at, 0)) if *at == moment => {}
            Some((at, left)) if *at == moment => {
                *left -= 1;
                return Some(());
            }
            _ => return Some(()),
        }
        state.held = true;
        while state.held {
            if is_hung_up(plugin) {
                state.hold = None;
                return None;
            }
            let waited = self.changed.wait_timeout(state, Duration::from_millis(5));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        // The gate may have been opened after the plugin's end, and before that was seen.
        (!is_hung_up(plugin)).then_some(())
    }
}

/// Passes on questions and answers in turn, as the plugin and the daemon exchange them.
fn relay(plugin: &UnixStream, daemon: &UnixStream, shared: &Shared) -> Option<()> {
    loop {
        // The daemon sends nothing unasked: its socket is readable here only when it has closed.
        if wait_readable(plugin, daemon)? == daemon.as_raw_fd() {
            return None;
        }
        let question = frame::receive::<Value>(plugin).ok()?;
        let name = name(&question.body)?;
        if let Some(name) = known(&name) {
            shared.pass(Moment::Before(name), plugin)?;
        }
        shared.state().asked = Some(name.clone());
        pass_on(daemon, &question)?;
        if wait_readable(plugin, daemon)? == plugin.as_raw_fd() {
            return None;
        }
        let answer = frame::receive::<Value>(daemon).ok()?;
        shared.state().asked = None;
        if let Some(name) = known(&name) {
            shared.pass(Moment::After(name), plugin)?;
        }
        pass_on(plugin, &answer)?;
    }
}

fn pass_on(to: &UnixStream, message: &Message<Value>) -> Option<()> {
    let fds: Vec<RawFd> = message.fds.iter().map(AsRawFd::as_raw_fd).collect();
    frame::send(to, &message.body, &message.blob, &fds).ok()
}

/// The name of the request, in a connection's first message or a later one.
fn name(body: &Value) -> Option<String> {
    match body.get("request").unwrap_or(body) {
        Value::String(name) => Some(name.clone()),
        Value::Object(request) => request.keys().next().cloned(),
        _ => None,
    }
}

fn known(name: &str) -> Option<&'static str> {
    let known = ["Pause", "Frozen", "NativeCheckpoint", "Socket", "Finish", "Restore", "Resume", "NativeResume"];
    known.into_iter().find(|it| *it == name)
}

/// Waits until one of the two can be read, and returns that one; the second if both can.
fn wait_readable(first: &UnixStream, second: &UnixStream) -> Option<RawFd> {
    let entry = |it: &UnixStream| libc::pollfd { fd: it.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut both = [entry(second), entry(first)];
    loop {
        // SAFETY: two live entries.
        unsafe { libc::poll(both.as_mut_ptr(), 2, -1) };
        if let Some(found) = both.iter().find(|it| it.revents != 0) {
            return Some(found.fd);
        }
        if std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return None;
        }
    }
}

fn is_hung_up(socket: &UnixStream) -> bool {
    let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one live entry.
    unsafe { libc::poll(&raw mut entry, 1, 0) > 0 }
}
