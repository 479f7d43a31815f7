//! The daemon: whether it is there, answers, and has workers.

use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rekindle_wire::control::{Opening, Reply, Request, SandboxInfo, StatusInfo};
use rekindle_wire::frame::{self, FrameError};

use super::Finding;
use crate::process::Process;

/// How long a daemon may take to answer; a healthy one answers at once.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The daemon's status, if the daemon answers.
pub(super) fn look(socket: &Path) -> (Finding, Option<StatusInfo>) {
    let shown = socket.display();
    let bad = |found: String, advice: &str| (Finding::bad("daemon", found, advice), None);
    let stream = match UnixStream::connect(socket) {
        Ok(stream) => stream,
        Err(error) => {
            let advice = match error.kind() {
                ErrorKind::PermissionDenied => {
                    "be root, or a member of the group that `socket_group` names in its configuration"
                }
                ErrorKind::ConnectionRefused => "it has died: start `rekindled` again",
                _ => "start `rekindled`, or say with --socket or REKINDLE_SOCKET where it listens",
            };
            return bad(format!("no daemon answers at {shown}: {error}"), advice);
        }
    };
    match ask(&stream) {
        Ok(Reply::Status(status)) => (judge(socket, &status), Some(status)),
        Ok(Reply::Failed(failure)) => {
            bad(format!("the daemon at {shown} refuses: {failure}"), "install one version of Rekindle")
        }
        Ok(_) | Err(FrameError::Json(_) | FrameError::TooLarge(_)) => {
            bad(format!("the daemon at {shown} gives an unexpected answer"), "install one version of Rekindle")
        }
        Err(error) => {
            let pid = peer(&stream);
            let stopped = pid.filter(|pid| Process::find(*pid).is_some_and(|it| it.is_stopped()));
            let who = pid.map_or_else(|| "the daemon".to_owned(), |pid| format!("the daemon (process {pid})"));
            match stopped {
                Some(pid) => bad(
                    format!("{who} at {shown} is stopped by a signal"),
                    &format!("let the daemon go on: kill -CONT {pid}; programs run without it meanwhile"),
                ),
                None => bad(
                    format!("{who} at {shown} does not answer: {error}"),
                    "see the daemon's log; restart the daemon: programs run on without it",
                ),
            }
        }
    }
}

fn ask(stream: &UnixStream) -> Result<Reply, FrameError> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    frame::send(stream, &Opening::new(&Request::Status)?, &[], &[])?;
    Ok(frame::receive(stream)?.body)
}

fn judge(socket: &Path, status: &StatusInfo) -> Finding {
    let most = status.max.map(|most| format!(" of {most}")).unwrap_or_default();
    let found = format!(
        "rekindled {} at {}: {} in use{most}, {} workers ready",
        status.version,
        socket.display(),
        status.used,
        status.spare,
    );
    match &status.problem {
        Some(problem) => Finding::bad(
            "daemon",
            format!("{found}; {problem}"),
            "see the daemon's log; workers load the driver's library",
        ),
        None if status.spare == 0 && status.used == 0 => {
            Finding::note("daemon", found, "the first worker is still starting: look again in a moment")
        }
        None => Finding::ok("daemon", found),
    }
}

/// The sandbox of its workers.
pub(super) fn sandbox(sandbox: &SandboxInfo) -> Finding {
    if sandbox.missing.is_empty() {
        return Finding::ok("sandbox", &sandbox.parts);
    }
    let found = match sandbox.parts.as_str() {
        "" => sandbox.missing.join("; "),
        parts => format!("{parts}; but {}", sandbox.missing.join("; ")),
    };
    Finding::note(
        "sandbox",
        found,
        "docs/security.md says what each part is for; [sandbox] required = true insists on all",
    )
}

/// The process that listens at the other end.
fn peer(stream: &UnixStream) -> Option<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into the local, which is that large.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    (result == 0 && peer.pid > 0).then_some(peer.pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn a_sandbox_that_is_not_whole_is_noted() {
        let info = |parts: &str, missing: &[&str]| SandboxInfo {
            parts: parts.to_owned(),
            missing: missing.iter().map(|it| (*it).to_owned()).collect(),
        };
        assert_eq!(sandbox(&info("users 5-9", &[])), Finding::ok("sandbox", "users 5-9"));
        let some = sandbox(&info("no capabilities", &["rekindled is not root"]));
        assert_eq!((some.verdict, some.found.as_str()), (Verdict::Note, "no capabilities; but rekindled is not root"));
        assert_eq!(sandbox(&info("", &["it is switched off"])).found, "it is switched off");
    }
}
