//! A job that is being watched: its first process, and the workers that have the GPU state of its processes.

use std::path::Path;
use std::time::{Duration, Instant};

use rekindle_protect::container::Said;
use rekindle_protect::{Container, Ending, Process};
use rekindle_wire::control::{ClientInfo, Reply, Request};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::container::Asked;
use super::ended::{self, Watched};
use super::folder::Folder;
use crate::daemon;
use crate::process::Process as Tree;

/// How often to ask the daemon for the workers, at most.
const WORKERS: Duration = Duration::from_secs(2);
/// How long to wait for what is to be known of an end.
const KNOWN: Duration = Duration::from_secs(2);
/// How long a job may take to fail after one of its workers has died.
const FAILS: Duration = Duration::from_secs(60);
/// How long processes may take to end that were killed.
const DYING: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long podman may take until it is asked again, and how long at most where it does not answer.
const PODMAN: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(5);

/// A job that is being watched.
pub(super) struct Job {
    process: Process,
    container: Option<Asked>,
    /// The parent of the container's first process, once podman has told.
    conmon: Option<Process>,
    /// When podman may be asked again, and how long it need not be asked after that.
    not_before: Instant,
    pause: Duration,
    root: Option<Watched>,
    workers: Vec<Worker>,
    looked: Option<Instant>,
    /// Whether one of its workers may have died unseen: it was restored, and the daemon has told no workers since then, or one that is none
    /// any more.
    is_unknown: bool,
    /// Whether one of its processes had lost its worker at the last look.
    has_lost: bool,
    /// When a dead worker was last seen that is not watched any more, since its process had ended, too, before the daemon was asked.
    died: Option<Instant>,
}

/// A worker of a job, and the process that has it.
struct Worker {
    watched: Watched,
    client: Process,
}

impl Worker {
    fn of(worker: i32, client: i32) -> Option<Self> {
        Some(Self { watched: Watched::new(ended::process(worker)?)?, client: ended::process(client)? })
    }
}

/// What the daemon knows of a job.
#[derive(Debug, Default)]
pub(super) struct Clients {
    /// GPUs that it has memory on.
    pub(super) gpus: usize,
    /// Bytes on the GPUs, and of pinned memory.
    pub(super) bytes: u64,
    /// Workers, and the processes that have them.
    workers: Vec<(i32, i32)>,
    /// Whether one of the processes has lost its worker.
    lost: bool,
}

impl Clients {
    /// What the daemon knows of the processes of a tree; `None` if none of them is a client.
    pub(super) fn of(socket: &Path, tree: &[Process]) -> Option<Self> {
        let Ok(Reply::Clients(clients)) = daemon::ask(socket, &Request::List) else { return None };
        Self::among(&clients, tree)
    }

    fn among(clients: &[ClientInfo], tree: &[Process]) -> Option<Self> {
        let own: Vec<_> = clients.iter().filter(|it| tree.iter().any(|process| process.pid == it.pid)).collect();
        let used = |gpu: usize| own.iter().any(|it| it.device_memory.get(gpu).is_some_and(|bytes| *bytes > 0));
        let most = own.iter().map(|it| it.device_memory.len()).max()?;
        let bytes = own.iter().map(|it| it.device_memory.iter().sum::<u64>() + it.pinned_memory).sum();
        let living = own.iter().filter(|it| it.state != "lost");
        Some(Self {
            gpus: (0..most).filter(|gpu| used(*gpu)).count(),
            bytes,
            workers: living.map(|it| (it.worker, it.pid)).collect(),
            lost: own.iter().any(|it| it.state == "lost"),
        })
    }
}

/// The processes of a tree now; none, if its root has ended.
pub(super) fn tree(root: i32) -> Vec<Process> {
    let pids = Tree::trees_of(&[root]).unwrap_or_default();
    pids.into_iter().filter_map(ended::process).collect()
}

/// Since when a job has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Since {
    /// It was seen alive shortly before: nobody else has its numbers yet.
    Now,
    /// Its numbers may have been given to others and freed again.
    Long,
}

/// Kills those of the processes that are still there, with what they have started and what is left of their groups and sessions,
/// and waits until all are gone, so that a restore can have their numbers. Of a job that has ended long ago, the guard inherits such
/// remainders. False if they do not end.
pub(super) fn kill(processes: &[Process], guard: i32, since: Since) -> bool {
    let began = Instant::now();
    loop {
        match remainders(processes, guard, since) {
            Ok(left) if left.is_empty() => return true,
            Ok(left) => {
                for pid in left.into_iter().filter_map(rustix::process::Pid::from_raw) {
                    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
                }
            }
            Err(_) => {}
        }
        if began.elapsed() > DYING {
            return false;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The numbers of what is left of a job.
fn remainders(processes: &[Process], guard: i32, since: Since) -> std::io::Result<Vec<i32>> {
    let is_guards = |pid: i32| Tree::find(pid).is_some_and(|it| it.is_child_of(guard));
    let (mut numbers, mut free) = (Vec::new(), Vec::new());
    for process in processes {
        match ended::process(process.pid) {
            Some(now) if now == *process => numbers.push(process.pid),
            // A restore has left it; any other process with this number is none of the job's.
            Some(_) if is_guards(process.pid) => numbers.push(process.pid),
            Some(_) => {}
            None => free.push(process.pid),
        }
    }
    match since {
        Since::Now => numbers.extend(free),
        Since::Long => numbers.extend(Tree::holders_of(&free)?.into_iter().filter(|it| is_guards(*it))),
    }
    Tree::holders_of(&numbers)
}

impl Job {
    /// Watches a job: a process and its descendants, or the container whose first process it is. One that was restored has had workers
    /// already.
    pub(super) fn watch(process: Process, container: Option<&Container>, was_restored: bool) -> Self {
        let root = Watched::new(process);
        let mut container = container.map(Asked::new);
        // As long as the process is there, its parent's number is nobody else's.
        let conmon = container.as_mut().filter(|_| root.is_some()).and_then(Asked::said).flatten();
        let conmon = conmon.and_then(|it| ended::process(it.state.conmon_pid));
        let (not_before, pause) = (Instant::now(), Duration::ZERO);
        let (workers, looked, is_unknown) = (Vec::new(), None, was_restored);
        let (has_lost, died) = (false, None);
        Self { process, container, conmon, not_before, pause, root, workers, looked, is_unknown, has_lost, died }
    }

    /// Whether it was there when somebody began to watch it.
    pub(super) fn was_seen(&self) -> bool {
        self.root.is_some()
    }

    pub(super) fn process(&self) -> Process {
        self.process
    }

    /// Learns from the daemon which workers the job has now.
    pub(super) fn look(&mut self, socket: &Path, tree: &[Process]) -> Option<Clients> {
        self.looked = Some(Instant::now());
        let clients = Clients::of(socket, tree)?;
        self.note_dead();
        self.workers = clients.workers.iter().filter_map(|(worker, client)| Worker::of(*worker, *client)).collect();
        if clients.lost {
            // The daemon forgets the process when that has ended, which may be before podman tells how.
            self.died = Some(Instant::now());
        }
        // One that has just ended, which the daemon does not know yet, may have been lost; and once the job is over, nothing is learned of it.
        let is_over = self.root.as_ref().is_some_and(Watched::has_ended);
        self.is_unknown = self.workers.len() < clients.workers.len() || (is_over && self.is_unknown);
        self.has_lost = clients.lost;
        Some(clients)
    }

    /// Whether it is long ago that somebody looked.
    pub(super) fn is_to_look(&self) -> bool {
        self.looked.is_none_or(|it| it.elapsed() > WORKERS)
    }

    /// Waits for the end of the job or of a worker, and returns how the job has ended, if it has and that is known.
    pub(super) fn wait(&mut self, folder: &Folder, socket: &Path, at_most: Duration) -> Option<Ending> {
        let Some(root) = &self.root else { return self.ending(folder) };
        let mut fds = vec![PollFd::new(root.fd(), PollFlags::IN)];
        fds.extend(self.workers.iter().map(|it| PollFd::new(it.watched.fd(), PollFlags::IN)));
        let timeout = Timespec::try_from(at_most).unwrap_or_default();
        let _ = poll(&mut fds, Some(&timeout));
        if root.has_ended() {
            return Some(match self.ending(folder)? {
                // Its calls have failed since its worker died, and it has given up.
                Ending::Exited(status) if status != 0 && self.may_fail_for_a_worker() => Ending::WorkerLost,
                // Or so it may be: its worker may have died before anybody knew that worker.
                Ending::Exited(status) if status != 0 && self.is_unknown => Ending::Unseen,
                ending => ending,
            });
        }
        if self.has_lost {
            return Some(Ending::WorkerLost);
        }
        let ended: Vec<i32> = self.ended_workers().map(|it| it.watched.pid()).collect();
        if ended.is_empty() {
            return None;
        }
        match were_lost(socket, &ended) {
            Some(true) => Some(Ending::WorkerLost),
            Some(false) => {
                self.note_dead();
                self.workers.retain(|it| !it.watched.has_ended());
                None
            }
            // The daemon does not run, or has not noticed yet.
            None => {
                std::thread::sleep(at_most.min(POLL_INTERVAL * 20));
                None
            }
        }
    }

    /// How the job has ended. None as long as podman does not tell whether a user wanted that; then this waits a little.
    fn ending(&mut self, folder: &Folder) -> Option<Ending> {
        let (process, root) = (self.process, &self.root);
        let seen = || root.as_ref().and_then(Watched::ending);
        let Some(container) = &mut self.container else {
            // The guard may be about to note it.
            let known = until_known(|| seen().or_else(|| folder.end_of(process.pid)));
            return Some(known.unwrap_or(Ending::Unseen));
        };
        // Its parent, which is conmon, waits for it soon.
        let seen = seen();
        let left = self.not_before.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            std::thread::sleep(left.min(PODMAN));
            return None;
        }
        // What conmon has told before its own end, podman says when it is asked once more.
        let is_told = self.conmon.is_none_or(ended::is_alive);
        let said = container.said();
        let ending = said.as_ref().and_then(|said| {
            let said = said.as_ref();
            Said::ending(said, process, said.and_then(|it| ended::process(it.state.pid)), seen, is_told)
        });
        if self.conmon.is_none()
            && let Some(Some(said)) = &said
        {
            let pid = said.state.conmon_pid;
            self.conmon = Some(ended::process(pid).unwrap_or(Process { pid, started: 0 }));
        }
        // A podman that does not answer is not asked all the time.
        self.pause = if matches!(said, Some(Some(_))) { PODMAN } else { (self.pause * 2).clamp(PODMAN, LONGEST) };
        self.not_before = Instant::now() + self.pause;
        ending
    }

    /// Whether it may have failed since it has lost a worker.
    fn may_fail_for_a_worker(&self) -> bool {
        self.has_lost || self.died.is_some_and(|it| it.elapsed() < FAILS) || self.a_worker_died()
    }

    /// Notes that a worker has died whose process has ended since, if there is one, before it is watched no more. Where the kernel does not
    /// tell how a process has ended that was waited for (`ended.rs`), it may stay unknown.
    fn note_dead(&mut self) {
        let died = |it: &Worker| it.watched.ending().is_some_and(|it| it != Ending::Exited(0));
        // The worker of a process that lives, and has become another program, is killed.
        if self.ended_workers().any(|it| died(it) && !ended::is_alive(it.client)) {
            self.died = Some(Instant::now());
        }
    }

    fn ended_workers(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().filter(|it| it.watched.has_ended())
    }

    /// Whether a worker has ended, and not by itself.
    fn a_worker_died(&self) -> bool {
        self.ended_workers().filter_map(|it| until_known(|| it.watched.ending())).any(|it| it != Ending::Exited(0))
    }
}

/// Whether clients have lost their GPU state with these workers, which have ended. Not so if a client was handed over, has become
/// another program, or is gone. `None` if the daemon does not know yet.
fn were_lost(socket: &Path, workers: &[i32]) -> Option<bool> {
    let Ok(Reply::Clients(clients)) = daemon::ask(socket, &Request::List) else { return None };
    let mut theirs = clients.iter().filter(|it| workers.contains(&it.worker));
    match theirs.next() {
        None => Some(false),
        Some(first) => (first.state == "lost" || theirs.any(|it| it.state == "lost")).then_some(true),
    }
}

fn until_known(mut look: impl FnMut() -> Option<Ending>) -> Option<Ending> {
    let began = Instant::now();
    loop {
        let found = look();
        if found.is_some() || began.elapsed() > KNOWN {
            return found;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::process::{Child, Command, Stdio};

    use rekindle_wire::control::Opening;
    use rekindle_wire::frame;
    use rustix::process::WaitOptions;
    use tempfile::TempDir;

    use super::*;

    fn client(pid: i32, state: &str, device_memory: Vec<u64>) -> ClientInfo {
        ClientInfo {
            pid,
            worker: pid + 100,
            state: state.to_owned(),
            device_memory,
            pinned_memory: 1,
            ..ClientInfo::default()
        }
    }

    #[test]
    fn only_the_clients_of_the_job_count() {
        let clients = [client(1, "running", vec![5, 0]), client(2, "lost", vec![]), client(3, "running", vec![0, 9])];
        let tree = |pids: &[i32]| pids.iter().map(|pid| Process { pid: *pid, started: 0 }).collect::<Vec<_>>();
        let of = |pids: &[i32]| Clients::among(&clients, &tree(pids));
        assert!(of(&[7]).is_none());
        let both = of(&[1, 2, 7]).unwrap();
        assert_eq!((both.gpus, both.bytes, both.workers.as_slice(), both.lost), (1, 7, &[(101, 1)][..], true));
        let all = of(&[1, 3]).unwrap();
        assert_eq!((all.gpus, all.bytes, all.lost), (2, 16, false));
    }

    #[test]
    fn a_killed_job_is_gone_and_a_later_process_of_its_number_is_left_alone() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = ended::process(child.id().cast_signed()).unwrap();
        let later = Process { started: process.started + 1, ..process };
        assert!(kill(&[later], 1, Since::Now) && ended::is_alive(process));
        let waiting = std::thread::spawn(move || child.wait());
        assert!(kill(&[process], 1, Since::Now));
        waiting.join().unwrap().unwrap();
    }

    fn own() -> i32 {
        std::process::id().cast_signed()
    }

    /// A daemon that knows these clients.
    fn daemon_with(dir: &TempDir, clients: Vec<ClientInfo>) -> PathBuf {
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                frame::receive::<Opening>(&stream).unwrap();
                frame::send(&stream, &Reply::Clients(clients.clone()), &[], &[]).unwrap();
            }
        });
        socket
    }

    fn shell(script: &str) -> (Child, Process) {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stdin(Stdio::piped());
        let child = command.spawn().unwrap();
        let process = ended::process(child.id().cast_signed()).unwrap();
        (child, process)
    }

    /// What becomes of a job that fails, with a worker that ends like this before, when its client has ended, or has become another program,
    /// by the time the daemon is asked. With `looks` the workers that the job has now are asked for in between.
    fn end_of_a_job(worker: &str, client_ends: bool, looks: bool) -> Ending {
        let dir = tempfile::tempdir().unwrap();
        let ((mut root, process), (now, _)) = (shell("read x; exit 3"), shell("read x"));
        let known = ClientInfo { worker: now.id().cast_signed(), ..client(process.pid, "running", vec![]) };
        let socket = daemon_with(&dir, if looks { vec![known] } else { vec![] });
        let ((mut dead, worker), (mut owner, owned)) = (shell(&format!("read x; {worker}")), shell("read x"));
        let mut job = Job::watch(process, None, false);
        job.workers = Worker::of(worker.pid, owned.pid).into_iter().collect();
        assert_eq!(job.workers.len(), 1);
        drop(dead.stdin.take());
        while !job.workers[0].watched.has_ended() {
            std::thread::sleep(POLL_INTERVAL);
        }
        if client_ends {
            drop(owner.stdin.take());
            owner.wait().unwrap();
        }
        let folder = Folder::at(dir.path());
        if looks {
            job.look(&socket, &[process]).unwrap();
        }
        assert_eq!(job.wait(&folder, &socket, Duration::from_millis(1)), None);
        drop(root.stdin.take());
        let ending = std::iter::from_fn(|| Some(job.wait(&folder, &socket, KNOWN))).flatten().next().unwrap();
        for mut child in [root, now, dead, owner] {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        ending
    }

    #[test]
    fn a_job_that_fails_since_its_worker_died_has_lost_it_although_nobody_knows_its_client_any_more() {
        for looks in [false, true] {
            assert_eq!(end_of_a_job("kill -KILL $$", true, looks), Ending::WorkerLost, "{looks}");
            assert_eq!(end_of_a_job("exit 0", true, looks), Ending::Exited(3), "{looks}");
            assert_eq!(end_of_a_job("kill -KILL $$", false, looks), Ending::Exited(3), "{looks}");
        }
    }

    #[test]
    fn what_a_restore_has_left_is_killed() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let left = ended::process(child.id().cast_signed()).unwrap();
        let former = Process { started: left.started + 1, ..left };
        let waiting = std::thread::spawn(move || child.wait());
        assert!(kill(&[former], own(), Since::Long) && !ended::is_alive(left));
        waiting.join().unwrap().unwrap();
    }
    #[test]
    fn what_a_job_has_started_unseen_is_killed_with_it() {
        // The shell that leads the session ends, and its children go on.
        const SCRIPT: &str = "sleep 600 & echo $!; sleep 600 & echo $!; read x";
        // This process inherits and awaits them, as a guard does.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let mut command = Command::new("setsid");
        command.args(["sh", "-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = command.spawn().unwrap();
        let root = ended::process(shell.id().cast_signed()).unwrap();
        let lines = BufReader::new(shell.stdout.take().unwrap()).lines().take(2);
        let children: Vec<i32> = lines.map(|it| it.unwrap().parse().unwrap()).collect();
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert!(tree(root.pid).is_empty() && children.iter().all(|it| ended::process(*it).is_some()));
        let awaited = children.clone();
        let waiting = std::thread::spawn(move || {
            let pids = awaited.into_iter().filter_map(rustix::process::Pid::from_raw);
            pids.map(|it| rustix::process::waitpid(Some(it), WaitOptions::empty())).collect::<Vec<_>>()
        });
        // Nobody can tell later whose they are, unless the guard is their parent.
        assert!(kill(&[root], 1, Since::Long) && children.iter().all(|it| ended::process(*it).is_some()));
        assert!(kill(&[root], own(), Since::Long));
        assert!(waiting.join().unwrap().iter().all(Result::is_ok));
        assert_eq!(Tree::holders_of(&[root.pid]).unwrap(), Vec::<i32>::new());
    }
}
