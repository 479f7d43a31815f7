//! Images that are kept ready for restores.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use rekindle_images::Grant;
use rekindle_wire::control::{Failure, FailureKind, Reply, Request, Resident, WarmInfo};

use crate::restore::{OPEN, Restored, begin, change, dumped};
use crate::support::{Client, Daemon, Session, as_user, ask, eventually, reason};

fn asked(daemon: &Daemon, request: &Request, dir: &Path) -> Result<Vec<WarmInfo>, Failure> {
    let dir = File::open(dir).unwrap();
    match ask(&daemon.socket(), request, &[dir.as_raw_fd()]) {
        Reply::Warm(images) => Ok(images),
        Reply::Failed(failure) => Err(failure),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn warm(daemon: &Daemon, dir: &Path, copies: u32, resident: Option<Resident>) -> Result<WarmInfo, Failure> {
    asked(daemon, &Request::Warm { copies, resident }, dir).map(|images| images.into_iter().next().unwrap())
}

fn list(daemon: &Daemon) -> Vec<WarmInfo> {
    match ask(&daemon.socket(), &Request::WarmImages, &[]) {
        Reply::Warm(images) => images,
        other => panic!("{other:?}"),
    }
}

/// Restores a process, which need not have the pid of the image. Returns the events since.
fn restored(daemon: &Daemon, dir: &Path) -> (Client, Vec<String>) {
    let before = daemon.events().len();
    let mut process = Client::start(daemon);
    let (session, restore) = begin(daemon, dir);
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    assert_eq!(open(&session, process.pid), OPEN);
    daemon.wait_for_state(&process, Some("running"));
    (process, daemon.events().split_off(before))
}

/// Asks until the connection has arrived: before that the daemon cannot tell that this is the client, which has another pid now.
fn open(session: &Session, pid: i32) -> Reply {
    let not_yet = Reply::Resumed { ours: false, open: false };
    eventually("the process is known", || Some(session.ask(&Request::Resume { pid })).filter(|reply| *reply != not_yet))
}

/// Waits until so many restores have workers that wait.
fn ready(daemon: &Daemon, count: u32) {
    eventually("workers wait", || (list(daemon)[0].ready == count).then_some(()));
}

fn has(events: &[String], event: &str) -> bool {
    events.iter().any(|it| it == event)
}

/// Damages an image on its disk, so that a load from there would fail.
fn damage(dir: &Path) {
    let file = dir.join("rekindle-data-0.raw");
    let mut content = std::fs::read(&file).unwrap();
    content[50_000] ^= 1;
    std::fs::write(&file, content).unwrap();
}

#[test]
fn a_restore_takes_the_workers_that_wait_and_others_take_their_place() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let info = warm(&daemon, dir.path(), 1, None).unwrap();
    assert_eq!((info.ready, info.copies, info.restores, info.problem), (1, 1, 0, None));
    assert!(info.bytes > 100_000, "{}", info.bytes);
    assert!(has(&daemon.events(), "app Load warm 1"));
    damage(dir.path());
    for round in 1..=2 {
        let (_process, events) = restored(&daemon, dir.path());
        assert!(has(&events, "app BringBack") && has(&events, "app Connect 0"), "{events:?}");
        ready(&daemon, 1);
        assert_eq!(list(&daemon)[0].restores, round);
    }
}

#[test]
fn a_resident_image_has_nothing_left_to_load() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let info = warm(&daemon, dir.path(), 2, Some(Resident::Each)).unwrap();
    assert_eq!((info.ready, info.resident), (2, Some(Resident::Each)));
    damage(dir.path());
    let (_first, events) = restored(&daemon, dir.path());
    assert!(!has(&events, "app BringBack") && has(&events, "app Connect 0"), "{events:?}");
    // What the image is to have can be changed.
    ready(&daemon, 2);
    let info = warm(&daemon, dir.path(), 1, None).unwrap();
    assert_eq!((info.ready, info.resident, info.copies), (1, None, 1));
    let (_second, events) = restored(&daemon, dir.path());
    assert!(has(&events, "app BringBack"), "{events:?}");
    assert_eq!(list(&daemon).len(), 1);
}

#[test]
fn an_image_that_is_resident_once_is_loaded_once() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let info = warm(&daemon, dir.path(), 2, Some(Resident::Once)).unwrap();
    assert_eq!((info.ready, info.resident), (2, Some(Resident::Once)));
    let events = daemon.events();
    let count = |event: &str| events.iter().filter(|it| *it == event).count();
    // One worker has loaded it and ended, and two have taken its memory.
    assert_eq!((count("app Load 1"), count("app Load warm 1"), count("app TakeTemplate 2")), (1, 2, 2), "{events:?}");
    let (_process, events) = restored(&daemon, dir.path());
    assert!(has(&events, "app BringBack"), "{events:?}");
    ready(&daemon, 2);
    assert_eq!(daemon.events().iter().filter(|it| *it == "app Load 1").count(), 1);
    asked(&daemon, &Request::ForgetWarm, dir.path()).unwrap();
    let kept = || std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().flatten();
    let of_template =
        |it: &std::fs::DirEntry| std::fs::read_link(it.path()).is_ok_and(|it| it.to_string_lossy().contains("events"));
    eventually("nobody keeps the memory", || (kept().filter(of_template).count() == 0).then_some(()));
}

#[test]
fn what_a_client_teaches_reaches_the_next_ones_also_of_the_next_daemon() {
    let mut daemon = Daemon::start();
    let teaches = daemon.dir.path().join("teaches");
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    assert_eq!(warm(&daemon, dir.path(), 1, Some(Resident::Shared)).unwrap().ready, 1);
    // The memory is lent before the client is loaded, and what was learned meanwhile comes with the restore.
    let place = |event: &str| daemon.events().iter().position(|it| it == event).unwrap();
    assert!(
        place("spare Borrow []") < place("spare TakeTemplate 2")
            && place("spare TakeTemplate 2") < place("app Load warm 1")
    );
    std::fs::write(&teaches, "7").unwrap();
    let borrowed = |events: &[String]| events.iter().rfind(|it| it.contains("Borrow")).cloned().unwrap_or_default();
    let (_first, events) = restored(&daemon, dir.path());
    assert!(events[0].ends_with("Borrow []") && has(&events, "app BringBack"), "{events:?}");
    ready(&daemon, 1);
    let (_second, events) = restored(&daemon, dir.path());
    assert!(events.iter().any(|it| it.ends_with("Borrow [7]")), "{events:?}");
    ready(&daemon, 1);
    std::fs::write(&teaches, "9 it has written what it has borrowed").unwrap();
    let mut faulty = Client::start(&daemon);
    let (session, restore) = begin(&daemon, dir.path());
    faulty.ask("map");
    faulty.ask(&format!("reattach {restore} 5"));
    assert_eq!(open(&session, faulty.pid), OPEN);
    faulty.was_killed();
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(log.contains("killing the process: it has written what it has borrowed"), "{log}");
    std::fs::remove_file(&teaches).unwrap();
    eventually("the lessons are kept", || {
        let files = std::fs::read_dir(daemon.dir.path().join("state/learned")).ok()?.flatten();
        files.flat_map(|it| std::fs::read_to_string(it.path())).any(|it| it.contains("[7,9]")).then_some(())
    });
    daemon.kill(libc::SIGTERM);
    assert!(daemon.wait_for_exit().success());
    daemon.start_again();
    assert_eq!(warm(&daemon, dir.path(), 1, Some(Resident::Shared)).unwrap().ready, 1);
    assert_eq!(borrowed(&daemon.events()), "spare Borrow [7, 9]");
}

#[test]
fn containers_share_memory_only_if_their_maker_has_said_so() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let grant = |share| Grant { container: "some-container".to_owned(), share, ..Grant::default() };
    change(&dir, |client| client.grant = Some(grant(false)));
    let why = warm(&daemon, dir.path(), 1, Some(Resident::Shared)).unwrap_err();
    assert_eq!(why.kind, FailureKind::Refused);
    assert!(why.reason.contains("some-container") && why.reason.contains("dev.rekindle/share=true"), "{why}");
    assert_eq!(warm(&daemon, dir.path(), 1, Some(Resident::Once)).unwrap().ready, 1);
    change(&dir, |client| client.grant = Some(grant(true)));
    assert_eq!(warm(&daemon, dir.path(), 1, Some(Resident::Shared)).unwrap().ready, 1);
}

#[test]
fn more_restores_than_workers_wait_for_load_from_host_memory() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let info = warm(&daemon, dir.path(), 0, None).unwrap();
    assert_eq!((info.ready, info.copies, &info.problem), (0, 0, &None));
    damage(dir.path());
    let (_process, events) = restored(&daemon, dir.path());
    assert!(has(&events, "app Load 1"), "{events:?}");
    assert_eq!(list(&daemon)[0].restores, 1);
}

#[test]
fn a_worker_that_dies_while_it_waits_is_replaced() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    warm(&daemon, dir.path(), 1, None).unwrap();
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let line = log.lines().find(|it| it.contains("is loaded in advance")).unwrap();
    let pid = line.split("worker=").nth(1).and_then(|it| it.split_whitespace().next()).unwrap();
    // SAFETY: a process that this test has caused to be.
    assert_eq!(unsafe { libc::kill(pid.parse().unwrap(), libc::SIGKILL) }, 0);
    eventually("another worker has loaded", || {
        (daemon.events().iter().filter(|it| *it == "app Load warm 1").count() == 2).then_some(())
    });
    ready(&daemon, 1);
    let (_process, events) = restored(&daemon, dir.path());
    assert!(has(&events, "app BringBack"), "{events:?}");
}

#[test]
fn a_gpu_without_room_fails_the_restore_and_the_next_one_finds_other_workers() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    warm(&daemon, dir.path(), 1, None).unwrap();
    let no_room = daemon.dir.path().join("no-room");
    std::fs::write(&no_room, "").unwrap();
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let text = reason(session.ask(&Request::Resume { pid: process.pid }));
    assert!(text.contains("no room"), "{text}");
    process.was_killed();
    drop(session);
    std::fs::remove_file(no_room).unwrap();
    ready(&daemon, 1);
    let (_process, events) = restored(&daemon, dir.path());
    assert!(has(&events, "app BringBack"), "{events:?}");
}

#[test]
fn an_image_that_is_bad_or_too_large_is_not_warmed_and_older_ones_make_room() {
    // The image has 100,000 bytes of GPU memory, in whole blocks of the file, and some code.
    let daemon = Daemon::start_with(&[("config.toml", "[warm]\nmemory_mib = 1\n")]);
    let mut images: Vec<_> = (0..11).map(|number| dumped(&daemon, &format!("app{number}"))).collect();
    for (number, Restored { dir, .. }) in images.iter().enumerate() {
        let info = warm(&daemon, dir.path(), 0, None).unwrap();
        assert!(info.bytes * 11 > 1 << 20, "{} bytes are too few for this test", info.bytes);
        let all = list(&daemon);
        let taken: u64 = all.iter().map(|it| it.bytes).sum();
        assert!(taken <= 1 << 20 && all[0].directory == dir.path().display().to_string(), "{number}: {all:?}");
    }
    let first = images[0].dir.path().display().to_string();
    assert!(list(&daemon).iter().all(|it| it.directory != first), "the oldest has gone");
    let Restored { dir, .. } = images.pop().unwrap();
    assert_eq!(asked(&daemon, &Request::ForgetWarm, dir.path()).unwrap().len(), list(&daemon).len());
    let why = asked(&daemon, &Request::ForgetWarm, dir.path()).unwrap_err();
    assert!(why.kind == FailureKind::Refused && why.reason.contains("is not warm"), "{why}");

    damage(dir.path());
    let why = warm(&daemon, dir.path(), 1, None).unwrap_err();
    assert!(why.kind == FailureKind::BadImage && why.reason.contains("rekindle-data-0.raw"), "{why}");

    let small = Daemon::start_with(&[("config.toml", "[warm]\nmemory_mib = 0\n")]);
    let why = warm(&small, images[0].dir.path(), 1, None).unwrap_err();
    assert!(why.kind == FailureKind::Refused && why.reason.contains("warm.memory_mib"), "{why}");
}

#[test]
fn an_image_that_another_has_replaced_is_loaded_from_its_directory() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    warm(&daemon, dir.path(), 1, None).unwrap();
    change(&dir, |client| client.namespace_pid += 1);
    let (_process, events) = restored(&daemon, dir.path());
    assert!(has(&events, "app Load 1") && !has(&events, "app BringBack"), "{events:?}");
    assert_eq!(list(&daemon)[0].restores, 0);
}

#[test]
fn an_image_whose_directory_is_gone_is_forgotten_by_its_name() {
    let daemon = Daemon::start();
    let [first, second] = ["app0", "app1"].map(|name| dumped(&daemon, name));
    let by_id = warm(&daemon, first.dir.path(), 0, None).unwrap().image;
    let by_directory = warm(&daemon, second.dir.path(), 1, None).unwrap().directory;
    drop((first.dir, second.dir));
    assert_eq!(list(&daemon).len(), 2);
    for (left, name) in [(1, by_id), (0, by_directory)] {
        let forget = || ask(&daemon.socket(), &Request::ForgetWarmNamed { name: name.clone() }, &[]);
        assert!(matches!(forget(), Reply::Warm(images) if images.len() == left), "{name}");
        let Reply::Failed(why) = forget() else { panic!("{name} is still warm") };
        assert!(why.kind == FailureKind::Refused && why.reason.contains(&name), "{why}");
    }
}

#[test]
fn only_an_operator_keeps_images_warm() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let named = Request::ForgetWarmNamed { name: dir.path().display().to_string() };
    let requests = [Request::Warm { copies: 1, resident: None }, Request::WarmImages, Request::ForgetWarm, named];
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    for request in requests {
        let Some(refused) = as_user(4711, || asked(&daemon, &request, dir.path())) else { return };
        let why = refused.unwrap_err();
        assert!(why.kind == FailureKind::Refused && why.reason.contains("only root"), "{why}");
    }
}

#[test]
fn workers_that_wait_end_with_the_daemon() {
    let mut daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    warm(&daemon, dir.path(), 2, None).unwrap();
    daemon.kill(libc::SIGTERM);
    assert!(daemon.wait_for_exit().success());
    eventually("both have ended", || {
        (daemon.events().iter().filter(|it| *it == "app daemon gone").count() == 2).then_some(())
    });
}
