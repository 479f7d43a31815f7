//! A container, and how the daemon tells its processes from others.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rekindle_images::Protocol;
use rekindle_wire::control::ContainerLimits;
use serde::{Deserialize, Serialize};

use super::super::pidns::{self, Identity};
use super::super::process::{self, Process};
use super::super::sys;

/// A UUID in the form of `cuDeviceGetUuid`.
pub(crate) type Uuid = [u8; 16];

/// The ending of systemd's cgroups for processes that others have started.
pub(crate) const SCOPE: &str = ".scope";

/// The cgroup that crun makes for the processes of a container, inside the container's scope.
pub(crate) const CRUN_INNER: &str = "container";

/// What LXC's and Incus's cgroups for processes of containers begin with.
const LXC: &str = "lxc.payload.";

/// Whether an engine has named a cgroup after this container: `libpod-ID`, `docker-ID.scope`, `lxc.payload.ID`, `ID`.
pub(crate) fn bears(part: &str, id: &str) -> bool {
    let before = part.strip_suffix(SCOPE).unwrap_or(part).strip_suffix(id);
    let begins_so = before.is_some_and(|before| before.is_empty() || before == LXC || before.ends_with('-'));
    !id.is_empty() && (part == id || begins_so)
}

/// A container that was given GPUs.
#[derive(Debug)]
pub(crate) struct Container {
    /// The name that its engine gives it.
    pub(crate) id: String,
    /// The container's first process. When it ends, the pid namespace ends, and the grant with it.
    pub(super) first: Process,
    /// A descriptor of the first process, which stays valid when the pid is used again.
    pub(super) process: OwnedFd,
    pub(super) place: Place,
    /// Other cgroups of its processes: CRIU puts the processes of a container that is imported under another name into their
    /// former cgroups, and engines start more processes in the regular ones.
    pub(super) more: Vec<Cgroups>,
    /// The GPUs, in the daemon's order; none for all.
    pub(crate) gpus: Option<Vec<Uuid>>,
    pub(crate) limits: ContainerLimits,
    /// The protocol that the container's annotation asks for.
    pub(crate) protocol: Option<Protocol>,
    /// Whether its annotation lets instances of its images share GPU memory.
    pub(crate) share: bool,
}

impl Container {
    /// Whether the container still exists.
    pub(super) fn is_there(&self) -> bool {
        // A pidfd can be read when its process has ended.
        matches!(sys::wait_readable([self.process.as_fd()], Some(Duration::ZERO)), Ok([false]))
    }

    /// The paths of its cgroups in the hierarchy of version 2: the engine's own first.
    pub(crate) fn unified(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.place.cgroups).chain(&self.more).filter_map(|it| it.0.get(UNIFIED).map(String::as_str))
    }

    /// The depth of the container's deepest cgroups that hold the given ones; none if no cgroups of it do.
    pub(super) fn holds(&self, those: &Cgroups) -> Option<usize> {
        let own = std::iter::once(&self.place.cgroups).chain(&self.more);
        own.filter(|it| it.hold(those) || it.hold_named(those, &self.id)).map(Cgroups::depth).max()
    }

    /// Adds what the container was given before.
    pub(super) fn add(&mut self, before: &Self) {
        self.more.clone_from(&before.more);
        self.protocol = self.protocol.or(before.protocol);
        self.share |= before.share;
        self.gpus = match (self.gpus.take(), &before.gpus) {
            (Some(mut gpus), Some(more)) => {
                gpus.extend(more.iter().filter(|it| !gpus.contains(it)).copied().collect::<Vec<_>>());
                Some(gpus)
            }
            _ => None,
        };
        let ContainerLimits { device_memory, pinned_memory, workers } = before.limits;
        self.limits = ContainerLimits {
            device_memory: self.limits.device_memory.or(device_memory),
            pinned_memory: self.limits.pinned_memory.or(pinned_memory),
            workers: self.limits.workers.or(workers),
        };
    }
}

/// The place of a process in namespaces and cgroups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The process's pid namespace, its parent namespace, and so on up to the daemon's.
    pub(super) namespaces: Vec<Identity>,
    pub(super) cgroups: Cgroups,
}

impl Place {
    /// The place of this very process; an error if another process has its pid by now.
    pub(super) fn of(process: Process) -> io::Result<Self> {
        let namespaces = match pidns::chain(process.pid) {
            // A daemon that is not root cannot examine other users' processes, but sees how deep they are.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_at_our_depth(process.pid)? => {
                vec![pidns::own()?]
            }
            found => found?,
        };
        let cgroups = Cgroups::parse(&std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid))?);
        // If the process is still there, everything above was about it: pids are used again only after their process is gone.
        if !process.is_alive() {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(Self { namespaces, cgroups })
    }
}

/// Whether a process is in as many pid namespaces as this one: all others that can be seen are below.
fn is_at_our_depth(pid: i32) -> io::Result<bool> {
    let own = process::namespace_pids(std::process::id() as i32)?;
    Ok(process::namespace_pids(pid)?.len() == own.len())
}

/// The first process in the innermost namespace of a place, as far up as the given process's ancestors are in it.
pub(super) fn first_in(place: &Place, process: Process) -> io::Result<Process> {
    let inside = |pid: &i32| pidns::chain(*pid).is_ok_and(|it| it == place.namespaces);
    let first = process::ancestry(process.pid).into_iter().take_while(inside).last();
    Process::with_pid(first.unwrap_or(process.pid))
}

/// The name of the hierarchy of version 2 in `/proc/PID/cgroup`.
const UNIFIED: &str = "";

/// The cgroup of a process in each hierarchy, as the daemon sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cgroups(BTreeMap<String, String>);

impl Cgroups {
    /// Parses the lines of `/proc/PID/cgroup`: number, controllers, path.
    fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let mut parts = line.splitn(3, ':').skip(1);
            Some((parts.next()?.to_owned(), parts.next()?.to_owned()))
        };
        Self(text.lines().filter_map(line).collect())
    }

    /// Whether a process with the given cgroups is in these, in every hierarchy.
    pub(super) fn hold(&self, those: &Self) -> bool {
        self.0.iter().all(|(hierarchy, own)| {
            let Some(rest) = those.0.get(hierarchy).and_then(|it| it.strip_prefix(own.trim_end_matches('/'))) else {
                return false;
            };
            rest.is_empty() || rest.starts_with('/')
        })
    }

    /// Whether a process with the given cgroups is in this cgroup of version 2, where that bears the container's name and so is
    /// the engine's. Where both versions are mounted CRIU, restoring for crun, also makes cgroups of version 1 that the engine
    /// does not know: processes that the engine starts later are not in them.
    fn hold_named(&self, those: &Self, name: &str) -> bool {
        let unified = |it: &Self| it.0.get(UNIFIED).map(|path| Self([(UNIFIED.to_owned(), path.clone())].into()));
        let (Some(own), Some(those)) = (unified(self), unified(those)) else { return false };
        own.0.values().all(|path| path.split('/').any(|part| bears(part, name))) && own.hold(&those)
    }

    /// The prefixes of cgroups that engines name after their container.
    pub(super) fn name(&self) -> Option<&str> {
        let deepest = self.0.values().max_by_key(|path| path.len())?;
        let (above, name) = deepest.rsplit_once('/')?;
        let scope = above.rsplit('/').next().and_then(|it| it.strip_suffix(SCOPE));
        let name = scope.filter(|_| name == CRUN_INNER).unwrap_or(name);
        Some(name.strip_prefix(LXC).unwrap_or(name)).filter(|name| !name.is_empty())
    }

    /// The depth below the top; 0 where the cgroups identify nothing.
    pub(super) fn depth(&self) -> usize {
        let depth = |path: &String| path.split('/').filter(|it| !it.is_empty()).count();
        self.0.values().map(depth).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_holds_itself_and_what_is_below() {
        let of = Cgroups::parse;
        let container = of("0::/libpod_parent/libpod-1\n");
        assert!(container.hold(&of("0::/libpod_parent/libpod-1\n")));
        assert!(container.hold(&of("0::/libpod_parent/libpod-1/inner\n")));
        assert!(!container.hold(&of("0::/libpod_parent/libpod-12\n")));
        assert!(!container.hold(&of("0::/libpod_parent\n")));
        assert!(!container.hold(&of("")));
        // All hierarchies count.
        let both = of("4:memory:/a:b\n0::/x\n");
        assert!(both.hold(&of("4:memory:/a:b/c\n0::/x\n")));
        assert!(!both.hold(&of("4:memory:/other\n0::/x\n")));
        assert_eq!((both.depth(), of("0::/\n").depth()), (1, 0));
        assert!(of("0::/\n").hold(&container));
    }

    #[test]
    fn a_cgroup_of_lxc_has_the_containers_name() {
        let name = |path: &str| Cgroups::parse(&format!("0::{path}\n")).name().map(str::to_owned);
        assert_eq!(name("/lxc.payload.job-1").as_deref(), Some("job-1"));
        assert_eq!(name("/pod/libpod-c1").as_deref(), Some("libpod-c1"));
        assert_eq!((name("/lxc.payload."), name("/")), (None, None));
        // crun's processes are below the scope, which has the name.
        assert_eq!(name("/jobs.slice/libpod-c1.scope/container").as_deref(), Some("libpod-c1"));
        assert_eq!(name("/pod/container").as_deref(), Some("container"));
        assert!(
            bears("lxc.payload.job", "job") && !bears("lxc.payload.my.job", "job") && !bears("lxc.monitor.job", "job")
        );
    }

    #[test]
    fn the_engines_own_cgroup_is_enough() {
        let restored = Cgroups::parse("3:cpuset:/libpod-c1\n0::/libpod-c1\n");
        let started_later = Cgroups::parse("3:cpuset:/\n0::/libpod-c1/inner\n");
        assert!(!restored.hold(&started_later) && restored.hold_named(&started_later, "c1"));
        assert!(!restored.hold_named(&Cgroups::parse("3:cpuset:/\n0::/libpod-c2\n"), "c1"));
        // A cgroup that many containers share: only the other hierarchies tell them apart.
        let shared = Cgroups::parse("3:cpuset:/docker/c1\n0::/containerd.service\n");
        assert!(!shared.hold_named(&Cgroups::parse("3:cpuset:/docker/c2\n0::/containerd.service\n"), "c1"));
    }

    #[test]
    fn a_process_is_where_it_is_as_long_as_it_is_there() {
        let own = Process::with_pid(std::process::id() as i32).unwrap();
        let place = Place::of(own).unwrap();
        assert_eq!(place.namespaces, [pidns::own().unwrap()]);
        let later = Process { start: own.start + 1, ..own };
        assert!(Place::of(later).is_err());
    }
}
