//! A daemon that is stopped by a signal, as by a debugger, or that hangs: CRIU fails in time, the program goes on, and
//! the daemon does no harm when it wakes up.

use std::fs;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::criu::Outcome;
use rekindle_e2e::image::COMMIT;
use rekindle_e2e::{App, Fate, Node, Result, process, until};

/// A worker goes on when it has heard nothing from the daemon for this time.
const CONFIGURATION: &str = "silence_timeout_ms = 5000\n";
/// Copies so slow that a dump of `memory` takes a second, in which much can happen.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.02")];
const MEMORY: [&str; 6] = ["--iterations", "200", "--largest-kib", "2048", "--sleep-us", "5000"];

/// Stops the daemon while GPU memory is being written, and returns CRIU's outcome.
fn stopped_during_a_dump(node: &Node, app: &App, fate: Fate) -> Result<Outcome> {
    let (mut criu, image) = node.start_dump(app, fate)?;
    until("GPU memory is written", || {
        assert!(criu.is_running()?, "the dump is over before the daemon could be stopped");
        let data = fs::metadata(image.path("rekindle-data-0.raw"));
        Ok(data.is_ok_and(|it| it.len() > 0).then_some(()))
    })?;
    process::signal(node.daemon_pid()?, libc::SIGSTOP)?;
    until("CRIU gives up", || Ok((!criu.is_running()?).then_some(())))?;
    assert!(!image.path(COMMIT).exists(), "a commit record without a daemon");
    criu.wait()
}

fn during_a_dump(fate: Fate) -> Result {
    let expected = undisturbed("memory", &MEMORY)?;
    let node = Node::configured(CONFIGURATION, &SLOW)?;
    let app = node.run("memory", &MEMORY)?;
    app.reaches(50)?;
    stopped_during_a_dump(&node, &app, fate)?.fails_with("is not answering")?;
    // The program goes on without its daemon, since the worker has opened its ring.
    app.advances()?;

    process::signal(node.daemon_pid()?, libc::SIGCONT)?;
    app.advances()?;
    until("the daemon has let it go", || Ok((node.client(app.pid())?.state == "running").then_some(())))?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_daemon_stopped_during_a_dump_that_was_to_kill_leaves_the_program_running() -> Result {
    during_a_dump(Fate::Killed)
}

#[test]
fn a_daemon_stopped_during_a_dump_that_leaves_running_leaves_the_program_running() -> Result {
    during_a_dump(Fate::Running)
}

#[test]
fn a_daemon_stopped_before_a_dump_fails_it_and_before_a_restore_too() -> Result {
    let expected = undisturbed("memory", &MEMORY)?;
    let node = Node::configured(CONFIGURATION, &[])?;
    let end = node.path("end");
    let waiting = node.run("idle", &["--until", &end.display().to_string()])?;
    waiting.reaches(1)?;
    process::signal(node.daemon_pid()?, libc::SIGSTOP)?;
    let (criu, _) = node.start_dump(&waiting, Fate::Killed)?;
    criu.wait()?.fails_with("is not answering")?;
    process::signal(node.daemon_pid()?, libc::SIGCONT)?;
    fs::write(end, "")?;
    assert_eq!(waiting.finish()?, "ready\n");

    let app = node.run("memory", &MEMORY)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    process::signal(node.daemon_pid()?, libc::SIGSTOP)?;
    node.try_restore(&image)?.fails_with("is not answering")?;
    process::signal(node.daemon_pid()?, libc::SIGCONT)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_program_that_comes_to_a_stopped_daemon_says_so_and_goes_on_with_it() -> Result {
    let node = Node::start()?;
    let arguments = ["--iterations", "20", "--largest-kib", "64"];
    let expected = undisturbed("memory", &arguments)?;
    process::signal(node.daemon_pid()?, libc::SIGSTOP)?;
    let app = node.run("memory", &arguments)?;
    until("the program says what it waits for", || {
        Ok(app.errors()?.contains("does not answer; waiting").then_some(()))
    })?;
    process::signal(node.daemon_pid()?, libc::SIGCONT)?;
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_worker_that_hangs_in_a_dump_fails_it_in_time_and_the_program_goes_on() -> Result {
    let node = Node::configured("stall_timeout_ms = 5000\n", &SLOW)?;
    let expected = undisturbed("memory", &MEMORY)?;
    let app = node.run("memory", &MEMORY)?;
    app.reaches(20)?;
    let worker = node.client(app.pid())?.worker;
    let (mut criu, image) = node.start_dump(&app, Fate::Killed)?;
    until("GPU memory is written", || {
        assert!(criu.is_running()?, "the dump is over before the worker could be stopped");
        let data = fs::metadata(image.path("rekindle-data-0.raw"));
        Ok(data.is_ok_and(|it| it.len() > 0).then_some(()))
    })?;
    process::signal(worker, libc::SIGSTOP)?;
    criu.wait()?.fails_with("(stall_timeout_ms)")?;
    process::signal(worker, libc::SIGCONT)?;
    app.advances()?;
    until("the daemon has removed what it wrote", || Ok(image.files()?.is_empty().then_some(())))?;
    let image = node.dump_and_kill(app)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

/// The copy is as slow as if it hung: one piece takes longer than an image may go without progress.
#[test]
fn a_copy_before_the_quiesce_that_hangs_is_given_up_and_the_program_goes_on() -> Result {
    let configuration = "stall_timeout_ms = 1000\n[checkpoint]\nprotocol = \"recopy\"\n";
    let node = Node::configured(configuration, &[("SIMGPU_COPY_GBPS", "0.0005")])?;
    let until = node.path("until");
    let app = node.run("hidden", &["--ballast-kib", "4096", "--until", &until.display().to_string()])?;
    app.reaches(3)?;
    let (criu, image) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?.fails_with("has made no progress")?;
    app.advances()?;
    assert!(image.files()?.is_empty(), "something is left of the image: {:?}", image.files()?);
    fs::write(&until, "")?;
    assert_eq!(app.finish()?, "hidden ok\n");
    node.finish()
}
