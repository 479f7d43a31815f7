//! Dumps whose clients go on before they are copied, and dumps whose clients are copied before they stop.

use rekindle_images::{Image, Protocol};
use rekindle_wire::control::{FailureKind, Reply, Request};
use tempfile::TempDir;

use crate::dump::pause;
use crate::support::{Client, Daemon, Session, eventually, reason};

fn with_protocol(name: &str) -> Daemon {
    Daemon::start_with(&[("config.toml", &format!("[checkpoint]\nstaging = 0\nprotocol = \"{name}\"\n"))])
}

/// A dump up to where CRIU is through with the processes.
fn up_to_finish(daemon: &Daemon, dir: &TempDir, client: &mut Client, leave_running: bool) -> Session {
    let (session, reply) = Session::open(daemon, &pause(client.pid, leave_running), dir.path());
    assert!(matches!(reply, Reply::Paused { .. }), "{reply:?}");
    assert_eq!(session.ask(&Request::Frozen { pid: client.pid }), Reply::Frozen { ours: true });
    let cookie = client.cookie();
    assert!(matches!(session.ask(&Request::Socket { id: 5, cookie }), Reply::Socket { ours: true, .. }));
    session.tell(&Request::Finish);
    session
}

fn place(daemon: &Daemon, event: &str) -> usize {
    let events = daemon.events();
    events.iter().position(|it| it == event).unwrap_or_else(|| panic!("no {event} in {events:?}"))
}

#[test]
fn one_whose_memory_is_cloned_goes_on_before_it_is_copied() {
    let daemon = with_protocol("clone");
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "clones");
    let session = up_to_finish(&daemon, &dir, &mut client, true);
    daemon.wait_for_event("clones Open");
    assert!(place(&daemon, "clones Reserve") < place(&daemon, "clones Quiesce"));
    assert!(place(&daemon, "clones Save Clone") < place(&daemon, "clones Open"));
    // The image is not complete, so no other dump begins.
    assert!(Image::open(dir.path()).is_err());
    let (_, refused) = Session::open(&daemon, &pause(client.pid, true), TempDir::new().unwrap().path());
    assert!(reason(refused).contains("already"));
    std::fs::write(daemon.dir.path().join("save-now"), "").unwrap();
    assert_eq!(session.hear(), Reply::Durable);
    daemon.wait_for_state(&client, Some("running"));
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().protocol, Protocol::Clone);
    assert!(image.verify(|_| ()).problems.is_empty());
}

#[test]
fn who_finds_no_memory_hears_whether_clones_have_it_and_when_they_are_gone() {
    let daemon = with_protocol("clone");
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "clones");
    let _alone = Client::attached(&daemon, "needs-room-alone");
    daemon.wait_for_event("needs-room-alone Room false");
    let session = up_to_finish(&daemon, &dir, &mut client, true);
    daemon.wait_for_event("clones Open");
    let _other = Client::attached(&daemon, "needs-room");
    daemon.wait_for_event("clones GiveWay");
    daemon.wait_for_event("needs-room Room true");
    assert!(!daemon.events().contains(&"needs-room Room false".to_owned()));
    std::fs::write(daemon.dir.path().join("save-now"), "").unwrap();
    assert_eq!(session.hear(), Reply::Durable);
    daemon.wait_for_event("needs-room Room false");
}

#[test]
fn one_that_is_copied_before_it_stops() {
    let daemon = with_protocol("recopy");
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    let session = up_to_finish(&daemon, &dir, &mut client, false);
    assert_eq!(session.hear(), Reply::Durable);
    assert!(place(&daemon, "app Precopy 0") < place(&daemon, "app Quiesce"));
    assert!(place(&daemon, "app Quiesce") < place(&daemon, "app Save Stop"));
    assert_eq!(Image::open(dir.path()).unwrap().manifest().protocol, Protocol::Recopy);
}

#[test]
fn what_is_not_as_it_was_is_in_no_image_and_the_client_goes_on() {
    let daemon = with_protocol("cow");
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "mispredicts");
    let session = up_to_finish(&daemon, &dir, &mut client, true);
    let Reply::Failed(failure) = session.hear() else { panic!() };
    assert_eq!(failure.kind, FailureKind::Mispredicted, "{failure}");
    drop(session);
    daemon.wait_for_state(&client, Some("running"));
    eventually("the image is removed", || std::fs::read_dir(dir.path()).unwrap().next().is_none().then_some(()));
}

#[test]
fn a_dump_given_up_while_its_client_goes_on_leaves_nothing() {
    let daemon = with_protocol("clone");
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "clones");
    let session = up_to_finish(&daemon, &dir, &mut client, true);
    daemon.wait_for_event("clones Open");
    drop(session);
    daemon.wait_for_event("clones Cancel");
    daemon.wait_for_state(&client, Some("running"));
    eventually("the image is removed", || std::fs::read_dir(dir.path()).unwrap().next().is_none().then_some(()));
}

/// Dumps a client that goes on.
fn dump(daemon: &Daemon, client: &mut Client) {
    let dir = TempDir::new().unwrap();
    let session = up_to_finish(daemon, &dir, client, true);
    assert_eq!(session.hear(), Reply::Durable);
    drop(session);
    daemon.wait_for_state(client, Some("running"));
}

#[test]
fn host_memory_goes_to_another_only_when_who_had_it_says_that_it_has_none() {
    let daemon = Daemon::start_with(&[("config.toml", "[checkpoint]\nstaging = 4194304\n")]);
    let has_come = |event: &str| daemon.events().iter().any(|it| it == event);
    // Repeats dumps until a worker has found that host memory is ready.
    let dump_until = |client: &mut Client, event: &str| {
        eventually(event, || {
            dump(&daemon, client);
            has_come(event).then_some(())
        });
    };
    let mut first = Client::attached(&daemon, "first");
    dump_until(&mut first, "first Stage 1 1");
    daemon.wait_for_event("first Stage 0 0");
    // A worker that neither takes the memory nor returns it is saved all the same. It may still have the memory: no other gets
    // it.
    let mut odd = Client::attached(&daemon, "no-stage");
    dump_until(&mut odd, "no-stage Stage 1 1");
    daemon.wait_for_event("no-stage Stage 0 0");
    let mut other = Client::attached(&daemon, "other");
    dump(&daemon, &mut other);
    assert!(!has_come("other Stage 1 1") && !has_come("other Stage 0 0"), "{:?}", daemon.events());
    odd.kill();
    daemon.wait_for_state(&odd, None);
    dump_until(&mut other, "other Stage 1 1");
}

#[test]
fn a_limit_of_the_link_is_told_before_anything_is_copied() {
    let config = "[checkpoint]\nstaging = 0\nbandwidth = 5000\napplication_first = false\nprotocol = \"recopy\"\n";
    let daemon = Daemon::start_with(&[("config.toml", config)]);
    let dir = TempDir::new().unwrap();
    let mut client = Client::attached(&daemon, "app");
    let session = up_to_finish(&daemon, &dir, &mut client, true);
    assert_eq!(session.hear(), Reply::Durable);
    // A client that is copied alone has all of the bandwidth.
    assert!(place(&daemon, "app Pace [5000] false") < place(&daemon, "app Precopy 0"));
    assert_eq!(daemon.events().iter().filter(|it| it.contains("Pace")).count(), 1);
}
