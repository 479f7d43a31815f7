//! Which GPUs, and how much of them, the processes of a container may use.
//!
//! ```text
//!   the hook, when a container is made ── Grant ──► granted ──► gone, when the container's first process is
//!   a restore, from the image's manifest ─────────►    │
//!                                                      └ kept in a file: a daemon that starts anew knows it again
//! ```
//!
//! A process belongs to a container by properties that it cannot change: its pid namespace or an ancestor of that, and its
//! cgroups or ancestors of these. The process's own statements and its environment do not count. A process in a pid namespace
//! other than the daemon's is refused if its container has no grant. A process in the daemon's namespace is a process of the
//! host and may use everything, unless its container shares that namespace and has a grant.

mod container;
mod files;
mod select;
mod serve;

use rekindle_images::{Grant as Recorded, Protocol};
use rekindle_wire::attach::Device;
use rekindle_wire::control::{ContainerLimits, Failing, FailureKind, WorkerRequest};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use thiserror::Error;
use tracing::{debug, info, warn};

use self::container::Place;
pub(crate) use self::container::{CRUN_INNER, Container, SCOPE, Uuid, bears};
pub(crate) use self::select::SelectError;
pub(crate) use self::serve::{Asked, contained, grant, revoke};
use super::pidns::{self, Identity};
use super::pool::PoolError;
use super::process::Process;
use super::worker::{Worker, WorkerError};
use super::{lock, sys};
use crate::limit::Limit;
use rekindle_ctx_worker::share;

/// Why a process may use no GPU, or a container gets no grant.
#[derive(Debug, Error)]
pub(crate) enum GrantError {
    #[error(
        "this process is in a container that was given no GPU: start the container with --device rekindle.dev/gpu=all or --annotation dev.rekindle/enable=true (rekindle-oci-hook install sets both up)"
    )]
    None,
    #[error(
        "only root, the user that rekindled runs as and the container's own user may give GPUs to a container, and only on the host itself"
    )]
    NotAllowed,
    #[error("a container's name has no more than {0} bytes")]
    LongName(usize),
    #[error("process {0} has ended")]
    Gone(i32),
    #[error("cannot tell which container process {pid} is in: {source}")]
    Examine { pid: i32, source: io::Error },
    #[error("nothing tells container {0} from the host: it has neither a pid namespace nor a cgroup of its own")]
    Nameless(String),
    #[error(transparent)]
    Select(#[from] SelectError),
    #[error(
        "the container asks for {asked} {what}, and rekindled's configuration allows no more than {most} (containers.{setting})"
    )]
    Quota { what: &'static str, asked: u64, most: u64, setting: &'static str },
    #[error("cannot write to {} what container {id} was given: {source}", .path.display())]
    Keep { id: String, path: PathBuf, source: io::Error },
}

impl Failing for GrantError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::None | Self::NotAllowed | Self::LongName(_) | Self::Nameless(_) | Self::Quota { .. } => {
                FailureKind::Refused
            }
            Self::Gone(_) => FailureKind::LostPeer,
            Self::Select(error) => error.kind(),
            Self::Examine { source, .. } | Self::Keep { source, .. } => Failing::kind(source),
        }
    }
}

/// Why a client's memory cannot be counted.
#[derive(Debug, Error)]
pub(crate) enum ShareError {
    #[error("no more than {} processes of a container with limits can use GPUs", share::ROWS)]
    Full,
    #[error("cannot account for what the container uses: {0}")]
    Io(#[from] io::Error),
    #[error("cannot account for what the container uses: {0}")]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

impl Failing for ShareError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Full => FailureKind::Refused,
            Self::Io(error) => Failing::kind(error),
            Self::Pool(error) => error.kind(),
            Self::Worker(error) => error.kind(),
        }
    }
}

/// The GPUs that a process may use, and how much of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Allowed {
    /// The container of the process; none for a process of the host, which may use everything.
    pub(crate) container: Option<Arc<Container>>,
}

impl Allowed {
    /// The GPUs, by UUID and in the daemon's order; none if the process may use all of them.
    pub(crate) fn gpus(&self) -> Option<&[Uuid]> {
        self.container.as_ref()?.gpus.as_deref()
    }

    /// Whether both processes are of the same container.
    pub(crate) fn is_with(&self, other: &Self) -> bool {
        let name = |it: &Self| it.container.as_ref().map(|it| (it.id.clone(), it.first));
        name(self).is_some() && name(self) == name(other)
    }

    /// The limits of all processes of the container together.
    pub(crate) fn limits(&self) -> ContainerLimits {
        self.container.as_ref().map_or_else(ContainerLimits::default, |it| it.limits)
    }
}

/// The GPUs and limits that a container is given.
#[derive(Debug, Default)]
struct Given {
    /// The GPUs; none for all.
    gpus: Option<Vec<Uuid>>,
    limits: ContainerLimits,
    protocol: Option<Protocol>,
    share: bool,
}

/// All grants.
pub(crate) struct Grants {
    dir: PathBuf,
    own: Option<Identity>,
    /// Whether a process in another pid namespace needs a grant.
    required: bool,
    containers: Mutex<Vec<Arc<Container>>>,
}

impl Grants {
    /// The grants that a former daemon has kept in `dir`, as far as they still hold.
    pub(crate) fn load(dir: &Path, required: bool) -> Self {
        let containers = files::load(dir);
        if !containers.is_empty() {
            info!(containers = containers.len(), "containers keep the GPUs that they were given before");
        }
        Self {
            dir: dir.to_owned(),
            own: pidns::own().ok(),
            required,
            containers: Mutex::new(containers.into_iter().map(Arc::new).collect()),
        }
    }

    /// The grant of a process. A process whose pid belongs to another one by now may use nothing.
    pub(crate) fn of(&self, process: Process) -> Result<Allowed, GrantError> {
        let place = Place::of(process).map_err(|source| examined(process, source))?;
        let containers = self.all();
        for namespace in &place.namespaces {
            let here = containers.iter().filter(|it| it.place.namespaces.first() == Some(namespace));
            let here = here.filter_map(|it| Some((it.holds(&place.cgroups)?, it)));
            if let Some((_, container)) = here.max_by_key(|it| it.0) {
                return Ok(Allowed { container: Some(Arc::clone(container)) });
            }
        }
        let of_host = self.own.is_some() && place.namespaces.first() == self.own.as_ref();
        if of_host || !self.required { Ok(Allowed::default()) } else { Err(GrantError::None) }
    }

    /// The grant of a restored process: the grant of its container or, where no hook has run, the one in the image, with the
    /// GPUs that its worker sees. A restore is made by root on the host, or within a container that has a grant; in that case
    /// the container's grant counts.
    pub(crate) fn of_restored(
        &self,
        process: Process,
        recorded: Option<&Recorded>,
        sees: &[Uuid],
    ) -> Result<Allowed, GrantError> {
        let found = match self.of(process) {
            Err(GrantError::None) => Allowed::default(),
            found => found?,
        };
        let place = Place::of(process).map_err(|source| examined(process, source))?;
        let on_host = place.namespaces.first() == self.own.as_ref();
        let Some(recorded) = recorded.filter(|_| found.container.is_none() && !on_host) else { return Ok(found) };
        let first = container::first_in(&place, process).map_err(|source| examined(process, source))?;
        if let Some(container) = self.put(first, &place)? {
            return Ok(Allowed { container: Some(container) });
        }
        let id = place.cgroups.name().unwrap_or(&recorded.container);
        let gpus = (!recorded.all_gpus).then(|| sees.to_vec());
        let Recorded { device_memory, pinned_memory, workers, protocol, share, .. } = *recorded;
        let limits = ContainerLimits { device_memory, pinned_memory, workers };
        let container = self.give(id, first, Given { gpus, limits, protocol, share })?;
        info!(container = id, "a restored container has what its image says that it was given");
        Ok(Allowed { container: Some(container) })
    }

    /// Notes that the container which begins with `first` has processes in these cgroups, too. None if it has no grant.
    fn put(&self, first: Process, there: &Place) -> Result<Option<Arc<Container>>, GrantError> {
        let mut containers = lock(&self.containers);
        let Some(known) = containers.iter_mut().find(|it| it.first == first) else { return Ok(None) };
        let process = sys::pidfd_open(first.pid).map_err(|source| examined(first, source))?;
        let mut more = known.more.clone();
        more.push(there.cgroups.clone());
        let Container { id, place, gpus, limits, protocol, share, .. } = &**known;
        let (id, place, gpus) = (id.clone(), place.clone(), gpus.clone());
        let (limits, protocol, share) = (*limits, *protocol, *share);
        let container = Container { id, first, process, place, more, gpus, limits, protocol, share };
        self.keep(&container)?;
        *known = Arc::new(container);
        Ok(Some(Arc::clone(known)))
    }

    fn keep(&self, container: &Container) -> Result<(), GrantError> {
        let failed = |source| GrantError::Keep { id: container.id.clone(), path: self.dir.clone(), source };
        files::keep(&self.dir, container).map_err(failed)
    }

    /// Gives to the container of a process, which is the container's first. The daemon knows the container by that process, so
    /// that nobody can have more grants than processes. The container keeps what it was given before.
    fn give(&self, id: &str, first: Process, given: Given) -> Result<Arc<Container>, GrantError> {
        let place = Place::of(first).map_err(|source| examined(first, source))?;
        if place.namespaces.first() == self.own.as_ref() && place.cgroups.depth() == 0 {
            return Err(GrantError::Nameless(id.to_owned()));
        }
        let process = sys::pidfd_open(first.pid).map_err(|source| examined(first, source))?;
        let Given { gpus, limits, protocol, share } = given;
        let id = id.to_owned();
        let mut container = Container { id, first, process, place, more: Vec::new(), gpus, limits, protocol, share };
        if !first.is_alive() {
            return Err(GrantError::Gone(first.pid));
        }
        let mut containers = lock(&self.containers);
        let before = containers.iter().position(|it| it.first == first);
        if let Some(before) = before.and_then(|at| containers.get(at)) {
            container.add(before);
        }
        self.keep(&container)?;
        let container = Arc::new(container);
        match before.and_then(|at| containers.get_mut(at)) {
            Some(place) => *place = Arc::clone(&container),
            None => containers.push(Arc::clone(&container)),
        }
        Ok(container)
    }

    /// Whether a client's container has limits, which its clients share.
    pub(crate) fn are_shared(&self, allowed: &Allowed) -> bool {
        let limits = allowed.container.as_ref().map(|it| it.limits);
        limits.is_some_and(|it| it.device_memory.is_some() || it.pinned_memory.is_some())
    }

    /// Has a worker count its client's memory together with that of the other clients of the container, if the container has
    /// limits. `devices` are all devices, and the worker answers within the limit.
    pub(crate) fn share(
        &self,
        allowed: &Allowed,
        worker: &Worker,
        devices: &[Device],
        limit: Limit,
    ) -> Result<(), ShareError> {
        let Some(container) = allowed.container.as_ref().filter(|_| self.are_shared(allowed)) else { return Ok(()) };
        let limits = container.limits;
        let owner = Process::with_pid(worker.pid())?;
        let table = {
            // One worker at a time.
            let _containers = lock(&self.containers);
            let table = files::table(&self.dir, container)?;
            let lives = |pid, start| Process { pid, start }.is_alive();
            let row = share::claim(&table, owner.pid, owner.start, lives)?;
            row.and_then(|row| u32::try_from(row).ok()).map(|row| (row, table))
        };
        let (row, table) = table.ok_or(ShareError::Full)?;
        let gpus = container.gpus.clone().unwrap_or_else(|| devices.iter().map(|it| it.uuid).collect());
        let request = WorkerRequest::JoinContainer { row, gpus, limits };
        Ok(worker.ask(&request, &[table.as_raw_fd()], limit)?)
    }

    /// A worker has died: its client's memory is free for other clients of the container.
    pub(crate) fn release(&self, allowed: &Allowed, worker: i32) {
        let Some(container) = &allowed.container else { return };
        let _containers = lock(&self.containers);
        if let Err(error) = files::release(&self.dir, container, worker) {
            warn!(container = container.id, worker, "cannot account for what a container uses: {error}");
        }
    }

    /// Forgets the grants of containers that are gone.
    pub(crate) fn collect(&self) {
        let mut containers = lock(&self.containers);
        containers.retain(|it| {
            let there = it.is_there();
            if !there {
                files::forget(&self.dir, it);
                debug!(container = it.id, "a container that was given GPUs is gone");
            }
            there
        });
    }

    fn all(&self) -> Vec<Arc<Container>> {
        self.collect();
        lock(&self.containers).clone()
    }
}

fn examined(process: Process, source: io::Error) -> GrantError {
    if process.is_alive() {
        warn!(pid = process.pid, "cannot examine a process: {source}");
        GrantError::Examine { pid: process.pid, source }
    } else {
        GrantError::Gone(process.pid)
    }
}
