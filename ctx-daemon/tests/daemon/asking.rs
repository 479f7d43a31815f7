//! Users' questions to the daemon about one process.

use rekindle_wire::control::{CallInfo, CheckInfo, Failure, FailureKind, ProtocolChange, Reply, Request};

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
    // Both are in this process's tree, which has no GPU state of its own. Clients of other tests belong to other daemons.
    let own = std::process::id() as i32;
    let pids: Vec<_> = check(&daemon, own).iter().map(|it| it.pid).collect();
    assert!(pids.contains(&good.pid) && pids.contains(&bad.pid) && !pids.contains(&own), "{pids:?}");
    assert!(reason(ask(&daemon.socket(), &Request::Check { pid: i32::MAX }, &[])).contains("no process"));
}

#[test]
fn a_program_that_ends_while_it_is_asked_about_has_ended_and_no_worker_of_it_has_died() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "ends-in-check");
    let answer = ask(&daemon.socket(), &Request::Check { pid: client.pid }, &[]);
    assert_eq!(answer, Reply::Failed(Failure::refused(format!("process {} has ended", client.pid))));
    // In a tree with others, the process is no obstacle.
    let (client, other) = (Client::attached(&daemon, "ends-in-check"), Client::attached(&daemon, "app"));
    let found = check(&daemon, std::process::id() as i32);
    assert!(found.iter().all(|it| it.pid != client.pid), "{found:?}");
    assert!(found.iter().any(|it| it.pid == other.pid && it.reasons.is_empty()), "{found:?}");
    for when in ["ends-in-quiesce", "ends-in-save"] {
        let client = Client::attached(&daemon, when);
        let dir = tempfile::tempdir().unwrap();
        let pause = Request::Pause { root: client.pid, leave_running: true, traceparent: None };
        let (session, mut reply) = crate::support::Session::open(&daemon, &pause, dir.path());
        if when == "ends-in-save" {
            reply = crate::support::eventually("the dump fails", || {
                Some(session.ask(&Request::Frozen { pid: client.pid })).filter(|it| matches!(it, Reply::Failed(_)))
            });
        }
        let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
        assert_eq!(failure.kind, FailureKind::LostPeer);
        assert!(failure.reason.contains("has ended") && !failure.reason.contains("worker"), "{failure}");
    }
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
    let pause = Request::Pause { root: client.pid, leave_running: true, traceparent: None };
    let (_session, reply) = crate::support::Session::open(&daemon, &pause, dir.path());
    let why = reason(reply);
    assert!(why.contains(&format!("process {}", client.pid)) && why.contains("restart it"), "{why}");
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

#[test]
fn the_first_that_says_a_protocol_wins() {
    let daemon = Daemon::start_with(&[("config.toml", "[checkpoint]\nprotocol = \"recopy\"\n")]);
    let plain = Client::attached(&daemon, "app");
    let said = Client::attached(&daemon, "app cow");
    let odd = Client::attached(&daemon, "app cov");
    let change = |pid, change| ask(&daemon.socket(), &Request::Protocol { pid, change }, &[]);
    let protocol = |pid, how| match change(pid, how) {
        Reply::Protocol { protocol, reason } => (protocol, reason),
        other => panic!("{other:?}"),
    };
    let found = protocol(plain.pid, ProtocolChange::Keep);
    assert_eq!((found.0.as_str(), found.1.contains("configuration")), ("recopy", true), "{found:?}");
    let found = protocol(said.pid, ProtocolChange::Keep);
    assert_eq!((found.0.as_str(), found.1.contains("REKINDLE_PROTOCOL")), ("cow", true), "{found:?}");
    // A value without a meaning is not reported, and does not count.
    let found = protocol(odd.pid, ProtocolChange::Keep);
    assert_eq!((found.0.as_str(), found.1.contains("\"cov\" is no protocol")), ("recopy", true), "{found:?}");
    // No worker is started for this setting.
    let worker = daemon.clients().into_iter().find(|it| it.pid == said.pid).unwrap().worker;
    let environment = std::fs::read(format!("/proc/{worker}/environ")).unwrap();
    assert!(!String::from_utf8_lossy(&environment).contains("REKINDLE_PROTOCOL"));

    let found = protocol(said.pid, ProtocolChange::Choose("stop".to_owned()));
    assert_eq!((found.0.as_str(), found.1.contains("rekindle protocol")), ("stop", true), "{found:?}");
    let listed = daemon.clients().into_iter().find(|it| it.pid == said.pid).unwrap();
    assert_eq!((listed.protocol, listed.protocol_reason), found);
    assert!(reason(change(said.pid, ProtocolChange::Choose("unknown".to_owned()))).contains("is no protocol"));
    assert_eq!(protocol(said.pid, ProtocolChange::Keep).0, "stop", "what is refused changes nothing");
    assert_eq!(protocol(said.pid, ProtocolChange::Forget).0, "cow");
    let own = std::process::id() as i32;
    assert!(reason(change(own, ProtocolChange::Keep)).contains("no client"));
}
