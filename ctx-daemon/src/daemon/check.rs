//! Checks whether a process tree can be checkpointed now, without making a checkpoint.

use std::collections::HashSet;

use rekindle_cuda_abi::checkpoint::ProcessState;
use rekindle_wire::control::{CheckInfo, Failure, Reply};

use super::clients::{Client, ClientState};
use super::native::NativeError;
use super::peer::is_operator;
use super::pidns::PidView;
use super::process;
use super::sys::Credentials;
use super::worker::WorkerError;
use super::{Daemon, ipc, mappings};

/// What `check` says of a client.
const BY_REKINDLE: &str = "its GPU memory is saved by Rekindle's worker";
/// What `check` says of a native process.
const BY_DRIVER: &str = "its GPU memory is saved by the driver's own checkpoint: the process stands still while all of its GPU memory \
    goes into its host memory and CRIU copies that; it must hold it all, and fails on managed memory and on memory exported to other \
    processes (started with `rekindle run`, it would not)";

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
    let outside = mapped_outside(daemon, root, &tree);
    let shared = ipc::shared_outside(daemon, &clients);
    let mut found = Vec::new();
    for pid in tree {
        let client = clients.iter().find(|it| it.process.pid == pid);
        let mapped = mappings::of(pid, &daemon.config.native.devices).unwrap_or_default();
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
        let mut way = if client.is_some() { BY_REKINDLE.to_owned() } else { String::new() };
        match (daemon.native.device_of(pid), client) {
            (Some(device), Some(_)) => {
                reasons.push(format!(
                    "it also uses {device} through the driver itself, which a restore would not bring back"
                ));
            }
            (Some(device), None) => match native(daemon, pid, &device) {
                Ok(Some(said)) => way = said,
                Ok(None) => {}
                Err(reason) => reasons.push(reason),
            },
            (None, _) => {}
        }
        let ours = client.is_some() || !reasons.is_empty() || !way.is_empty();
        if ours && let Some(pid) = view.to_theirs(pid) {
            let command = client.map_or_else(|| process::command(pid), |it| it.attach.command.clone());
            found.push(CheckInfo { pid, command, device_memory: memory, reasons, way });
        }
    }
    Ok(found)
}

/// How the GPU memory of a process without a worker is saved, and what that costs; none if the driver does not know the process.
fn native(daemon: &Daemon, pid: i32, device: &str) -> Result<Option<String>, String> {
    if !daemon.config.native.enabled {
        return Err(format!(
            "it uses {device} through the driver itself, and the daemon leaves such processes to other plugins (native.enabled): start it with `rekindle run`"
        ));
    }
    let Some(one) =
        daemon.native.look(pid, device).map_err(|error| format!("{error}; or start it with `rekindle run`"))?
    else {
        return Ok(None);
    };
    match daemon.native.state(&one, daemon.native.limits().short) {
        Ok(ProcessState::Running) => Ok(Some(BY_DRIVER.to_owned())),
        Ok(state) => Err(NativeError::NotRunning { name: one.name, state: state.as_str() }.to_string()),
        Err(error) => Err(error.to_string()),
    }
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
fn mapped_outside(daemon: &Daemon, root: i32, tree: &[i32]) -> Vec<(i32, HashSet<(String, u64)>)> {
    let clients = daemon.clients.registry.clients();
    let ours = |pid: i32| tree.contains(&pid) || clients.iter().any(|it| it.worker.pid() == pid);
    let others = process::all().unwrap_or_default().into_iter().filter(|pid| !ours(*pid));
    let found = others
        .filter_map(|pid| Some((pid, mappings::of(pid, &daemon.config.native.devices).ok()?.shared)))
        .filter(|(_, shared)| !shared.is_empty());
    let mut found: Vec<_> = found.collect();
    if !found.is_empty() {
        // The tree runs: it may have made these processes since it was listed, and they may have ended.
        let tree = process::tree(root).unwrap_or_default();
        found.retain(|(pid, _)| !tree.contains(pid) && process::user(*pid).is_some());
    }
    found
}
