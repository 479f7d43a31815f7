//! Checks whether a process tree can be checkpointed now, without making a checkpoint.

use std::collections::HashSet;

use rekindle_wire::control::{CheckInfo, Failure, Reply};

use super::clients::{Client, ClientState};
use super::peer::is_operator;
use super::pidns::PidView;
use super::process;
use super::sys::Credentials;
use super::worker::WorkerError;
use super::{Daemon, ipc, mappings};

/// The obstacles to a dump, for each process of the tree that uses a GPU.
pub(crate) fn check(daemon: &Daemon, peer: Credentials, pid: i32) -> Reply {
    match try_check(daemon, peer, pid) {
        Ok(found) => Reply::Checked(found),
        Err(failure) => Reply::Failed(failure),
    }
}

fn try_check(daemon: &Daemon, peer: Credentials, asked: i32) -> Result<Vec<CheckInfo>, Failure> {
    let view = PidView::of(peer.pid)?;
    let root = view.to_ours(asked)?;
    let tree =
        process::tree(root).map_err(|e| Failure::internal(format!("cannot list the processes of the tree: {e}")))?;
    let owner = process::user(root);
    if tree.is_empty() || !is_operator(peer) && owner != Some(peer.uid) {
        return Err(Failure::refused(format!("there is no process {asked} of yours")));
    }
    let clients = daemon.clients.registry.clients_among(&tree);
    let pending = daemon.clients.registry.pending_among(&tree);
    let outside = mapped_outside(daemon, &tree);
    let shared = ipc::shared_outside(daemon, &clients);
    let mut found = Vec::new();
    for pid in tree {
        let client = clients.iter().find(|it| it.process.pid == pid);
        let mapped = mappings::of(pid).unwrap_or_default();
        let mut reasons = Vec::new();
        let mut memory = 0;
        match client {
            Some(client) => {
                memory = client.worker.describe().device_memory.iter().sum();
                match of_client(client) {
                    Some(against) => reasons.extend(against),
                    None if pid == root => return Err(Failure::refused(format!("process {asked} has ended"))),
                    // This process delays no dump of the others.
                    None => continue,
                }
                reasons.extend(shared.iter().filter(|it| it.pid == pid).map(ToString::to_string));
                let strangers = outside.iter().filter(|(_, shared)| !shared.is_disjoint(&mapped.shared));
                reasons.extend(strangers.map(|(stranger, _)| {
                    format!("its pinned memory is also mapped by process {stranger}, which is not in the tree: a restored process would no longer share it")
                }));
            }
            None if pending.iter().any(|it| it.process.pid == pid) => {
                reasons.push("it is just attaching to a worker: ask again".to_owned());
            }
            None if mapped.ring => reasons.push(daemon.clients.lost.why(pid)),
            None => {}
        }
        if let Some(device) = mapped.device {
            reasons.push(format!("it uses {device} by the driver itself: start it with `rekindle run`"));
        }
        let ours = client.is_some() || !reasons.is_empty();
        if ours && let Some(pid) = view.to_theirs(pid) {
            let command = client.map_or_else(|| process::command(pid), |it| it.attach.command.clone());
            found.push(CheckInfo { pid, command, device_memory: memory, reasons });
        }
    }
    Ok(found)
}

/// The obstacles of one client; none where its process has ended.
fn of_client(client: &Client) -> Option<Vec<String>> {
    match client.state() {
        ClientState::Running => match client.worker.check().map_err(|error| client.explain(error)) {
            Ok(reasons) => Some(reasons),
            Err(WorkerError::Ended) => None,
            Err(error) => Some(vec![error.to_string()]),
        },
        state => Some(vec![format!("it is {} already: wait until that is over", state.as_str())]),
    }
}

/// Processes that are neither in the tree nor workers, and the memory of clients that they have mapped.
fn mapped_outside(daemon: &Daemon, tree: &[i32]) -> Vec<(i32, HashSet<(String, u64)>)> {
    let clients = daemon.clients.registry.clients();
    let ours = |pid: i32| tree.contains(&pid) || clients.iter().any(|it| it.worker.pid() == pid);
    let others = process::all().unwrap_or_default().into_iter().filter(|pid| !ours(*pid));
    others
        .filter_map(|pid| Some((pid, mappings::of(pid).ok()?.shared)))
        .filter(|(_, shared)| !shared.is_empty())
        .collect()
}
