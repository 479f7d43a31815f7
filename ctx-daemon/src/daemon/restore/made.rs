//! The processes that CRIU has made, which are killed with a restore that is given up.
//!
//! A CRIU that is killed leaves them behind: stopped for ever or, when only our part was missing, running without a worker. The
//! daemon identifies them by the connections that they make, and by their ancestors: processes below CRIU, or, after its death,
//! below a process that was above it, up to that process, are CRIU's work. A process that has not connected yet is still CRIU's
//! own program, has the pid of a client in the image, and has CRIU's image directory open: not just the same directory, but the
//! open file that CRIU's children inherit and of which the daemon has a copy. So another CRIU that restores the same image at
//! the same time, where pids are the same in another pid namespace, is left alone.

use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rekindle_images::Image;
use tracing::{debug, warn};

use super::super::process::{self, Process};
use super::super::{lock, sys};

/// How long a CRIU may take to end after its connection has closed.
const END: Duration = Duration::from_secs(2);
/// How long processes that a CRIU has begun to make may take to appear: the root makes the others by itself.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
const POLLS: u32 = 10;

/// The known processes that a CRIU has made.
pub(super) struct Made {
    /// CRIU and all above it.
    makers: Vec<i32>,
    known: Mutex<Known>,
}

/// The CRIU that makes the processes, as long as its restore goes on.
pub(super) struct Maker {
    criu: Option<Criu>,
    made: Arc<Made>,
}

#[derive(Default)]
struct Known {
    roots: Vec<Process>,
    /// Whether processes that become known from now on are killed too.
    ended: bool,
}

/// The CRIU that makes the processes, and the image that it reads.
struct Criu {
    process: Process,
    program: File,
    /// The image directory as CRIU itself has opened it.
    directory: OwnedFd,
    /// The pids of clients and native processes, each in the innermost of its pid namespaces.
    clients: BTreeSet<u32>,
}

/// The identity of a file: its device and inode.
type File = (u64, u64);

fn file(metadata: &Metadata) -> File {
    (metadata.dev(), metadata.ino())
}

fn file_at(path: impl AsRef<Path>) -> Option<File> {
    fs::metadata(path).ok().as_ref().map(file)
}

impl Criu {
    fn new(pid: i32, image: &Image, directory: OwnedFd) -> std::io::Result<Self> {
        Ok(Self {
            process: Process::with_pid(pid)?,
            program: file(&fs::metadata(format!("/proc/{pid}/exe"))?),
            directory,
            clients: {
                let manifest = image.manifest();
                let natives = manifest.natives.iter().map(|it| it.namespace_pid);
                manifest.clients.iter().map(|it| it.namespace_pid).chain(natives).collect()
            },
        })
    }

    /// The clients that this CRIU has begun to make.
    fn begun(&self) -> Vec<Process> {
        self.forked().filter(|it| self.is_client(*it)).collect()
    }

    /// The processes that are still this CRIU's program: those that it makes, and its helpers.
    fn forked(&self) -> impl Iterator<Item = Process> {
        let all = process::all().unwrap_or_default();
        let processes = all.into_iter().filter_map(|pid| Process::with_pid(pid).ok());
        processes.filter(|it| self.has_forked(*it))
    }

    /// Whether this process has the number of a client.
    fn is_client(&self, process: Process) -> bool {
        let number = process::namespace_pids(process.pid).ok().and_then(|it| it.last().copied());
        number.is_some_and(|it| self.clients.contains(&it.unsigned_abs()))
    }

    /// Whether this process is one of this CRIU's.
    fn has_forked(&self, process: Process) -> bool {
        let pid = process.pid;
        let holds_directory = || {
            let fds = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
            let mut fds = fds.filter_map(|fd| fd.file_name().to_str()?.parse().ok());
            fds.any(|fd| sys::has_opened(pid, fd, self.directory.as_fd()).unwrap_or(false))
        };
        process != self.process
            && process.start >= self.process.start
            && file_at(format!("/proc/{pid}/exe")) == Some(self.program)
            && holds_directory()
    }
}

/// The processes that a CRIU has made and stopped: those below it, and those that it traces. A container's first process is beside CRIU,
/// below the runtime that has called it (`rst_sibling` in CRIU's RPC).
fn made_by(criu: i32) -> Vec<Process> {
    let mut pids = process::frozen_tree(criu).unwrap_or_default();
    let traced = process::traced_by(criu).unwrap_or_default();
    pids.extend(traced.into_iter().filter(|it| !pids.contains(it)).collect::<Vec<_>>());
    let others = pids.into_iter().filter(|it| *it != criu);
    others.filter_map(|pid| Process::with_pid(pid).ok()).collect()
}

/// The system call in which a process is, by `/proc/PID/syscall`. None if it runs, is ready to, or is gone.
fn syscall_of(process: Process) -> Option<i64> {
    syscall_in(&fs::read_to_string(format!("/proc/{}/syscall", process.pid)).ok()?)
}

fn syscall_in(content: &str) -> Option<i64> {
    content.split(' ').next()?.parse().ok().filter(|number| *number >= 0)
}

/// Whether CRIU waits in this system call for its processes. When it waits for the runtime that has called it, it is in another one.
fn waits_for_processes(syscall: Option<i64>) -> bool {
    syscall == Some(libc::SYS_futex)
}

/// Whether a process of CRIU's waits in this system call for another one: at one of the stages of a restore; for a request, as helpers do;
/// or for children that CRIU only makes for them to have ended.
fn waits_for_others(syscall: Option<i64>) -> bool {
    waits_for_processes(syscall)
        || [libc::SYS_recvmsg, libc::SYS_recvfrom, libc::SYS_waitid].into_iter().any(|it| syscall == Some(it))
}

impl Maker {
    /// Notes this CRIU, which is running, its image, and the image directory behind the descriptor, which CRIU has opened.
    pub(super) fn new(criu: i32, image: &Image, directory: &OwnedFd) -> Self {
        let found = directory.try_clone().and_then(|it| Criu::new(criu, image, it));
        if let Err(error) = &found {
            debug!(criu, %error, "cannot tell what it makes before that connects");
        }
        let made = Made { makers: process::ancestry(criu), known: Mutex::default() };
        Self { criu: found.ok(), made: Arc::new(made) }
    }

    /// The processes that this CRIU makes.
    pub(super) fn made(&self) -> &Arc<Made> {
        &self.made
    }

    /// The processes that it has made, which it has stopped.
    pub(super) fn processes(&self) -> Vec<Process> {
        self.criu.as_ref().map(|it| made_by(it.process.pid)).unwrap_or_default()
    }

    /// Whether CRIU has died. A process that it had begun to make may keep its connection open.
    pub(super) fn is_orphaned(&self) -> bool {
        self.criu.as_ref().is_some_and(|it| !it.process.is_alive())
    }

    /// Whether CRIU waits for its processes although none of the clients has been begun, or all begun ones have ended, and none of the
    /// others does anything either: one of them, as the first process of a container, may yet make the clients, however long that takes.
    pub(super) fn is_awaited_in_vain(&self) -> bool {
        let Some(criu) = &self.criu else { return false };
        let all_wait = || {
            waits_for_processes(syscall_of(criu.process)) && criu.forked().all(|it| waits_for_others(syscall_of(it)))
        };
        criu.process.is_alive() && all_wait() && criu.begun().is_empty() && all_wait()
    }

    /// The CRIU, once it has died.
    pub(super) fn dead_criu(&self) -> Option<Process> {
        self.criu.as_ref().map(|it| it.process).filter(|it| !it.is_alive())
    }

    /// Kills the processes that a CRIU which has died had begun to make, also where none of them has connected. A CRIU that
    /// lives ends them by itself.
    pub(super) fn kill_what_was_begun(&self) {
        let Some(criu) = &self.criu else { return };
        let deadline = Instant::now() + END;
        while criu.process.is_alive() {
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        for _ in 0..POLLS {
            let begun = criu.begun();
            begun.iter().for_each(|it| self.made.note(*it));
            if !begun.is_empty() {
                self.made.kill();
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

impl Made {
    /// Adds a process.
    pub(super) fn note(&self, process: Process) {
        let above = process::ancestry(process.pid);
        let made = above.into_iter().take_while(|pid| *pid > 1 && !self.makers.contains(pid));
        // There is none where CRIU itself, or a test in its place, has connected.
        let Some(root) = made.last().and_then(|pid| Process::with_pid(pid).ok()) else {
            return;
        };
        let mut known = lock(&self.known);
        if !known.roots.contains(&root) {
            known.roots.push(root);
        }
        // The process has connected while its restore was given up.
        if known.ended {
            drop(known);
            self.kill();
        }
    }

    /// Kills the known processes, and all below them; from now on, also processes that become known later.
    pub(super) fn kill(&self) {
        let mut known = lock(&self.known);
        known.ended = true;
        for root in &known.roots {
            let before = process::now();
            if !root.is_alive() {
                continue;
            }
            warn!(root = root.pid, "killing the processes of a restore that was given up");
            let tree = process::tree(root.pid).unwrap_or_default();
            let tree: Vec<_> = tree.into_iter().filter_map(|pid| Process::with_pid(pid).ok()).collect();
            // If the root has ended meanwhile, a later process may have its number, and what is below that is none of this restore's.
            let is_whole = root.is_alive();
            tree.iter().filter(|it| is_whole || it.start < before).for_each(Process::kill);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_that_does_something_is_told_from_one_that_waits_for_another() {
        for (content, criu, others) in [
            ("202 0x7f00 0x0 0x1 0x0 0x0 0x0 0x7ffd 0x7f01", true, true),
            // A helper waits for requests, and CRIU for the runtime.
            ("47 0x5 0x7ffd 0x0 0x0 0x0 0x0 0x7ffd 0x7f01", false, true),
            ("45 0x5 0x7ffd 0x10 0x0 0x0 0x0 0x7ffd 0x7f01", false, true),
            ("247 0x0 0x0 0x7ffd 0x1000004 0x0 0x0 0x7ffd 0x7f01", false, true),
            // It mounts; waits for a program that it has started; runs; is stopped in its own code.
            ("165 0x7f00 0x7f10 0x7f20 0x1000 0x0 0x0 0x7ffd 0x7f01", false, false),
            ("61 0x1f 0x7ffd 0x0 0x0 0x0 0x0 0x7ffd 0x7f01", false, false),
            ("running\n", false, false),
            ("-1 0x7ffd 0x7f01", false, false),
            ("", false, false),
        ] {
            let syscall = syscall_in(content);
            assert_eq!((waits_for_processes(syscall), waits_for_others(syscall)), (criu, others), "{content}");
        }
    }

    #[test]
    fn what_criu_traces_it_has_made_wherever_that_is() {
        // An orphan: below nothing that this test has started.
        let orphan = ["-c", "sleep 60 >/dev/null 2>&1 & echo $!"];
        let said = Command::new("sh").args(orphan).output().unwrap();
        let orphan = Process::with_pid(String::from_utf8(said.stdout).unwrap().trim().parse().unwrap()).unwrap();
        // SAFETY: no pointers. Only the thread that calls this is the tracer, and CRIU has one thread.
        let tracer = unsafe { libc::gettid() };
        assert!(!made_by(tracer).contains(&orphan));
        // SAFETY: as above.
        let traced = unsafe { libc::ptrace(libc::PTRACE_SEIZE, orphan.pid, 0, 0) };
        assert_eq!(traced, 0, "{}", std::io::Error::last_os_error());
        assert!(made_by(tracer).contains(&orphan) && !made_by(tracer).contains(&Process::with_pid(tracer).unwrap()));
        orphan.kill();
        // SAFETY: no pointers that are used.
        unsafe { libc::waitpid(orphan.pid, std::ptr::null_mut(), libc::__WALL) };
    }

    #[test]
    fn all_below_the_maker_is_killed_and_nothing_else() {
        let own = std::process::id() as i32;
        let made = Made { makers: process::ancestry(own), known: Mutex::default() };
        // The maker itself, and its ancestors, are never taken for its work.
        made.note(Process::with_pid(own).unwrap());
        made.kill();
        let mut other = Command::new("sleep").arg("60").spawn().unwrap();
        let mut root =
            Command::new("sh").args(["-c", "sleep 60 & echo $!; wait"]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut said = std::io::BufReader::new(root.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut said, &mut line).unwrap();
        let below = Process::with_pid(line.trim().parse().unwrap()).unwrap();
        // This process becomes known after its restore was given up.
        made.note(below);
        assert_eq!(root.wait().unwrap().signal(), Some(libc::SIGKILL));
        let begun = std::time::Instant::now();
        while below.is_alive() {
            assert!(begun.elapsed().as_secs() < 60, "what was below it lives");
        }
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
