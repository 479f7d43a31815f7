//! The party of a connection: limits are per party, so that one party cannot use up the resources of all.
//!
//! A user of the host can make user namespaces with other users in them, and pid namespaces; root of a container can make more
//! of them below the container's own. So a party is an entity that nobody can multiply at will:
//!
//! | the process is | its party |
//! |---|---|
//! | root's or the daemon's user's, in the daemon's pid and user namespaces | the operators |
//! | below a pid namespace that root has made | that namespace, the outermost one: a container |
//! | below a user namespace that root has made, in the daemon's pid namespace | that namespace: a container |
//! | below a pid or user namespace that another user has made | that user |
//! | another user's | that user |

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use super::pidns::{self, Identity};
use super::sys::{self, Credentials};

/// A party.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Party {
    Operator,
    /// A user of the host.
    User(u32),
    /// A container, by the outermost namespace that tells it from the host.
    Container(Identity),
    /// A worker at the workers' endpoint: each is a user of its own.
    Worker(u32),
}

impl Party {
    /// The party of a peer at the socket for clients. A peer that cannot be examined counts for its user: it has ended, or the
    /// daemon has no privileges and there are no other users.
    pub(crate) fn of_client(peer: Credentials) -> Self {
        if peer.pid == 0 {
            return Self::User(peer.uid);
        }
        Self::examine(peer).unwrap_or(Self::User(peer.uid))
    }

    /// The party of a peer at the workers' endpoint. Where workers have no users of their own, all have the daemon's.
    pub(crate) fn of_worker(peer: Credentials) -> Self {
        if is_privileged(peer.uid) { Self::Operator } else { Self::Worker(peer.uid) }
    }

    fn examine(peer: Credentials) -> io::Result<Self> {
        if let Some(namespace) = pidns::outermost(peer.pid)? {
            let owner = sys::namespace_owner(namespace.as_fd())?;
            return Self::of_namespace(owner, namespace);
        }
        if let Some(namespace) = outermost_users(peer.pid)? {
            let owner = sys::user_namespace_owner(namespace.as_fd())?;
            return Self::of_namespace(owner, namespace);
        }
        Ok(if is_privileged(peer.uid) { Self::Operator } else { Self::User(peer.uid) })
    }

    fn of_namespace(owner: u32, namespace: OwnedFd) -> io::Result<Self> {
        Ok(if is_privileged(owner) { Self::Container(pidns::identity(namespace)?) } else { Self::User(owner) })
    }
}

impl std::fmt::Display for Party {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Operator => write!(f, "the operators"),
            Self::User(uid) => write!(f, "user {uid}"),
            Self::Container((_, inode)) => write!(f, "the container with namespace {inode}"),
            Self::Worker(uid) => write!(f, "the worker with user {uid}"),
        }
    }
}

fn is_privileged(uid: u32) -> bool {
    uid == 0 || uid == sys::own_uid()
}

/// The outermost user namespace that a process is in below the daemon's. None if it is in the daemon's.
fn outermost_users(pid: i32) -> io::Result<Option<OwnedFd>> {
    let own = pidns::identity(File::open("/proc/self/ns/user")?.into())?;
    let mut at = OwnedFd::from(File::open(format!("/proc/{pid}/ns/user"))?);
    let mut outermost = None;
    while pidns::identity(at.try_clone()?)? != own {
        let above = sys::parent_namespace(at.as_fd())?;
        outermost = Some(at);
        at = above;
    }
    Ok(outermost)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};

    const ROOTS: [&str; 4] = ["unshare", "--pid", "--fork", "--kill-child"];
    const USER_1: [&str; 6] = ["setpriv", "--reuid", "1", "--regid", "1", "--clear-groups"];
    const USERS: [&str; 3] = ["unshare", "--user", "--map-root-user"];
    const PIDS: [&str; 3] = ["--pid", "--fork", "--kill-child"];

    /// The process that these commands start, each around the next.
    struct Inside(Child, i32);

    impl Inside {
        fn of(around: &[&[&str]]) -> Option<Self> {
            let words: Vec<_> = around.concat().into_iter().chain(["sleep", "60"]).collect();
            let mut child = Command::new(words[0]).args(&words[1..]).spawn().unwrap();
            loop {
                let mut pid = child.id();
                while let Ok(children) = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
                    && let Some(first) = children.split_whitespace().next()
                {
                    pid = first.parse().unwrap();
                }
                if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it == "sleep\n") {
                    return Some(Self(child, pid as i32));
                }
                if child.try_wait().unwrap().is_some() {
                    return None;
                }
                std::thread::yield_now();
            }
        }

        fn party(&self) -> Party {
            use std::os::unix::fs::MetadataExt;
            let uid = std::fs::metadata(format!("/proc/{}", self.1)).unwrap().uid();
            Party::of_client(Credentials { pid: self.1, uid })
        }
    }

    impl Drop for Inside {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn nobody_becomes_another_party_by_making_namespaces() {
        let own = Credentials { pid: std::process::id() as i32, uid: sys::own_uid() };
        assert_eq!(Party::of_client(own), Party::Operator);
        let users_and_pids = [&USERS[..], &PIDS[..]].concat();
        let all = [
            Inside::of(&[&USER_1]),
            Inside::of(&[&USER_1, &USERS]),
            Inside::of(&[&USER_1, &users_and_pids]),
            Inside::of(&[&USER_1, &USERS, &users_and_pids]),
            // A container, with processes of different users and with a namespace in it.
            Inside::of(&[&ROOTS]),
            Inside::of(&[&ROOTS, &USER_1]),
            Inside::of(&[&ROOTS, &ROOTS]),
            Inside::of(&[&ROOTS, &USER_1, &users_and_pids]),
            Inside::of(&[&USERS]),
        ];
        let Some(all) = all.into_iter().collect::<Option<Vec<_>>>() else {
            return eprintln!("skipped: no user namespaces here, or not root");
        };
        let (users, containers) = all.split_at(4);
        for inside in users {
            assert_eq!(inside.party(), Party::User(1));
        }
        for inside in containers {
            assert!(matches!(inside.party(), Party::Container(_)), "{:?}", inside.party());
        }
        let other = Inside::of(&[&ROOTS]).unwrap();
        assert_ne!(other.party(), containers[0].party());
    }

    #[test]
    fn all_in_one_container_are_one_party() {
        let shell =
            "setpriv --reuid 1 --regid 1 --clear-groups sleep 60 & unshare --pid --fork --kill-child sleep 60 & wait";
        let words = [&ROOTS[..], &["sh", "-c", shell][..]].concat();
        let mut outer = Command::new(words[0]).args(&words[1..]).spawn().unwrap();
        let sleeps = loop {
            let tree = super::super::process::tree(outer.id() as i32).unwrap();
            let sleeps: Vec<_> =
                tree.into_iter().filter(|pid| super::super::process::command(*pid) == "sleep").collect();
            if sleeps.len() == 2 {
                break sleeps;
            }
            if outer.try_wait().unwrap().is_some() {
                return eprintln!("skipped: no namespaces here, or not root");
            }
            std::thread::yield_now();
        };
        let parties: Vec<_> =
            sleeps.iter().zip([0, 1]).map(|(pid, uid)| Party::of_client(Credentials { pid: *pid, uid })).collect();
        assert!(matches!(parties[0], Party::Container(_)) && parties[0] == parties[1], "{parties:?}");
        outer.kill().unwrap();
        outer.wait().unwrap();
    }
}
