//! Tests: what is heard of a connection that is lost.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};

use super::authority::Authority;
use super::carry::Carrier;
use super::frames::{Kind, LONGEST, WINDOW};
use super::keys::Keys;
use super::pipes::Source;
use super::secured::{Lost, Secured};

/// A connection: the end of who calls, and of who listens.
fn connected() -> (Secured, Secured) {
    let authority = Authority::new();
    let (host, client) = (authority.host("gpu2"), authority.host("gpu1"));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let tls = ServerConnection::new(Keys::of(host.path()).server().unwrap()).unwrap();
    let mut there = Secured::new(listener.accept().unwrap().0, tls).unwrap();
    let name = ServerName::try_from("gpu2").unwrap();
    let tls = ClientConnection::new(Keys::of(client.path()).client().unwrap(), name).unwrap();
    let mut here = Secured::new(socket, tls).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        let shaking = scope.spawn(|| here.shake_hands(deadline));
        there.shake_hands(deadline).unwrap();
        shaking.join().unwrap().unwrap();
    });
    (here, there)
}

/// The connection ends: with a word, or without.
fn end(connection: Secured, is_told: bool) {
    if is_told {
        connection.close(Instant::now());
    }
}

/// A shell that runs this, and what carries for it.
fn run(connection: Secured, script: &str) -> (Child, Carrier) {
    let mut command = Command::new("sh");
    command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let program = pidfd_open(Pid::from_raw(child.id() as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let output = Source { from: child.stdout.take().unwrap().into(), kind: Kind::Data };
    let errors = Source { from: child.stderr.take().unwrap().into(), kind: Kind::Errors };
    let input = child.stdin.take().unwrap().into();
    let carrier = Carrier::of_program(connection, program, input, vec![output, errors]).unwrap();
    (child, carrier)
}

#[test]
fn a_program_hears_the_last_word_before_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("heard");
    for is_told in [false, true] {
        let (mut here, there) = connected();
        let (mut child, carrier) = run(there, &format!("exec cat >{}", file.display()));
        here.say(Kind::Data, b"Own").unwrap();
        end(here, is_told);
        let Err((lost, orphan)) = carrier.until_ended() else { panic!("it is lost") };
        assert!(matches!(lost, Lost::Closed | Lost::Io(_)), "{lost}");
        orphan.attend();
        assert!(child.wait().unwrap().success());
        assert_eq!(fs::read(&file).unwrap(), b"Own");
    }
}

/// What reads the last word finds only afterwards that nothing can be said any more: the caller has not read all, so its kernel refuses
/// what comes.
#[test]
fn a_program_hears_the_last_word_if_its_answer_finds_the_loss() {
    let dir = tempfile::tempdir().unwrap();
    let [file, said] = ["heard", "said"].map(|it| dir.path().join(it));
    let (mut here, mut there) = connected();
    there.say(Kind::Started, &[]).unwrap();
    let (mut child, carrier) = run(there, &format!("echo x; touch {}; exec cat >{}", said.display(), file.display()));
    let deadline = Instant::now() + Duration::from_secs(60);
    while !said.exists() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(1));
    }
    here.say(Kind::Data, b"Own").unwrap();
    drop(here);
    let Err((_, orphan)) = carrier.until_ended() else { panic!("it is lost") };
    orphan.attend();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read(&file).unwrap(), b"Own");
}

/// Its pipes are full in both directions by then.
#[test]
fn a_program_that_says_much_first_hears_all_before_a_loss() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("heard");
    let (mut here, there) = connected();
    let (mut child, carrier) = run(there, &format!("head -c {} /dev/zero; exec cat >{}", 2 * WINDOW, file.display()));
    std::thread::scope(|scope| {
        let carrying = scope.spawn(|| carrier.until_ended());
        let (mut said, deadline) = (0, Instant::now() + Duration::from_secs(60));
        // Nothing is passed on here, so it cannot say all.
        while said < WINDOW {
            let more = LONGEST.min(WINDOW - said);
            here.say(Kind::Data, &vec![7; more]).unwrap();
            said += more;
            while here.is_full() {
                assert!(Instant::now() < deadline);
                let flags = here.interest();
                poll(&mut [PollFd::new(&here, flags)], Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
                here.read().unwrap();
                here.flush().unwrap();
            }
        }
        // The kernel discards what is under way if a socket is closed that has not read all.
        here.close(deadline);
        let Err((_, orphan)) = carrying.join().unwrap() else { panic!("it is lost") };
        orphan.attend();
    });
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::metadata(&file).unwrap().len(), WINDOW as u64);
}

#[test]
fn what_a_lost_callers_program_leaves_has_its_pipes_and_nobody_waits_for_it() {
    let (here, there) = connected();
    let dir = tempfile::tempdir().unwrap();
    let left = dir.path().join("left");
    let (mut child, carrier) = run(there, &format!("cat; sleep 1000 & echo $! >{}", left.display()));
    drop(here);
    let Err((_, orphan)) = carrier.until_ended() else { panic!("it is lost") };
    orphan.attend();
    assert!(child.wait().unwrap().success());
    let left = fs::read_to_string(&left).unwrap();
    assert!(Command::new("kill").arg(left.trim()).status().unwrap().success(), "it lives");
}

#[test]
fn a_caller_hears_the_last_word_and_the_status_before_a_loss() {
    for is_told in [false, true] {
        let (here, mut there) = connected();
        let [(input, _to), (mut from, output), (mut heard, errors)] = [(); 3].map(|()| io::pipe().unwrap());
        there.say(Kind::Data, b"Running").unwrap();
        there.say(Kind::Errors, b"a warning").unwrap();
        there.say(Kind::Status, &[3]).unwrap();
        end(there, is_told);
        let carrier = Carrier::of_caller(here, input.into(), OwnedFd::from(output), errors.into());
        assert!(matches!(carrier.until_status(), Ok(3)), "told: {is_told}");
        let [mut said, mut warned] = [String::new(), String::new()];
        from.read_to_string(&mut said).unwrap();
        heard.read_to_string(&mut warned).unwrap();
        assert_eq!((&*said, &*warned), ("Running", "a warning"));
    }
}

#[test]
fn a_caller_without_a_status_hears_what_was_said_and_that_the_connection_is_lost() {
    for is_told in [false, true] {
        let (here, mut there) = connected();
        let [(input, _to), (mut from, output)] = [(); 2].map(|()| io::pipe().unwrap());
        there.say(Kind::Data, b"Held").unwrap();
        end(there, is_told);
        let nowhere = File::options().write(true).open("/dev/null").unwrap();
        let carrier = Carrier::of_caller(here, input.into(), OwnedFd::from(output), nowhere.into());
        assert!(matches!(carrier.until_status(), Err(Lost::Closed | Lost::Io(_))));
        let mut said = String::new();
        from.read_to_string(&mut said).unwrap();
        assert_eq!(said, "Held");
    }
}

/// A pipe that is full.
fn full_pipe() -> (io::PipeReader, io::PipeWriter) {
    let (from, mut to) = io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&to, true).unwrap();
    while to.write(&[b'.'; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&to, false).unwrap();
    (from, to)
}

#[test]
fn a_loss_is_seen_at_the_output_although_nobody_reads_the_errors() {
    let (here, mut there) = connected();
    let [(input, _to), (mut from, output)] = [(); 2].map(|()| io::pipe().unwrap());
    let (mut heard, errors) = full_pipe();
    there.say(Kind::Errors, b"a warning").unwrap();
    there.say(Kind::Data, b"Held").unwrap();
    drop(there);
    let carrier = Carrier::of_caller(here, input.into(), OwnedFd::from(output), errors.into());
    std::thread::scope(|scope| {
        let carrying = scope.spawn(|| carrier.until_status());
        let mut said = String::new();
        from.read_to_string(&mut said).unwrap();
        assert_eq!(said, "Held");
        let mut warned = Vec::new();
        heard.read_to_end(&mut warned).unwrap();
        assert!(warned.ends_with(b"a warning"));
        assert!(carrying.join().unwrap().is_err());
    });
}

#[test]
fn errors_that_nobody_reads_hold_up_nothing_else() {
    let (here, mut there) = connected();
    let [(input, _to), (mut from, output)] = [(); 2].map(|()| io::pipe().unwrap());
    let (mut heard, errors) = full_pipe();
    let carrier = Carrier::of_caller(here, input.into(), OwnedFd::from(output), errors.into());
    std::thread::scope(|scope| {
        let carrying = scope.spawn(|| carrier.until_status());
        there.say(Kind::Errors, b"a warning").unwrap();
        there.say(Kind::Data, b"Running").unwrap();
        let mut said = [0; 7];
        from.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"Running");
        // All that was said comes, and only then the status.
        there.say(Kind::Status, &[0]).unwrap();
        let mut warned = Vec::new();
        heard.read_to_end(&mut warned).unwrap();
        assert!(warned.ends_with(b"a warning"));
        assert!(matches!(carrying.join().unwrap(), Ok(0)));
    });
}
