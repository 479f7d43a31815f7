//! Answers to `rekindle ps` and to others that ask about the daemon itself.

use std::sync::Arc;

use rekindle_cuda_abi::table;
use rekindle_wire::attach::Device;
use rekindle_wire::calls::Count;
use rekindle_wire::control::{CallInfo, ClientInfo, Failure, GpuInfo, Owner, ProtectInfo, Reply, StatusInfo};
use rekindle_wire::gpus;
use rekindle_wire::version::control_version;

use super::Daemon;
use super::clients::{Client, ClientState};
use super::lost::Lost;
use super::oversubscribe::SuspendedFor;
use super::peer::is_operator;
use super::pidns::PidView;
use super::process::{self, Process};
use super::sys::Credentials;
use super::worker::{Description, describe_all};

/// The clients that the peer may know of: those in its pid namespace and, unless it is an operator, of its own user only.
pub(crate) fn clients(daemon: &Daemon, peer: Credentials) -> Reply {
    let view = match PidView::of(peer.pid) {
        Ok(view) => view,
        Err(error) => {
            return Reply::Failed(error.into());
        }
    };
    let operator = is_operator(peer);
    let visible = |pid: i32| {
        let theirs = view.to_theirs(pid)?;
        (operator || process::user(pid) == Some(peer.uid)).then_some(theirs)
    };
    let clients = daemon.clients.registry.clients();
    let clients: Vec<_> = clients.iter().filter_map(|it| Some((visible(it.process.pid)?, it))).collect();
    // A worker that does not answer delays none of the others.
    let workers: Vec<_> = clients.iter().map(|(_, client)| &*client.worker).collect();
    let described = clients.iter().zip(describe_all(&workers));
    let infos = described.map(|((pid, client), described)| {
        let for_whom = suspended_for(daemon, client, &described, &visible);
        ClientInfo { suspended_for: for_whom, ..info(daemon, *pid, client, described) }
    });
    let mut infos: Vec<_> = infos.collect();
    // A client that loses its worker right now is in both.
    let lost = daemon.clients.lost.all();
    let lost: Vec<_> = lost.into_iter().filter_map(|it| Some(without_worker(visible(it.process.pid)?, it))).collect();
    infos.retain(|it| !lost.iter().any(|lost| lost.worker == it.worker));
    infos.extend(lost);
    infos.sort_by_key(|it| it.pid);
    Reply::Clients(infos)
}

/// For which program the daemon has suspended a client. A program that the peer may not know of has no name.
fn suspended_for(
    daemon: &Daemon,
    client: &Client,
    described: &Description,
    visible: &impl Fn(i32) -> Option<i32>,
) -> Option<String> {
    described.suspended?;
    let SuspendedFor { process, command, .. } = daemon.oversubscription.of_worker(client.worker.pid())?;
    let pid = Some(process.pid).filter(|_| process.is_alive()).and_then(visible);
    Some(pid.map_or_else(|| "another program".to_owned(), |pid| format!("process {pid} ({command})")))
}

fn without_worker(pid: i32, lost: Lost) -> ClientInfo {
    ClientInfo {
        pid,
        worker: lost.worker,
        command: lost.command,
        state: "lost".to_owned(),
        owner: owner(lost.process, None),
        ..ClientInfo::default()
    }
}

/// Whose a process is.
fn owner(process: Process, container: Option<&str>) -> Owner {
    Owner {
        user: process::user(process.pid),
        container: container.map(str::to_owned),
        cgroup: process::cgroup(process.pid),
    }
}

/// The calls of one client.
pub(crate) fn calls(daemon: &Daemon, peer: Credentials, pid: i32) -> Reply {
    match try_calls(daemon, peer, pid) {
        Ok(calls) => Reply::Calls(calls),
        Err(failure) => Reply::Failed(failure),
    }
}

/// The counters of one client's accesses to memory.
pub(crate) fn access(daemon: &Daemon, peer: Credentials, pid: i32) -> Reply {
    let report = client(daemon, peer, pid).and_then(|client| Ok(client.worker.access()?));
    match report {
        Ok(report) => Reply::Access(Box::new(report)),
        Err(failure) => Reply::Failed(failure),
    }
}

/// A client that the peer may ask about.
pub(crate) fn client(daemon: &Daemon, peer: Credentials, pid: i32) -> Result<Arc<Client>, Failure> {
    let ours = PidView::of(peer.pid).and_then(|view| view.to_ours(pid))?;
    let allowed = is_operator(peer) || process::user(ours) == Some(peer.uid);
    let clients = daemon.clients.registry.clients_among(&[ours]);
    let client = clients.into_iter().next().filter(|_| allowed);
    client.ok_or_else(|| Failure::refused(format!("process {pid} is no client of yours")))
}

fn try_calls(daemon: &Daemon, peer: Credentials, pid: i32) -> Result<Vec<CallInfo>, Failure> {
    let client = client(daemon, peer, pid)?;
    let counts = client.worker.calls()?;
    let table = table::parse(table::TEXT).map_err(|e| Failure::internal(e.to_string()))?;
    let info = |count: Count| {
        // A count for an unknown function is the client's own invention.
        let function = table.get(usize::from(count.function))?;
        let (call, how) = (function.symbol.clone(), function.route.name().to_owned());
        Some(CallInfo { call, how, asked: count.asked, refused: count.refused })
    };
    Ok(counts.into_iter().filter_map(info).collect())
}

fn info(daemon: &Daemon, pid: i32, client: &Client, described: Description) -> ClientInfo {
    let (protocol, protocol_reason) = daemon.protocol_of(client);
    let state = match client.state() {
        ClientState::Running if described.suspended.is_some() => "suspended",
        state => state.as_str(),
    };
    ClientInfo {
        pid,
        worker: client.worker.pid(),
        command: client.attach.command.clone(),
        state: state.to_owned(),
        device_memory: described.device_memory,
        gpu_time_ns: described.gpu_time_ns,
        pinned_memory: described.pinned_memory,
        commands: described.commands,
        protocol: protocol.as_str().to_owned(),
        protocol_reason,
        dump: daemon.checkpoints.of_client(client),
        suspended: described.suspended,
        idle_ms: described.idle_ms,
        suspended_for: None,
        owner: owner(client.process, client.allowed.container.as_deref().map(|it| it.id.as_str())),
        not_moved: described.suspended.filter(|it| it.deep).and_then(|_| daemon.moves.why(client.process)),
    }
}

/// The daemon's status. Operators hear of the kinds of workers too, which tell what other users ask for.
pub(crate) fn status(daemon: &Daemon, peer: Credentials) -> Reply {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let (problem, seen) = daemon.pool.health();
    let gpu = |it: &Device| GpuInfo {
        name: it.name.clone(),
        memory: it.memory,
        pci_bus_id: it.pci_bus_id.clone(),
        uuid: gpus::name(&it.uuid),
    };
    Reply::Status(StatusInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        wire: control_version(),
        cuda_driver: daemon.config.workers.cuda_driver.display().to_string(),
        spare: count(daemon.pool.spare()),
        used: count(daemon.clients.registry.used()),
        max: daemon.config.clients.max.map(count),
        problem,
        driver_version: seen.as_ref().map(|it| it.driver_version),
        sandbox: Some(daemon.sandbox.info()),
        gpus: seen.iter().flat_map(|it| &it.devices).map(gpu).collect(),
        kinds: if is_operator(peer) { daemon.pool.kinds() } else { Vec::new() },
        protect: Some(ProtectInfo {
            dir: daemon.config.protect.dir.clone(),
            mtbf_ms: u64::try_from(daemon.config.protect.mtbf.as_millis()).unwrap_or(u64::MAX),
        }),
    })
}
