//! Both ends in one process, with scripts in the place of this program.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustls::pki_types::ServerName;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConnection};
use tempfile::TempDir;

use super::authority::Authority;
use super::carry::Carrier;
use super::connect;
use super::frames::{Kind, WINDOW};
use super::keys::Keys;
use super::listen;
use super::secured::{Lost, Secured};
use super::words::Programs;

const HOST: &str = "127.0.0.1";

/// A host that listens, and runs a script.
struct Host {
    dir: TempDir,
    address: SocketAddr,
}

impl Host {
    fn new(dir: TempDir, script: &str) -> Self {
        let program = dir.path().join("program");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o700)).unwrap();
        let programs = Programs { rekindle: program, dir: Some("/d".into()), podman: "/p".into(), socket: "/s".into() };
        fs::write(dir.path().join("peers"), "gpu1\n").unwrap();
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let keys = Keys::of(dir.path());
        std::thread::spawn(move || listen::accept(&listener, &keys, &programs));
        Self { dir, address }
    }

    fn open(&self, dir: &TempDir, words: &str) -> Result<Secured, String> {
        connect::open(&Keys::of(dir.path()), &self.address.to_string(), words.as_bytes()).map_err(|it| it.to_string())
    }

    /// Says this to the script. What it answers, its errors and its status.
    fn tell(&self, dir: &TempDir, said: &[u8]) -> (Vec<u8>, String, u8) {
        let connection = self.open(dir, "migrate").unwrap();
        let [(input, to), (from, output), (errors, of_errors)] = [(); 3].map(|()| io::pipe().unwrap());
        let (mut to, mut from, mut errors) = (to, from, errors);
        let carrier = Carrier::of_caller(connection, input.into(), OwnedFd::from(output), of_errors.into());
        std::thread::scope(|scope| {
            let carrying = scope.spawn(move || carrier.until_status());
            scope.spawn(move || {
                let _ = to.write_all(said);
            });
            let (mut heard, mut text) = (Vec::new(), String::new());
            from.read_to_end(&mut heard).unwrap();
            let status = carrying.join().unwrap().unwrap();
            errors.read_to_string(&mut text).unwrap();
            (heard, text, status)
        })
    }
}

/// Two hosts of one authority.
fn hosts(script: &str) -> (Authority, Host, TempDir) {
    let authority = Authority::new();
    let (host, client) = (Host::new(authority.host(HOST), script), authority.host("gpu1"));
    (authority, host, client)
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_program_is_run_with_the_words_of_its_host_and_what_it_says_comes_back() {
    let (_authority, host, client) = hosts("echo \"$@\" >&2; read -r line; echo \"$line!\"; exit 3");
    let (heard, errors, status) = host.tell(&client, b"hello\n");
    assert_eq!((&*heard, status), (&b"hello!\n"[..], 3));
    assert_eq!(errors, "migrate --receive --dir /d --podman /p --socket /s\n");
}

#[test]
fn any_amount_passes_in_both_directions_at_once() {
    let (_authority, host, client) = hosts("echo ready >&2; exec cat");
    let said: Vec<u8> = (0..3 * WINDOW + 12345).map(|at| (at * 7 / 3) as u8).collect();
    let (heard, errors, status) = host.tell(&client, &said);
    assert!(heard == said, "{} of {}", heard.len(), said.len());
    assert_eq!((&*errors, status), ("ready\n", 0));
}

#[test]
fn a_program_that_does_not_read_and_one_that_is_killed_end_all_the_same() {
    let (_authority, host, client) = hosts("exec 0<&-; echo done; exit 0");
    assert_eq!(host.tell(&client, &vec![1; 2 * WINDOW]).0, b"done\n");
    let (_authority, host, client) = hosts("kill -KILL $$");
    assert_eq!(host.tell(&client, b"").2, 128 + 9);
}

/// Processes that are restored may have their restorer's pipes.
#[test]
fn nobody_waits_for_processes_that_a_program_has_left() {
    let (_authority, host, client) = hosts("sleep 1000 & echo $!; exit 4");
    let (heard, _, status) = host.tell(&client, b"");
    let left = String::from_utf8(heard).unwrap();
    let killed = std::process::Command::new("kill").arg(left.trim()).status().unwrap();
    assert!(killed.success(), "it lives");
    assert_eq!(status, 4);
}

#[test]
fn a_program_hears_that_its_caller_is_lost_and_lives() {
    let dir = tempfile::tempdir().unwrap();
    let (began, over) = (dir.path().join("began"), dir.path().join("over"));
    let script =
        format!("touch {}; cat >/dev/null; echo to nobody; echo >&2; touch {}", began.display(), over.display());
    let (_authority, host, client) = hosts(&script);
    let connection = host.open(&client, "migrate").unwrap();
    until("it runs", || began.exists());
    assert!(!over.exists());
    drop(connection);
    until("it has heard the end, and nothing has killed it", || over.exists());
}

#[test]
fn only_the_two_words_are_run() {
    let (_authority, host, client) = hosts("touch \"$0.ran\"");
    for words in ["migrate\0--podman\0/tmp/x", "sh", "", "/bin/true"] {
        let said = host.open(&client, words).err().unwrap();
        assert!(said.contains("nothing else") && said.contains("refuses"), "{said}");
    }
    assert!(!host.dir.path().join("program.ran").exists());
    assert_eq!(host.tell(&client, b"").2, 0);
    assert!(host.dir.path().join("program.ran").exists());
}

#[test]
fn who_is_not_let_in_hears_it_and_nothing_is_run_for_them() {
    let (authority, host, client) = hosts("touch \"$0.ran\"");
    let refused = |dir: &TempDir| host.open(dir, "migrate").err().unwrap();
    // Another authority, which believes in this one.
    let other = Authority::new().host("gpu1");
    authority.is_believed_in(other.path());
    let said = refused(&other);
    assert!(said.contains("does not accept this host's certificate"), "{said}");
    let said = refused(&authority.host_of_old("gpu1"));
    assert!(said.contains("expired") || said.contains("Expired"), "{said}");
    // Not in the list, which is read anew each time.
    let peers = host.dir.path().join("peers");
    fs::write(&peers, "gpu2\n").unwrap();
    let said = refused(&client);
    assert!(said.contains("peers"), "{said}");
    // Nor without a list.
    fs::remove_file(&peers).unwrap();
    let said = refused(&client);
    assert!(said.contains("says why"), "{said}");
    fs::write(&peers, "gpu2\ngpu1\n").unwrap();
    assert!(!host.dir.path().join("program.ran").exists());
    assert_eq!(host.tell(&client, b"").2, 0);
}

#[test]
fn a_host_must_be_who_it_is_called() {
    let authority = Authority::new();
    let client = authority.host("gpu1");
    let refused = |host: TempDir| Host::new(host, "").open(&client, "migrate").err().unwrap();
    let said = refused(authority.host("gpu2"));
    assert!(said.contains("not valid for name") && said.contains("127.0.0.1"), "{said}");
    let said = refused(authority.host_of_old(HOST));
    assert!(said.contains("expired"), "{said}");
    let other = Authority::new().host(HOST);
    authority.is_believed_in(other.path());
    let said = refused(other);
    assert!(said.contains("ca.pem"), "{said}");
    // Its key is not safe: it says nothing, and its log why.
    let host = authority.host(HOST);
    fs::set_permissions(host.path().join("key.pem"), Permissions::from_mode(0o644)).unwrap();
    let said = refused(host);
    assert!(said.contains("says why"), "{said}");
}

/// What a client is told that shows no certificate, or speaks an older TLS.
fn handshake(host: &Host, client: &TempDir, version: &'static rustls::SupportedProtocolVersion) -> Result<(), Lost> {
    let mut roots = RootCertStore::empty();
    roots.add(rustls::pki_types::CertificateDer::from_pem_file(client.path().join("ca.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_protocol_versions(&[version]).unwrap().with_root_certificates(roots).with_no_client_auth();
    let tls = ClientConnection::new(Arc::new(config), ServerName::try_from(HOST).unwrap()).unwrap();
    let mut connection = Secured::new(TcpStream::connect(host.address).unwrap(), tls).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    connection.shake_hands(deadline)?;
    connection.say(Kind::Ask, b"migrate")?;
    connection.hear(deadline).map(drop)
}

#[test]
fn without_a_certificate_or_with_an_older_tls_nobody_is_let_in() {
    let (_authority, host, client) = hosts("");
    let said = handshake(&host, &client, &rustls::version::TLS13).unwrap_err().to_string();
    assert!(said.contains("CertificateRequired"), "{said}");
    let said = handshake(&host, &client, &rustls::version::TLS12).unwrap_err().to_string();
    assert!(said.contains("ProtocolVersion"), "{said}");
}

#[test]
fn who_speaks_another_version_hears_that_and_not_that_its_certificate_is_bad() {
    let authority = Authority::new();
    let (host, client) = (authority.host(HOST), authority.host("gpu1"));
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut config = (*Keys::of(host.path()).server().unwrap()).clone();
    config.alpn_protocols = vec![b"rekindle/0".to_vec()];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let tls = ServerConnection::new(Arc::new(config)).unwrap();
            let mut connection = Secured::new(listener.accept().unwrap().0, tls).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            connection.shake_hands(deadline).unwrap_err();
            connection.close(deadline);
        });
        let said = connect::open(&Keys::of(client.path()), &address, b"migrate").map(drop).unwrap_err().to_string();
        assert!(said.contains("one version of Rekindle on both hosts") && !said.contains("certificate"), "{said}");
    });
}

#[test]
fn who_reaches_nobody_hears_what_to_start() {
    let client = Authority::new().host("gpu1");
    let nobody = TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap().to_string();
    let said = connect::open(&Keys::of(client.path()), &nobody, b"migrate").map(drop).unwrap_err().to_string();
    assert!(said.contains("rekindle tls listen") && said.contains("firewall"), "{said}");
}

#[test]
fn what_is_no_tls_is_closed_and_who_says_nothing_keeps_nobody_out() {
    let (_authority, host, client) = hosts("");
    // As many as may wait, and more, all from one address as these tests are. They are there before the others come.
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(host.address).unwrap()).collect();
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], &[0x16, 3, 1, 0xff, 0xff], &[0x16, 3, 1, 0, 1, 1]] {
        let mut socket = TcpStream::connect(host.address).unwrap();
        let _ = socket.write_all(garbage);
        socket.shutdown(Shutdown::Write).unwrap();
        // An alert at most.
        let mut said = Vec::new();
        let _ = socket.read_to_end(&mut said);
        assert!(said.len() < 100, "{said:?}");
    }
    assert_eq!(host.tell(&client, b"").2, 0);
    drop(silent);
}

#[test]
fn who_takes_too_long_is_given_up() {
    let authority = Authority::new();
    let (host, client) = (authority.host(HOST), authority.host("gpu1"));
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let tls = || ServerConnection::new(Keys::of(host.path()).server().unwrap()).unwrap();
    // A byte now and then changes nothing.
    other.write_all(&[0x16]).unwrap();
    let mut connection = Secured::new(listener.accept().unwrap().0, tls()).unwrap();
    let soon = || Instant::now() + Duration::from_millis(20);
    assert!(matches!(connection.shake_hands(soon()), Err(Lost::Slow)));
    // Nor does a certificate, without a word behind it.
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut connection = Secured::new(listener.accept().unwrap().0, tls()).unwrap();
    let name = ServerName::try_from(HOST).unwrap();
    let tls = ClientConnection::new(Keys::of(client.path()).client().unwrap(), name).unwrap();
    let mut calling = Secured::new(socket, tls).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let shaking = scope.spawn(|| calling.shake_hands(deadline));
        connection.shake_hands(deadline).unwrap();
        shaking.join().unwrap().unwrap();
    });
    assert!(matches!(connection.hear(soon()), Err(Lost::Slow)));
    drop(calling);
    assert!(matches!(connection.hear(deadline), Err(Lost::Closed | Lost::Io(_))));
}

/// What follows the two words is checked as well: more than was asked for, and frames of the other side.
#[test]
fn a_host_that_breaks_the_rules_is_lost_and_its_program_hears_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let over = dir.path().join("over");
    let is_over = || fs::remove_file(&over).is_ok();
    // It reads nothing until the file `go` is there.
    let go = dir.path().join("go");
    let script =
        format!("while [ ! -e {} ]; do sleep 0.01; done; cat >/dev/null; touch {}", go.display(), over.display());
    let (_authority, host, client) = hosts(&script);
    for kind in [Kind::Status, Kind::Errors, Kind::Ask, Kind::Started, Kind::Refused] {
        fs::write(&go, "").unwrap();
        let mut connection = host.open(&client, "cut").unwrap();
        connection.say(kind, &[]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        assert!(matches!(connection.hear(deadline), Err(Lost::Closed | Lost::Io(_))), "{kind:?}");
        until("its program has heard the end", &is_over);
        fs::remove_file(&go).unwrap();
    }
    let mut connection = host.open(&client, "cut").unwrap();
    let piece = vec![0; super::frames::LONGEST];
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut lost = Ok(());
    while lost.is_ok() {
        assert!(Instant::now() < deadline);
        // No more than the socket takes.
        lost = if connection.is_full() {
            let flags = connection.interest();
            poll(&mut [PollFd::new(&connection, flags)], Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
            connection.flush()
        } else {
            connection.say(Kind::Data, &piece)
        };
        lost = lost.and_then(|()| connection.read().map(drop));
    }
    File::create(&go).unwrap();
    until("its program has heard the end", is_over);
}
