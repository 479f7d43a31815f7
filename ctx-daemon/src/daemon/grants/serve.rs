//! The hook's requests.

use rekindle_images::UnknownProtocol;
use rekindle_wire::control::{ContainerLimits, Failure, Reply};
use rekindle_wire::gpus;
use tracing::{info, warn};

use super::super::peer::is_operator;
use super::super::process::Process;
use super::super::sys::Credentials;
use super::super::{Daemon, pidns, takeover};
use super::select::select;
use super::{Container, Given, GrantError};

/// The longest id; the ids of engines have 64 characters.
const LONGEST_ID: usize = 1024;

/// The request of a hook.
pub(crate) struct Asked {
    /// The process that the container begins with.
    pub(crate) pid: i32,
    pub(crate) gpus: Vec<String>,
    pub(crate) limits: ContainerLimits,
    pub(crate) protocol: Option<String>,
    pub(crate) share: bool,
}

/// Checks the name's length. A name that is too long is not logged.
fn check_name(container: &str) -> Result<(), GrantError> {
    if container.len() > LONGEST_ID { Err(GrantError::LongName(LONGEST_ID)) } else { Ok(()) }
}

/// Gives GPUs to a container.
pub(crate) fn grant(daemon: &Daemon, peer: Credentials, container: &str, asked: &Asked) -> Reply {
    let pid = asked.pid;
    if let Err(error) = check_name(container) {
        warn!(pid, "refused GPUs to a container: {error}");
        return Reply::Failed(error.into());
    }
    match try_grant(daemon, peer, container, asked) {
        Ok(reply) => {
            info!(container, pid, gpus = asked.gpus.join(","), "gave GPUs to a container");
            reply
        }
        Err(failure) => {
            warn!(container, pid, "refused GPUs to a container: {failure}");
            Reply::Failed(failure)
        }
    }
}

fn try_grant(daemon: &Daemon, peer: Credentials, container: &str, asked: &Asked) -> Result<Reply, Failure> {
    let pid = asked.pid;
    let first = Process::with_pid(pid).map_err(|_| GrantError::Gone(pid))?;
    if !(is_operator_here(daemon, peer) || is_users_own(daemon, peer, first)) {
        return Err(GrantError::NotAllowed.into());
    }
    let devices = daemon.pool.devices()?;
    let protocol = asked.protocol.as_deref().map(str::parse).transpose();
    let given = Given {
        gpus: select(&asked.gpus, &devices)?,
        limits: within(asked.limits, daemon.config.clients.of_container)?,
        protocol: protocol
            .map_err(|error: UnknownProtocol| Failure::refused(format!("annotation dev.rekindle/protocol: {error}")))?,
        share: asked.share,
    };
    let container = daemon.grants.give(container, first, given)?;
    Ok(Reply::Granted { gpus: names_of(&container, &devices) })
}

/// Forgets a container that is gone. Any peer may ask, since the daemon checks: a container that is there keeps its grant.
pub(crate) fn revoke(daemon: &Daemon, container: &str) -> Reply {
    if let Err(error) = check_name(container) {
        warn!("refused to forget a container: {error}");
        return Reply::Failed(error.into());
    }
    // A container of the same name that is there may have been restored meanwhile.
    info!(container, "a container has ended");
    daemon.grants.collect();
    Reply::Revoked
}

/// Whether the peer is an operator on the host. Root of a container is root as well, so the peer must be on the host, and in no
/// container that has a grant (a container may share the host's namespaces).
fn is_operator_here(daemon: &Daemon, peer: Credentials) -> bool {
    is_operator(peer) && takeover::is_neighbour(peer.pid) && !contained(daemon, peer)
}

/// Whether the container belongs to the peer's user alone, as rootless engines make them. A user who may connect may use GPUs
/// on the host, and so may let such containers use them.
fn is_users_own(daemon: &Daemon, peer: Credentials, first: Process) -> bool {
    let on_host = takeover::is_at_our_depth(peer.pid) && !contained(daemon, peer);
    on_host && pidns::is_owned_by(first.pid, peer.uid).unwrap_or(false) && first.is_alive()
}

/// Whether a peer is in a container that has a grant.
pub(crate) fn contained(daemon: &Daemon, peer: Credentials) -> bool {
    let found = Process::with_pid(peer.pid).map(|process| daemon.grants.of(process));
    found.is_ok_and(|found| found.is_ok_and(|allowed| allowed.container.is_some()))
}

/// The limits that are asked for, if the configuration allows as much; the configuration's limits where none are asked for.
fn within(asked: ContainerLimits, most: ContainerLimits) -> Result<ContainerLimits, GrantError> {
    let check = |what, setting, unit: u64, asked: Option<u64>, most: Option<u64>| match (asked, most) {
        (Some(asked), Some(most)) if asked > most => {
            let (asked, most) = (asked / unit, most / unit);
            Err(GrantError::Quota { what, asked, most, setting })
        }
        (asked, most) => Ok(asked.or(most)),
    };
    let mib = 1 << 20;
    let number = |it: Option<u32>| it.map(u64::from);
    let workers = check("workers", "workers", 1, number(asked.workers), number(most.workers))?;
    Ok(ContainerLimits {
        device_memory: check("MiB of GPU memory", "gpu_memory_mib", mib, asked.device_memory, most.device_memory)?,
        pinned_memory: check(
            "MiB of pinned memory",
            "pinned_memory_mib",
            mib,
            asked.pinned_memory,
            most.pinned_memory,
        )?,
        workers: workers.and_then(|it| u32::try_from(it).ok()),
    })
}

fn names_of(container: &Container, devices: &[rekindle_wire::attach::Device]) -> Vec<String> {
    match &container.gpus {
        Some(uuids) => uuids.iter().map(gpus::name).collect(),
        None => devices.iter().map(|it| gpus::name(&it.uuid)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_given_than_the_configuration_allows() {
        let limits = |memory, workers| ContainerLimits { device_memory: memory, workers, ..ContainerLimits::default() };
        let most = limits(Some(8 << 20), Some(2));
        assert_eq!(within(limits(None, None), most).unwrap(), most);
        assert_eq!(within(limits(Some(1 << 20), Some(1)), most).unwrap(), limits(Some(1 << 20), Some(1)));
        assert_eq!(within(limits(Some(9), None), limits(None, None)).unwrap(), limits(Some(9), None));
        let error = within(limits(Some(9 << 20), None), most).unwrap_err().to_string();
        assert!(error.contains("9 MiB of GPU memory") && error.contains("no more than 8"), "{error}");
        assert!(within(limits(None, Some(3)), most).is_err());
    }
}
