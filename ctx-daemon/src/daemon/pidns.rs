//! Translation of pids for peers outside the daemon's pid namespace.
//!
//! CRIU's plugin names tasks by the pids that CRIU sees. Both views are the same when daemon and CRIU run on the host. A CRIU
//! in a container sees other pids, and may name only processes that it sees.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use super::{process, sys};

/// Why a peer's pids mean nothing here.
#[derive(Debug, Error)]
pub(crate) enum PidError {
    #[error("the daemon cannot see the pid namespace of this process: run rekindled in the host's pid namespace")]
    Foreign,
    #[error("cannot tell the pid namespace of process {pid}: {source}")]
    Examine { pid: i32, source: io::Error },
    #[error("there is no process {0}")]
    Unknown(i32),
}

impl Failing for PidError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Foreign | Self::Unknown(_) => FailureKind::Refused,
            Self::Examine { .. } => FailureKind::Internal,
        }
    }
}

/// How a peer numbers processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PidView {
    /// Numbers the daemon's way.
    Same,
    /// Numbers by a namespace this many levels below the daemon's.
    Below { depth: usize, namespace: Identity },
}

/// A namespace, as device and inode.
pub(crate) type Identity = (u64, u64);

impl PidView {
    /// The view of a peer, by its pid as the daemon sees it.
    pub(crate) fn of(peer: i32) -> Result<Self, PidError> {
        if peer == 0 {
            return Err(PidError::Foreign);
        }
        let examine = |source| PidError::Examine { pid: peer, source };
        let namespace = identity(namespace(peer).map_err(examine)?).map_err(examine)?;
        let own = File::open("/proc/self/ns/pid").map(OwnedFd::from);
        if identity(own.map_err(examine)?).map_err(examine)? == namespace {
            return Ok(Self::Same);
        }
        let depth = process::namespace_pids(peer).map_err(examine)?.len() - 1;
        if depth == 0 {
            return Err(PidError::Foreign);
        }
        Ok(Self::Below { depth, namespace })
    }

    /// The daemon's pid for one of the peer's.
    pub(crate) fn to_ours(self, pid: i32) -> Result<i32, PidError> {
        match self {
            Self::Same => Ok(pid),
            Self::Below { .. } => {
                let all = process::all().map_err(|source| PidError::Examine { pid, source })?;
                all.into_iter().find(|it| self.to_theirs(*it) == Some(pid)).ok_or(PidError::Unknown(pid))
            }
        }
    }

    /// The peer's pid for one of the daemon's; none if the peer does not see that process.
    pub(crate) fn to_theirs(self, pid: i32) -> Option<i32> {
        match self {
            Self::Same => Some(pid),
            Self::Below { depth, namespace: wanted } => {
                let pids = process::namespace_pids(pid).ok()?;
                let found = *pids.get(depth)?;
                let mut at = namespace(pid).ok()?;
                for _ in depth + 1..pids.len() {
                    at = sys::parent_namespace(at.as_fd()).ok()?;
                }
                (identity(at).ok()? == wanted).then_some(found)
            }
        }
    }
}

/// The daemon's own namespace.
pub(crate) fn own() -> io::Result<Identity> {
    identity(File::open("/proc/self/ns/pid")?.into())
}

/// The namespace of a process, its parent namespace, and so on up to the daemon's.
pub(crate) fn chain(pid: i32) -> io::Result<Vec<Identity>> {
    let own = own()?;
    let mut at = namespace(pid)?;
    let mut found = Vec::new();
    loop {
        let namespace = identity(at.try_clone()?)?;
        found.push(namespace);
        if namespace == own {
            return Ok(found);
        }
        at = sys::parent_namespace(at.as_fd())?;
    }
}

/// Whether a process is in a pid namespace that is this user's, as are all between it and the daemon's: each was made in a user
/// namespace that the user has made. False for processes of the same user in other users' namespaces, whatever namespaces they
/// make there.
pub(crate) fn is_owned_by(pid: i32, uid: u32) -> io::Result<bool> {
    let own = own()?;
    let mut at = namespace(pid)?;
    let mut below = false;
    while identity(at.try_clone()?)? != own {
        if sys::namespace_owner(at.as_fd())? != uid {
            return Ok(false);
        }
        below = true;
        at = sys::parent_namespace(at.as_fd())?;
    }
    Ok(below)
}

/// The outermost pid namespace that a process is in below the daemon's. None if it is in the daemon's.
pub(crate) fn outermost(pid: i32) -> io::Result<Option<OwnedFd>> {
    let own = own()?;
    let mut at = namespace(pid)?;
    let mut outermost = None;
    while identity(at.try_clone()?)? != own {
        let above = sys::parent_namespace(at.as_fd())?;
        outermost = Some(at);
        at = above;
    }
    Ok(outermost)
}

/// The innermost pid namespace of a process.
fn namespace(pid: i32) -> io::Result<OwnedFd> {
    File::open(format!("/proc/{pid}/ns/pid")).map(OwnedFd::from)
}

/// The identity of a namespace.
pub(crate) fn identity(namespace: OwnedFd) -> io::Result<Identity> {
    let status = File::from(namespace).metadata()?;
    Ok((status.dev(), status.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_namespace_is_of_who_has_made_its_user_namespace() {
        let own = std::process::id() as i32;
        assert!(!is_owned_by(own, sys::own_uid()).unwrap(), "the daemon's own is nobody's to give to");
        // A namespace in a user namespace of user 1, and one in a user namespace of root around a namespace of user 1.
        let run = |around: &[&str]| {
            let one = ["setpriv", "--reuid", "1", "--regid", "1", "--clear-groups", "--inh-caps=-all"];
            let inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "sleep", "60"];
            let words: Vec<_> = around.iter().chain(&one).chain(&inside).collect();
            Command::new(words[0]).args(&words[1..]).spawn().unwrap()
        };
        let innermost = |child: &mut std::process::Child| loop {
            let mut pid = child.id();
            while let Ok(children) = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
                && let Some(first) = children.split_whitespace().next()
            {
                pid = first.parse().unwrap();
            }
            if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it == "sleep\n") {
                break Some(pid as i32);
            }
            if child.try_wait().unwrap().is_some() {
                break None;
            }
            std::thread::yield_now();
        };
        for (around, expected) in [(&[][..], true), (&["unshare", "--pid", "--fork", "--kill-child"][..], false)] {
            let mut child = run(around);
            let Some(inside) = innermost(&mut child) else {
                return eprintln!("skipped: no user namespaces here, or not root");
            };
            assert_eq!(is_owned_by(inside, 1).unwrap(), expected);
            assert!(!is_owned_by(inside, 2).unwrap());
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn on_the_same_host_pids_are_the_same() {
        let own = std::process::id() as i32;
        let view = PidView::of(own).unwrap();
        assert_eq!(view, PidView::Same);
        assert_eq!(view.to_ours(5).unwrap(), 5);
        assert!(matches!(PidView::of(0), Err(PidError::Foreign)));
    }

    #[test]
    fn pids_of_a_namespace_below_are_translated() {
        // Process 1 of a new namespace, and another process in a namespace below that.
        let shell = "unshare --pid --fork --kill-child sleep 61 & exec sleep 60";
        let started = Command::new("unshare").args(["--pid", "--fork", "--kill-child", "sh", "-c", shell]).spawn();
        let Ok(mut outer) = started else {
            return eprintln!("skipped: no unshare here");
        };
        let find = |count: usize| {
            (0..100).find_map(|_| {
                std::thread::sleep(std::time::Duration::from_millis(20));
                let mut tree = process::tree(outer.id() as i32).unwrap();
                tree.retain(|pid| {
                    let pids = process::namespace_pids(*pid).unwrap_or_default();
                    process::command(*pid) == "sleep" && pids.len() >= count
                });
                tree.first().copied()
            })
        };
        let depth = process::namespace_pids(std::process::id() as i32).unwrap().len();
        match (find(depth + 1), find(depth + 2)) {
            (Some(first), Some(second)) => {
                let view = PidView::of(first).unwrap();
                assert!(matches!(view, PidView::Below { .. }));
                assert_eq!(view.to_theirs(first), Some(1));
                assert_eq!(view.to_ours(1).unwrap(), first);
                // Processes further below are visible as well, and processes above are not.
                let inner = view.to_theirs(second).unwrap();
                assert_eq!(view.to_ours(inner).unwrap(), second);
                assert_eq!(view.to_theirs(std::process::id() as i32), None);
                assert_eq!(PidView::of(second).unwrap().to_theirs(first), None);
            }
            _ => eprintln!("skipped: no namespaces here"),
        }
        outer.kill().unwrap();
        outer.wait().unwrap();
    }
}
