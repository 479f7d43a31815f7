//! What is malformed, closed, or without end costs the daemon nothing.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use rekindle_wire::control::{Opening, Request};
use rekindle_wire::frame;

use crate::support::{Client, Daemon, ask, eventually, reason};

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
    // Well-formed, and nonsense: answered, and the descriptors that came with it closed.
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
    // This process is of the daemon's user and namespaces, but brings no client, or one that is not there.
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
        reason(ask(&daemon.door(), &request, fds))
    };
    assert!(rejoin(&[]).contains("must come with the offer"));
    let null = std::fs::File::open("/dev/null").unwrap();
    rejoin(&[null.as_raw_fd()]);
    assert_eq!(daemon.clients(), attached);
}

#[test]
fn each_socket_is_for_what_it_is_for() {
    let daemon = Daemon::start();
    let client = Client::attached(&daemon, "app");
    for request in [Request::List, Request::Status, Request::Restore, Request::Check { pid: client.pid }] {
        assert!(reason(ask(&daemon.door(), &request, &[])).contains("not what this socket is for"));
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
    let door = std::fs::metadata(daemon.door()).unwrap();
    assert_eq!(door.mode() & 0o007, 0);
}

#[test]
fn of_too_many_connections_those_that_say_nothing_are_closed() {
    let daemon = Daemon::start();
    let mut open = Vec::new();
    for _ in 0..1024 {
        open.push(UnixStream::connect(daemon.socket()).unwrap());
    }
    // Who has something to say is served.
    daemon.status();
    Client::attached(&daemon, "app");
    // In the place of one of the first, whose patience would be longer.
    open.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    let start = std::time::Instant::now();
    while !open.iter_mut().any(|stream| stream.read(&mut [0]).is_ok_and(|bytes| bytes == 0)) {
        assert!(start.elapsed() < std::time::Duration::from_secs(5), "none is closed");
        std::thread::yield_now();
    }
}
