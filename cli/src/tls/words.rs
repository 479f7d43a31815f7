//! The words by which a host says what is to be run for it. They are two; the program, its paths and its options are those of the host that
//! runs it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// The variable that tells both ends of the connection, as sshd's SSH_CONNECTION.
pub(crate) const CONNECTION: &str = "REKINDLE_CONNECTION";

/// The variable in which sshd tells them. Whoever has started `rekindle tls listen` may have it, for a connection that is none of those that are served.
pub(crate) const BY_SSH: &str = "SSH_CONNECTION";

/// The most characters of what is not run that a message has.
const SHOWN: usize = 100;

/// What a host runs for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// The target of a migration.
    Migrate,
    /// A part of a cut.
    Cut,
}

/// All, with their words.
const ALL: [(Service, &str); 2] = [(Service::Migrate, "migrate"), (Service::Cut, "cut")];

impl Service {
    /// The word for it.
    pub(crate) fn word(self) -> &'static str {
        ALL.iter().find(|(it, _)| *it == self).map_or("", |(_, word)| word)
    }

    /// What these words ask for. The error says why it is nothing.
    pub(super) fn asked(words: &[u8]) -> Result<Self, String> {
        if let Some((found, _)) = ALL.iter().find(|(_, word)| word.as_bytes() == words) {
            return Ok(*found);
        }
        let shown: String = String::from_utf8_lossy(words).replace('\0', " ").chars().take(SHOWN).collect();
        let [(_, a), (_, b)] = ALL;
        Err(format!(
            "{shown:?} is not run for other hosts: they say `{a}` or `{b}` and nothing else. Programs, paths and options are those of \
             `rekindle tls listen`"
        ))
    }
}

/// How a host runs it.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    /// This program.
    pub(super) rekindle: PathBuf,
    /// The directory for files, unless it is the usual one.
    pub(super) dir: Option<PathBuf>,
    pub(super) podman: PathBuf,
    pub(super) socket: PathBuf,
}

impl Programs {
    /// The command.
    pub(super) fn command(&self, service: Service) -> Command {
        let words: Vec<OsString> = match service {
            Service::Migrate => {
                let dir = self.dir.iter().flat_map(|it| ["--dir".into(), it.into()]);
                let words = ["migrate", "--receive"].map(OsString::from).into_iter().chain(dir);
                words.chain(["--podman".into(), self.podman.clone().into()]).collect()
            }
            Service::Cut => vec!["cut-part".into()],
        };
        let mut command = Command::new(&self.rekindle);
        command.args(words).arg("--socket").arg(&self.socket).env_remove(BY_SSH);
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_the_two_words_is_run() {
        for (service, word) in ALL {
            assert_eq!(Service::asked(word.as_bytes()), Ok(service));
            assert_eq!(service.word(), word);
        }
        let refused: [&[u8]; 10] = [
            b"",
            b"Migrate",
            b"migrate ",
            b"migrate\0",
            b"migrate\0--receive\0--podman\0/tmp/x",
            b"/usr/bin/rekindle\0migrate",
            b"cut-part",
            b"sh\0-c\0id",
            b"migrate\n",
            b"\xff",
        ];
        for words in refused {
            let said = Service::asked(words).unwrap_err();
            assert!(said.contains("nothing else"), "{said}");
        }
        // The reason is sent back, in one frame.
        assert!(Service::asked(&[0xff; 64 << 10]).unwrap_err().len() < 4096);
    }

    #[test]
    fn programs_and_paths_are_those_of_who_listens() {
        let [rekindle, dir, podman, socket] = ["/r", "/d", "/p", "/s"].map(PathBuf::from);
        let programs = Programs { rekindle, dir: Some(dir), podman, socket };
        let line = |service| {
            let command = programs.command(service);
            let words = command.get_args().map(|it| it.to_string_lossy().into_owned());
            [command.get_program().to_string_lossy().into_owned()]
                .into_iter()
                .chain(words)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(line(Service::Migrate), "/r migrate --receive --dir /d --podman /p --socket /s");
        assert_eq!(line(Service::Cut), "/r cut-part --socket /s");
    }

    #[test]
    fn a_program_does_not_take_the_connection_of_who_listens_for_its_own() {
        let [rekindle, podman, socket] = ["/r", "/p", "/s"].map(PathBuf::from);
        let programs = Programs { rekindle, dir: None, podman, socket };
        for (service, _) in ALL {
            assert!(programs.command(service).get_envs().any(|it| it == (BY_SSH.as_ref(), None)));
        }
    }
}
