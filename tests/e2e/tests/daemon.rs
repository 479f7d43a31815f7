//! A daemon that is absent, has another version, or ends in the middle of an operation.

use std::fs;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::fake::FakeDaemon;
use rekindle_e2e::image::COMMIT;
use rekindle_e2e::{App, Fate, Node, Result, process, until};
use rekindle_wire::attach::{Answer, Attach};
use rekindle_wire::control::{FailureKind, Opening, Reply, Request};
use rekindle_wire::{CONTROL_VERSION, OLDEST_CONTROL};
use serde_json::json;

/// The exit code of programs of `tests/apps` after a CUDA error.
const CUDA_ERROR: i32 = 3;

/// Checks that `firstkernel` fails in CUDA's initialisation, and returns the one line on stderr that is Rekindle's.
fn initialisation_fails(node: &Node) -> Result<String> {
    let app = node.run("firstkernel", &[])?;
    assert_eq!(app.end()?.code(), Some(CUDA_ERROR));
    let errors = app.errors()?;
    assert!(errors.contains("cudaErrorSystemNotReady (802"), "{errors}");
    let ours: Vec<_> = errors.lines().filter(|line| line.starts_with("rekindle: ")).collect();
    let [line] = ours[..] else { panic!("not one line of Rekindle's: {errors}") };
    Ok(line.to_owned())
}

#[test]
fn without_a_daemon_cuda_says_so_and_what_to_start() -> Result {
    let node = Node::without_daemon()?;
    let line = initialisation_fails(&node)?;
    assert!(line.contains(&node.socket().display().to_string()), "{line}");
    assert!(line.contains("`rekindled`"), "{line}");
    node.finish()
}

#[test]
fn a_client_of_another_version_is_refused_by_both_versions() -> Result {
    let node = Node::start()?;
    let attach = Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: 1,
        command: "test".into(),
        socket: node.socket().display().to_string(),
        cookie: 0,
        settings: Vec::new(),
    };
    let attach = Opening::new(&Request::Attach(attach))?;
    let names_both = |reason: &str| {
        let speaks = format!("speaks {OLDEST_CONTROL} to {CONTROL_VERSION}");
        for version in [format!("speaks control version {}", CONTROL_VERSION + 1), speaks] {
            assert!(reason.contains(&version), "{reason}");
        }
    };
    let (wire, oldest) = (CONTROL_VERSION + 1, CONTROL_VERSION + 1);
    match node.exchange(&Opening { wire, oldest, ..attach })? {
        Answer::Refused { reason } => names_both(&reason),
        attached => panic!("{attached:?}"),
    }
    match node.exchange(&Opening { wire, oldest, ..Opening::new(&Request::Status)? })? {
        Reply::Failed(failure) => {
            names_both(&failure.reason);
            assert_eq!(failure.kind, FailureKind::Version);
        }
        answer => panic!("{answer:?}"),
    }
    node.finish()
}

#[test]
fn a_daemon_of_another_version_is_named_and_what_it_says() -> Result {
    let reason = "wire version 1 was spoken, and this rekindled 7.0 speaks 9";
    let node = Node::without_daemon()?;
    let daemon = FakeDaemon::start(node.socket(), json!({ "Refused": { "reason": reason } }))?;
    let line = initialisation_fails(&node)?;
    assert!(line.contains(reason), "{line}");
    drop(daemon);
    // This daemon's answers have an unknown form.
    let daemon = FakeDaemon::start(node.socket(), json!({ "NotYet": { "invented": [1, 2] } }))?;
    let line = initialisation_fails(&node)?;
    assert!(line.contains(&node.socket().display().to_string()) && line.contains("version"), "{line}");
    drop(daemon);
    node.finish()
}

#[test]
fn a_dump_through_a_daemon_of_another_version_fails_and_the_program_goes_on() -> Result {
    let arguments = ["--iterations", "300", "--sleep-us", "5000"];
    let reason = "wire version 1 was spoken, and this rekindled 7.0 speaks 9";
    let expected = undisturbed("streams4", &arguments)?;
    let mut node = Node::start()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(50)?;
    node.kill_daemon()?;
    let other = FakeDaemon::start(node.socket(), json!({ "Failed": { "reason": reason } }))?;
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?.fails_with(reason)?;
    app.advances()?;
    drop(other);

    // The worker connects to the next daemon.
    node.start_daemon(&[])?;
    node.client(app.pid())?;
    let image = node.dump_and_kill(app)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn an_image_outlives_the_daemon_that_made_it() -> Result {
    let arguments = ["--iterations", "150", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let mut node = Node::start()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(100)?;
    let worker = node.client(app.pid())?.worker;
    let image = node.dump_and_kill(app)?;
    assert!(node.stop_daemon()?.success());
    process::wait_gone("the worker of what was dumped", worker)?;
    node.start_daemon(&[])?;
    let app = node.restore(&image)?;
    assert_ne!(node.client(app.pid())?.worker, worker);
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_daemon_stopped_while_a_program_runs_is_replaced_without_its_notice() -> Result {
    let arguments = ["--iterations", "300", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let mut node = Node::start()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(50)?;
    let worker = node.client(app.pid())?.worker;
    assert!(node.stop_daemon()?.success());
    app.advances()?;
    node.start_daemon(&[])?;
    assert_eq!(node.client(app.pid())?.worker, worker);
    let image = node.dump_and_kill(app)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

/// Copies so slow that a dump of `memory` takes a second, in which much can happen.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.02")];
const MEMORY: [&str; 6] = ["--iterations", "400", "--largest-kib", "2048", "--sleep-us", "5000"];

/// Kills the daemon while it writes the image: CRIU reports that, the program goes on, and the next daemon can dump it.
fn daemon_killed_during_a_dump(fate: Fate) -> Result {
    // Before the program runs, which does not wait for it.
    let expected = undisturbed("memory", &MEMORY)?;
    let mut node = Node::with_gpu(&SLOW)?;
    let app = node.run("memory", &MEMORY)?;
    app.reaches(50)?;
    let (mut criu, image) = node.start_dump(&app, fate)?;
    until("GPU memory is written", || {
        assert!(criu.is_running()?, "the dump is over before the daemon could be killed");
        let data = fs::metadata(image.path("rekindle-data-0.raw"));
        Ok(data.is_ok_and(|it| it.len() > 0).then_some(()))
    })?;
    node.kill_daemon()?;
    let outcome = criu.wait()?;
    assert!(!outcome.status.success(), "criu has not noticed");
    assert!(!image.path(COMMIT).exists(), "a commit record without a daemon");
    app.advances()?;

    node.start_daemon(&SLOW)?;
    node.client(app.pid())?;
    goes_on_from_another_dump(node, app, &expected)
}

fn goes_on_from_another_dump(node: Node, app: App, expected: &str) -> Result {
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_daemon_killed_during_a_dump_that_was_to_kill_leaves_the_program_running() -> Result {
    daemon_killed_during_a_dump(Fate::Killed)
}

#[test]
fn a_daemon_killed_during_a_dump_that_leaves_running_leaves_the_program_running() -> Result {
    daemon_killed_during_a_dump(Fate::Running)
}

#[test]
fn a_criu_killed_during_a_dump_leaves_the_program_running() -> Result {
    let expected = undisturbed("memory", &MEMORY)?;
    // CRIU has to reach its last step while the copy goes on.
    let node = Node::with_gpu(&[("SIMGPU_COPY_GBPS", "0.008")])?;
    let app = node.run("memory", &MEMORY)?;
    app.reaches(50)?;
    let (mut criu, image) = node.start_dump(&app, Fate::Running)?;
    // CRIU writes `inventory.img` last. Before that the program may still execute code that CRIU has injected, and
    // nobody would remove that code after CRIU's death.
    until("GPU memory is written, and CRIU is out of the program", || {
        assert!(criu.is_running()?, "the dump is over before CRIU could be killed");
        let data = fs::metadata(image.path("rekindle-data-0.raw"));
        let written = data.is_ok_and(|it| it.len() > 0) && image.path("inventory.img").exists();
        Ok(written.then_some(()))
    })?;
    process::signal(criu.pid(), libc::SIGKILL)?;
    criu.wait()?;
    // CRIU may have been killed while it held the program stopped.
    process::signal(app.pid(), libc::SIGCONT)?;
    app.advances()?;
    until("the daemon has removed what it wrote", || Ok(image.files()?.is_empty().then_some(())))?;
    goes_on_from_another_dump(node, app, &expected)
}
