//! A daemon of another version, which answers every request with one given value.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rekindle_wire::control::Opening;
use rekindle_wire::frame;
use serde_json::Value;

use crate::Result;

/// Dropping this value stops the daemon and removes its socket.
#[derive(Debug)]
pub struct FakeDaemon {
    socket: PathBuf,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FakeDaemon {
    /// Listens at `socket`, in place of a daemon that was killed.
    pub fn start(socket: &Path, answer: Value) -> Result<Self> {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket)?;
        let stopping = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stopping);
        let thread = std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if told.load(Ordering::Acquire) {
                    return;
                }
                // The client may have disconnected already.
                let _ = serve(&stream, &answer);
            }
        });
        Ok(Self { socket: socket.to_owned(), stopping, thread: Some(thread) })
    }
}

fn serve(stream: &UnixStream, answer: &Value) -> Result {
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    frame::receive::<Opening>(stream)?;
    Ok(frame::send(stream, answer, &[], &[])?)
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        let woken = UnixStream::connect(&self.socket).is_ok();
        if let Some(thread) = self.thread.take().filter(|_| woken) {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}
