//! Attaching, and death on either side.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use rekindle_wire::attach::{Answer, Attach};
use rekindle_wire::control::{Opening, Request};
use rekindle_wire::frame;
use rekindle_wire::layout::{SHARED_NAME, SHARED_SIZE, STAGING_NAME, STAGING_SIZE};
use rekindle_wire::{CONTROL_VERSION, Dialect, OLDEST_CONTROL};

use crate::support::{Client, Daemon, eventually, memfd};

#[test]
fn a_client_gets_a_worker_and_the_pool_is_filled_again() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "app");
    let clients = daemon.clients();
    let [info] = clients.as_slice() else { panic!("{clients:?}") };
    assert_eq!((info.pid, info.command.as_str(), info.state.as_str()), (client.pid, "app", "running"));
    // A worker that has no time to answer is shown with its last description.
    eventually("what its worker says", || {
        let clients = daemon.clients();
        clients.first().is_some_and(|it| it.commands == 42 && it.device_memory == [4096]).then_some(())
    });
    eventually("a spare worker", || (daemon.status().spare == 1).then_some(()));
    assert_eq!(daemon.status().used, 1);
    assert_eq!(daemon.status().cuda_driver, "/fake/libcuda.so.1");
}

#[test]
fn a_clients_death_frees_its_worker() {
    let daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "app");
    let worker = daemon.clients()[0].worker;
    client.kill();
    daemon.wait_for_state(&client, None);
    daemon.wait_for_event("app client gone");
    eventually("the worker is reaped", || (!std::path::Path::new(&format!("/proc/{worker}")).exists()).then_some(()));
}

#[test]
fn a_workers_death_closes_its_clients_connection() {
    let daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "app");
    let worker = daemon.clients()[0].worker;
    client.tell("wait");
    // SAFETY: a process that this test has caused to be.
    assert_eq!(unsafe { libc::kill(worker, libc::SIGKILL) }, 0);
    assert_eq!(client.hear(), "closed");
    daemon.wait_for_state(&client, None);
}

#[test]
fn an_unsuccessful_adoption_is_told_once() {
    let daemon = Daemon::start();
    let mut client = Client::start(&daemon);
    assert_eq!(client.ask("attach refused"), "refused no memory for staging");
    assert_eq!(client.ask("wait"), "closed");
    let mut client = Client::start(&daemon);
    let answer = client.ask("attach dies-on-adopt");
    assert!(answer.contains("its worker has died"), "{answer}");
    eventually("nobody is left", || daemon.clients().is_empty().then_some(()));
}

#[test]
fn without_a_gpu_a_client_is_refused_with_the_reason() {
    let daemon = Daemon::start_with(&[("no-gpu", "")]);
    let mut client = Client::start(&daemon);
    let answer = client.ask("attach app");
    assert!(answer.starts_with("refused no worker: "), "{answer}");
    assert!(answer.contains("exit status: 9"), "{answer}");
    assert!(answer.contains("/fake/libcuda.so.1"), "{answer}");
    // The GPU works again.
    std::fs::remove_file(daemon.dir.path().join("no-gpu")).unwrap();
    Client::attached(&daemon, "app");
}

#[test]
fn a_workers_own_words_are_the_reason() {
    let daemon = Daemon::start_with(&[("not-ready", "cuInit says 999")]);
    let mut client = Client::start(&daemon);
    let answer = client.ask("attach app");
    assert!(answer.contains("cuInit says 999"), "{answer}");
}

fn attach_with(daemon: &Daemon, change: impl FnOnce(&mut Opening), fds: &[i32]) -> Answer {
    let stream = UnixStream::connect(daemon.socket()).unwrap();
    let request = Request::Attach(Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: 1,
        command: "app".to_owned(),
        socket: "s".to_owned(),
        cookie: 1,
        settings: vec![("CUDA_DEVICE_ORDER".to_owned(), "PCI_BUS_ID".to_owned())],
    });
    let mut opening = Opening::new(&request).unwrap();
    change(&mut opening);
    frame::send(&stream, &opening, &[], fds).unwrap();
    frame::receive(&stream).unwrap().body
}

fn refusal(answer: Answer) -> String {
    match answer {
        Answer::Refused { reason } => reason,
        Answer::Attached(_) => panic!("attached"),
    }
}

#[test]
fn other_versions_are_refused_and_both_are_named() {
    let daemon = Daemon::start();
    let only = |version: u32| move |it: &mut Opening| (it.wire, it.oldest) = (version, version);
    for version in [77, OLDEST_CONTROL - 1] {
        let reason = refusal(attach_with(&daemon, only(version), &[]));
        assert!(reason.contains(&format!("speaks control version {version}")), "{reason}");
        assert!(reason.contains(&format!("speaks {OLDEST_CONTROL} to {CONTROL_VERSION}")), "{reason}");
    }
    // The version decides even if nothing else in the message can be understood.
    let other = serde_json::json!({"Attach": {"new": true}});
    let change = |it: &mut Opening| (it.wire, it.oldest, it.request) = (78, 78, other);
    assert!(refusal(attach_with(&daemon, change, &[])).contains("control version 78"));
    // A newer client that understands this version is let in, and its message is understood as far as this version goes.
    let newer = |it: &mut Opening| {
        it.wire = CONTROL_VERSION + 5;
        it.request["Attach"]["unheard_of"] = serde_json::json!([1]);
    };
    assert!(refusal(attach_with(&daemon, newer, &[])).contains("descriptors came"));
}

#[test]
fn a_client_whose_commands_would_be_read_otherwise_is_refused() {
    let daemon = Daemon::start();
    let with = |change: fn(&mut Dialect)| {
        let mut dialect = Dialect::own();
        change(&mut dialect);
        let said = serde_json::to_value(dialect).unwrap();
        refusal(attach_with(&daemon, |it| it.request["Attach"]["dialect"] = said, &[]))
    };
    assert!(with(|it| it.version += 1).contains("install a newer Rekindle"));
    assert!(with(|it| it.version = 0).contains("use the version of Rekindle that it was built for"));
    let first = |it: &Dialect| it.calls.iter().position(|encoding| *encoding != 0).unwrap();
    assert!(first(&Dialect::own()) > 0);
    let reason = with(|it| {
        let first = it.calls.iter().position(|encoding| *encoding != 0).unwrap();
        it.calls[first] ^= 1;
    });
    assert!(reason.contains(&format!("driver call number {} is not cu", first(&Dialect::own()))), "{reason}");
    // An older client, which has fewer calls, attaches like any other.
    let older = with(|it| {
        it.calls.truncate(600);
        let first = it.calls.iter().position(|encoding| *encoding != 0).unwrap();
        it.calls[first] = 0;
    });
    assert!(older.contains("descriptors came"), "{older}");
}

#[test]
fn memory_that_could_change_its_size_is_refused() {
    let daemon = Daemon::start();
    let ring = memfd(SHARED_NAME, SHARED_SIZE);
    let staging = memfd(STAGING_NAME, STAGING_SIZE);
    let file = tempfile::tempfile().unwrap();
    file.set_len(SHARED_SIZE as u64).unwrap();
    let refused = |fds: &[i32]| refusal(attach_with(&daemon, |_| (), fds));
    assert!(refused(&[file.as_raw_fd(), staging.as_raw_fd()]).contains("not a sealed memfd"));
    assert!(refused(&[staging.as_raw_fd(), ring.as_raw_fd()]).contains("bytes instead of"));
    assert!(refused(&[ring.as_raw_fd()]).contains("1 descriptors came"));
}

#[test]
fn settings_go_to_a_worker_of_its_own_and_only_known_ones() {
    let daemon = Daemon::start();
    let ring = memfd(SHARED_NAME, SHARED_SIZE);
    let staging = memfd(STAGING_NAME, STAGING_SIZE);
    let fds = [ring.as_raw_fd(), staging.as_raw_fd()];
    assert!(matches!(attach_with(&daemon, |_| (), &fds), Answer::Attached(_)));
    let change = |it: &mut Opening| {
        it.request["Attach"]["settings"][0][0] = "LD_PRELOAD".into();
    };
    let reason = refusal(attach_with(&daemon, change, &fds));
    assert!(reason.contains("LD_PRELOAD"), "{reason}");
}

#[test]
fn a_spare_worker_that_dies_is_replaced() {
    let daemon = Daemon::start();
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
    // The worker is a child of the thread that started it as long as that thread exists.
    let first =
        eventually("it is the daemon's child", || std::fs::read_to_string(&children).ok().filter(|it| !it.is_empty()));
    // SAFETY: a process that this test has caused to be.
    assert_eq!(unsafe { libc::kill(first.trim().parse().unwrap(), libc::SIGKILL) }, 0);
    eventually("another", || {
        let now = std::fs::read_to_string(&children).unwrap();
        (daemon.status().spare == 1 && !now.is_empty() && now != first).then_some(())
    });
    Client::attached(&daemon, "app");
}
