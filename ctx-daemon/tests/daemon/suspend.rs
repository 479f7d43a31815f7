//! Clients that are suspended in place and resumed.

use std::fs;
use std::time::Duration;

use rekindle_wire::control::{FailureKind, Reply, Request};
use tempfile::TempDir;

use crate::dump::pause;
use crate::support::{Client, Daemon, Session, as_user, ask};

fn suspend(daemon: &Daemon, pid: i32, hold: bool) -> Reply {
    ask(&daemon.socket(), &Request::Suspend { pid, hold, deep: false }, &[])
}

fn resume(daemon: &Daemon, pid: i32) -> Reply {
    ask(&daemon.socket(), &Request::ResumeSuspended { pid }, &[])
}

fn failure(reply: Reply) -> rekindle_wire::control::Failure {
    match reply {
        Reply::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_suspended_client_runs_and_is_listed_until_it_is_resumed() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "client");
    let Reply::Suspended(all) = suspend(&daemon, client.pid, true) else { panic!("not suspended") };
    assert!(all.len() == 1 && all[0].pid == client.pid && all[0].bytes > 0, "{all:?}");
    assert_eq!(daemon.state_of(client.pid).as_deref(), Some("suspended"));
    let events = daemon.events();
    let place = |event: &str| events.iter().position(|it| it == event).unwrap_or_else(|| panic!("{event}: {events:?}"));
    assert!(
        place("client Quiesce") < place("client Save Stop") && place("client Save Stop") < place("client Suspend true")
    );
    // The worker opens the ring by itself.
    assert!(!events.contains(&"client Open".to_owned()), "{events:?}");
    assert_eq!(suspend(&daemon, client.pid, true), Reply::Suspended(Vec::new()));
    let Reply::WereResumed(all) = resume(&daemon, client.pid) else { panic!("not resumed") };
    assert!(all.len() == 1 && all[0].bytes > 0, "{all:?}");
    assert_eq!(daemon.state_of(client.pid).as_deref(), Some("running"));
    let Reply::WereResumed(all) = resume(&daemon, client.pid) else { panic!("not resumed") };
    assert!(all.len() == 1 && all[0].bytes == 0, "{all:?}");
}

#[test]
fn a_client_that_cannot_be_suspended_goes_on() {
    let daemon = Daemon::start();
    for (command, words) in [
        ("busy", "stream 0x1 is busy"),
        ("shares-late", "it shares GPU memory"),
        ("huge", "do not fit into host memory"),
    ] {
        let client = Client::attached(&daemon, command);
        let why = failure(suspend(&daemon, client.pid, false));
        assert!(why.reason.contains(words), "{command}: {why}");
        daemon.wait_for_state(&client, Some("running"));
    }
    let client = Client::attached(&daemon, "shares");
    fs::write(daemon.dir.path().join("shares-shares"), "own").unwrap();
    let why = failure(suspend(&daemon, client.pid, false));
    assert!(why.kind == FailureKind::Refused && why.reason.contains("shares GPU memory"), "{why}");
    assert!(!daemon.events().contains(&"shares Quiesce".to_owned()));
}

#[test]
fn a_client_whose_gpu_has_no_room_is_not_resumed_in_time_and_stays_suspended() {
    let daemon = Daemon::start_with(&[("config.toml", "stall_timeout_ms = 300\n")]);
    let client = Client::attached(&daemon, "client");
    assert!(matches!(suspend(&daemon, client.pid, true), Reply::Suspended(_)));
    fs::write(daemon.dir.path().join("no-room"), "").unwrap();
    let why = failure(resume(&daemon, client.pid));
    assert!(why.kind == FailureKind::Refused && why.reason.contains("has had no room"), "{why}");
    assert_eq!(daemon.state_of(client.pid).as_deref(), Some("suspended"));
    fs::remove_file(daemon.dir.path().join("no-room")).unwrap();
    assert!(matches!(resume(&daemon, client.pid), Reply::WereResumed(_)));
}

#[test]
fn another_user_suspends_nobody_and_names_no_directory() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "client");
    fs::set_permissions(daemon.socket(), std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let Some(replies) = as_user(4711, || {
        let dir = fs::File::open("/tmp").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&dir);
        let in_directory = Request::Suspend { pid: client.pid, hold: false, deep: false };
        [suspend(&daemon, client.pid, false), resume(&daemon, client.pid), ask(&daemon.socket(), &in_directory, &[fd])]
    }) else {
        return;
    };
    let [suspended, resumed, in_directory] = replies.map(failure);
    assert!(suspended.reason.contains("does not exist, or is not yours"), "{suspended}");
    assert!(resumed.reason.contains("does not exist, or is not yours"), "{resumed}");
    assert!(in_directory.reason.contains("may name a directory"), "{in_directory}");
    assert_eq!(daemon.state_of(client.pid).as_deref(), Some("running"));
}

/// Suspends a client deeply.
fn suspend_deep(daemon: &Daemon, client: &Client) -> i32 {
    let request = Request::Suspend { pid: client.pid, hold: true, deep: true };
    let Reply::Suspended(all) = ask(&daemon.socket(), &request, &[]) else { panic!("not suspended") };
    assert!(all.len() == 1 && all[0].pid == client.pid && all[0].deep, "{all:?}");
    worker(daemon, client)
}

fn worker(daemon: &Daemon, client: &Client) -> i32 {
    daemon.clients().into_iter().find(|it| it.pid == client.pid).unwrap().worker
}

/// A client that has the memory which it shares with its worker mapped, as clients do. `None` where the daemon may not open that.
fn mapped(daemon: &Daemon, command: &str) -> Option<Client> {
    let mut client = Client::attached(daemon, command);
    assert_eq!(client.ask("map"), "mapped");
    let opened = fs::read_dir(format!("/proc/{}/map_files", client.pid)).unwrap().next().unwrap().unwrap();
    if fs::File::open(opened.path()).is_err() {
        eprintln!("skipped: map_files may not be opened here");
        return None;
    }
    Some(client)
}

#[test]
fn another_worker_takes_a_deeply_suspended_client_over() {
    let mut daemon = Daemon::start();
    let Some(client) = mapped(&daemon, "client") else { return };
    let keeper = suspend_deep(&daemon, &client);
    assert!(daemon.events().contains(&"client Suspend true deep".to_owned()));
    assert_eq!(daemon.state_of(client.pid).as_deref(), Some("suspended"));
    // The next daemon knows that the worker is a keeper.
    daemon.kill(libc::SIGKILL);
    daemon.start_again();
    daemon.wait_for_state(&client, Some("suspended"));
    let Reply::WereResumed(all) = resume(&daemon, client.pid) else { panic!("not resumed") };
    assert!(all.len() == 1 && all[0].bytes > 0, "{all:?}");
    daemon.wait_for_state(&client, Some("running"));
    let moved = worker(&daemon, &client);
    assert_ne!(moved, keeper);
    daemon.wait_for_event("client given away");
    let events = daemon.events();
    let place =
        |event: &str| events.iter().rposition(|it| it == event).unwrap_or_else(|| panic!("{event}: {events:?}"));
    let order = ["Kept", "SaveCode", "Load 1", "HandOver", "Connect 0", "Open", "given away"];
    let places: Vec<_> = order.iter().map(|it| place(&format!("client {it}"))).collect();
    assert!(places.is_sorted(), "{events:?}");
    // It is an ordinary client, whose worker is recorded for the next daemon.
    daemon.kill(libc::SIGKILL);
    daemon.start_again();
    daemon.wait_for_state(&client, Some("running"));
    assert_eq!(worker(&daemon, &client), moved);
    let keeper = suspend_deep(&daemon, &client);
    assert_eq!(keeper, moved);
}

#[test]
fn a_worker_that_dies_at_the_last_moment_leaves_the_client_with_its_keeper() {
    let daemon = Daemon::start();
    let Some(client) = mapped(&daemon, "client") else { return };
    let keeper = suspend_deep(&daemon, &client);
    fs::write(daemon.dir.path().join("dies-at-open"), "").unwrap();
    let why = failure(resume(&daemon, client.pid));
    assert!(why.reason.contains("stays suspended"), "{why}");
    assert_eq!((daemon.state_of(client.pid).as_deref(), worker(&daemon, &client)), (Some("suspended"), keeper));
    // Content that cannot be loaded is no loss either.
    fs::write(daemon.dir.path().join("content"), "a piece is bad").unwrap();
    let why = failure(resume(&daemon, client.pid));
    assert!(why.reason.contains("a piece is bad"), "{why}");
    fs::remove_file(daemon.dir.path().join("content")).unwrap();
    assert_eq!(worker(&daemon, &client), keeper);
    let Reply::WereResumed(_) = resume(&daemon, client.pid) else { panic!("not resumed") };
    daemon.wait_for_state(&client, Some("running"));
    assert_ne!(worker(&daemon, &client), keeper);
}

#[test]
fn a_client_or_a_keeper_that_ends_ends_the_other() {
    let daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "ends");
    suspend_deep(&daemon, &client);
    client.kill();
    daemon.wait_for_event("ends client gone");
    daemon.wait_for_state(&client, None);
    let Some(client) = mapped(&daemon, "loses") else { return };
    let keeper = suspend_deep(&daemon, &client);
    // SAFETY: a worker of this test's daemon.
    assert_eq!(unsafe { libc::kill(keeper, libc::SIGKILL) }, 0);
    daemon.wait_for_state(&client, Some("lost"));
}

/// Its content takes longer to come back than a dump waits for anything that does not end by itself.
#[test]
fn a_dump_waits_until_its_client_has_been_resumed() {
    let quiesce = Duration::from_millis(500);
    let config = format!("quiesce_timeout_ms = {}\n", quiesce.as_millis());
    let daemon = Daemon::start_with(&[("config.toml", config.as_str())]);
    let Some(client) = mapped(&daemon, "client") else { return };
    suspend_deep(&daemon, &client);
    let (content, dir) = (daemon.dir.path().join("content"), TempDir::new().unwrap());
    fs::write(&content, "stands still").unwrap();
    std::thread::scope(|scope| {
        let resumed = scope.spawn(|| resume(&daemon, client.pid));
        daemon.wait_for_event("client Connect 0");
        let dumped = scope.spawn(|| Session::open(&daemon, &pause(client.pid, true), dir.path()));
        std::thread::sleep(2 * quiesce);
        assert!(!dumped.is_finished() && !resumed.is_finished());
        fs::remove_file(&content).unwrap();
        assert!(matches!(resumed.join().unwrap(), Reply::WereResumed(_)));
        let (_session, reply) = dumped.join().unwrap();
        assert_eq!(reply, Reply::Paused { pids: vec![client.pid] });
    });
}
