//! The workers' sandbox: the privileges that workers give up, by the configuration and this machine's abilities, and the
//! users that they run as.
//!
//! Each worker gets a user of its own from a range, whatever the application's user: a worker is started before its client is
//! known, and two clients of one user must not reach each other either. A daemon that is not root cannot do that, and says so.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rekindle_wire::control::SandboxInfo;
use thiserror::Error;
use tracing::{info, warn};

use super::{lock, sys};
use crate::config::{SandboxConfig, UidRange};
use rekindle_ctx_worker::confinement::{Confinement, Identity, landlock_version};

/// The parts that are missing for a daemon that requires the whole sandbox.
#[derive(Debug, Error)]
#[error("[sandbox] required = true, but {}", .0.join("; and "))]
pub(crate) struct SandboxError(Vec<String>);

/// No user is free for one more worker.
#[derive(Debug, Error)]
#[error("all {0} users of [sandbox] uid_range are in use")]
pub(crate) struct NoUser(u32);

/// How workers are confined.
#[derive(Clone, Debug)]
pub(crate) struct Sandbox {
    enabled: bool,
    /// The workers' users; none where the daemon cannot assign them.
    uids: Option<Arc<Uids>>,
    device_group: Option<u32>,
    /// The version of landlock; 0 where the kernel has none.
    landlock: i32,
    seccomp: bool,
    read: Vec<PathBuf>,
    missing: Vec<String>,
}

impl Sandbox {
    /// Finds the parts that are possible here, and logs the others. An error if all of them are required.
    pub(crate) fn probe(config: &SandboxConfig) -> Result<Self, SandboxError> {
        let mut missing = Vec::new();
        let uids = match can_give_users(config.uids) {
            Ok(()) => Some(Arc::new(Uids::new(config.uids))),
            Err(reason) => {
                missing.push(format!("workers have no users of their own: {reason}"));
                None
            }
        };
        let (landlock, seccomp) = (landlock_version(), has_seccomp());
        if landlock == 0 {
            let advice = "add it to the kernel's parameter lsm=, if it has CONFIG_SECURITY_LANDLOCK";
            missing.push(format!("this kernel has no landlock, so that workers open what their users may ({advice})"));
        }
        if !seccomp {
            missing.push("this kernel has no seccomp filters, so that workers make every system call".to_owned());
        }
        let mut sandbox = Self {
            enabled: config.enabled,
            uids,
            device_group: device_group(),
            landlock,
            seccomp,
            read: config.read.clone(),
            missing,
        };
        if !config.enabled {
            warn!("workers are not sandboxed, by the configuration");
            // The users stay known: workers from before may come back.
            sandbox.missing = vec!["it is switched off ([sandbox] enabled)".to_owned()];
            return Ok(sandbox);
        }
        for part in &sandbox.missing {
            warn!("the sandbox is incomplete: {part}");
        }
        if config.required && !sandbox.missing.is_empty() {
            return Err(SandboxError(sandbox.missing));
        }
        info!("workers are sandboxed: {}", sandbox.shown());
        Ok(sandbox)
    }

    /// The confinement of the next worker, and the claim on its user, which is dropped when the worker has ended.
    pub(crate) fn confine(&self) -> Result<Option<(Confinement, Option<UidClaim>)>, NoUser> {
        if !self.enabled {
            return Ok(None);
        }
        let claim = self.uids.as_ref().map(Uids::claim).transpose()?;
        let identity = claim.as_ref().map(|claim| Identity {
            uid: claim.uid,
            gid: claim.uids.range.first,
            device_group: self.device_group,
        });
        let (landlock, seccomp, read) = (self.landlock > 0, self.seccomp, self.read.clone());
        Ok(Some((Confinement { identity, landlock, seccomp, read }, claim)))
    }

    /// Whether a worker may run as this user. The daemon's own counts too, since the configuration may have been another.
    pub(crate) fn is_workers_user(&self, uid: u32) -> bool {
        uid == sys::own_uid() || self.uids.as_ref().is_some_and(|uids| uids.range.contains(uid))
    }

    /// The group of all workers, if they have one.
    pub(crate) fn group(&self) -> Option<u32> {
        self.uids.as_ref().map(|uids| uids.range.first)
    }

    /// The sandbox for `rekindle doctor`.
    pub(crate) fn info(&self) -> SandboxInfo {
        SandboxInfo { parts: self.shown(), missing: self.missing.clone() }
    }

    fn shown(&self) -> String {
        if !self.enabled {
            return String::new();
        }
        let mut parts = vec!["no capabilities".to_owned()];
        if let Some(uids) = &self.uids {
            parts.insert(0, format!("users {}", uids.range));
        }
        if self.landlock > 0 {
            parts.push(format!("landlock (version {})", self.landlock));
        }
        if self.seccomp {
            parts.push("seccomp".to_owned());
        }
        parts.join(", ")
    }
}

/// Why workers have no users of their own.
#[derive(Debug, Error)]
enum NoUsers {
    #[error("rekindled is not root")]
    NotRoot,
    #[error("{map}: {source}")]
    Map { map: &'static str, source: std::io::Error },
    #[error("this user namespace lacks {range} ({map}); set [sandbox] uid_range")]
    Range { range: UidRange, map: &'static str },
    #[error("this user namespace may not set groups")]
    Groups,
}

/// Whether this process can assign users. Root can, unless it is root only in a namespace that does not have these users.
fn can_give_users(range: UidRange) -> Result<(), NoUsers> {
    if sys::own_uid() != 0 {
        return Err(NoUsers::NotRoot);
    }
    for map in ["/proc/self/uid_map", "/proc/self/gid_map"] {
        let text = std::fs::read_to_string(map).map_err(|source| NoUsers::Map { map, source })?;
        if !maps_all(&text, range) {
            return Err(NoUsers::Range { range, map });
        }
    }
    match std::fs::read_to_string("/proc/self/setgroups") {
        Ok(text) if text.trim() == "deny" => Err(NoUsers::Groups),
        _ => Ok(()),
    }
}

/// Whether one line of a map (`inside outside count`) has all of the range.
fn maps_all(map: &str, range: UidRange) -> bool {
    map.lines().any(|line| {
        let mut numbers = line.split_ascii_whitespace().map(|it| it.parse::<u64>());
        let (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) = (numbers.next(), numbers.next(), numbers.next()) else {
            return false;
        };
        first <= u64::from(range.first) && u64::from(range.last) < first + count
    })
}

/// Whether this kernel supports seccomp filters that return an error.
fn has_seccomp() -> bool {
    let action: u32 = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the kernel reads the local.
    unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) == 0 }
}

/// The group of the device files, where an administrator reserves the GPUs for a group.
fn device_group() -> Option<u32> {
    let device = Path::new("/dev/nvidiactl").metadata().ok()?;
    let mode = device.mode();
    (mode & 0o006 != 0o006 && mode & 0o060 == 0o060).then(|| device.gid())
}

/// Has the driver's device files made where they are missing: workers cannot make them, and the driver's own way to do so from
/// within a program is closed to workers.
pub(crate) fn make_devices() {
    let Ok(gpus) = std::fs::read_dir("/proc/driver/nvidia/gpus") else { return };
    let minors: Vec<u32> = gpus
        .flatten()
        .filter_map(|gpu| minor(&std::fs::read_to_string(gpu.path().join("information")).ok()?))
        .collect();
    let devices = minors.iter().map(|minor| format!("/dev/nvidia{minor}"));
    let mut needed = devices.chain(["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()]);
    if sys::own_uid() != 0 || needed.all(|path| Path::new(&path).exists()) {
        return;
    }
    let mut command = std::process::Command::new("nvidia-modprobe");
    command.arg("-u").args(minors.iter().map(|minor| format!("-c={minor}")));
    match command.status() {
        Ok(status) if status.success() => info!("nvidia-modprobe has made the driver's device files"),
        Ok(status) => warn!("the driver's device files are missing, and nvidia-modprobe ended with {status}"),
        Err(error) => warn!("the driver's device files are missing, and nvidia-modprobe cannot be started: {error}"),
    }
}

/// The number of a GPU's device file, from `/proc/driver/nvidia/gpus/*/information`.
fn minor(information: &str) -> Option<u32> {
    information.lines().find_map(|line| line.strip_prefix("Device Minor:"))?.trim().parse().ok()
}

/// The users of workers.
#[derive(Debug)]
pub(crate) struct Uids {
    range: UidRange,
    state: Mutex<Used>,
}

#[derive(Debug)]
struct Used {
    claimed: HashSet<u32>,
    /// Where the search for a free user begins. It goes on from the last one, so that a user is used again as late as possible.
    next: u32,
}

impl Uids {
    fn new(range: UidRange) -> Self {
        // The search begins anywhere, so that two daemons do not try for the same user at the same moment.
        let next = sys::random().unwrap_or(0) % u64::from(range.count());
        Self { range, state: Mutex::new(Used { claimed: HashSet::new(), next: next as u32 }) }
    }

    /// Claims a user that no process has: neither a worker of this daemon nor one that another daemon has left.
    fn claim(self: &Arc<Self>) -> Result<UidClaim, NoUser> {
        let mut state = lock(&self.state);
        for _ in 0..self.range.count() {
            let uid = self.range.first + state.next;
            state.next = (state.next + 1) % self.range.count();
            if !state.claimed.contains(&uid) && !sys::user_has_processes(uid) {
                state.claimed.insert(uid);
                return Ok(UidClaim { uids: Arc::clone(self), uid });
            }
        }
        Err(NoUser(self.range.count()))
    }
}

/// A worker's user, free again when this is dropped.
#[derive(Debug)]
pub(crate) struct UidClaim {
    uids: Arc<Uids>,
    uid: u32,
}

impl Drop for UidClaim {
    fn drop(&mut self) {
        lock(&self.uids.state).claimed.remove(&self.uid);
    }
}

/// The closed folder that keeps workers from the endpoint at this path, if any: all folders above it must be open to all.
pub(crate) fn closed_folder(path: &Path) -> Option<&Path> {
    path.ancestors().skip(1).find(|folder| folder.metadata().is_ok_and(|it| it.mode() & 0o001 == 0))
}

/// Sets the group and mode of the workers' endpoint.
pub(crate) fn restrict_endpoint(path: &Path, group: Option<u32>) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let mode = if group.is_some() { 0o660 } else { 0o600 };
    if group.is_some() {
        std::os::unix::fs::chown(path, None, group)?;
    }
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: UidRange = UidRange { first: 1_900_100_000, last: 1_900_100_002 };

    #[test]
    fn a_user_is_one_workers_until_that_has_ended() {
        let uids = Arc::new(Uids::new(RANGE));
        let mut claims: Vec<_> = (0..3).map(|_| uids.claim().unwrap()).collect();
        let mut all: Vec<_> = claims.iter().map(|it| it.uid).collect();
        all.sort_unstable();
        assert_eq!(all, [RANGE.first, RANGE.first + 1, RANGE.last]);
        assert!(uids.claim().unwrap_err().to_string().contains("all 3 users"));
        let gone = claims.remove(1).uid;
        assert_eq!(uids.claim().unwrap().uid, gone);
    }

    #[test]
    fn a_user_that_some_process_has_is_nobodys() {
        let own = sys::own_uid();
        let uids = Arc::new(Uids::new(UidRange { first: own, last: own }));
        uids.claim().unwrap_err();
    }

    #[test]
    fn a_gpus_device_file_is_numbered_by_the_driver() {
        assert_eq!(minor("Model: \t\t NVIDIA H200\nDevice Minor: \t 3\nGPU Excluded:\t No\n"), Some(3));
        assert_eq!(minor("Model: x\n"), None);
    }

    #[test]
    fn a_namespace_must_have_the_whole_range() {
        assert!(maps_all("         0          0 4294967295\n", RANGE));
        assert!(!maps_all("0 1000 1\n1 100000 65536\n", RANGE));
        assert!(maps_all("0 1000 1\n1900100000 100000 3\n", RANGE));
        assert!(!maps_all("0 1000 1\n1900100000 100000 2\n", RANGE));
        assert!(!maps_all("nonsense", RANGE));
    }
}
