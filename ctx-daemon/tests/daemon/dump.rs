//! Dumps, in the requests of CRIU's plugin.

use std::path::Path;

use rekindle_images::{Image, PhaseName, Protocol};
use rekindle_wire::control::{DumpInfo, DumpOutcome, FailureKind, Reply, Request};
use tempfile::TempDir;

use crate::support::{Client, Daemon, Session, eventually, reason};
use crate::worker::CODE;

pub(crate) fn pause(root: i32, leave_running: bool) -> Request {
    Request::Pause { root, leave_running, traceparent: None }
}

/// Begins a dump of a tree with these clients.
fn begin(daemon: &Daemon, dir: &Path, root: i32, leave_running: bool, clients: &[i32]) -> Session {
    let (session, reply) = Session::open(daemon, &pause(root, leave_running), dir);
    let Reply::Paused { mut pids } = reply else { panic!("{reply:?}") };
    pids.sort_unstable();
    // The daemon may not have read the first message of a connection that this process has just made.
    pids.retain(|pid| *pid != std::process::id() as i32);
    let mut clients = clients.to_vec();
    clients.sort_unstable();
    assert_eq!(pids, clients);
    session
}

fn ours(reply: &Reply) -> bool {
    match reply {
        Reply::Frozen { ours } | Reply::Socket { ours, .. } => *ours,
        other => panic!("{other:?}"),
    }
}

/// A whole dump of one client, with socket 5.
pub(crate) fn dump(daemon: &Daemon, dir: &Path, client: &mut Client) {
    dump_and(daemon, dir, client, false);
}

/// The same, of a client that may go on.
pub(crate) fn dump_and(daemon: &Daemon, dir: &Path, client: &mut Client, leave_running: bool) {
    let session = begin(daemon, dir, client.pid, leave_running, &[client.pid]);
    let pid = client.pid;
    assert!(ours(&session.ask(&Request::Frozen { pid })));
    let cookie = client.cookie();
    assert!(ours(&session.ask(&Request::Socket { id: 5, cookie })));
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn what_a_process_outside_has_too_is_not_dumped() {
    let daemon = Daemon::start_with(&[("shares-one", "own"), ("shares-two", "others")]);
    let dir = TempDir::new().unwrap();
    let one = Client::attached(&daemon, "one");
    let two = Client::attached(&daemon, "two");
    for (client, other) in [(&one, &two), (&two, &one)] {
        let pause = Request::Pause { root: client.pid, leave_running: true, traceparent: None };
        let text = reason(Session::open(&daemon, &pause, dir.path()).1);
        assert!(text.contains(&format!("shares GPU memory with process {}", other.pid)), "{text}");
        daemon.wait_for_state(client, Some("running"));
    }
    let root = std::process::id() as i32;
    begin(&daemon, dir.path(), root, true, &[one.pid, two.pid]);
}

/// The number follows from the memory's size and the machine's cores; unused files are not in the image.
#[test]
fn a_client_with_much_memory_has_several_data_files() {
    let several = std::thread::available_parallelism().unwrap().get().min(4) as u32;
    let daemon = Daemon::start_with(&[("config.toml", "[checkpoint]\nstaging = 0\n[image]\nfile_mib = 1\n")]);
    let first = rekindle_images::limits::FIRST_FREE_DATA_FILE;
    for (command, files) in [("narrow", vec![0]), ("wide", vec![0, first + several - 2]), ("small", vec![0])] {
        let dir = TempDir::new().unwrap();
        let mut client = Client::attached(&daemon, command);
        dump(&daemon, dir.path(), &mut client);
        let image = Image::open(dir.path()).unwrap();
        assert!(image.verify(|_| ()).is_good());
        let found: Vec<_> = image.data_files().collect();
        assert_eq!(found, if several > 1 { files } else { vec![0] }, "{command}");
        let is_data = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("rekindle-data");
        let there = std::fs::read_dir(dir.path()).unwrap().filter(|it| is_data(&it.as_ref().unwrap().file_name()));
        assert_eq!(there.count(), found.len(), "{command}");
        client.kill();
    }
}

#[test]
fn a_worker_whose_client_would_have_what_is_in_others_files_makes_no_image() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "strays");
    let pid = client.pid;
    let session = begin(&daemon, dir.path(), pid, false, &[pid]);
    assert!(ours(&session.ask(&Request::Frozen { pid })));
    let cookie = client.cookie();
    session.ask(&Request::Socket { id: 5, cookie });
    let text = reason(session.ask(&Request::Finish));
    assert!(text.contains("its worker names files of other clients"), "{text}");
    daemon.wait_for_state(&client, Some("running"));
    eventually("what was written is gone", || is_empty(dir.path()).then_some(()));
}

#[test]
fn a_dump_that_leaves_its_tree_running() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut one = Client::attached(&daemon, "one");
    let mut two = Client::attached(&daemon, "two");
    let mut stranger = Client::attached(&daemon, "stranger");
    // The clients' parent is this process: all three are of its tree.
    let root = std::process::id() as i32;
    let all = [one.pid, two.pid, stranger.pid];
    let session = begin(&daemon, dir.path(), root, true, &all);
    for event in ["one Quiesce", "two Quiesce", "stranger Quiesce"] {
        daemon.wait_for_event(event);
    }
    assert_eq!(daemon.state_of(one.pid).unwrap(), "quiesced");
    assert!(!ours(&session.ask(&Request::Frozen { pid: root })));
    for client in [&one, &two, &stranger] {
        assert!(ours(&session.ask(&Request::Frozen { pid: client.pid })));
    }
    for (id, client) in (20..).zip([&mut one, &mut two, &mut stranger]) {
        let cookie = client.cookie();
        assert!(ours(&session.ask(&Request::Socket { id, cookie })));
    }
    let (id, cookie) = (1, 99);
    assert!(!ours(&session.ask(&Request::Socket { id, cookie })));
    // The memory has been saved for long, but CRIU is still writing memory that a running GPU would change.
    eventually("it is saved", || {
        let saved = |it: &&String| it.ends_with("SaveCode");
        daemon.events().iter().find(saved).map(drop)
    });
    assert!(!daemon.events().iter().any(|it| it.ends_with("Open")));

    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    for client in [&one, &two, &stranger] {
        assert_eq!(daemon.state_of(client.pid).unwrap(), "running");
    }
    let image = Image::open(dir.path()).unwrap();
    assert!(image.verify(|_| ()).problems.is_empty());
    let manifest = image.manifest();
    assert_eq!(manifest.protocol, Protocol::Stop);
    let sockets: Vec<_> = manifest.clients.iter().map(|it| it.socket_ids[0]).collect();
    assert_eq!(sockets.len(), 3);
    for (command, pid, id) in [("one", one.pid, 20), ("stranger", stranger.pid, 22)] {
        let found = manifest.clients.iter().find(|it| it.command == command);
        let found = found.unwrap();
        assert_eq!((found.pid as i32, &found.socket_ids), (pid, &vec![id]));
        assert_eq!(found.namespace_pid as i32, pid);
        assert_eq!(found.socket_path, daemon.socket());
    }
    // Code that all clients have is stored once.
    assert_eq!(manifest.code.len(), 1);
    assert_eq!(image.read_code(manifest.code[0].hash).unwrap(), CODE);
    assert_eq!(manifest.host.gpus[0].compute_major, 9);
    assert_eq!(manifest.host.driver_version, "CUDA 13.0");
    let phases: Vec<_> = manifest.phases.iter().map(|it| it.name).collect();
    for phase in [PhaseName::Quiesce, PhaseName::Freeze, PhaseName::Copy, PhaseName::Write, PhaseName::Stall] {
        assert!(phases.contains(&phase), "{phase:?}");
    }
    drop(session);
    drop(stranger);
    one.kill();
    two.kill();
}

#[test]
fn a_dump_that_kills_keeps_rings_closed_until_criu_is_gone() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    let session = begin(&daemon, dir.path(), client.pid, false, &[client.pid]);
    let pid = client.pid;
    assert!(ours(&session.ask(&Request::Frozen { pid })));
    let cookie = client.cookie();
    assert!(ours(&session.ask(&Request::Socket { id: 5, cookie })));
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    assert_eq!(daemon.state_of(client.pid).unwrap(), "saving");
    assert!(!daemon.events().contains(&"app Open".to_owned()));
    // A post-dump script failed, so CRIU lets the tasks go on after all.
    drop(session);
    daemon.wait_for_event("app Open");
    daemon.wait_for_state(&client, Some("running"));
    Image::open(dir.path()).unwrap();
}

#[test]
fn a_tree_without_clients_is_none_of_ours_and_an_older_image_goes() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    dump(&daemon, dir.path(), &mut client);
    client.kill();
    std::fs::write(dir.path().join("core-1.img"), "CRIU's").unwrap();
    let other = Client::start(&daemon);
    let session = begin(&daemon, dir.path(), other.pid, true, &[]);
    let pid = other.pid;
    assert!(!ours(&session.ask(&Request::Frozen { pid })));
    let (id, cookie) = (1, 2);
    assert!(!ours(&session.ask(&Request::Socket { id, cookie })));
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_dump_into_the_directory_of_another_takes_its_place() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut one = Client::attached(&daemon, "one");
    dump(&daemon, dir.path(), &mut one);
    let mut two = Client::attached(&daemon, "two");
    dump(&daemon, dir.path(), &mut two);
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().clients[0].command, "two");
}

#[test]
fn a_connection_that_closes_gives_the_dump_up() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "slow-save");
    let pid = client.pid;
    let cookie = client.cookie();
    let steps: [&dyn Fn(&Session); 4] = [
        &|_| (),
        &|it| assert!(ours(&it.ask(&Request::Frozen { pid }))),
        &|it| assert!(ours(&it.ask(&Request::Socket { id: 5, cookie }))),
        &|it| it.tell(&Request::Finish),
    ];
    for count in 1..=steps.len() {
        let session = begin(&daemon, dir.path(), pid, true, &[pid]);
        steps[..count].iter().for_each(|step| step(&session));
        if count > 1 {
            daemon.wait_for_event("slow-save Save Stop");
        }
        drop(session);
        daemon.wait_for_state(&client, Some("running"));
        eventually("the image is removed", || is_empty(dir.path()).then_some(()));
        let count = |event: &str| daemon.events().iter().filter(|it| *it == event).count();
        assert_eq!(count("slow-save Open"), count("slow-save Quiesce"));
    }
    daemon.wait_for_event("slow-save Cancel");
    // The next dump is complete.
    std::fs::write(daemon.dir.path().join("save-now"), "").unwrap();
    dump(&daemon, dir.path(), &mut client);
    Image::open(dir.path()).unwrap();
}

#[test]
fn one_that_does_not_come_to_rest_fails_the_dump_by_name() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let good = Client::attached(&daemon, "good");
    let busy = Client::attached(&daemon, "busy");
    let root = std::process::id() as i32;
    let (session, reply) = Session::open(&daemon, &pause(root, true), dir.path());
    let reason = reason(reply);
    assert!(reason.contains(&format!("process {} (busy)", busy.pid)), "{reason}");
    assert!(reason.contains("kernel spin"), "{reason}");
    daemon.wait_for_event("good Open");
    daemon.wait_for_state(&good, Some("running"));
    daemon.wait_for_state(&busy, Some("running"));
    drop(session);
    assert!(is_empty(dir.path()));
}

/// The worker is in a call of the driver for longer than the daemon waits for a device at a time.
#[test]
fn one_that_answers_within_the_configured_limit_is_waited_for() {
    let daemon = Daemon::start_with(&[("config.toml", "quiesce_timeout_ms = 60000\n")]);
    let dir = TempDir::new().unwrap();
    let slow = Client::attached(&daemon, "slow-quiesce");
    begin(&daemon, dir.path(), slow.pid, true, &[slow.pid]);
}

#[test]
fn one_whose_worker_is_stopped_fails_the_dump_by_the_configured_limit_and_says_so() {
    let daemon = Daemon::start_with(&[("config.toml", "quiesce_timeout_ms = 300\n")]);
    let dir = TempDir::new().unwrap();
    let client = Client::attached(&daemon, "app");
    let worker = daemon.clients()[0].worker;
    let signal = |signal| {
        // SAFETY: no memory is concerned; the worker is the daemon's, which lives.
        assert_eq!(unsafe { libc::kill(worker, signal) }, 0);
    };
    signal(libc::SIGSTOP);
    // The thread that serves the daemon runs on until another of its threads has taken the signal.
    eventually("all threads of the worker are stopped", || {
        let threads = std::fs::read_dir(format!("/proc/{worker}/task")).unwrap();
        let stat = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat")).unwrap();
        let stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|it| it.starts_with('T'));
        threads.map(|it| it.unwrap()).all(|it| stopped(stat(it))).then_some(())
    });
    let (_session, reply) = Session::open(&daemon, &pause(client.pid, true), dir.path());
    signal(libc::SIGCONT);
    let reason = reason(reply);
    let expected =
        format!("process {} (app) cannot be saved: its worker did not answer Describe within 300 ms", client.pid);
    assert!(reason.contains(&expected) && reason.contains("it is stopped"), "{reason}");
    daemon.wait_for_state(&client, Some("running"));
    eventually("it can be dumped again", || {
        let (_session, reply) = Session::open(&daemon, &pause(client.pid, true), dir.path());
        matches!(reply, Reply::Paused { .. }).then_some(())
    });
}

#[test]
fn one_that_says_nothing_fails_the_dump_and_goes_on_when_it_does() {
    let daemon = Daemon::start_with(&[("config.toml", "quiesce_timeout_ms = 500\n")]);
    let dir = TempDir::new().unwrap();
    let slow = Client::attached(&daemon, "slow-quiesce");
    let (_session, reply) = Session::open(&daemon, &pause(slow.pid, true), dir.path());
    let reason = reason(reply);
    assert!(
        reason.contains("did not answer Quiesce within 500 ms (quiesce_timeout_ms)")
            && reason.contains("in a call of the driver"),
        "{reason}"
    );
    daemon.wait_for_event("slow-quiesce Open");
    daemon.wait_for_state(&slow, Some("running"));
}

#[test]
fn a_worker_that_fails_or_dies_fails_the_dump_and_the_others_go_on() {
    for bad in ["fails-save", "dies-on-save"] {
        let daemon = Daemon::start();
        let dir = TempDir::new().unwrap();
        let good = Client::attached(&daemon, "slow-save");
        let client = Client::attached(&daemon, bad);
        let root = std::process::id() as i32;
        let session = begin(&daemon, dir.path(), root, true, &[good.pid, client.pid]);
        let pid = good.pid;
        assert!(ours(&session.ask(&Request::Frozen { pid })));
        daemon.wait_for_event("slow-save Cancel");
        let pid = client.pid;
        let text = reason(session.ask(&Request::Frozen { pid }));
        assert!(text.contains(&format!("({bad}) cannot be saved")), "{text}");
        if bad == "fails-save" {
            assert!(text.contains("0x2000 failed: 700"), "{text}");
        }
        // This comes before CRIU's next step.
        daemon.wait_for_event("slow-save Open");
        daemon.wait_for_state(&good, Some("running"));
        eventually("the image is removed", || is_empty(dir.path()).then_some(()));
        assert!(reason(session.ask(&Request::Finish)).contains("failed already"));
    }
}

#[test]
fn a_connection_that_criu_did_not_see_fails_the_dump() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let client = Client::attached(&daemon, "app");
    let session = begin(&daemon, dir.path(), client.pid, true, &[client.pid]);
    let pid = client.pid;
    assert!(ours(&session.ask(&Request::Frozen { pid })));
    let reason = reason(session.ask(&Request::Finish));
    assert!(reason.contains("has not dumped the connection"), "{reason}");
    eventually("the image is removed", || is_empty(dir.path()).then_some(()));
    daemon.wait_for_state(&client, Some("running"));
}

#[test]
fn what_does_not_fit_is_refused_before_anything_stops() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let client = Client::attached(&daemon, "huge");
    let (_session, reply) = Session::open(&daemon, &pause(client.pid, true), dir.path());
    let reason = reason(reply);
    assert!(reason.contains("1152921504606846976 bytes"), "{reason}");
    assert!(!daemon.events().contains(&"huge Quiesce".to_owned()));
}

#[test]
fn what_builds_on_another_image_may_be_small_enough() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
    std::fs::create_dir_all(&first).unwrap();
    std::fs::create_dir_all(&second).unwrap();
    std::os::unix::fs::symlink("../first", second.join("rekindle-parent")).unwrap();
    let huge = Client::attached(&daemon, "huge");
    let refused = |dir: &Path| {
        let (_, reply) = Session::open(&daemon, &pause(huge.pid, true), dir);
        matches!(reply, Reply::Failed(failure) if failure.kind == FailureKind::NoSpace)
    };
    assert!(refused(&second));
    let mut client = Client::attached(&daemon, "app");
    let session = begin(&daemon, &first, client.pid, true, &[client.pid]);
    assert!(ours(&session.ask(&Request::Frozen { pid: client.pid })));
    let cookie = client.cookie();
    assert!(ours(&session.ask(&Request::Socket { id: 5, cookie })));
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    assert!(!refused(&second));
    daemon.wait_for_state(&huge, Some("running"));
    assert!(refused(&first));
}

#[test]
fn a_dump_into_what_its_base_builds_on_fails_before_anything_stops() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
    for (dir, other) in [(&first, "../second"), (&second, "../first")] {
        std::fs::create_dir_all(dir).unwrap();
        std::os::unix::fs::symlink(other, dir.join("rekindle-parent")).unwrap();
    }
    let mut client = Client::attached(&daemon, "app");
    for dir in [&first, &second] {
        dump(&daemon, dir, &mut client);
        daemon.wait_for_state(&client, Some("running"));
    }
    assert_eq!(Image::open(&second).unwrap().depth(), 1);
    let quiesced = || daemon.events().iter().filter(|it| *it == "app Quiesce").count();
    let before = quiesced();
    let text = reason(Session::open(&daemon, &pause(client.pid, true), &first).1);
    assert!(text.contains(&format!("rekindle flatten {}", second.display())), "{text}");
    assert_eq!((quiesced(), daemon.state_of(client.pid).as_deref()), (before, Some("running")));
    assert!(Image::open(&second).unwrap().verify(|_| ()).is_good());
    // As it says.
    rekindle_images::flatten_in_place(&second).unwrap();
    dump(&daemon, &first, &mut client);
    for (dir, depth) in [(&second, 0), (&first, 1)] {
        let image = Image::open(dir).unwrap();
        assert!(image.depth() == depth && image.verify(|_| ()).is_good());
    }
}

#[test]
fn two_dumps_of_one_tree_do_not_mix() {
    let daemon = Daemon::start();
    let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let client = Client::attached(&daemon, "app");
    let session = begin(&daemon, dir.path(), client.pid, true, &[client.pid]);
    let (_second, reply) = Session::open(&daemon, &pause(client.pid, true), other.path());
    assert!(reason(reply).contains("is being dumped"));
    let pid = client.pid;
    assert!(ours(&session.ask(&Request::Frozen { pid })));
}

/// The first dump is copying memory while its clients run, and the second must not touch any of it.
#[test]
fn a_dump_of_a_tree_that_has_a_process_in_common_with_another_is_refused_and_the_other_goes_on() {
    let daemon = Daemon::start_with(&[("config.toml", "[checkpoint]\nprotocol = \"recopy\"\n")]);
    let mut one = Client::attached(&daemon, "one");
    let mut two = Client::attached(&daemon, "two");
    let root = std::process::id() as i32;
    let all = [one.pid, two.pid];
    for (first, clients, second) in [(root, &all[..], one.pid), (one.pid, &all[..1], root)] {
        let (dir, other) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let session = begin(&daemon, dir.path(), first, true, clients);
        let text = reason(Session::open(&daemon, &pause(second, true), other.path()).1);
        assert!(
            text.contains(&format!("process {second} is being dumped already, with the tree of process {first}")),
            "{text}"
        );
        assert!(is_empty(other.path()));
        for &pid in clients {
            assert!(ours(&session.ask(&Request::Frozen { pid })));
        }
        for (id, client) in (20..).zip([&mut one, &mut two].into_iter().take(clients.len())) {
            let cookie = client.cookie();
            assert!(ours(&session.ask(&Request::Socket { id, cookie })));
        }
        assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    }
}

#[test]
fn a_process_that_attaches_during_a_dump_waits() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    let mut late = Client::start(&daemon);
    let root = std::process::id() as i32;
    let session = begin(&daemon, dir.path(), root, true, &[client.pid]);
    late.tell("attach late");
    std::thread::sleep(std::time::Duration::from_millis(300));
    assert_eq!(daemon.state_of(late.pid), None);
    let pid = client.pid;
    assert!(ours(&session.ask(&Request::Frozen { pid })));
    let cookie = client.cookie();
    assert!(ours(&session.ask(&Request::Socket { id: 5, cookie })));
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    drop(session);
    assert_eq!(late.hear(), "attached");
}

#[test]
fn a_handshake_that_was_frozen_is_noted_and_goes_on() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    // A process that has connected and not said why.
    let mut silent = Client::start(&daemon);
    assert_eq!(silent.ask("connect"), "connected");
    let root = std::process::id() as i32;
    let both = [client.pid, silent.pid];
    eventually("it is noticed", || {
        let (_session, reply) = Session::open(&daemon, &pause(root, true), dir.path());
        matches!(reply, Reply::Paused { pids } if pids.len() == 2).then_some(())
    });
    daemon.wait_for_state(&client, Some("running"));
    let session = begin(&daemon, dir.path(), root, true, &both);
    for pid in both {
        assert!(ours(&session.ask(&Request::Frozen { pid })));
    }
    for (id, cookie) in [(7, client.cookie()), (8, silent.cookie())] {
        assert!(ours(&session.ask(&Request::Socket { id, cookie })));
    }
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    drop(session);
    let image = Image::open(dir.path()).unwrap();
    let record = image.client(1).unwrap();
    assert_eq!((record.pid as i32, record.ring.size), (silent.pid, 0));
    assert_eq!(record.socket_ids, [8]);
    assert_eq!(silent.ask("attach silent"), "attached");
}

#[test]
fn a_daemon_that_stops_gives_dumps_up() {
    let mut daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let client = Client::attached(&daemon, "slow-save");
    let session = begin(&daemon, dir.path(), client.pid, true, &[client.pid]);
    let pid = client.pid;
    assert!(ours(&session.ask(&Request::Frozen { pid })));
    daemon.wait_for_event("slow-save Save Stop");
    daemon.kill(libc::SIGTERM);
    assert!(daemon.wait_for_exit().success());
    assert!(is_empty(dir.path()));
    daemon.start_again();
    daemon.wait_for_state(&client, Some("running"));
}

#[test]
fn what_has_gone_on_while_the_daemon_was_silent_is_not_in_an_image() {
    for leave_running in [true, false] {
        let daemon = Daemon::start();
        let dir = TempDir::new().unwrap();
        let mut client = Client::attached(&daemon, "went-on");
        let session = begin(&daemon, dir.path(), client.pid, leave_running, &[client.pid]);
        let pid = client.pid;
        assert!(ours(&session.ask(&Request::Frozen { pid })));
        let cookie = client.cookie();
        assert!(ours(&session.ask(&Request::Socket { id: 5, cookie })));
        let why = reason(session.ask(&Request::Finish));
        assert!(why.contains("it has gone on by itself"), "{why}");
        eventually("the image is removed", || is_empty(dir.path()).then_some(()));
        daemon.wait_for_state(&client, Some("running"));
    }
}

fn progress(order: &Session) -> Option<DumpInfo> {
    match order.ask(&Request::Progress) {
        Reply::Progress(info) => info,
        other => panic!("{other:?}"),
    }
}

/// Makes an order, as a command that has CRIU dump a tree does.
fn order(daemon: &Daemon, root: i32, protocol: Option<&str>) -> Session {
    let protocol = protocol.map(str::to_owned);
    let (order, reply) =
        Session::open(daemon, &Request::Checkpoint { root, protocol, moment_ms: None, span: None }, Path::new("/"));
    assert_eq!(reply, Reply::Awaited);
    order
}

#[test]
fn who_has_a_dump_made_says_how_and_hears_what_becomes_of_it() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    let bad = Client::attached(&daemon, "fails-save");
    let protocol = |pid: i32| {
        let found = daemon.clients().into_iter().find(|it| it.pid == pid).unwrap();
        (found.protocol, found.protocol_reason)
    };
    let said = order(&daemon, client.pid, Some("stop"));
    assert_eq!(progress(&said), None);
    assert_eq!(protocol(client.pid).0, "stop");
    assert_eq!(protocol(bad.pid).0, "auto", "it is in another tree");
    let session = begin(&daemon, dir.path(), client.pid, true, &[client.pid]);
    let info = progress(&said).unwrap();
    assert_eq!((info.phase.as_str(), info.bytes, &info.outcome), ("freeze", 4096, &None));
    let listed = daemon.clients().into_iter().find(|it| it.pid == client.pid).unwrap().dump.unwrap();
    assert_eq!((listed.phase, listed.bytes), (info.phase, info.bytes));
    assert!(ours(&session.ask(&Request::Frozen { pid: client.pid })));
    let cookie = client.cookie();
    assert!(ours(&session.ask(&Request::Socket { id: 5, cookie })));
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    drop(session);
    let info = progress(&said).unwrap();
    let Some(DumpOutcome::Durable { protocol: by, protocol_reason, phases, .. }) = info.outcome else {
        panic!("{info:?}")
    };
    assert_eq!((info.done, by.as_str()), (4096, "stop"));
    assert_eq!(protocol_reason, "stop asked for by `rekindle checkpoint`");
    assert!(phases.iter().any(|it| it.name == "stall"), "{phases:?}");
    assert_eq!(Image::open(dir.path()).unwrap().manifest().protocol_reason, protocol_reason);
    // An order, with its options, ends with its connection.
    drop(said);
    eventually("the order is over", || (protocol(client.pid).0 == "auto").then_some(()));

    let said = order(&daemon, bad.pid, None);
    let other = TempDir::new().unwrap();
    let session = begin(&daemon, other.path(), bad.pid, true, &[bad.pid]);
    session.ask(&Request::Frozen { pid: bad.pid });
    let why = eventually("it fails", || match session.ask(&Request::Frozen { pid: bad.pid }) {
        Reply::Failed(failure) => Some(failure),
        _ => None,
    });
    assert_eq!(progress(&said).unwrap().outcome, Some(DumpOutcome::Failed(why)));
    // So does an order whose dump CRIU gives up.
    drop(session);
    let session = begin(&daemon, other.path(), client.pid, true, &[client.pid]);
    let said = order(&daemon, client.pid, None);
    assert_eq!(progress(&said), None, "it has begun before");
    drop(session);
    daemon.wait_for_state(&client, Some("running"));
    let session = begin(&daemon, other.path(), client.pid, true, &[client.pid]);
    drop(session);
    let outcome = eventually("it is over", || progress(&said).and_then(|it| it.outcome));
    assert!(matches!(outcome, DumpOutcome::Failed(failure) if failure.kind == FailureKind::GivenUp));
    for (root, protocol) in [(i32::MAX, None), (client.pid, Some("cov".to_owned()))] {
        let request = Request::Checkpoint { root, protocol, moment_ms: None, span: None };
        reason(Session::open(&daemon, &request, Path::new("/")).1);
    }
}

#[test]
fn a_dump_waits_for_the_moment_that_its_application_says() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    assert_eq!(client.ask("moment"), "moment false", "nobody waits");
    let waits = |root, moment_ms| {
        let request = Request::Checkpoint { root, protocol: None, moment_ms: Some(moment_ms), span: None };
        let (order, reply) = Session::open(&daemon, &request, Path::new("/"));
        assert_eq!(reply, Reply::Awaited);
        order
    };
    let order = waits(client.pid, 60_000);
    let (daemon_socket, pid, folder) = (daemon.socket(), client.pid, dir.path().to_owned());
    let dump = std::thread::spawn(move || Session::open_at(&daemon_socket, &pause(pid, true), &folder));
    daemon.wait_for_event("app Moment");
    assert_eq!(daemon.state_of(client.pid).unwrap(), "running");
    assert_eq!(progress(&order).unwrap().phase, "moment");
    assert_eq!(client.ask("moment"), "moment true");
    // The application gets its answer when it is at rest.
    assert_ne!(daemon.state_of(client.pid).unwrap(), "running");
    let (session, reply) = dump.join().unwrap();
    assert_eq!(reply, Reply::Paused { pids: vec![client.pid] });
    assert!(daemon.events().iter().any(|it| it == "app no Moment"));
    drop((session, order));
    daemon.wait_for_state(&client, Some("running"));

    // The moment does not come, and the order's command ends.
    let order = waits(client.pid, 1);
    let (_session, reply) = Session::open(&daemon, &pause(client.pid, true), dir.path());
    assert!(reason(reply).contains("rekindle_checkpoint"));
    drop(order);
    // A new client, since the daemon may not have noticed yet that no dump waits for the former one.
    let client = Client::attached(&daemon, "other");
    let order = waits(client.pid, 60_000);
    let (daemon_socket, pid, folder) = (daemon.socket(), client.pid, dir.path().to_owned());
    let dump = std::thread::spawn(move || Session::open_at(&daemon_socket, &pause(pid, true), &folder));
    eventually("it waits", || progress(&order).filter(|it| it.phase == "moment"));
    drop(order);
    assert!(reason(dump.join().unwrap().1).contains("has ended"));
    assert_eq!(daemon.state_of(client.pid).unwrap(), "running");
}
