//! Malformed, closed and endless connections do not harm the daemon.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::frame;

use crate::support::{Client, Daemon, as_user, ask, eventually, reason};

#[test]
fn malformed_frames_close_their_connection_and_leak_nothing() {
    let daemon = Daemon::start();
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    let before = daemon.descriptors();
    let null = std::fs::File::open("/dev/null").unwrap();
    let frames: [&[u8]; 7] = [
        b"",
        b"\x01",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x05\0\0\0\0\0\0\0{{{{{",
        b"\x02\0\0\0\0\0\0\x40{}",
        b"\x02\0\0\0\0\0\0\0{}",
        b"\0\0\x20\0\0\0\0\0",
    ];
    for bytes in frames {
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    // Well-formed nonsense is answered, and the descriptors that came with it are closed.
    for request in ["Fly", "Finish", "Reattach"] {
        let stream = UnixStream::connect(daemon.socket()).unwrap();
        let mut opening = Opening::new(&Request::Status).unwrap();
        opening.request = request.into();
        frame::send(&stream, &opening, &[], &[null.as_raw_fd(); 200]).unwrap();
        let mut rest = Vec::new();
        let _ = (&stream).read_to_end(&mut rest);
    }
    let reattach = Request::Reattach { restore: 1, socket: 2, cookie: 3 };
    let stream = UnixStream::connect(daemon.socket()).unwrap();
    frame::send(&stream, &Opening::new(&reattach).unwrap(), &[], &[]).unwrap();
    let mut rest = Vec::new();
    (&stream).read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "nothing may be queued to a restored process");
    eventually("everything is closed", || (daemon.descriptors() == before).then_some(()));
    Client::attached(&daemon, "app");
}

#[test]
fn a_strangers_worker_is_not_taken_over() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "app");
    let attached = daemon.clients();
    // This process is of the daemon's user and namespaces, but brings no client, or one that does not exist.
    let rejoin = |fds: &[i32]| {
        let request = Request::Rejoin {
            attach: rekindle_wire::attach::Attach {
                dialect: rekindle_wire::Dialect::own(),
                pid: client.pid,
                command: "app".to_owned(),
                socket: String::new(),
                cookie: 0,
                settings: Vec::new(),
            },
            attached: rekindle_wire::attach::Attached {
                driver_version: 0,
                driver_build: String::new(),
                api_version: 0,
                devices: Vec::new(),
            },
        };
        reason(ask(&daemon.workers_endpoint(), &request, fds))
    };
    assert!(rejoin(&[]).contains("lacks the client's connection"));
    let null = std::fs::File::open("/dev/null").unwrap();
    rejoin(&[null.as_raw_fd()]);
    assert_eq!(daemon.clients(), attached);
}

/// A daemon that replaces the impostor's own refuses it. Returns the reason.
fn impostor_is_refused(daemon: &mut Daemon) -> String {
    daemon.kill(libc::SIGKILL);
    daemon.wait_for_event("impostor daemon gone");
    daemon.start_again();
    let text = eventually("it has had its answer", || {
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        (log.contains("not taken over") || !daemon.clients().is_empty()).then_some(log)
    });
    assert_eq!(daemon.clients(), [], "an impostor is taken for a worker");
    text
}

#[test]
fn a_worker_that_brings_a_connection_to_another_process_is_not_taken_for_that_ones() {
    let mut daemon = Daemon::start();
    let mut victim = Client::start(&daemon);
    assert_eq!(victim.ask(&format!("listen {}", daemon.dir.path().join("victim").display())), "listening");
    let _enemy = Client::attached(&daemon, "impostor");
    let text = impostor_is_refused(&mut daemon);
    assert!(text.contains(&format!("claims to belong to process {}", victim.pid)), "{text}");
}

#[test]
fn a_worker_that_brings_a_connection_of_its_own_making_is_not_taken_over() {
    let mut daemon = Daemon::start();
    let mut enemy = Client::attached(&daemon, "impostor");
    assert_eq!(enemy.ask(&format!("listen {}", daemon.dir.path().join("victim").display())), "listening");
    let text = impostor_is_refused(&mut daemon);
    assert!(text.contains("not its connection with the client"), "{text}");
}

#[test]
fn a_worker_without_a_record_is_not_taken_over() {
    let mut daemon = Daemon::start();
    let _client = Client::attached(&daemon, "app");
    let folder = daemon.dir.path().join("state/workers");
    daemon.kill(libc::SIGKILL);
    daemon.wait_for_event("app daemon gone");
    std::fs::remove_dir_all(&folder).unwrap();
    daemon.start_again();
    eventually("it is refused", || {
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        log.contains("has left no record of").then_some(())
    });
    assert_eq!(daemon.clients(), []);
}

#[test]
fn each_socket_is_for_what_it_is_for() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "app");
    for request in [Request::List, Request::Status, Request::Restore, Request::Check { pid: client.pid }] {
        assert!(reason(ask(&daemon.workers_endpoint(), &request, &[])).contains("not what this socket is for"));
    }
    let attached = rekindle_wire::attach::Attached {
        driver_version: 0,
        driver_build: String::new(),
        api_version: 0,
        devices: Vec::new(),
    };
    let attach = rekindle_wire::attach::Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: client.pid,
        command: "app".to_owned(),
        socket: String::new(),
        cookie: 0,
        settings: Vec::new(),
    };
    let rejoin = Request::Rejoin { attach, attached };
    assert!(reason(ask(&daemon.socket(), &rejoin, &[])).contains("not what this socket is for"));
    use std::os::unix::fs::MetadataExt;
    let endpoint = std::fs::metadata(daemon.workers_endpoint()).unwrap();
    assert_eq!(endpoint.mode() & 0o007, 0);
}

#[test]
fn of_too_many_connections_those_that_say_nothing_are_closed() {
    let daemon = Daemon::start();
    let mut open = Vec::new();
    for _ in 0..1024 {
        open.push(UnixStream::connect(daemon.socket()).unwrap());
    }
    // A peer that has something to say is served.
    daemon.status();
    Client::attached(&daemon, "app");
    // The new connection takes the place of one of the first, which would have waited longer.
    open.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let start = std::time::Instant::now();
    while !open.iter_mut().any(|stream| stream.read(&mut [0]).is_ok_and(|bytes| bytes == 0)) {
        assert!(start.elapsed() < std::time::Duration::from_secs(5), "none is closed");
        std::thread::yield_now();
    }
}

/// A process of a user without special rights.
fn process_of(uid: u32) -> std::process::Child {
    use std::os::unix::process::CommandExt;
    std::process::Command::new("sleep").arg("120").uid(uid).spawn().unwrap()
}

fn open_to_all() -> Daemon {
    let daemon = Daemon::start_with(&[("config.toml", "socket_mode = \"0666\"\n")]);
    std::fs::set_permissions(daemon.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
    daemon
}

#[test]
fn orders_of_one_user_leave_places_for_operators_and_other_users() {
    let daemon = open_to_all();
    let nobody = 65534;
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: not root");
    }
    let mut process = process_of(nobody);
    let order = Request::Checkpoint { root: process.id() as i32, protocol: None, moment_ms: None, span: None };
    let socket = daemon.socket();
    let open = || {
        let stream = UnixStream::connect(&socket).ok()?;
        frame::send(&stream, &Opening::new(&order).ok()?, &[], &[]).ok()?;
        let reply = frame::receive::<Reply>(&stream).ok()?.body;
        Some((stream, reply))
    };
    let held = as_user(nobody, || (0..1100).filter_map(|_| open()).collect::<Vec<_>>()).unwrap();
    let awaited = held.iter().filter(|(_, reply)| *reply == Reply::Awaited).count();
    daemon.status();
    let listed = as_user(65533, || ask(&daemon.socket(), &Request::List, &[])).unwrap();
    assert_eq!(listed, Reply::Clients(Vec::new()));
    assert_eq!(awaited, 16);
    // The sessions end with their connections.
    drop(held);
    eventually("another is accepted", || {
        let (_, reply) = as_user(nobody, open).unwrap()?;
        (reply == Reply::Awaited).then_some(())
    });
    process.kill().unwrap();
    process.wait().unwrap();
}

#[test]
fn a_users_order_does_not_hold_an_operators_dump() {
    let daemon = open_to_all();
    let nobody = 65534;
    // SAFETY: always succeeds.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("skipped: not root");
    }
    let mut process = process_of(nobody);
    let root = process.id() as i32;
    let order = |moment_ms| Request::Checkpoint { root, protocol: None, moment_ms: Some(moment_ms), span: None };
    let (order_of_user, huge) = (order(1 << 40), order(u64::MAX));
    let (_held, reply) = as_user(nobody, || {
        let stream = UnixStream::connect(daemon.socket()).unwrap();
        frame::send(&stream, &Opening::new(&order_of_user).unwrap(), &[], &[]).unwrap();
        let reply = frame::receive::<Reply>(&stream).unwrap().body;
        (stream, reply)
    })
    .unwrap();
    // The dump does not wait for the other user's order.
    let dir = tempfile::tempdir().unwrap();
    let (_session, paused) = crate::support::Session::open(&daemon, &crate::dump::pause(root, true), dir.path());
    assert_eq!(paused, Reply::Paused { pids: Vec::new() });
    assert!(reason(reply).contains("only root"));
    // A wait without an end is not possible either.
    assert!(reason(ask(&daemon.socket(), &huge, &[])).contains("86400 s at most"));
    process.kill().unwrap();
    process.wait().unwrap();
}
