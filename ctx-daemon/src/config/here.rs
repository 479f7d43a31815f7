//! What a configuration asks for that this machine does not have.

use std::path::Path;

use super::settings::{Config, UidRange};
use crate::daemon::sys;

/// A setting that cannot work here, and why.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// `TABLE.NAME`, or `NAME` outside of the tables.
    pub(crate) setting: &'static str,
    pub(crate) problem: String,
}

/// The users of this machine.
#[derive(Debug, Default)]
pub(crate) struct Host {
    /// The text of `/etc/passwd`.
    passwd: String,
    /// The text of `/etc/subuid`.
    subuid: String,
}

impl Host {
    /// Reads the files of this machine. One that cannot be read names no user.
    pub(crate) fn here() -> Self {
        let read = |file| std::fs::read(file).map_or(String::new(), |it| String::from_utf8_lossy(&it).into_owned());
        Self { passwd: read("/etc/passwd"), subuid: read("/etc/subuid") }
    }

    /// Everything that cannot work. A driver library that is only a name is left out: the loader of a worker finds it, or
    /// `rekindle doctor` says that it does not.
    pub(crate) fn notes(&self, config: &Config) -> Vec<Note> {
        let mut notes = Vec::new();
        if let Some(group) = &config.socket.group
            && sys::group(group).is_err()
        {
            let problem =
                format!("there is no group {group:?}, and the daemon does not start without it; create the group");
            notes.push(Note { setting: "socket_group", problem });
        }
        let driver = &config.workers.cuda_driver;
        if driver.is_absolute() && !driver.exists() {
            let problem = format!("there is no file {}, and no worker starts without it", driver.display());
            notes.push(Note { setting: "cuda_driver", problem });
        }
        let sandbox = &config.workers.sandbox;
        if sandbox.enabled {
            let absent = sandbox.read.iter().filter(|path| !path.exists());
            notes.extend(absent.map(|path| Note { setting: "sandbox.read", problem: no_path(path) }));
            notes.extend(self.overlap(sandbox.uids).map(|whose| Note {
                setting: "sandbox.uid_range",
                problem: format!("{} has {whose}; choose a range that nobody else uses", sandbox.uids),
            }));
        }
        notes
    }

    /// Whose users the range has, of this machine's.
    fn overlap(&self, range: UidRange) -> Option<String> {
        let fields = |line: &'_ str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
        let user = self.passwd.lines().map(fields).find_map(|fields| {
            let uid = fields.get(2)?.parse().ok()?;
            range.contains(uid).then(|| format!("user {} ({uid}) of /etc/passwd", fields[0]))
        });
        let delegated = || {
            self.subuid.lines().map(fields).find_map(|fields| {
                let first: u32 = fields.get(1)?.parse().ok()?;
                let count: u32 = fields.get(2)?.parse().ok()?;
                let last = first.saturating_add(count.checked_sub(1)?);
                (first <= range.last && range.first <= last)
                    .then(|| format!("users of {} ({first}-{last}) of /etc/subuid", fields[0]))
            })
        };
        user.or_else(delegated)
    }
}

fn no_path(path: &Path) -> String {
    format!("there is no {}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_must_not_have_users_of_others() {
        let host = Host {
            passwd: "root:x:0:0::/root:/bin/sh\nodd line\nann:x:1000:1000::/home/ann:/bin/sh\n".to_owned(),
            subuid: "ann:100000:65536\nbad:1\nnone:5:0\n".to_owned(),
        };
        let overlap = |first, last| host.overlap(UidRange { first, last });
        assert_eq!(overlap(1000, 1000).unwrap(), "user ann (1000) of /etc/passwd");
        assert_eq!(overlap(165_535, 165_536).unwrap(), "users of ann (100000-165535) of /etc/subuid");
        assert_eq!(overlap(99_000, 100_000).unwrap(), "users of ann (100000-165535) of /etc/subuid");
        for (first, last) in [(1, 999), (1001, 99_999), (165_536, u32::MAX - 1)] {
            assert_eq!(overlap(first, last), None, "{first}-{last}");
        }
    }
}
