//! The program as an OCI runtime, for engines that run no hook before they hand config.json to theirs: containerd, for example.
//!
//! ```text
//!   containerd ── rekindle-runc create --bundle DIR ID ──► DIR/config.json changed, as at podman's stage precreate
//!                                                                  └──► runc create --bundle DIR ID, in this process
//! ```
//!
//! A link to this program with a runtime's name behind `rekindle-` makes it that runtime. A container whose annotations ask for no
//! GPU goes to the runtime as it is, and so does every other command.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use thiserror::Error;

use crate::host::HostArgs;
use crate::precreate::{self, PrecreateError};
use crate::report;

/// The runtimes that this program knows how to call.
const RUNTIMES: [&str; 2] = ["runc", "crun"];

/// The options before a command whose value is the next word.
const WITH_VALUE: [&str; 7] =
    ["--cgroup-manager", "--criu", "--log", "--log-format", "--log-level", "--root", "--rootless"];

/// The commands that read config.json.
const READERS: [&str; 3] = ["create", "restore", "run"];

/// An error before the runtime has begun.
#[derive(Debug, Error)]
enum RuntimeError {
    #[error(transparent)]
    Precreate(#[from] PrecreateError),
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot run {name}: {source} (install {name})")]
    Start { name: &'static str, source: io::Error },
}

/// The runtime that the program was called as, if it was.
pub(crate) fn called_as(program: &OsStr) -> Option<&'static str> {
    let name = Path::new(program).file_name()?.to_str()?.strip_prefix("rekindle-")?;
    RUNTIMES.into_iter().find(|it| *it == name)
}

/// Changes config.json if this command reads it, and becomes the runtime. Returns only after an error.
pub(crate) fn become_runtime(name: &'static str, arguments: &[OsString]) -> ExitCode {
    let done = match bundle(arguments) {
        Some(bundle) => change(&bundle.join("config.json"), &bundle),
        None => Ok(()),
    };
    let error = match done {
        Ok(()) => RuntimeError::Start { name, source: Command::new(name).args(arguments).exec() },
        Err(error) => error,
    };
    report::as_runtime(&format!("rekindle-{name}: {error}"));
    ExitCode::FAILURE
}

/// The bundle of a command that reads config.json.
fn bundle(arguments: &[OsString]) -> Option<PathBuf> {
    let mut words = arguments.iter().map(OsString::as_os_str);
    let command = loop {
        let word = words.next()?;
        if WITH_VALUE.iter().any(|option| word == *option) {
            words.next();
        } else if !word.as_bytes().starts_with(b"-") {
            break word;
        }
    };
    if !READERS.iter().any(|reader| command == *reader) {
        return None;
    }
    while let Some(word) = words.next() {
        if word == "--bundle" || word == "-b" {
            return words.next().map(PathBuf::from);
        }
        if let Some(dir) = word.as_bytes().strip_prefix(b"--bundle=") {
            return Some(OsStr::from_bytes(dir).into());
        }
    }
    Some(".".into())
}

/// Adds what the annotations in a config.json ask for. The file is as before, or whole.
fn change(path: &Path, bundle: &Path) -> Result<(), RuntimeError> {
    let config = match fs::read(path) {
        Ok(config) => config,
        // The runtime says so in its own words.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(RuntimeError::Read { path: path.into(), source }),
    };
    let Some(changed) = precreate::change(&config, bundle, &HostArgs::from_environment())? else {
        return Ok(());
    };
    let new = path.with_extension("json.rekindle");
    write(&new, path, &changed).map_err(|source| {
        // It may not be there.
        let _ = fs::remove_file(&new);
        RuntimeError::Write { path: path.into(), source }
    })
}

/// Writes a file under a new name with the permissions of the one that it replaces.
fn write(new: &Path, old: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(new)?;
    file.write_all(content)?;
    file.set_permissions(fs::metadata(old)?.permissions())?;
    fs::rename(new, old)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_behind_rekindle_is_that_runtime() {
        assert_eq!(called_as("/usr/bin/rekindle-runc".as_ref()), Some("runc"));
        assert_eq!(called_as("rekindle-crun".as_ref()), Some("crun"));
        for other in ["/usr/bin/rekindle-oci-hook", "runc", "rekindle-", "/rekindle-runc/hook", ""] {
            assert_eq!(called_as(other.as_ref()), None, "{other}");
        }
    }

    #[test]
    fn only_commands_that_read_it_have_a_bundle() {
        let bundle = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(OsString::from).collect();
            super::bundle(&words).map(|dir| dir.display().to_string())
        };
        for (line, expected) in [
            ("--root /r --log /l --log-format json create --bundle /b --pid-file /p id", Some("/b")),
            ("--root=/r --systemd-cgroup restore --image-path /i --detach -no-subreaper --bundle /b id", Some("/b")),
            ("--cgroup-manager cgroupfs run -b /b id", Some("/b")),
            ("create --bundle=/b id", Some("/b")),
            ("create id", Some(".")),
            ("--root create start id", None),
            ("exec id create --bundle /b", None),
            ("--version", None),
            ("create --bundle", None),
            ("", None),
        ] {
            assert_eq!(bundle(line).as_deref(), expected, "{line}");
        }
    }
}
