//! A worker that is stopped in the middle of a dump or a restore, at each request that it may get.
//!
//! The dump or restore fails by the configured limit, and names the process, the request, the limit and the reason. It leaves
//! nothing behind: when the worker goes on, its client runs and can be dumped.

use std::path::Path;
use std::time::Duration;

use rekindle_wire::control::{Reply, Request};
use tempfile::TempDir;

use crate::dump::{dump, pause};
use crate::restore::{Restored, dumped};
use crate::support::{Client, Daemon, Session, eventually};

/// Limits that let a healthy worker answer on a loaded machine.
const LIMITS: &str = "quiesce_timeout_ms = 1000\nstall_timeout_ms = 1500\n";
const QUIESCE: &str = "1000 ms (quiesce_timeout_ms)";
const STALL: &str = "1500 ms (stall_timeout_ms)";

/// A daemon whose configuration ends with this text.
fn daemon(configuration: &str) -> Daemon {
    Daemon::start_with(&[("config.toml", &format!("{LIMITS}{configuration}"))])
}

/// Makes the worker stop at this request, after so many others of the same name.
fn stop_at(daemon: &Daemon, request: &str, before: usize) {
    std::fs::write(daemon.dir.path().join("stop-at"), format!("{request} {before}")).unwrap();
}

/// A worker that may be stopped. It goes on when this is dropped, so that a test that fails leaves none behind.
struct Stopped(i32);

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: no memory is concerned; the worker is the daemon's, which lives.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

/// Opens a session whose answers come within a minute, or the test fails.
fn open(daemon: &Daemon, request: &Request, dir: &Path) -> (Session, Reply) {
    let (socket, dir, request) = (daemon.socket(), dir.to_owned(), request.clone());
    let (say, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _ = say.send(Session::open_at(&socket, &request, &dir));
    });
    let (session, reply) = said.recv_timeout(Duration::from_secs(60)).unwrap();
    session.0.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (session, reply)
}

/// Makes all requests of CRIU's plugin in a dump, until one fails. Returns the reason.
fn try_dump(daemon: &Daemon, dir: &Path, client: &mut Client) -> Option<String> {
    let (session, reply) = open(daemon, &pause(client.pid, true), dir);
    let (pid, cookie) = (client.pid, client.cookie());
    let requests = [Request::Frozen { pid }, Request::Socket { id: 5, cookie }, Request::Finish];
    let replies = std::iter::once(reply).chain(requests.iter().map(|it| session.ask(it)));
    replies.filter_map(|it| if let Reply::Failed(failure) = it { Some(failure.reason) } else { None }).next()
}

/// Has a worker stop at a request of a dump, which must fail and name the worker's request.
fn fails_a_dump(daemon: &Daemon, request: &str, before: usize, limit: &str) {
    let mut client = Client::attached(daemon, "app");
    let worker = Stopped(daemon.clients()[0].worker);
    stop_at(daemon, request, before);
    let dir = TempDir::new().unwrap();
    let failed = try_dump(daemon, dir.path(), &mut client);
    let reason = failed.unwrap();
    let named = format!("process {} (app)", client.pid);
    assert!(reason.contains(&named), "{reason}");
    assert!(reason.contains(&format!("did not answer {request} within {limit}")), "{reason}");
    assert!(reason.contains("it is stopped"), "{reason}");
    // The next dump does not wait for ever either for a worker that is still stopped.
    let again = try_dump(daemon, dir.path(), &mut client).unwrap();
    assert!(again.contains(&named) && again.contains("it is stopped"), "{again}");
    drop(worker);
    daemon.wait_for_state(&client, Some("running"));
    dump(daemon, TempDir::new().unwrap().path(), &mut client);
}

macro_rules! a_worker_that_is_stopped_at {
    ($($name:ident: $configuration:literal, $request:literal, $before:literal, $limit:expr;)*) => {
        mod a_worker_that_is_stopped_fails_the_dump_by_the_configured_limit {
            use super::*;
            $(#[test]
            fn $name() {
                fails_a_dump(&daemon($configuration), $request, $before, $limit);
            })*
        }
    };
}

a_worker_that_is_stopped_at! {
    when_asked_for_its_memory: "", "Describe", 0, QUIESCE;
    when_told_its_bandwidth: "", "Pace", 0, QUIESCE;
    when_given_staging: "[checkpoint]\nstaging = 67108864\n", "Stage", 0, STALL;
    when_asked_to_reserve: "[checkpoint]\nprotocol = \"clone\"\n", "Reserve", 0, STALL;
    when_asked_to_precopy: "[checkpoint]\nprotocol = \"recopy\"\n", "Precopy", 0, STALL;
    when_asked_how_far_its_precopy_is: "[checkpoint]\nprotocol = \"recopy\"\n", "Progress", 0, STALL;
    when_asked_to_quiesce: "", "Quiesce", 0, QUIESCE;
    when_asked_what_it_shares: "", "Shares", 0, QUIESCE;
    when_asked_again_what_it_shares: "", "Shares", 1, QUIESCE;
    when_asked_to_save: "", "Save", 0, STALL;
    when_asked_to_save_code: "", "SaveCode", 0, STALL;
    when_asked_how_far_it_is: "", "Progress", 0, STALL;
    when_asked_whether_it_is_at_rest: "", "ConfirmQuiesced", 0, QUIESCE;
    when_asked_to_open_its_ring: "", "Open", 0, QUIESCE;
}

#[test]
fn a_worker_that_is_stopped_when_told_of_a_moment_fails_the_dump_by_the_configured_limit() {
    let daemon = daemon("");
    let client = Client::attached(&daemon, "app");
    let worker = Stopped(daemon.clients()[0].worker);
    let request = Request::Checkpoint { root: client.pid, protocol: None, moment_ms: Some(600_000), span: None };
    let (order, reply) = open(&daemon, &request, Path::new("/"));
    assert_eq!(reply, Reply::Awaited);
    stop_at(&daemon, "Moment", 0);
    let dir = TempDir::new().unwrap();
    let (_session, reply) = open(&daemon, &pause(client.pid, true), dir.path());
    drop(worker);
    let reason = crate::support::reason(reply);
    assert!(reason.contains(&format!("process {} (app)", client.pid)), "{reason}");
    assert!(reason.contains(&format!("did not answer Moment within {QUIESCE}")), "{reason}");
    assert!(reason.contains("it is stopped"), "{reason}");
    drop(order);
    daemon.wait_for_state(&client, Some("running"));
}

/// The application may announce its moment before the daemon knows that its worker has told it.
#[test]
fn a_moment_that_comes_before_the_worker_has_answered_counts() {
    let daemon = Daemon::start_with(&[("config.toml", "quiesce_timeout_ms = 60000\n")]);
    let mut client = Client::attached(&daemon, "app");
    let worker = Stopped(daemon.clients()[0].worker);
    let request = Request::Checkpoint { root: client.pid, protocol: None, moment_ms: Some(600_000), span: None };
    let (order, reply) = open(&daemon, &request, Path::new("/"));
    assert_eq!(reply, Reply::Awaited);
    stop_at(&daemon, "Moment", 0);
    let (dir, pid) = (TempDir::new().unwrap(), client.pid);
    std::thread::scope(|threads| {
        let dump = threads.spawn(|| open(&daemon, &pause(pid, true), dir.path()));
        eventually("the worker stops", || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", worker.0)).unwrap();
            status.contains("(stopped)").then_some(())
        });
        assert_eq!(client.ask("moment"), "moment true");
        drop(worker);
        let (session, reply) = dump.join().unwrap();
        assert_eq!(reply, Reply::Paused { pids: vec![pid] });
        drop((session, order));
    });
    daemon.wait_for_state(&client, Some("running"));
}

/// Makes all requests of CRIU's plugin in a restore, until one fails. Returns the reason.
fn try_restore(daemon: &Daemon, restored: &mut Restored) -> Option<String> {
    let (session, reply) = open(daemon, &Request::Restore, restored.dir.path());
    let restore = match reply {
        Reply::Prepared { restore, .. } => restore,
        Reply::Failed(failure) => return Some(failure.reason),
        other => panic!("{other:?}"),
    };
    restored.process.ask("map");
    restored.process.ask(&format!("reattach {restore} 5"));
    match session.ask(&Request::Resume { pid: restored.process.pid }) {
        Reply::Failed(failure) => Some(failure.reason),
        _ => None,
    }
}

#[test]
fn a_worker_that_is_stopped_at_any_request_of_a_restore_fails_it_by_the_configured_limit() {
    std::thread::scope(|scope| {
        let works = |request| format!("has made no progress with {request} for {STALL}");
        let answers = |request| format!("did not answer {request} within {QUIESCE}");
        for (request, expected) in [
            ("MakeShared", works("MakeShared")),
            ("Load", works("Load")),
            ("Connect", works("Connect")),
            ("Open", answers("Open")),
        ] {
            scope.spawn(move || {
                let daemon = daemon("");
                let mut restored = dumped(&daemon, "app");
                stop_at(&daemon, request, 0);
                let reason = try_restore(&daemon, &mut restored).unwrap();
                assert!(reason.contains("app") && reason.contains(&expected), "{request}: {reason}");
                assert!(reason.contains("it is stopped"), "{request}: {reason}");
                // Its workers are killed, and it does not hinder the next restore.
                eventually("the client is gone", || daemon.clients().is_empty().then_some(()));
            });
        }
    });
}
