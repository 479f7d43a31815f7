//! Workers of containers are charged to what limits their containers: the pod or slice that a container's cgroup lies in.
//!
//! ```text
//!     slice or pod, with limits of memory and CPU
//!       ├── libpod-ID       the container: frozen and killed by its engine, and dumped by CRIU
//!       └── rekindle-ID     its workers, which must run meanwhile; the daemon makes it with the first and removes it after the last
//! ```
//!
//! A worker is not in its container's own cgroup: it would be frozen together with the container, and a dump has to ask it for the
//! GPU's memory then. So the limits of the container itself do not hold for its workers, and those of all above it do.
//!
//! A worker that cannot be moved stays in the daemon's cgroup and serves its client all the same; the log says why, once for each
//! reason. The kernel charges memory to the cgroup in which a process is when it gets the memory, so what a worker had before it
//! had a client stays with the daemon.
//!
//! Where the pod or slice has no memory left, the kernel ends the process in it that has most, and then the client hears why.

mod place;
mod shortage;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::{debug, info, warn};

use self::place::NoPlace;
use super::grants::{Allowed, Container};
use super::process::Process;
use super::{lock, state_dir, sys, thread};
use crate::config::Charge;

/// The folder in the state directory.
const FOLDER: &str = "cgroups";
/// The file in it.
const FILE: &str = "made.json";
/// The version of the file's content.
const VERSION: u32 = 1;
/// How long a worker whose channel has closed may take to end: the driver gives back its memory.
const END: Duration = Duration::from_secs(60);
/// How often, and in which intervals, the daemon looks whether the cgroup of a process that has ended is empty.
const LOOKS: u32 = 50;
const LOOK: Duration = Duration::from_millis(20);

/// Why a worker is not charged to its container's pod or slice.
#[derive(Debug, Error)]
enum ChargeError {
    #[error("this machine has no cgroups of version 2 mounted that rekindled can see")]
    Unmounted,
    #[error(transparent)]
    NoPlace(#[from] NoPlace),
    #[error("cannot make cgroups in {}: {}", .path.display(), explained(.source))]
    Make { path: PathBuf, source: io::Error },
    #[error("cannot move it to {}: {}", .path.display(), explained(.source))]
    Move { path: PathBuf, source: io::Error },
    #[error("cannot note in {} which cgroups are rekindled's: {source}", .path.display())]
    Keep { path: PathBuf, source: io::Error },
    #[error("it has ended")]
    Gone,
}

impl ChargeError {
    /// What makes two errors the same for the log.
    fn key(&self) -> String {
        match self {
            Self::Unmounted | Self::Gone => self.to_string(),
            Self::NoPlace(why) => why.to_string(),
            Self::Make { source, .. } => format!("make {source}"),
            Self::Move { source, .. } => format!("move {source}"),
            Self::Keep { source, .. } => format!("keep {source}"),
        }
    }
}

/// An error of the kernel's, and what to do.
fn explained(error: &io::Error) -> String {
    let advice = match error.raw_os_error() {
        Some(libc::EROFS) => {
            "; a service of systemd's may write there with ProtectControlGroups=no (`systemctl edit rekindled`)"
        }
        Some(libc::EACCES | libc::EPERM) => "; rekindled must be root, outside of user namespaces",
        Some(libc::EOPNOTSUPP) => "; the cgroup above is threaded, and holds threads of processes that are elsewhere",
        Some(libc::EAGAIN | libc::ENOSPC) => "; a limit above it is reached (cgroup.max.depth, cgroup.max.descendants)",
        Some(libc::EBUSY) => {
            "; the cgroup has controllers for cgroups below it (cgroup.subtree_control), so it takes no processes"
        }
        _ => "",
    };
    format!("{error}{advice}")
}

/// The cgroups of workers.
pub(crate) struct Charges {
    charge: Charge,
    /// Where the hierarchy of version 2 is mounted.
    root: Option<PathBuf>,
    dir: PathBuf,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// The cgroups that the daemon, or one before it, has made, by their paths in the hierarchy.
    made: BTreeSet<String>,
    /// The workers in them.
    members: HashMap<Process, Member>,
    /// What the log has said.
    said: HashSet<String>,
}

/// A worker beside its container.
#[derive(Debug)]
struct Member {
    /// The path of its cgroup.
    path: String,
    /// How many processes of that cgroup the kernel had ended for want of memory by then.
    ended: u64,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u32,
    boot: String,
    made: BTreeSet<String>,
}

impl Charges {
    /// Opens the records in the daemon's state directory, and removes what a former daemon has left.
    pub(crate) fn open(charge: Charge, state_dir: &Path) -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self::at(charge, hierarchy(&mounts), state_dir.join(FOLDER))
    }

    fn at(charge: Charge, root: Option<PathBuf>, dir: PathBuf) -> Self {
        let made = kept(&dir);
        let charges = Self { charge, root, dir, inner: Mutex::new(Inner { made, ..Inner::default() }) };
        charges.sweep();
        if charge == Charge::Parent
            && let Err(error) = charges.probe()
        {
            warn!("workers are not charged to their containers' pods and slices (containers.charge): {error}");
            lock(&charges.inner).said.insert(error.key());
        }
        charges
    }

    /// Whether cgroups can be made at all.
    fn probe(&self) -> Result<(), ChargeError> {
        let root = self.root.as_deref().ok_or(ChargeError::Unmounted)?;
        let may_write = rustix::fs::access(root, rustix::fs::Access::WRITE_OK);
        may_write.map_err(|error| ChargeError::Make { path: root.to_owned(), source: error.into() })
    }

    /// Charges a worker that has got a client to the pod or slice of the client's container. Clients of the host have none.
    pub(crate) fn put(&self, allowed: &Allowed, client: Process, worker: Process) {
        let (Charge::Parent, Some(container)) = (self.charge, &allowed.container) else { return };
        let id = &container.id;
        match self.try_put(container, client, worker) {
            // Its death is dealt with elsewhere.
            Ok(()) | Err(ChargeError::Gone) => {}
            Err(error) => {
                if lock(&self.inner).said.insert(error.key()) {
                    warn!(
                        container = id,
                        worker = worker.pid,
                        "a worker is charged to rekindled, not to its container's pod or slice (containers.charge); others \
                         may be too: {error}"
                    );
                }
            }
        }
    }

    fn try_put(&self, container: &Container, client: Process, worker: Process) -> Result<(), ChargeError> {
        let root = self.root.as_deref().ok_or(ChargeError::Unmounted)?;
        let now = fs::read_to_string(format!("/proc/{}/cgroup", client.pid)).unwrap_or_default();
        let now = now.lines().find_map(|line| line.strip_prefix("0::"));
        // The engine's own counts first: a client may be able to make cgroups below it, and name them as it likes.
        let path = place::beside(container.unified().chain(now), &container.id)?;
        self.join(root, &path, worker)?;
        if let Err(error) = shortage::weigh_as(client, worker) {
            debug!(worker = worker.pid, %error, "cannot give a worker the oom_score_adj of its client");
        }
        Ok(())
    }

    /// Why a worker has died, if the kernel has ended it because its pod or slice had no memory left.
    pub(crate) fn starved(&self, worker: Process) -> Option<String> {
        let root = self.root.as_deref()?;
        let mut inner = lock(&self.inner);
        let Member { path, ended } = inner.members.remove(&worker)?;
        let now = shortage::ended(&root.join(path.trim_start_matches('/')));
        if now <= ended {
            return None;
        }
        // That one was this worker: another one in the same cgroup needs another.
        for other in inner.members.values_mut().filter(|it| it.path == path) {
            other.ended += 1;
        }
        let parent = path.rsplit_once('/').map_or("/", |it| it.0);
        Some(format!("the kernel has ended it, since {parent} (memory.max), or the host, has no memory left"))
    }

    /// Moves a worker into the cgroup with this path, which is made if necessary.
    fn join(&self, root: &Path, path: &str, worker: Process) -> Result<(), ChargeError> {
        let folder = root.join(path.trim_start_matches('/'));
        // Nobody removes it meanwhile.
        let mut inner = lock(&self.inner);
        if inner.made.insert(path.to_owned()) {
            // Noted before it is made: no daemon leaves a cgroup that the next one does not know.
            if let Err(error) = self.keep(&inner) {
                inner.made.remove(path);
                return Err(error);
            }
        }
        let joined = match fs::create_dir(&folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                let path = folder.parent().unwrap_or(root).to_owned();
                Err(ChargeError::Make { path, source: error })
            }
            made => {
                if made.is_ok() {
                    info!(cgroup = path, worker = worker.pid, "workers are charged beside their container");
                    inner.look_for_controllers(&folder);
                }
                enter(&folder, worker)
            }
        };
        if joined.is_ok() {
            inner.members.insert(worker, Member { path: path.to_owned(), ended: shortage::ended(&folder) });
        } else {
            self.sweep_all(&mut inner);
        }
        joined
    }

    /// Removes the cgroup of a worker that is dying if no other worker is in it, as soon as the worker has ended.
    pub(crate) fn left(self: &Arc<Self>, worker: Process) {
        lock(&self.inner).members.remove(&worker);
        self.sweep();
        if lock(&self.inner).made.is_empty() {
            return;
        }
        let charges = Arc::clone(self);
        let waiting = thread("cgroup", move || {
            // If the process is gone there is nothing to wait for.
            if let (true, Ok(process)) = (worker.is_alive(), sys::pidfd_open(worker.pid)) {
                let _ = sys::wait_readable([process.as_fd()], Some(END));
            }
            for _ in 0..LOOKS {
                charges.sweep();
                if !charges.is_left(worker) {
                    break;
                }
                std::thread::sleep(LOOK);
            }
        });
        if let Err(error) = waiting {
            warn!("cannot remove the cgroup of a worker yet: {error}");
        }
    }

    /// Removes the cgroups in which no process is.
    fn sweep(&self) {
        self.sweep_all(&mut lock(&self.inner));
    }

    fn sweep_all(&self, inner: &mut Inner) {
        let Some(root) = &self.root else { return };
        let before = inner.made.len();
        inner.made.retain(|path| match fs::remove_dir(root.join(path.trim_start_matches('/'))) {
            Ok(()) => {
                debug!(cgroup = path, "removed the cgroup of workers that have ended");
                false
            }
            // The engine may have removed it with the pod.
            Err(error) => error.kind() != io::ErrorKind::NotFound,
        });
        if inner.made.len() != before
            && let Err(error) = self.keep(inner)
        {
            warn!("{error}");
        }
    }

    /// Whether a cgroup has no process, or only this one, which has ended: the kernel may take it out of its cgroup a moment later.
    fn is_left(&self, worker: Process) -> bool {
        let Some(root) = &self.root else { return false };
        let members = |path: &String| fs::read_to_string(root.join(path.trim_start_matches('/')).join("cgroup.procs"));
        let only_it = |members: String| members.lines().all(|it| it.parse() == Ok(worker.pid));
        lock(&self.inner).made.iter().any(|path| members(path).is_ok_and(only_it))
    }

    fn keep(&self, inner: &Inner) -> Result<(), ChargeError> {
        let write = || {
            state_dir::make(&self.dir)?;
            let kept = Kept { version: VERSION, boot: state_dir::boot()?, made: inner.made.clone() };
            state_dir::write(&self.dir.join(FILE), &serde_json::to_vec(&kept)?)
        };
        write().map_err(|source| ChargeError::Keep { path: self.dir.clone(), source })
    }
}

impl Inner {
    /// Says once if nothing above a new cgroup can limit memory or CPU: the kernel counts neither there.
    fn look_for_controllers(&mut self, folder: &Path) {
        let Some(parent) = folder.parent() else { return };
        let found = fs::read_to_string(parent.join("cgroup.controllers")).unwrap_or_default();
        let lacks = |name: &&&str| !found.split_ascii_whitespace().any(|it| it == **name);
        let missing: Vec<_> = ["memory", "cpu"].iter().filter(lacks).copied().collect();
        if !missing.is_empty() && self.said.insert(format!("controllers {missing:?}")) {
            warn!(
                cgroup = %parent.display(),
                "containers.charge limits nothing of {} here: the cgroup of the pod or slice lacks that controller (cgroup.controllers)",
                missing.join(" and ")
            );
        }
    }
}

/// Moves a worker into a cgroup.
fn enter(folder: &Path, worker: Process) -> Result<(), ChargeError> {
    // The pid may belong to another process once the worker has ended and was reaped.
    if !worker.is_alive() {
        return Err(ChargeError::Gone);
    }
    fs::write(folder.join("cgroup.procs"), worker.pid.to_string()).map_err(|source| match source.raw_os_error() {
        Some(libc::ESRCH) => ChargeError::Gone,
        _ => ChargeError::Move { path: folder.to_owned(), source },
    })
}

/// The cgroups that were made before. A file that others can write counts for nothing.
fn kept(dir: &Path) -> BTreeSet<String> {
    let read = || {
        let file = dir.join(FILE);
        let kept: Kept = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
        (kept.version == VERSION && kept.boot == state_dir::boot().ok()?).then_some(kept.made)
    };
    if dir.exists() && state_dir::is_ours(dir) { read().unwrap_or_default() } else { BTreeSet::new() }
}

/// Where the whole hierarchy of version 2 is mounted, by the lines of `/proc/self/mountinfo`.
fn hierarchy(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        // "36 35 0:30 ROOT MOUNTPOINT options optional... - TYPE source options"
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (root == "/" && kind.split(' ').next()? == "cgroup2").then(|| point.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The hierarchy of this machine, and a cgroup in it for a test; none where that cannot be.
    fn own_cgroup(name: &str) -> Option<(PathBuf, String)> {
        let root = hierarchy(&fs::read_to_string("/proc/self/mountinfo").unwrap())?;
        let path = format!("/rekindle-test-{name}-{}", std::process::id());
        match fs::create_dir(root.join(&path[1..])) {
            Ok(()) => Some((root, path)),
            Err(error) => {
                eprintln!("skipped: no cgroup can be made in {}: {error}", root.display());
                None
            }
        }
    }

    fn process(of: &std::process::Child) -> Process {
        Process::with_pid(of.id() as i32).unwrap()
    }

    #[test]
    fn the_whole_hierarchy_of_version_2_is_found() {
        let mounts = "22 1 0:20 / /sys rw shared:7 - sysfs sysfs rw\n\
                      30 22 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      31 22 0:27 /docker/1 /mnt rw - cgroup2 cgroup2 rw\n\
                      32 22 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw\n";
        assert_eq!(hierarchy(mounts).unwrap(), Path::new("/sys/fs/cgroup/unified"));
        assert_eq!(hierarchy("30 22 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\nodd"), None);
    }

    #[test]
    fn a_cgroup_is_there_as_long_as_a_worker_is_in_it_also_for_the_next_daemon() {
        let Some((root, parent)) = own_cgroup("shared") else { return };
        let state = tempfile::tempdir().unwrap();
        let open = || Arc::new(Charges::at(Charge::Parent, Some(root.clone()), state.path().join(FOLDER)));
        let (path, folder) = (format!("{parent}/rekindle-c1"), root.join(&parent[1..]).join("rekindle-c1"));
        let mut workers = [0, 1].map(|_| Command::new("sleep").arg("600").spawn().unwrap());
        let charges = open();
        for worker in &workers {
            charges.join(&root, &path, process(worker)).unwrap();
            let now = fs::read_to_string(format!("/proc/{}/cgroup", worker.id())).unwrap();
            assert!(now.lines().any(|it| it.strip_prefix("0::") == Some(&path)), "{now}");
        }
        let mut end = |which: usize| {
            let it = process(&workers[which]);
            workers[which].kill().unwrap();
            workers[which].wait().unwrap();
            it
        };
        charges.left(end(0));
        assert!(folder.exists());
        // The next daemon finds it in use, and removes it after its last worker.
        let charges = open();
        assert!(folder.exists());
        let last = end(1);
        charges.left(last);
        let began = std::time::Instant::now();
        while folder.exists() && began.elapsed() < END {
            std::thread::sleep(LOOK);
        }
        assert!(!folder.exists());
        assert!(open().inner.lock().unwrap().made.is_empty());
        assert!(matches!(charges.join(&root, &path, last), Err(ChargeError::Gone)));
        assert!(!folder.exists(), "made for a worker that has ended");

        // A daemon that ended before the last worker leaves it to the next.
        let mut worker = Command::new("sleep").arg("600").spawn().unwrap();
        open().join(&root, &path, process(&worker)).unwrap();
        worker.kill().unwrap();
        worker.wait().unwrap();
        assert!(folder.exists());
        let began = std::time::Instant::now();
        while folder.exists() && began.elapsed() < END {
            drop(open());
        }
        assert!(!folder.exists());
        fs::remove_dir(root.join(&parent[1..])).unwrap();
    }

    #[test]
    fn a_threaded_parent_is_refused_with_the_reason_and_leaves_nothing() {
        let Some((root, parent)) = own_cgroup("threaded") else { return };
        let folder = root.join(&parent[1..]);
        fs::write(folder.join("cgroup.type"), "threaded").unwrap();
        let state = tempfile::tempdir().unwrap();
        let charges = Charges::at(Charge::Parent, Some(root.clone()), state.path().join(FOLDER));
        let mut worker = Command::new("sleep").arg("600").spawn().unwrap();
        let error = charges.join(&root, &format!("{parent}/rekindle-c1"), process(&worker)).unwrap_err();
        worker.kill().unwrap();
        worker.wait().unwrap();
        assert!(!folder.join("rekindle-c1").exists());
        fs::remove_dir(folder).unwrap();
        assert!(error.to_string().contains("is threaded"), "{error}");
    }

    #[test]
    fn what_the_kernel_refuses_is_explained() {
        // A folder that is no cgroup: it stands for a parent in which the daemon cannot make one.
        let state = tempfile::tempdir().unwrap();
        let charges = Charges::at(Charge::Parent, Some(state.path().join("absent")), state.path().join(FOLDER));
        let own = Process::with_pid(std::process::id() as i32).unwrap();
        let error = charges.join(&state.path().join("absent"), "/p/rekindle-c1", own).unwrap_err();
        assert!(error.to_string().contains("cannot make cgroups in"), "{error}");
        assert!(charges.inner.lock().unwrap().made.is_empty());
        let advice = |code| explained(&io::Error::from_raw_os_error(code));
        assert!(advice(libc::EROFS).contains("ProtectControlGroups=no") && advice(libc::EPERM).contains("root"));
        assert!(advice(libc::EBUSY).contains("cgroup.subtree_control") && advice(libc::ENOSPC).contains("max.depth"));
        assert!(!advice(libc::EIO).contains(';'));
    }

    #[test]
    fn records_that_others_can_write_do_not_count() {
        use std::os::unix::fs::PermissionsExt;
        let state = tempfile::tempdir().unwrap();
        let dir = state.path().join(FOLDER);
        let charges = Charges::at(Charge::Parent, None, dir.clone());
        let made = BTreeSet::from(["/p/rekindle-1".to_owned()]);
        charges.keep(&Inner { made: made.clone(), ..Inner::default() }).unwrap();
        assert_eq!(kept(&dir), made);
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(kept(&dir).is_empty());
    }
}
