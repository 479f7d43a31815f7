//! Restores, in the requests of CRIU's plugin.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rekindle_images::{CreateOptions, DataFile, HashKey, Image, ImageDir, ImageWriter, Manifest};
use rekindle_wire::control::{FailureKind, Opening, Reply, Request, RestoreInfo};
use rekindle_wire::frame;
use tempfile::TempDir;

use crate::dump::dump;
use crate::support::{Client, Daemon, Session, eventually, reason};
use crate::worker::{MEMORY, PINNED};

/// A process that "CRIU" has restored, and an image that is changed so that its client is that process.
pub(crate) struct Restored {
    pub(crate) dir: TempDir,
    pub(crate) process: Client,
}

/// Dumps a client of this name, kills it, and makes a new process take its pid in the image.
pub(crate) fn dumped(daemon: &Daemon, command: &str) -> Restored {
    let mut client = Client::attached(daemon, command);
    let dir = TempDir::new().unwrap();
    dump(daemon, dir.path(), &mut client);
    client.kill();
    daemon.wait_for_state(&client, None);
    let process = Client::start(daemon);
    change_pid(&dir, process.pid);
    Restored { dir, process }
}

/// Writes the image again with another pid: a test cannot choose pids as CRIU does.
fn change_pid(dir: &TempDir, pid: i32) {
    change(dir, |client| client.namespace_pid = pid as u32);
}

/// Writes the image again with a change.
pub(crate) fn change(dir: &TempDir, change: impl FnOnce(&mut rekindle_images::Client)) {
    change_all(dir, |clients| change(&mut clients[0]));
}

fn change_all(dir: &TempDir, change: impl FnOnce(&mut Vec<rekindle_images::Client>)) {
    change_manifest(dir, |manifest| change(&mut manifest.clients));
}

fn change_manifest(dir: &TempDir, change: impl FnOnce(&mut Manifest)) {
    let image = Image::open(dir.path()).unwrap();
    let mut manifest = image.manifest().clone();
    change(&mut manifest);
    let read = |number| {
        let mut content = Vec::new();
        std::io::Read::read_to_end(&mut image.data_file(DataFile::own(number)).unwrap(), &mut content).unwrap();
        (number, content)
    };
    let files: Vec<_> = image.data_files().map(read).collect();
    let code = image.read_code(manifest.code[0].hash).unwrap();
    drop(image);
    let HashKey::Content(key) = manifest.hash_key else { panic!("{:?}", manifest.hash_key) };
    let options = CreateOptions { id: manifest.id, key, ..CreateOptions::new().unwrap() };
    // The files get the same numbers again.
    ImageWriter::remove_image(ImageDir::open(dir.path()).unwrap()).unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), options).unwrap();
    for (number, content) in files {
        std::io::Write::write_all(&mut writer.data_file(number).unwrap().1, &content).unwrap();
    }
    writer.put_code(&code).unwrap();
    writer.commit(manifest).unwrap();
}

pub(crate) fn begin(daemon: &Daemon, dir: &Path) -> (Session, u64) {
    let (session, reply) = Session::open(daemon, &Request::Restore, dir);
    let Reply::Prepared { restore, sockets } = reply else { panic!("{reply:?}") };
    assert_eq!((sockets[0].id, Path::new(&sockets[0].path)), (5, &*daemon.socket()));
    (session, restore)
}

fn refused(daemon: &Daemon, dir: &Path) -> String {
    reason(Session::open(daemon, &Request::Restore, dir).1)
}

pub(crate) const OPEN: Reply = Reply::Resumed { ours: true, open: true };

#[test]
fn a_client_comes_back_and_can_be_dumped_again() {
    let mut daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let (session, restore) = begin(&daemon, dir.path());
    assert_eq!(process.ask("map"), "mapped");
    assert_eq!(process.ask(&format!("reattach {restore} 5")), "reattached");
    // Another task of the tree, which is no client.
    let pid = std::process::id() as i32;
    let none = Reply::Resumed { ours: false, open: false };
    assert_eq!(session.ask(&Request::Resume { pid }), none);
    let pid = process.pid;
    assert_eq!(session.ask(&Request::Resume { pid }), OPEN);
    drop(session);
    daemon.wait_for_state(&process, Some("running"));
    let events = daemon.events();
    let after_load = events.iter().skip_while(|it| *it != "app Load 1");
    let after_load: Vec<_> = after_load.collect();
    assert_eq!(after_load[..3], ["app Load 1", "app Connect 0", "app Open"]);

    // The process runs under another daemon, which has not restored it.
    daemon.kill(libc::SIGKILL);
    daemon.wait_for_event("app daemon gone");
    daemon.start_again();
    daemon.wait_for_state(&process, Some("running"));

    let second = TempDir::new().unwrap();
    dump(&daemon, second.path(), &mut process);
    let image = Image::open(second.path()).unwrap();
    assert_eq!(image.manifest().clients[0].pid as i32, process.pid);
    process.kill();
    daemon.wait_for_state(&process, None);
}

#[test]
fn pinned_memory_comes_with_it_however_much_there_is() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "pinned");
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let pid = process.pid;
    let text = reason(session.ask(&Request::Resume { pid }));
    assert!(text.contains("is not what was dumped"), "{text}");
    process.was_killed();
    drop(session);

    let (session, restore) = begin(&daemon, dir.path());
    let mut process = Client::start(&daemon);
    let pid = process.pid;
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    // The daemon cannot tell that this is a client, which has another pid now, before its connection has arrived.
    eventually("both connections have arrived", || {
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        (log.matches("Absent -> Reattached").count() == 2).then_some(())
    });
    for i in 0..300 {
        let (address, size) = (PINNED.0 + i * (1 << 20), PINNED.1);
        assert_eq!(process.ask(&format!("map {size} {address:x}")), "mapped");
    }
    assert_eq!(session.ask(&Request::Resume { pid }), OPEN);
    daemon.wait_for_event("pinned Connect 300");
}

#[test]
fn a_directory_without_an_image_is_none_of_ours() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("inventory.img"), "CRIU's").unwrap();
    let (session, reply) = Session::open(&daemon, &Request::Restore, dir.path());
    assert_eq!(reply, Reply::NotOurs);
    let none = Reply::Resumed { ours: false, open: false };
    assert_eq!(session.ask(&Request::Resume { pid: 1 }), none);
}

#[test]
fn what_can_be_known_beforehand_fails_beforehand() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    let path = dir.path();
    let names: Vec<_> = std::fs::read_dir(path).unwrap().map(|it| it.unwrap().path()).collect();
    for file in &names {
        let good = std::fs::read(file).unwrap();
        std::fs::remove_file(file).unwrap();
        let text = refused(&daemon, path);
        assert!(text.starts_with("bad image: "), "{text}");
        let mut bad = good.clone();
        bad[good.len() / 2] ^= 1;
        std::fs::write(file, bad).unwrap();
        // Code and the content of memory are compared when they are loaded.
        let name = file.to_string_lossy();
        if !name.contains("data") && !name.contains("code") {
            let text = refused(&daemon, path);
            assert!(text.starts_with("bad image: "), "{text}");
        }
        std::fs::write(file, &good[..good.len() - 1]).unwrap();
        let text = refused(&daemon, path);
        assert!(text.starts_with("bad image: "), "{text}");
        std::fs::write(file, good).unwrap();
    }
    let _session = begin(&daemon, path);
    let no_load = |events: Vec<String>| events.iter().filter(|it| it.contains("Load")).count();
    eventually("only the last was loaded", || (no_load(daemon.events()) == 1).then_some(()));
}

#[test]
fn an_image_whose_process_would_send_what_is_read_otherwise_is_refused() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    change(&dir, |client| client.shared_state = vec![1; 8]);
    assert!(refused(&daemon, dir.path()).contains("driver call number 0 is not"));
    change(&dir, |client| client.wire_version += 1);
    let newer = format!("speaks client version {}", rekindle_wire::CLIENT_VERSION + 1);
    assert!(refused(&daemon, dir.path()).contains(&newer));
    change(&dir, |client| (client.wire_version, client.worker_version) = (rekindle_wire::CLIENT_VERSION, 8));
    assert!(refused(&daemon, dir.path()).contains("driver call number 0 is not"));
    change(&dir, |client| (client.shared_state, client.worker_version) = (Vec::new(), 8));
    let reason = refused(&daemon, dir.path());
    assert!(reason.contains("has state of version 8") && reason.contains("with the one that made it"), "{reason}");
    change(&dir, |client| client.worker_version = 1000);
    assert!(refused(&daemon, dir.path()).contains("restore it with a newer one"));
}

#[test]
fn another_kind_of_gpu_or_too_little_memory_is_refused() {
    let daemon = Daemon::start();
    let Restored { dir, process: _ } = dumped(&daemon, "app");
    for (file, content, says) in [
        ("capability", "8", "of compute capability 9.0 and is a Fake of 8.0 here"),
        ("memory", "4096", "needs 100000 bytes on GPU 0, which has 4096"),
        ("memory", "2147483648", "GPU 0 was a Fake with 1024 MiB and is a Fake with 2048 MiB here"),
    ] {
        let other = Daemon::start_with(&[(file, content)]);
        let text = refused(&other, dir.path());
        assert!(text.contains(says), "{text}");
        assert!(!other.events().iter().any(|it| it.contains("Load")));
        eventually("the pool is filled again", || (other.status().spare == 1).then_some(()));
    }
    let none = Daemon::start_with(&[("no-gpu", "")]);
    assert!(refused(&none, dir.path()).contains("no worker: "));
}

#[test]
fn content_that_was_changed_fails_when_the_process_is_resumed() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let file = dir.path().join("rekindle-data-0.raw");
    let mut content = std::fs::read(&file).unwrap();
    content[50_000] ^= 1;
    std::fs::write(&file, content).unwrap();
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let pid = process.pid;
    let text = reason(session.ask(&Request::Resume { pid }));
    assert!(text.contains("rekindle-data-0.raw"), "{text}");
    process.was_killed();
    let text = reason(session.ask(&Request::Resume { pid }));
    assert!(text.contains("failed already"), "{text}");
}

/// Restores a client to a running process whose content is still being loaded.
fn running_before_loaded(daemon: &Daemon) -> (Restored, Session) {
    running_while(daemon, "content", "stands still")
}

/// Restores a client to a process that runs while its worker does what this file says.
fn running_while(daemon: &Daemon, file: &str, content: &str) -> (Restored, Session) {
    let mut restored = dumped(daemon, "app");
    std::fs::write(daemon.dir.path().join(file), content).unwrap();
    let (session, restore) = begin(daemon, restored.dir.path());
    restored.process.ask("map");
    restored.process.ask(&format!("reattach {restore} 5"));
    assert_eq!(session.ask(&Request::Resume { pid: restored.process.pid }), OPEN);
    daemon.wait_for_state(&restored.process, Some("loading"));
    (restored, session)
}

#[test]
fn a_process_runs_before_its_content_is_loaded_and_a_dump_waits_for_the_content() {
    let daemon = Daemon::start();
    let (Restored { mut process, .. }, session) = running_before_loaded(&daemon);
    drop(session);
    let dir = TempDir::new().unwrap();
    std::thread::scope(|scope| {
        let dumped = scope.spawn(|| dump(&daemon, dir.path(), &mut process));
        // The dump has begun, and has not asked the worker to quiesce.
        eventually("the dump has begun", || {
            let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
            log.contains("the dump waits until its memory is loaded").then_some(())
        });
        assert_eq!(daemon.events().iter().filter(|it| *it == "app Quiesce").count(), 1);
        assert!(!dumped.is_finished());
        std::fs::remove_file(daemon.dir.path().join("content")).unwrap();
        dumped.join().unwrap();
    });
    daemon.wait_for_state(&process, Some("running"));
    let events = daemon.events();
    let at = |event: &str| events.iter().rposition(|it| it == event);
    assert!(at("app content is there") < at("app Quiesce"), "{events:?}");
}

#[test]
fn content_that_fails_after_the_process_runs_ends_the_process_and_the_log_says_why() {
    let daemon = Daemon::start();
    let (Restored { mut process, .. }, session) = running_before_loaded(&daemon);
    std::fs::write(daemon.dir.path().join("content"), "rekindle-data-0.raw at 0: content does not match its hash")
        .unwrap();
    process.was_killed();
    daemon.wait_for_state(&process, None);
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let line = log.lines().find(|it| it.contains("its memory cannot be restored")).unwrap();
    assert!(line.contains("content does not match its hash") && line.contains("app"), "{line}");
    drop(session);
}

/// Restores a client to a process that runs, while its worker replays the log.
fn running_ahead(daemon: &Daemon) -> (Restored, Session) {
    let running = running_while(daemon, "assures", "");
    assert!(!daemon.events().iter().any(|it| it == "app Load 1"), "it is not loaded yet");
    running
}

#[test]
fn a_process_runs_before_its_log_is_replayed_and_its_worker_takes_it_afterwards() {
    let daemon = Daemon::start();
    let (Restored { mut process, .. }, session) = running_ahead(&daemon);
    drop(session);
    std::fs::remove_file(daemon.dir.path().join("assures")).unwrap();
    daemon.wait_for_state(&process, Some("running"));
    daemon.wait_for_event("app Open");
    let events = daemon.events();
    let after_load: Vec<_> = events.iter().skip_while(|it| *it != "app Load 1").collect();
    assert_eq!(after_load[..4], ["app Load 1", "app Comes", "app Connect 0", "app Open"]);
    let second = TempDir::new().unwrap();
    dump(&daemon, second.path(), &mut process);
    process.kill();
    daemon.wait_for_state(&process, None);
}

#[test]
fn a_log_that_cannot_be_replayed_after_the_process_runs_ends_the_process_and_the_log_says_why() {
    let daemon = Daemon::start();
    let (Restored { mut process, .. }, _session) = running_ahead(&daemon);
    std::fs::write(daemon.dir.path().join("assures"), "cuLibraryLoadData returned error 2").unwrap();
    process.was_killed();
    daemon.wait_for_state(&process, None);
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let line = log.lines().find(|it| it.contains("cannot be restored")).unwrap();
    assert!(line.contains("cuLibraryLoadData returned error 2") && line.contains("app"), "{line}");
}

#[test]
fn a_process_that_leaves_its_worker_while_its_log_is_replayed_lives() {
    let daemon = Daemon::start();
    let (Restored { mut process, .. }, _session) = running_ahead(&daemon);
    process.ask("disconnect");
    std::fs::remove_file(daemon.dir.path().join("assures")).unwrap();
    daemon.wait_for_state(&process, Some("lost"));
    assert_eq!(process.ask("map"), "mapped");
}

/// With another driver code may lie elsewhere, which a replay finds.
#[test]
fn a_process_waits_for_the_replay_where_the_driver_is_another_that_is_allowed() {
    for (driver, ahead) in [(None, true), (Some("another"), false)] {
        let daemon = Daemon::start_with(&[("config.toml", "[restore]\nallow_other_driver = true\n")]);
        let Restored { dir, mut process } = dumped(&daemon, "app");
        change_manifest(&dir, |manifest| {
            manifest.host.driver_build = driver.map_or(manifest.host.driver_build.clone(), str::to_owned);
        });
        let assures = daemon.dir.path().join("assures");
        std::fs::write(&assures, "").unwrap();
        let (session, restore) = begin(&daemon, dir.path());
        process.ask("map");
        process.ask(&format!("reattach {restore} 5"));
        let pid = process.pid;
        std::thread::scope(|scope| {
            let resumed = scope.spawn(|| session.ask(&Request::Resume { pid }));
            daemon.wait_for_event("spare replays");
            if ahead {
                eventually("the process runs", || resumed.is_finished().then_some(()));
            }
            std::fs::remove_file(&assures).unwrap();
            assert_eq!(resumed.join().unwrap(), OPEN);
        });
        daemon.wait_for_state(&process, Some("running"));
        let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
        assert_eq!(log.contains("Loading -> Assured"), ahead, "{log}");
    }
}

/// Watches the next restore of this process's.
fn watch(daemon: &Daemon, hears_first: bool) -> Session {
    let stream = UnixStream::connect(daemon.socket()).unwrap();
    frame::send(&stream, &Opening::new(&Request::WatchRestore { hears_first, span: None }).unwrap(), &[], &[]).unwrap();
    let watch = Session(stream);
    assert_eq!(watch.hear(), Reply::Awaited);
    watch
}

fn progress(watch: &Session) -> Option<RestoreInfo> {
    match watch.ask(&Request::Progress) {
        Reply::RestoreProgress(info) => info.map(|it| *it),
        other => panic!("{other:?}"),
    }
}

fn names(phases: &[rekindle_wire::control::PhaseInfo]) -> Vec<&str> {
    phases.iter().map(|it| it.name.as_str()).collect()
}

fn names_in(dir: &Path) -> BTreeSet<String> {
    std::fs::read_dir(dir).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_watcher_hears_how_far_a_restore_is_and_an_account_is_kept_beside_the_image() {
    let daemon = Daemon::start();
    let watch = watch(&daemon, true);
    assert_eq!(progress(&watch), None);
    // The watcher hears before the processes run, and does not have to.
    let (Restored { dir, mut process }, session) = running_before_loaded(&daemon);
    let info = progress(&watch).unwrap();
    assert_eq!((info.phase.as_str(), info.done, info.bytes), ("content", 0, MEMORY as u64));
    assert!(info.running_ns.is_some() && info.loaded_ns.is_none() && info.failure.is_none(), "{info:?}");
    assert_eq!(names(&info.phases), ["check", "workers", "prepare", "criu", "wait", "connect", "open"]);
    let client = &info.clients[0];
    assert_eq!((client.pid, client.command.as_str()), (Some(process.pid), "app"));
    assert_eq!(names(&client.phases), ["code", "replay", "map"]);
    assert_eq!(Image::open(dir.path()).unwrap().last_restore(), None);
    let before = names_in(dir.path());

    std::fs::remove_file(daemon.dir.path().join("content")).unwrap();
    let info = eventually("all is loaded", || progress(&watch).filter(|it| it.loaded_ns.is_some()));
    assert_eq!(names(&info.clients[0].phases), ["code", "replay", "map", "content", "hash"]);
    let image = Image::open(dir.path()).unwrap();
    let account = image.last_restore().unwrap();
    assert_eq!((Some(account.running_ns), Some(account.loaded_ns)), (info.running_ns, info.loaded_ns));
    assert_eq!(account.clients[0].command, "app");
    // No file is made after the processes run: somebody may be removing the directory.
    assert!(names_in(dir.path()) == before && before.contains("rekindle-restore.json"));
    assert!(image.verify(|_| ()).is_good());
    drop((session, watch));

    // A dump into the same directory takes it away with the image.
    dump(&daemon, dir.path(), &mut process);
    assert!(!names_in(dir.path()).contains("rekindle-restore.json"));
    assert_eq!(Image::open(dir.path()).unwrap().last_restore(), None);
}

#[test]
fn a_directory_that_takes_no_account_harms_no_restore() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    // Nothing takes the place of a directory.
    std::fs::create_dir(dir.path().join("rekindle-restore.json")).unwrap();
    let before = names_in(dir.path());
    let watch = watch(&daemon, false);
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    assert_eq!(session.ask(&Request::Resume { pid: process.pid }), OPEN);
    let info = eventually("all is loaded", || progress(&watch).filter(|it| it.loaded_ns.is_some()));
    assert_eq!(info.failure, None);
    daemon.wait_for_state(&process, Some("running"));
    assert_eq!(names_in(dir.path()), before);
}

#[test]
fn a_watcher_hears_why_a_restore_has_failed() {
    let daemon = Daemon::start();
    let failure = |watch: &Session| progress(watch).unwrap().failure.unwrap();
    let Restored { dir, .. } = dumped(&daemon, "app");
    // Nothing was given up by then, so only the first request can have failed.
    let bad = TempDir::new().unwrap();
    for name in names_in(dir.path()) {
        std::fs::copy(dir.path().join(&name), bad.path().join(&name)).unwrap();
    }
    std::fs::write(bad.path().join("rekindle.img"), "no manifest").unwrap();
    let refuses = watch(&daemon, true);
    refused(&daemon, bad.path());
    assert_eq!(failure(&refuses).kind, FailureKind::BadImage);
    let gives_up = watch(&daemon, true);
    drop(begin(&daemon, dir.path()));
    eventually("it is given up", || progress(&gives_up).unwrap().failure);
    assert_eq!(failure(&gives_up).kind, FailureKind::GivenUp);

    let late = watch(&daemon, false);
    let (Restored { mut process, dir: other }, _session) = running_before_loaded(&daemon);
    std::fs::write(daemon.dir.path().join("content"), "content does not match its hash").unwrap();
    process.was_killed();
    let info = eventually("it has failed", || progress(&late).filter(|it| it.failure.is_some()));
    assert!(info.running_ns.is_some() && info.loaded_ns.is_none(), "{info:?}");
    assert!(info.failure.unwrap().reason.contains("content does not match its hash"));
    for dir in [&dir, &bad, &other] {
        assert!(!names_in(dir.path()).contains("rekindle-restore.json"));
    }
}

/// As a process that executes another program.
#[test]
fn a_process_that_leaves_its_worker_while_content_is_loaded_lives() {
    let daemon = Daemon::start();
    let (Restored { mut process, .. }, _session) = running_before_loaded(&daemon);
    process.ask("disconnect");
    daemon.wait_for_state(&process, Some("lost"));
    eventually("the load has ended", || {
        std::fs::read_to_string(daemon.dir.path().join("log")).unwrap().contains("Prepared -> Failed").then_some(())
    });
    assert_eq!(process.ask("map"), "mapped");
}

#[test]
fn content_that_makes_no_progress_ends_the_process() {
    let daemon = Daemon::start_with(&[("config.toml", "stall_timeout_ms = 300\n")]);
    let (Restored { mut process, .. }, _session) = running_before_loaded(&daemon);
    process.was_killed();
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    assert!(log.contains("no progress with LoadProgress for 300 ms (stall_timeout_ms)"), "{log}");
}

#[test]
fn content_that_fails_before_the_process_is_complete_fails_the_restore() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    std::fs::write(daemon.dir.path().join("content"), "the disk is gone").unwrap();
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    eventually("the load has failed", || {
        std::fs::read_to_string(daemon.dir.path().join("log")).unwrap().contains("Prepared -> Failed").then_some(())
    });
    let text = reason(session.ask(&Request::Resume { pid: process.pid }));
    assert!(text.contains("the disk is gone"), "{text}");
    process.was_killed();
}

#[test]
fn a_process_waits_for_its_content_where_the_configuration_says_so() {
    let daemon = Daemon::start_with(&[("config.toml", "[restore]\nrun_before_loaded = false\n")]);
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    assert_eq!(session.ask(&Request::Resume { pid: process.pid }), OPEN);
    daemon.wait_for_state(&process, Some("running"));
    assert!(!daemon.events().iter().any(|it| it == "app content is there"));
}

/// The process has much memory, so its worker has several threads.
#[test]
fn a_client_comes_back_from_several_data_files() {
    let daemon = Daemon::start_with(&[("config.toml", "[checkpoint]\nstaging = 0\n[image]\nfile_mib = 1\n")]);
    let Restored { dir, mut process } = dumped(&daemon, "wide");
    let files = Image::open(dir.path()).unwrap().data_files().count();
    assert_eq!(files, 2.min(std::thread::available_parallelism().unwrap().get()));
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let pid = process.pid;
    assert_eq!(session.ask(&Request::Resume { pid }), OPEN);
    daemon.wait_for_event("wide Load 1");
}

/// A worker must not be given another process's memory.
#[test]
fn an_image_whose_clients_share_a_data_file_is_refused() {
    let daemon = Daemon::start();
    let Restored { dir, .. } = dumped(&daemon, "app");
    change_all(&dir, |clients| {
        let mut other = clients[0].clone();
        (other.index, other.namespace_pid, other.socket_ids) = (1, other.namespace_pid + 1, vec![6]);
        clients.push(other);
    });
    let text = refused(&daemon, dir.path());
    assert!(text.contains("is in a data file of another process"), "{text}");
}

#[test]
fn what_did_not_come_back_fails_at_its_process() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let pid = process.pid;
    let (session, _) = begin(&daemon, dir.path());
    let text = reason(session.ask(&Request::Resume { pid }));
    assert!(text.contains("without its connection"), "{text}");
    drop(session);
    let (session, restore) = begin(&daemon, dir.path());
    process.ask(&format!("reattach {restore} 5"));
    let text = reason(session.ask(&Request::Resume { pid }));
    assert!(text.contains("without the memory"), "{text}");
    process.was_killed();
}

#[test]
fn a_restore_that_is_given_up_leaves_nothing() {
    let daemon = Daemon::start();
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    // Counted before there is any client: the daemon holds descriptors of one that has just ended for a moment.
    let before = daemon.descriptors();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    drop(session);
    process.was_killed();
    // A process that connects late, and that no daemon would continue either.
    let mut late = Client::start(&daemon);
    late.tell(&format!("reattach {restore} 5"));
    late.was_killed();
    eventually("everything is closed", || (daemon.descriptors() <= before && daemon.status().spare == 1).then_some(()));
    assert!(daemon.clients().is_empty());
}

#[test]
fn nobody_takes_a_clients_place() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let (session, restore) = begin(&daemon, dir.path());
    let mut thief = Client::start(&daemon);
    for (number, socket) in [(restore ^ 1, 5), (restore, 6), (1, 5)] {
        thief.ask(&format!("reattach {number} {socket}"));
        assert_eq!(thief.ask("wait"), "closed");
    }
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let pid = process.pid;
    assert_eq!(session.ask(&Request::Resume { pid }), OPEN);
}

#[test]
fn a_process_that_was_in_its_handshake_begins_it_again() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    let mut silent = Client::start(&daemon);
    silent.ask("connect");
    let pid = silent.pid;
    let pause = crate::dump::pause(pid, false);
    let session = eventually("it is noticed", || {
        let (session, reply) = Session::open(&daemon, &pause, dir.path());
        matches!(reply, Reply::Paused { pids } if pids == [pid]).then_some(session)
    });
    session.ask(&Request::Frozen { pid });
    let cookie = silent.cookie();
    session.ask(&Request::Socket { id: 5, cookie });
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    silent.kill();
    drop(session);

    let (session, restore) = begin(&daemon, dir.path());
    let mut process = Client::start(&daemon);
    process.ask(&format!("reattach {restore} 5"));
    assert_eq!(process.ask("wait"), "closed");
    let pid = process.pid;
    let resumed = session.ask(&Request::Resume { pid });
    let expected = Reply::Resumed { ours: false, open: true };
    assert_eq!(resumed, expected);
    drop(session);
    let mut process = Client::start(&daemon);
    assert_eq!(process.ask("attach app"), "attached");
}

#[test]
fn a_restore_counts_among_the_clients_that_there_may_be() {
    let daemon = Daemon::start_with(&[("config.toml", "[pool]\nmax = 2\n")]);
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let first = Client::attached(&daemon, "first");
    let mut second = Client::attached(&daemon, "second");
    let text = refused(&daemon, dir.path());
    assert!(
        text.contains("this image has 1 GPU processes, 2 are running already") && text.contains("pool.max"),
        "{text}"
    );
    second.kill();
    daemon.wait_for_state(&second, None);
    let (session, restore) = begin(&daemon, dir.path());
    // The client's place is taken before the client is there, and not taken twice afterwards.
    let text = refused(&daemon, dir.path());
    assert!(text.contains("2 are running already"), "{text}");
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let pid = process.pid;
    assert_eq!(session.ask(&Request::Resume { pid }), OPEN);
    drop(session);
    drop(first);
    eventually("a place is free again", || (daemon.clients().len() == 1).then_some(()));
    let mut third = Client::start(&daemon);
    assert_eq!(third.ask("attach third"), "attached");
    // A restore that is given up releases its place.
    third.kill();
    daemon.wait_for_state(&third, None);
    for _ in 0..3 {
        let begins = || matches!(Session::open(&daemon, &Request::Restore, dir.path()).1, Reply::Prepared { .. });
        eventually("its place is free", || begins().then_some(()));
    }
}

#[test]
fn a_process_killed_before_it_is_complete_ends_its_restore_although_criu_says_nothing() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    let before = daemon.descriptors();
    let (session, restore) = begin(&daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    daemon.wait_for_event("app Load 1");
    process.kill();
    // Waits for all but CRIU's own connection.
    eventually("its worker is let go", || {
        (daemon.descriptors() <= before + 2 && daemon.status().spare == 1).then_some(())
    });
    let text = reason(session.ask(&Request::Resume { pid: process.pid }));
    assert!(text.contains("was killed before it was restored"), "{text}");
}

#[test]
fn what_a_dead_criu_had_begun_is_killed() {
    let daemon = Daemon::start();
    let Restored { dir, .. } = dumped(&daemon, "app");
    let mut criu = Client::start(&daemon);
    assert_eq!(criu.ask(&format!("open {}", dir.path().display())), "opened");
    let begun: i32 = criu.ask("begin").parse().unwrap();
    change_pid(&dir, begun);
    assert_eq!(criu.ask("restore"), "prepared");
    criu.kill();
    eventually("what it had begun is killed", || {
        let status = std::fs::read_to_string(format!("/proc/{begun}/stat"));
        status.map_or(true, |it| it.contains(") Z ")).then_some(())
    });
}

/// The second process stands for one of another pid namespace, with the same number there.
#[test]
fn what_another_criu_makes_of_the_same_image_survives() {
    let daemon = Daemon::start();
    let Restored { dir, .. } = dumped(&daemon, "app");
    eventually("a spare", || (daemon.status().spare == 1).then_some(()));
    let before = daemon.descriptors();
    let open = format!("open {}", dir.path().display());
    let (mut criu, mut another) = (Client::start(&daemon), Client::start(&daemon));
    assert_eq!((criu.ask(&open), another.ask(&open)), ("opened".to_owned(), "opened".to_owned()));
    change_pid(&dir, another.pid);
    assert_eq!(criu.ask("restore"), "prepared");
    criu.kill();
    eventually("the restore is over", || (daemon.descriptors() <= before).then_some(()));
    assert_eq!(another.ask(&open), "opened");
}
