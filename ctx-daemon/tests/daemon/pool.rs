//! Workers that are slow to become ready, and the limit of such workers.

use std::time::Duration;

use rekindle_wire::control::WorkerKindInfo;

use crate::support::{Client, Daemon, eventually};

fn hanging(daemon: &Daemon) -> String {
    eventually("a worker hangs", || {
        std::fs::read_to_string(daemon.dir.path().join("hanging")).ok().filter(|pid| !pid.is_empty())
    })
}

fn log(daemon: &Daemon) -> String {
    std::fs::read_to_string(daemon.dir.path().join("log")).unwrap()
}

#[test]
fn a_worker_that_hangs_at_its_start_is_said_replaced_and_killed() {
    let config = ("config.toml", "[pool]\nslow_start_ms = 200\nstart_timeout_ms = 3000\n");
    let daemon = Daemon::start_with(&[config, ("hang-once", "")]);
    let worker = hanging(&daemon);
    // The client gets the worker that was started in place of the slow one.
    let client = Client::attached(&daemon, "app");
    assert_ne!(daemon.clients()[0].worker.to_string(), worker);
    eventually("that is said", || log(&daemon).contains("a worker is not ready after 200 ms").then_some(()));
    eventually("it is killed", || (!std::path::Path::new(&format!("/proc/{worker}")).exists()).then_some(()));
    eventually("that is said", || log(&daemon).contains("was not ready after 3000 ms and was killed").then_some(()));
    // Other workers have become ready since.
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    assert_eq!(daemon.status().problem, None);
    drop(client);
}

#[test]
fn where_every_worker_hangs_a_client_hears_of_it_and_the_daemon_says_so() {
    let config = ("config.toml", "[pool]\nslow_start_ms = 100\nstart_timeout_ms = 5000\n");
    let daemon = Daemon::start_with(&[config, ("hang", "")]);
    let mut client = Client::start(&daemon);
    let answer = client.ask("attach app");
    assert!(answer.contains("was not ready after 5000 ms and was killed"), "{answer}");
    let status = daemon.status();
    assert!(status.problem.is_some_and(|it| it.contains("hang")), "no problem");
    std::fs::remove_file(daemon.dir.path().join("hang")).unwrap();
    Client::attached(&daemon, "app");
    eventually("all is well again", || daemon.status().problem.is_none().then_some(()));
    assert_eq!(daemon.status().gpus[0].name, "Fake");
}

#[test]
fn no_more_clients_than_the_configuration_allows() {
    let daemon = Daemon::start_with(&[("config.toml", "[pool]\nmax = 2\n")]);
    assert_eq!(daemon.status().max, Some(2));
    let mut first = Client::attached(&daemon, "app");
    let _second = Client::attached(&daemon, "app");
    let mut third = Client::start(&daemon);
    let answer = third.ask("attach app");
    assert!(answer.starts_with("refused 2 processes use the GPUs already"), "{answer}");
    first.kill();
    daemon.wait_for_state(&first, None);
    let mut third = Client::start(&daemon);
    assert_eq!(third.ask("attach app"), "attached");
}

/// The pids of all workers that have become ready so far.
fn ready(daemon: &Daemon) -> Vec<i32> {
    let log = log(daemon);
    let lines = log.lines().filter(|line| line.contains("a worker is ready"));
    lines.filter_map(|line| line.split_once("worker=")?.1.split(' ').next()?.parse().ok()).collect()
}

#[test]
fn a_kind_that_clients_ask_for_again_is_kept_ready_until_they_no_longer_do() {
    const KIND: &str = "CUDA_DEVICE_MAX_CONNECTIONS=4";
    let daemon = Daemon::start_with(&[("config.toml", "[pool]\nremember_s = 6\n")]);
    let attach = || {
        let mut client = Client::start(&daemon);
        assert_eq!(client.ask(&format!("attach app {KIND}")), "attached");
        client
    };
    let kind = || daemon.status().kinds.into_iter().find(|it| it.kind == KIND);
    let counts = |it: WorkerKindInfo| (it.ready, it.starting, it.kept, it.problem);
    assert!(kind().is_none());
    drop(attach());
    // One burst teaches nothing.
    assert_eq!(kind().map(counts), Some((0, 0, 0, None)));
    eventually("a second burst teaches the pool", || {
        drop(attach());
        std::thread::sleep(Duration::from_millis(300));
        (kind()?.kept == 1).then_some(())
    });
    eventually("a worker of the kind is ready", || (counts(kind()?) == (1, 0, 1, None)).then_some(()));
    let before = ready(&daemon);
    let client = attach();
    let worker = daemon.clients().iter().find(|it| it.pid == client.pid).unwrap().worker;
    assert!(before.contains(&worker), "{worker} was started for its client, after {before:?}");
    drop(client);
    eventually("the kind is forgotten", || (kind().is_none() && daemon.status().spare == 1).then_some(()));
}
