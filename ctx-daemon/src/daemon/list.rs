//! What `rekindle ps` and others ask of the daemon itself.

use rekindle_wire::WIRE_VERSION;
use rekindle_wire::control::{ClientInfo, Reply, StatusInfo};

use super::clients::Client;
use super::pidns::PidView;
use super::sys::Credentials;
use super::{Daemon, connection};

/// The clients that the peer may know of: those it can see, and, unless it is an operator, its own user's.
pub(crate) fn clients(daemon: &Daemon, peer: Credentials) -> Reply {
    let view = match PidView::of(peer.pid) {
        Ok(view) => view,
        Err(error) => {
            return Reply::Failed { reason: error.to_string() };
        }
    };
    let operator = connection::is_operator(peer);
    let visible = |client: &Client| {
        let pid = view.to_theirs(client.process.pid)?;
        (operator || super::process::user(client.process.pid) == Some(peer.uid)).then_some(pid)
    };
    let clients = daemon.registry.clients();
    let clients: Vec<_> = clients.iter().filter_map(|client| Some((visible(client)?, client))).collect();
    // All at once: one that does not answer holds up none of the others.
    let mut infos: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = clients.iter().map(|(pid, client)| scope.spawn(|| info(*pid, client))).collect();
        asked.into_iter().filter_map(|it| it.join().ok()).collect()
    });
    infos.sort_by_key(|it| it.pid);
    Reply::Clients(infos)
}

fn info(pid: i32, client: &Client) -> ClientInfo {
    let described = client.worker.describe();
    ClientInfo {
        pid,
        worker: client.worker.pid(),
        command: client.attach.command.clone(),
        state: client.state().as_str().to_owned(),
        device_memory: described.device_memory,
        pinned_memory: described.pinned_memory,
        commands: described.commands,
    }
}

/// The daemon.
pub(crate) fn status(daemon: &Daemon) -> Reply {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Reply::Status(StatusInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        wire: WIRE_VERSION,
        cuda_driver: daemon.config.cuda_driver.display().to_string(),
        spare: count(daemon.pool.spare()),
        used: count(daemon.registry.used()),
    })
}
