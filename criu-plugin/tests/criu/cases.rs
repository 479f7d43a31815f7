//! The test cases.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::application::{ANSWER, ECHO, QUESTION};
use crate::daemon::{Event, Resumed, Script};
use crate::stage::{Application, Container, Stage, alive, gone, sockets, tree, until, word};

const NOWHERE: &str = "/tmp/test/no daemon here";

fn reason(text: &str) -> Option<String> {
    Some(text.into())
}

/// A restored process counts on from the count that the daemon found, and receives the daemon's question.
fn goes_on(stage: &Stage, application: &Application, dumped: u64) {
    let resumed = stage.daemon.resumed();
    assert!(!resumed.is_empty());
    for Resumed { pid, count, frozen } in resumed {
        assert_eq!(count, frozen);
        assert!(pid != application.pid || dumped <= count, "{count}, dumped after {dumped}");
        until("the process answers through shared memory", || word(pid, ANSWER) == word(pid, QUESTION));
    }
    application.runs();
}

/// The connection to the daemon has been closed.
fn closed(stage: &Stage, event: Event) -> Vec<Event> {
    let mut events = Vec::new();
    until("the session is closed", || {
        events.extend(stage.daemon.events());
        events.contains(&event)
    });
    events
}

pub(crate) fn a_killed_process_is_restored(stage: &Stage) {
    let application = stage.application("client");
    let pid = application.pid;
    let held = sockets(pid);
    let images = stage.images("images");
    let count = application.count();
    let ended = stage.dump(&application, &images, &[]);
    assert!(ended.success);
    let root = pid;
    let ours = true;
    assert_eq!(
        closed(stage, Event::DumpClosed),
        [
            Event::Pause { root, leave_running: false },
            Event::Frozen { pid, ours },
            Event::Socket { ours },
            Event::Finish,
            Event::DumpClosed,
        ]
    );
    application.gone();

    assert!(stage.restore(&images).success);
    let application = Application::restored(pid);
    goes_on(stage, &application, count);
    assert_eq!(
        closed(stage, Event::RestoreClosed),
        [Event::Restore, Event::Reattach, Event::Resume { pid, ours }, Event::RestoreClosed,]
    );
    // The process holds its own sockets, and none of the plugin's.
    assert_eq!(sockets(pid), held);
}

pub(crate) fn a_tree_is_restored_again_and_again(stage: &Stage) {
    let mut application = stage.application("tree");
    let pid = application.pid;
    let pids = tree(pid);
    for generation in 0..3 {
        let images = stage.images(&format!("images{generation}"));
        let count = application.count();
        assert!(stage.dump(&application, &images, &[]).success);
        let events = closed(stage, Event::DumpClosed);
        for (ours, expected) in [(true, 2), (false, 1)] {
            let frozen = |event: &&Event| matches!(event, Event::Frozen { ours: o, .. } if *o == ours);
            assert_eq!(events.iter().filter(frozen).count(), expected);
        }
        assert_eq!(events.iter().filter(|e| **e == Event::Socket { ours: true }).count(), 2);
        application.gone();

        assert!(stage.restore(&images).success);
        application = Application::restored(pid);
        assert_eq!(tree(pid), pids);
        goes_on(stage, &application, count);
        closed(stage, Event::RestoreClosed);
    }
}

/// Delays the daemon's reply to `Finish` until the application, which `during` dumps, has gone on.
fn goes_on_before_it_is_durable<T: Send>(
    stage: &Stage,
    application: &Application,
    during: impl FnOnce() -> T + Send,
) -> T {
    let hold = Arc::new(AtomicBool::new(true));
    stage.daemon.script(Script { hold_finish: Some(Arc::clone(&hold)), ..Script::default() });
    thread::scope(|scope| {
        let during = scope.spawn(during);
        until("CRIU asks whether the image is whole", || stage.daemon.is_asked(&Event::Finish));
        application.runs();
        assert!(!during.is_finished());
        hold.store(false, Ordering::Relaxed);
        during.join().unwrap()
    })
}

pub(crate) fn a_running_process_goes_on_before_its_image_is_durable(stage: &Stage) {
    let application = stage.application("tree");
    let pid = application.pid;
    let images = stage.images("images");
    let dumped = application.count();
    let dump = || stage.dump(&application, &images, &["--leave-running"]);
    let ended = goes_on_before_it_is_durable(stage, &application, dump);
    assert!(ended.success);
    application.runs();
    let events = closed(stage, Event::DumpClosed);
    assert!(events.contains(&Event::Pause { root: pid, leave_running: true }));

    // The image is of the moment of the dump.
    let later = application.count();
    let pids = tree(pid);
    drop(application);
    gone(&pids);
    assert!(stage.restore(&images).success);
    let application = Application::restored(pid);
    assert!(application.count() < later);
    goes_on(stage, &application, dumped);
}

pub(crate) fn a_failed_image_leaves_a_running_process_running(stage: &Stage) {
    let application = stage.application("tree");
    stage.daemon.script(Script { finish: reason("the disk is full"), ..Script::default() });
    let ended = stage.dump(&application, &stage.images("images"), &["--leave-running"]);
    assert!(!ended.success);
    assert!(ended.log.contains("the disk is full"));
    application.runs();
    closed(stage, Event::DumpClosed);
    // The process can be dumped later.
    stage.daemon.script(Script::default());
    assert!(stage.dump(&application, &stage.images("again"), &["--leave-running"]).success);
    application.runs();
}

pub(crate) fn a_failed_image_keeps_a_process_from_being_killed(stage: &Stage) {
    let application = stage.application("tree");
    for arguments in [&[][..], &["--leave-stopped"]] {
        stage.daemon.script(Script { finish: reason("the disk is full"), ..Script::default() });
        let ended = stage.dump(&application, &stage.images("images"), arguments);
        assert!(!ended.success);
        assert!(ended.log.contains("the disk is full"));
        application.runs();
        closed(stage, Event::DumpClosed);
    }
    stage.daemon.script(Script::default());
    assert!(stage.dump(&application, &stage.images("again"), &[]).success);
    application.gone();
}

pub(crate) fn a_failed_image_leaves_connections_unlocked(stage: &Stage) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let application = stage.application_with("client", &[(ECHO, &address)]);
    let mut peer: TcpStream = listener.accept().unwrap().0;
    peer.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut echo = || {
        peer.write_all(b"hello").unwrap();
        peer.read_exact(&mut [0; 5]).unwrap();
    };
    echo();
    stage.daemon.script(Script { finish: reason("the disk is full"), ..Script::default() });
    let ended = stage.dump(&application, &stage.images("images"), &["--tcp-established", "--network-lock", "nftables"]);
    assert!(!ended.success);
    if ended.log.contains("Can't get 1:16 opt") {
        // CRIU needs SO_PASSCRED, which Linux 6.17 removed from all but Unix sockets.
        println!("skipped: CRIU before 4.2 cannot dump TCP connections on this kernel");
        return;
    }
    assert!(ended.log.contains("the disk is full"));
    echo();
    application.runs();
}

pub(crate) fn a_dump_that_criu_fails_closes_the_session(stage: &Stage) {
    // An established connection without --tcp-established.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let application = stage.application_with("client", &[(ECHO, &address)]);
    let ended = stage.dump(&application, &stage.images("images"), &[]);
    assert!(!ended.success);
    let events = closed(stage, Event::DumpClosed);
    assert!(!events.contains(&Event::Finish));
    application.runs();
}

pub(crate) fn a_killed_criu_closes_the_session(stage: &Stage) {
    let application = stage.application("client");
    let images = stage.images("images");
    let pid = application.pid.to_string();
    for arguments in [&["-t", &pid, "--leave-running"][..], &["-t", &pid]] {
        let hold = Arc::new(AtomicBool::new(true));
        stage.daemon.script(Script { hold_finish: Some(Arc::clone(&hold)), ..Script::default() });
        let mut criu = stage.criu_start("dump", &images, arguments, &stage.daemon.path);
        until("CRIU waits for the image", || stage.daemon.is_asked(&Event::Finish));
        criu.kill().unwrap();
        criu.wait().unwrap();
        hold.store(false, Ordering::Relaxed);
        closed(stage, Event::DumpClosed);
        application.runs();
    }
}

pub(crate) fn what_cannot_be_quiesced_is_not_dumped(stage: &Stage) {
    let application = stage.application("tree");
    stage.daemon.script(Script { pause: reason("a kernel of process 7 never ends"), ..Script::default() });
    let ended = stage.dump(&application, &stage.images("images"), &[]);
    assert!(!ended.success);
    assert!(ended.log.contains("a kernel of process 7 never ends"));
    application.runs();
}

pub(crate) fn a_long_quiesce_outlasts_the_alarm(stage: &Stage) {
    let application = stage.application("tree");
    stage.daemon.script(Script { pause_takes: Duration::from_secs(3), ..Script::default() });
    let ended = stage.dump(&application, &stage.images("images"), &["--timeout", "1"]);
    assert!(ended.success);
    assert!(!ended.log.contains("Timeout reached"));
    application.gone();
}

pub(crate) fn without_a_daemon_a_client_is_not_dumped(stage: &Stage) {
    let application = stage.application("client");
    let pid = application.pid.to_string();
    let images = stage.images("images");
    let ended = stage.criu_with("dump", &images, &["-t", &pid], Path::new(NOWHERE));
    assert!(!ended.success);
    assert!(ended.log.contains("External socket"));
    application.runs();
    assert_eq!(stage.daemon.events(), []);

    // A daemon of another version is reported in more detail.
    stage.daemon.script(Script { status: reason("wire version 9 here, 1 there"), ..Script::default() });
    let ended = stage.dump(&application, &images, &[]);
    assert!(!ended.success);
    assert!(ended.log.contains("uses a GPU, but wire version 9 here, 1 there"));
    application.runs();
}

pub(crate) fn foreign_processes_are_dumped_with_and_without_a_daemon(stage: &Stage) {
    for (images, socket) in [("with", stage.daemon.path.as_path()), ("without", Path::new(NOWHERE))] {
        let application = stage.application("foreign");
        let id = application.pid;
        let pid = id.to_string();
        let images = stage.images(images);
        let alive = stage.criu_with("dump", &images, &["-t", &pid, "--leave-running"], socket);
        assert!(alive.success);
        application.runs();
        let killed = stage.criu_with("dump", &images, &["-t", &pid], socket);
        assert!(killed.success);
        application.gone();
        let inventory = fs::read(images.join("inventory.img")).unwrap();
        assert!(!inventory.windows(8).any(|window| window == b"rekindle"));
        let restored = stage.criu_with("restore", &images, &["-d"], socket);
        assert!(restored.success);
        Application::restored(id).runs();
        // The logs have no line that a user would take for a fault.
        for log in [alive.log, killed.log, restored.log] {
            assert!(!log.contains("(rekindle)"));
        }
    }
    let events = stage.daemon.events();
    // The daemon learns when an older image there loses the rest of its files, and when it must be removed.
    for dump in events.chunks(4) {
        let [Event::Pause { .. }, Event::Frozen { ours: false, .. }, Event::Finish, Event::DumpClosed] = dump else {
            panic!("{events:?}");
        };
    }
    assert_eq!(events.len(), 8);
}

pub(crate) fn a_daemon_that_hangs_or_refuses_holds_up_no_foreign_dump(stage: &Stage) {
    let application = stage.application("foreign");
    for script in [
        Script { hang: true, ..Script::default() },
        Script { status: reason("wire version 9 here, 1 there"), ..Script::default() },
    ] {
        stage.daemon.script(script);
        let ended = stage.dump(&application, &stage.images("images"), &["--leave-running"]);
        assert!(ended.success);
        assert!(ended.took < Duration::from_secs(40));
        assert!(ended.log.contains("Warn  (rekindle)"));
        application.runs();
    }
}

pub(crate) fn a_pre_dump_pauses_nothing(stage: &Stage) {
    let application = stage.application("client");
    let pid = application.pid.to_string();
    // The pre-dump fails where the kernel has no dirty tracking for it; in either case the daemon received no request.
    stage.criu("pre-dump", &stage.images("images"), &["-t", &pid]);
    assert_eq!(stage.daemon.events(), []);
    application.runs();
}

/// Dumps a tree, which ends.
fn dumped(stage: &Stage, kind: &str) -> (i32, std::path::PathBuf) {
    let application = stage.application(kind);
    let pid = application.pid;
    let images = stage.images("images");
    assert!(stage.dump(&application, &images, &[]).success);
    application.gone();
    closed(stage, Event::DumpClosed);
    (pid, images)
}

pub(crate) fn a_restore_that_cannot_be_prepared_runs_nothing(stage: &Stage) {
    let (pid, images) = dumped(stage, "tree");
    stage.daemon.script(Script { prepare: reason("the image is of an H200, here is none"), ..Script::default() });
    let ended = stage.restore(&images);
    assert!(!ended.success);
    assert!(ended.log.contains("Error (rekindle)"));
    assert!(ended.log.contains("the image is of an H200, here is none"));
    assert!(!ended.log.contains("Forking task"));
    assert!(!alive(pid));
    assert_eq!(closed(stage, Event::RestoreClosed), [Event::Restore, Event::RestoreClosed]);
}

pub(crate) fn without_a_daemon_nothing_is_restored(stage: &Stage) {
    let (pid, images) = dumped(stage, "client");
    let ended = stage.criu_with("restore", &images, &["-d"], Path::new(NOWHERE));
    assert!(!ended.success);
    assert!(ended.log.contains("no daemon at /tmp/test/no daemon here"));
    assert!(!alive(pid));
    // With the daemon's socket the restore succeeds.
    assert!(stage.restore(&images).success);
    Application::restored(pid).runs();
}

pub(crate) fn an_image_without_its_gpu_part_is_not_restored(stage: &Stage) {
    let (pid, images) = dumped(stage, "client");
    fs::remove_file(images.join("rekindle.img")).unwrap();
    let ended = stage.restore(&images);
    assert!(!ended.success);
    assert!(ended.log.contains("rekindle.img is missing"));
    assert!(!alive(pid));
    assert_eq!(stage.daemon.events(), []);
}

pub(crate) fn a_stale_gpu_part_does_not_hinder_a_foreign_restore(stage: &Stage) {
    let (_, images) = dumped(stage, "client");
    let application = stage.application("foreign");
    let pid = application.pid;
    assert!(stage.dump(&application, &images, &[]).success);
    application.gone();
    closed(stage, Event::DumpClosed);
    let ended = stage.restore(&images);
    assert!(ended.success);
    assert!(ended.log.contains("rekindle.img is of another dump"));
    Application::restored(pid).runs();
    assert_eq!(stage.daemon.events(), []);
}

pub(crate) fn a_process_that_cannot_go_on_takes_the_tree_with_it(stage: &Stage) {
    let application = stage.application("tree");
    let pids = tree(application.pid);
    let images = stage.images("images");
    assert!(stage.dump(&application, &images, &[]).success);
    application.gone();
    for from in [1, 2, 3] {
        stage.daemon.script(Script { resume: Some((from, "a memfd is gone".into())), ..Script::default() });
        let ended = stage.restore(&images);
        assert!(!ended.success);
        assert!(ended.log.contains("a memfd is gone"));
        gone(&pids);
        closed(stage, Event::RestoreClosed);
    }
    // The image is unchanged.
    stage.daemon.script(Script::default());
    stage.daemon.resumed();
    assert!(stage.restore(&images).success);
    Application::restored(*pids.first().unwrap()).runs();
}

pub(crate) fn a_daemon_that_forgets_a_process_fails_the_restore(stage: &Stage) {
    let (pid, images) = dumped(stage, "client");
    stage.daemon.script(Script { forgetful: true, ..Script::default() });
    let ended = stage.restore(&images);
    assert!(!ended.success);
    assert!(ended.log.contains("has not asked about all restored GPU processes"));
    drop(Application::restored(pid));
}

pub(crate) fn a_container_is_checkpointed_while_it_runs_and_restored(stage: &Stage) {
    let container = Container::start(stage);
    let application = container.application();
    let dumped = application.count();
    assert!(goes_on_before_it_is_durable(stage, &application, || {
        Container::podman("podman_ container checkpoint --leave-running --export /tmp/test/c.tar.zst c")
    }));
    application.runs();
    closed(stage, Event::DumpClosed);

    // The container is stopped with a checkpoint, and restored.
    stage.daemon.script(Script::default());
    let count = application.count();
    assert!(Container::podman("podman_ container checkpoint c"));
    assert!(!alive(application.pid));
    closed(stage, Event::DumpClosed);
    assert!(Container::podman("podman_ container restore c"));
    let application = container.application();
    goes_on(stage, &application, count);
    closed(stage, Event::RestoreClosed);
    drop(application);
    drop(container);

    // Restores from the archive, as on another machine: it contained the image of the GPU's state.
    assert!(Container::podman("podman_ container restore --import /tmp/test/c.tar.zst --name c"));
    let container = Container;
    goes_on(stage, &container.application(), dumped);
}

pub(crate) fn a_container_whose_image_fails_runs_on(stage: &Stage) {
    let container = Container::start(stage);
    let application = container.application();
    stage.daemon.script(Script { finish: reason("the disk is full"), ..Script::default() });
    for option in ["--leave-running", ""] {
        assert!(!Container::podman(&format!("podman_ container checkpoint {option} c")));
        application.runs();
        closed(stage, Event::DumpClosed);
    }
    stage.daemon.script(Script::default());
    assert!(Container::podman("podman_ container checkpoint c"));
    stage.daemon.script(Script { prepare: reason("here is no GPU"), ..Script::default() });
    assert!(!Container::podman("podman_ container restore c"));
    stage.daemon.script(Script::default());
    assert!(Container::podman("podman_ container restore c"));
    container.application().runs();
}

pub(crate) fn a_connection_that_a_forked_child_holds_too_is_restored_once(stage: &Stage) {
    let application = stage.application("forked");
    let (pid, pids) = (application.pid, tree(application.pid));
    let images = stage.images("images");
    let dumped = application.count();
    assert!(stage.dump(&application, &images, &[]).success);
    let events = closed(stage, Event::DumpClosed);
    assert_eq!(events.iter().filter(|event| **event == Event::Socket { ours: true }).count(), 1);
    application.gone();
    assert!(stage.restore(&images).success);
    let application = Application::restored(pid);
    assert!(tree(pid) == pids && pids.iter().all(|&pid| sockets(pid) == 1));
    goes_on(stage, &application, dumped);
    let events = closed(stage, Event::RestoreClosed);
    assert_eq!(events.iter().filter(|event| **event == Event::Reattach).count(), 1);
}

pub(crate) fn a_criu_without_the_plugin_does_not_restore(stage: &Stage) {
    let (pid, images) = dumped(stage, "client");
    let none = stage.images("no plugins");
    let ended = stage.criu("restore", &images, &["-d", "--libdir", none.to_str().unwrap()]);
    assert!(!ended.success);
    assert!(ended.log.contains("Missing required plugin: rekindle"));
    assert!(!alive(pid));
}
