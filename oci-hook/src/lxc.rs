//! LXC and Incus, which read neither config.json nor CDI: the lines of their configuration, and the hook that these name.
//!
//! ```text
//!   lxc config ── lines for the container's configuration: mounts, environment, and the hook ──► start-host: GPUs given
//! ```
//!
//! LXC runs `start-host` on the host when the container's first process exists, before any program of the container. It passes the
//! container's name and that process in the environment. It runs no hook on a restore: the image tells the daemon what the
//! container has.

use std::env;
use std::fmt::Write;
use std::path::Path;

use rekindle_wire::control::{ContainerLimits, Request};
use thiserror::Error;

use crate::daemon::{self, DaemonError};
use crate::host::Provided;
use crate::spec::{self, Hooks};

/// An error of the hook that LXC runs.
#[derive(Debug, Error)]
pub(crate) enum LxcError {
    #[error("{0} is not set to a {1}: is this LXC's hook start-host?")]
    Variable(&'static str, &'static str),
    #[error(transparent)]
    Daemon(#[from] DaemonError),
}

/// The lines that give a container these GPUs.
pub(crate) fn config(provided: &Provided, hooks: &Hooks, gpus: &[String]) -> String {
    let mut lines = String::new();
    let mut line = |key: &str, value: &str| {
        // A String takes every write.
        let _ = writeln!(lines, "lxc.{key} = {value}");
    };
    for (place, source, more) in spec::mounts(provided) {
        let options = ["bind,ro,nosuid,nodev,create=dir"].iter().chain(more).copied().collect::<Vec<_>>().join(",");
        line("mount.entry", &mount(&source, place, &options));
    }
    for (place, source) in spec::default_libraries(provided) {
        line("mount.entry", &mount(&source, &place, "bind,ro,nosuid,nodev,create=file"));
    }
    line("environment", &format!("LD_LIBRARY_PATH={}", spec::LIB_DIR));
    for (name, value) in spec::variables(provided) {
        line("environment", &format!("{name}={value}"));
    }
    let mut hook = vec![hooks.path.as_str(), "lxc", "start-host"];
    hook.extend(gpus.iter().flat_map(|gpu| [spec::GPU, gpu]));
    hook.extend(hooks.host.iter().map(String::as_str));
    line("hook.start-host", &hook.into_iter().map(quoted).collect::<Vec<_>>().join(" "));
    // LXC restores no container that has a console.
    line("console.path", "none");
    lines
}

/// Has the daemon grant GPUs to the container of which LXC's variables speak.
pub(crate) fn start_host(gpus: Vec<String>, socket: &Path) -> Result<(), LxcError> {
    let name = env::var("LXC_NAME").map_err(|_| LxcError::Variable("LXC_NAME", "name"))?;
    let pid = env::var("LXC_PID").ok().and_then(|pid| pid.parse().ok()).filter(|pid| *pid > 0);
    let pid = pid.ok_or(LxcError::Variable("LXC_PID", "process"))?;
    let limits = ContainerLimits::default();
    let request = Request::Grant { container: name, pid, gpus, limits, protocol: None, share: false };
    daemon::ask(socket, &request).map(drop).map_err(LxcError::from)
}

/// A mount as in fstab, where the place is relative to the container's root.
fn mount(source: &Path, place: &str, options: &str) -> String {
    format!("{} {} none {options} 0 0", escaped(&source.to_string_lossy()), escaped(place.trim_start_matches('/')))
}

/// A path as in fstab.
fn escaped(path: &str) -> String {
    path.chars().fold(String::new(), |mut text, c| {
        match c {
            ' ' | '\t' | '\n' | '\\' => {
                // A String takes every write.
                let _ = write!(text, "\\{:03o}", u32::from(c));
            }
            c => text.push(c),
        }
        text
    })
}

/// A word for the shell by which LXC runs hooks.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-=:".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_mounts_environment_and_the_hook() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libcuda.so.1"), "").unwrap();
        let provided = Provided {
            lib_dir: dir.path().to_owned(),
            socket_dir: "/run/my rekindle".into(),
            socket_name: "r.sock".to_owned(),
        };
        let hooks =
            Hooks { path: "/opt/it's/rekindle-oci-hook".to_owned(), host: vec!["--socket".into(), "/r s".into()] };
        let lib = dir.path().display();
        let expected = format!(
            "lxc.mount.entry = {lib} usr/lib/rekindle none bind,ro,nosuid,nodev,create=dir 0 0\n\
             lxc.mount.entry = /run/my\\040rekindle run/rekindle none bind,ro,nosuid,nodev,create=dir,noexec 0 0\n\
             lxc.mount.entry = {lib}/libcuda.so.1 usr/lib/x86_64-linux-gnu/libcuda.so.1 none bind,ro,nosuid,nodev,create=file 0 0\n\
             lxc.mount.entry = {lib}/libcuda.so.1 usr/lib64/libcuda.so.1 none bind,ro,nosuid,nodev,create=file 0 0\n\
             lxc.environment = LD_LIBRARY_PATH=/usr/lib/rekindle\n\
             lxc.environment = REKINDLE_SOCKET=/run/rekindle/r.sock\n\
             lxc.environment = TRITON_LIBCUDA_PATH=/usr/lib/rekindle\n\
             lxc.hook.start-host = '/opt/it'\\''s/rekindle-oci-hook' lxc start-host --gpu 1 --socket '/r s'\n\
             lxc.console.path = none\n"
        );
        assert_eq!(config(&provided, &hooks, &["1".to_owned()]), expected);
    }
}
