//! The programs that could be suspended: clients with all clients among their descendants, as `rekindle suspend` takes them.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::victims::{Candidate, Gpu};
use crate::daemon::clients::{Client, ClientState};
use crate::daemon::process;
use crate::daemon::state::Daemon;
use crate::daemon::worker::{Description, describe_now};

/// A program.
pub(super) struct Program {
    /// The first of its processes that is a client.
    pub(super) root: i32,
    /// All clients of its tree.
    pub(super) clients: Vec<Arc<Client>>,
    pub(super) candidate: Candidate,
}

/// All programs except those with these roots. One that has work, or cannot be suspended, has been idle for no time.
pub(super) fn programs(daemon: &Daemon, without: &HashSet<i32>) -> Vec<Program> {
    let mut clients = daemon.clients.registry.clients();
    clients.retain(|it| it.process.is_alive());
    let pids: HashSet<i32> = clients.iter().map(|it| it.process.pid).collect();
    // A worker whose client waits for memory answers nothing.
    let (asking, others): (Vec<_>, Vec<_>) =
        clients.into_iter().partition(|it| daemon.oversubscription.is_asking(it.worker.pid()));
    let workers: Vec<_> = others.iter().map(|it| &*it.worker).collect();
    let described = describe_now(&workers);
    let members = asking.into_iter().map(|it| (it, None)).chain(others.into_iter().zip(described));
    let mut found: Vec<Program> = Vec::new();
    for (client, description) in members {
        let root = root_of(&process::ancestry(client.process.pid), &pids).unwrap_or(client.process.pid);
        if without.contains(&root) {
            continue;
        }
        let (idle, memory) = idle_and_memory(&client, description.as_ref());
        let took = daemon.oversubscription.of_worker(client.worker.pid()).map_or(Duration::ZERO, |it| it.took);
        let enough = daemon.config.gpu.idle.max(took);
        match found.iter_mut().find(|it| it.root == root) {
            Some(program) => {
                program.clients.push(client);
                let candidate = &mut program.candidate;
                candidate.idle = candidate.idle.min(idle);
                candidate.enough = candidate.enough.max(enough);
                candidate.memory.extend(memory);
            }
            None => {
                let candidate = Candidate { idle, enough, memory };
                found.push(Program { root, clients: vec![client], candidate });
            }
        }
    }
    found
}

/// The topmost of a process and all above it that is a client.
fn root_of(ancestry: &[i32], clients: &HashSet<i32>) -> Option<i32> {
    ancestry.iter().rev().find(|it| clients.contains(it)).copied()
}

/// How long a client has been idle, and the memory that it would give back.
fn idle_and_memory(client: &Client, description: Option<&Description>) -> (Duration, Vec<(Gpu, u64)>) {
    let nothing = (Duration::ZERO, Vec::new());
    let Some(it) = description.filter(|_| client.worker.makes_room() && client.state() == ClientState::Running) else {
        return nothing;
    };
    match it.suspended {
        Some(suspended) if suspended.waits_for_room => nothing,
        // It has given everything back, and is in nobody's way.
        Some(_) => (Duration::MAX, Vec::new()),
        None => {
            let gpus = client.worker.attached().devices.iter().map(|it| it.uuid);
            (Duration::from_millis(it.idle_ms), gpus.zip(it.physical.iter().copied()).collect())
        }
    }
}

/// The free bytes of a GPU, which the worker of an idle program can tell.
pub(super) fn free_on(programs: &[Program], gpu: Gpu) -> Option<u64> {
    let idle = programs.iter().filter(|it| !it.candidate.idle.is_zero());
    idle.flat_map(|it| &it.clients).find_map(|client| {
        let place = client.worker.attached().devices.iter().position(|it| it.uuid == gpu)?;
        client.worker.memory().ok()?.get(place).map(|it| it.free)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_begins_at_the_topmost_process_that_is_a_client() {
        let clients = HashSet::from([5, 9]);
        assert_eq!(root_of(&[9, 7, 5, 3, 1], &clients), Some(5));
        assert_eq!(root_of(&[9, 7, 1], &clients), Some(9));
        assert_eq!(root_of(&[5, 3, 1], &clients), Some(5));
        assert_eq!(root_of(&[4, 1], &clients), None);
    }
}
