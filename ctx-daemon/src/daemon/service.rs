//! What systemd is told, if it has started this daemon as a service of `Type=notify` (sd_notify(3)): that the daemon serves, that it
//! lives, and that it stops.
//!
//! The daemon is ready when a worker is up, so that what is started after it finds GPUs. It is ready as well when a worker has failed
//! to start: the status says why, the pool tries again, and the machine's other services do not wait for a GPU that is broken.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use sd_notify::NotifyState;
use tracing::warn;

use super::state::Daemon;
use super::thread;

/// Tells systemd when the daemon is ready, and from then on again and again that it lives.
pub(super) fn begin(daemon: &Arc<Daemon>) -> io::Result<()> {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return Ok(());
    }
    let ready = Arc::clone(daemon);
    thread("ready", move || notify(&[NotifyState::Ready, NotifyState::Status(&status(&ready))]))?;
    let Some(limit) = sd_notify::watchdog_enabled() else { return Ok(()) };
    let watched = Arc::clone(daemon);
    thread("watchdog", move || {
        while !watched.stopping.load(Ordering::Acquire) {
            // Whoever holds one of these locks for good holds up every request.
            let _ = (watched.clients.registry.used(), watched.pool.spare());
            notify(&[NotifyState::Watchdog]);
            std::thread::sleep(limit / 3);
        }
    })
    .map(drop)
}

/// Tells systemd that the daemon stops.
pub(super) fn stopping() {
    if std::env::var_os("NOTIFY_SOCKET").is_some() {
        notify(&[NotifyState::Stopping]);
    }
}

/// Waits for the first worker, unless there is to be none, and describes what it has found.
fn status(daemon: &Daemon) -> String {
    if daemon.config.workers.spares.usual == 0 {
        return "serves; workers are started when they are needed".to_owned();
    }
    match daemon.pool.seen() {
        Ok(seen) => format!("serves {} GPUs", seen.devices.len()),
        Err(error) => format!("no worker starts: {error}"),
    }
}

fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        warn!("cannot tell systemd how the daemon is: {error}");
    }
}
