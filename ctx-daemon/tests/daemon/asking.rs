//! What users ask of the daemon about one process.

use rekindle_wire::control::{CallInfo, CheckInfo, Reply, Request};

use crate::support::{Client, Daemon, ask, reason};

fn check(daemon: &Daemon, pid: i32) -> Vec<CheckInfo> {
    match ask(&daemon.socket(), &Request::Check { pid }, &[]) {
        Reply::Checked(processes) => processes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_are_told_by_name_and_what_no_table_has_is_not() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "app");
    let Reply::Calls(calls) = ask(&daemon.socket(), &Request::Calls { pid: client.pid }, &[]) else {
        panic!("no calls");
    };
    let [CallInfo { call, asked: 5, refused: 5, .. }] = calls.as_slice() else { panic!("{calls:?}") };
    assert!(call.starts_with("cu"), "{call}");
    let own = std::process::id() as i32;
    assert!(reason(ask(&daemon.socket(), &Request::Calls { pid: own }, &[])).contains("no client"));
}

#[test]
fn a_process_can_be_checkpointed_unless_its_worker_says_why_not() {
    let daemon = Daemon::start();
    let good = Client::attached(&daemon, "app");
    let bad = Client::attached(&daemon, "unsavable");
    let found = check(&daemon, good.pid);
    assert!(found[0].reasons.is_empty(), "{found:?}");
    assert_eq!((found.len(), found[0].device_memory), (1, 4096));
    assert_eq!(check(&daemon, bad.pid)[0].reasons, ["it calls malloc"]);
    // Both are in this process's tree, which has no GPU state of its own. Other tests' clients are other daemons'.
    let own = std::process::id() as i32;
    let pids: Vec<_> = check(&daemon, own).iter().map(|it| it.pid).collect();
    assert!(pids.contains(&good.pid) && pids.contains(&bad.pid) && !pids.contains(&own), "{pids:?}");
    assert!(reason(ask(&daemon.socket(), &Request::Check { pid: i32::MAX }, &[])).contains("no process"));
}

#[test]
fn a_client_whose_worker_died_is_named_as_long_as_it_has_a_ring() {
    let daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "app");
    assert_eq!(client.ask("map"), "mapped");
    let worker = daemon.clients()[0].worker;
    // SAFETY: a process that this test has caused to be.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGKILL) }, 0);
    daemon.wait_for_state(&client, Some("lost"));
    assert_eq!(daemon.status().used, 0);
    let found = check(&daemon, client.pid);
    assert!(found[0].reasons[0].contains("has lost its worker"), "{found:?}");
    let dir = tempfile::tempdir().unwrap();
    let pause = Request::Pause { root: client.pid, leave_running: true };
    let (_session, reply) = crate::support::Session::open(&daemon, &pause, dir.path());
    let why = reason(reply);
    assert!(why.contains(&format!("process {}", client.pid)) && why.contains("start it anew"), "{why}");
    client.kill();
    daemon.wait_for_state(&client, None);
}

#[test]
fn accesses_are_told_of_ones_own_clients() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "app");
    let Reply::Access(report) = ask(&daemon.socket(), &Request::Access { pid: client.pid }, &[]) else {
        panic!("no report");
    };
    assert_eq!(report.watched, 7);
    let own = std::process::id() as i32;
    assert!(reason(ask(&daemon.socket(), &Request::Access { pid: own }, &[])).contains("no client"));
}
