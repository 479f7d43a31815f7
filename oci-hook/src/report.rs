//! Error messages for the user. podman reports that a hook failed, but gives it /dev/null as its stderr (5.4, 5.8). So the hook
//! writes its message to podman's stderr. crun does the same to hooks at its stages (1.21). podman shows crun's log if that is
//! one JSON object, and crun's stderr otherwise, so the message goes into both.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::process;

use rustix::process::{PidfdFlags, PidfdGetfdFlags, getppid, pidfd_getfd, pidfd_open};
use serde_json::json;

const STDERR: RawFd = 2;

/// Writes one line to stderr. If that is /dev/null, writes it to the stderr of the parent process, and to the parent's log
/// if it is an OCI runtime.
pub(crate) fn error(line: &str) {
    if stderr_is_null() && parents_stderr().is_some_and(|mut file| writeln!(file, "{line}").is_ok()) {
        write_to_log(parent_id(), line, File::options().append(true));
        return;
    }
    eprintln!("{line}");
}

/// Writes one line to stderr, and to the log that this process was told to keep as an OCI runtime.
pub(crate) fn as_runtime(line: &str) {
    write_to_log(process::id(), line, File::options().append(true).create(true));
    eprintln!("{line}");
}

/// Writes a line to the log that a process was told to keep, if it is an OCI runtime. Without it the engine says less.
fn write_to_log(process: u32, line: &str, options: &OpenOptions) {
    let Ok(command) = fs::read(format!("/proc/{process}/cmdline")) else { return };
    let log = log_in(&command).and_then(|path| options.open(path).ok());
    if let Some(mut log) = log {
        let _ = writeln!(log, "{}", json!({ "msg": line, "level": "error" }));
    }
}

/// `--log PATH --log-format=json`, as conmon and containerd call runtimes.
fn log_in(command: &[u8]) -> Option<&Path> {
    let mut path = None;
    let mut is_json = false;
    let mut words = command.split(|byte| *byte == 0);
    while let Some(word) = words.next() {
        match word {
            b"--log" => path = words.next(),
            b"--log-format" => is_json = words.next() == Some(b"json"),
            b"--log-format=json" => is_json = true,
            _ => path = word.strip_prefix(b"--log=").or(path),
        }
    }
    let path = Path::new(OsStr::from_bytes(path?));
    (is_json && path.is_absolute()).then_some(path)
}

fn stderr_is_null() -> bool {
    let null = fs::metadata("/dev/null").map(|null| null.rdev());
    let stderr = fs::metadata(format!("/proc/self/fd/{STDERR}")).map(|stderr| stderr.rdev());
    matches!((null, stderr), (Ok(null), Ok(stderr)) if null == stderr)
}

/// The parent's open file with its position, so that podman's next line does not overwrite this one.
fn parents_stderr() -> Option<File> {
    let parent = pidfd_open(getppid()?, PidfdFlags::empty()).ok()?;
    Some(pidfd_getfd(parent, STDERR, PidfdGetfdFlags::empty()).ok()?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtimes_log_is_found_in_its_command_line() {
        let log = |text: &str| log_in(text.replace(' ', "\0").as_bytes()).map(|path| path.display().to_string());
        let podmans = "/usr/bin/crun --log-format=json --log /run/c/oci-log create --bundle /b id ";
        assert_eq!(log(podmans).as_deref(), Some("/run/c/oci-log"));
        assert_eq!(log("crun --log=/l --log-format json create id ").as_deref(), Some("/l"));
        for other in
            ["podman --log-level error run ", "crun --log /l create id ", "crun --log-format=json --log l ", ""]
        {
            assert_eq!(log(other), None, "{other}");
        }
    }
}
