//! The daemon's own life: start, stop, death, replacement by another.

use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use rekindle_wire::control::{ProtocolChange, Reply, Request};

use crate::support::{Client, Daemon, ask, eventually};

fn start_second(daemon: &Daemon) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rekindled"))
        .arg("serve")
        .arg("--socket")
        .arg(daemon.socket())
        .args(["--config", "/dev/null"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), text)
}

#[test]
fn two_daemons_do_not_share_a_socket() {
    let daemon = Daemon::start();
    let (code, text) = start_second(&daemon);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("another rekindled serves"), "{text}");
    assert!(daemon.clients().is_empty());
}

#[test]
fn a_stale_socket_is_replaced_and_a_file_is_not() {
    let mut daemon = Daemon::start();
    daemon.kill(libc::SIGKILL);
    daemon.wait_for_exit();
    assert!(daemon.socket().exists());
    daemon.start_again();
    daemon.kill(libc::SIGTERM);
    assert!(daemon.wait_for_exit().success());
    assert!(!daemon.socket().exists());
    std::fs::write(daemon.socket(), "precious").unwrap();
    let (code, text) = start_second(&daemon);
    assert_eq!(code, Some(1), "{text}");
    assert_eq!(std::fs::read(daemon.socket()).unwrap(), b"precious");
}

/// A process that a daemon was about to start when it was killed has its socket for a moment.
#[test]
fn a_daemon_takes_the_place_of_a_dead_one_whose_socket_somebody_has_inherited() {
    let mut daemon = Daemon::start();
    daemon.kill(libc::SIGKILL);
    daemon.wait_for_exit();
    std::fs::remove_file(daemon.socket()).unwrap();
    let inherited = UnixListener::bind(daemon.socket()).unwrap();
    let heir = std::thread::spawn(move || drop(inherited.accept().unwrap()));
    daemon.start_again();
    heir.join().unwrap();
    assert!(daemon.clients().is_empty());
}

#[test]
fn a_configuration_is_checked_without_a_daemon() {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("its configuration");
    let check = |text: Option<&str>| {
        if let Some(text) = text {
            std::fs::write(&file, text).unwrap();
        }
        let output = Command::new(env!("CARGO_BIN_EXE_rekindled")).arg("check-config").arg(&file).output().unwrap();
        let said = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap());
        (output.status.code(), said)
    };
    let (code, [out, err]) = check(None);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("cannot read the configuration"), "{err}");
    let expected = format!("{}: ok\n", file.display());
    assert_eq!(check(Some("[pool]\nspare = 2\n")), (Some(0), [expected, String::new()]));
    let (code, [out, err]) = check(Some("[pool]\nspare = -2\n"));
    assert_eq!((code, err.as_str()), (Some(3), ""));
    assert!(out.starts_with(&format!("{}:2:9: ", file.display())), "{out}");
    for number in ["0", "16"] {
        let (code, [out, err]) = check(Some(&format!("[gpu]\nvirtual = {number}\n")));
        assert_eq!((code, err.as_str()), (Some(3), ""));
        let expected = format!("{}:2:11: gpu.virtual: \"{number}\" is not between 1 and 15\n", file.display());
        assert_eq!(out, expected);
    }
}

#[test]
fn mistakes_in_the_configuration_are_usage_errors() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_rekindled")).args(["--config", "/nonexistent.toml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("/nonexistent.toml"), "{text}");
}

#[test]
fn the_socket_is_for_its_owner_and_group_unless_configured() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |daemon: &Daemon| {
        let status = std::fs::metadata(daemon.socket()).unwrap();
        status.permissions().mode() & 0o777
    };
    assert_eq!(mode(&Daemon::start()), 0o660);
    let config = ("config.toml", "socket_mode = \"0666\"\n");
    assert_eq!(mode(&Daemon::start_with(&[config])), 0o666);
}

/// An application does not notice that its daemon is replaced, after an orderly end or not.
fn workers_survive(signal: i32) {
    let mut daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "app");
    let worker = daemon.clients()[0].worker;
    let protocol = Request::Protocol { pid: client.pid, change: ProtocolChange::Choose("recopy".to_owned()) };
    assert!(matches!(ask(&daemon.socket(), &protocol, &[]), Reply::Protocol { .. }));
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    daemon.kill(signal);
    daemon.wait_for_event("app daemon gone");
    daemon.start_again();
    daemon.wait_for_state(&client, Some("running"));
    assert_eq!(daemon.clients()[0].protocol, "recopy");
    assert_eq!(daemon.clients()[0].worker, worker);
    daemon.wait_for_event("app Open");
    // The worker that was taken over works like any other.
    client.tell("wait");
    client.kill();
    daemon.wait_for_state(&client, None);
}

#[test]
fn workers_in_use_survive_a_daemon_that_is_stopped() {
    workers_survive(libc::SIGTERM);
}

#[test]
fn workers_in_use_survive_a_daemon_that_is_killed() {
    workers_survive(libc::SIGKILL);
}

#[test]
fn a_worker_that_was_taken_over_and_fails_to_open_its_ring_hears_no_other_answer() {
    let mut daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "app");
    std::fs::write(daemon.dir.path().join("opens-badly"), "").unwrap();
    daemon.kill(libc::SIGKILL);
    daemon.start_again();
    let log = daemon.dir.path().join("log");
    let failed = "taken over, but the worker does not open the ring";
    eventually(failed, || std::fs::read_to_string(&log).unwrap().contains(failed).then_some(()));
    // It takes what comes to it for requests, and a message that is none would end it.
    let protocol = Request::Protocol { pid: client.pid, change: ProtocolChange::Choose("recopy".to_owned()) };
    assert!(matches!(ask(&daemon.socket(), &protocol, &[]), Reply::Protocol { .. }));
    assert_eq!(daemon.clients()[0].commands, 42);
    client.tell("wait");
    client.kill();
    daemon.wait_for_state(&client, None);
}

#[test]
fn spare_workers_end_with_their_daemon() {
    for signal in [libc::SIGTERM, libc::SIGKILL] {
        let mut daemon = Daemon::start();
        eventually("a spare", || (daemon.status().spare == 1).then_some(()));
        let children = format!("/proc/{0}/task/{0}/children", daemon.pid());
        // The worker is a child of the thread that started it as long as that thread exists.
        let worker = eventually("it is the daemon's child", || {
            std::fs::read_to_string(&children).unwrap().split_whitespace().next().map(str::to_owned)
        });
        daemon.kill(signal);
        daemon.wait_for_exit();
        eventually("the spare ends", || {
            let status = std::fs::read_to_string(format!("/proc/{worker}/stat"));
            status.map_or(true, |it| it.contains(") Z ")).then_some(())
        });
    }
}
