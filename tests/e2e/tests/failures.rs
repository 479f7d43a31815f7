//! Failures of processes other than the daemon: workers and programs.

use std::ffi::OsStr;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, process, stage, until};

/// Whether all threads of a process sleep in a futex.
fn all_wait(pid: i32) -> Result<bool> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let call = std::fs::read_to_string(thread?.path().join("syscall"))?;
        if call.split(' ').next() != Some(&libc::SYS_futex.to_string()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The program has one thread. With several, one would end the program while others are still in the runtime, which the
/// runtime does not support.
#[test]
fn a_killed_worker_is_an_error_in_its_program_and_not_a_hang() -> Result {
    let node = Node::start()?;
    let app = node.run("streams4", &["--threads", "1", "--iterations", "100000"])?;
    app.reaches(20)?;
    let worker = node.client(app.pid())?.worker;
    process::signal(worker, libc::SIGSTOP)?;
    until("a call waits for the worker", || Ok(all_wait(app.pid())?.then_some(())))?;
    process::signal(worker, libc::SIGKILL)?;
    let status = app.end()?;
    let errors = app.errors()?;
    assert_eq!(status.code(), Some(3), "{status}: {errors}");
    assert!(errors.contains("rekindle: the worker of this process has died"), "{errors}");
    assert!(errors.contains("cudaErrorLaunchFailure"), "{errors}");
    node.finish()
}

#[test]
fn a_killed_program_frees_its_worker_and_the_pool_is_full_again() -> Result {
    let node = Node::start()?;
    let app = node.run("streams4", &["--iterations", "100000", "--sleep-us", "1000"])?;
    app.reaches(20)?;
    let worker = node.client(app.pid())?.worker;
    app.kill()?;
    process::wait_gone("the worker of a killed program", worker)?;
    node.is_idle()?;
    assert!(node.clients()?.is_empty());
    node.finish()
}

#[test]
fn a_worker_that_is_slow_to_end_is_not_taken_for_that_of_the_restored_program() -> Result {
    let arguments = ["--iterations", "150", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let node = Node::start()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(20)?;
    let image = node.dump(&app)?;
    // The stopped worker cannot notice that its client has ended. The restored program then has the same process id.
    let worker = node.client(app.pid())?.worker;
    process::signal(worker, libc::SIGSTOP)?;
    app.kill()?;
    let app = node.restore(&image)?;
    app.advances()?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    process::signal(worker, libc::SIGCONT)?;
    node.finish()
}

#[test]
fn a_program_that_becomes_another_frees_its_worker() -> Result {
    let node = Node::start()?;
    let go = node.path("go");
    let mut command = node.command(&stage::helper("exec-after-cuda")?)?;
    command.args([go.as_os_str(), OsStr::new("sleep"), OsStr::new("infinity")]);
    let app = App::start(&mut command, &node.fresh("exec"), None)?;
    let worker = node.client(app.pid())?.worker;
    std::fs::write(go, "")?;
    process::wait_gone("the worker of a program that is another now", worker)?;
    until("it is no client", || Ok(node.clients()?.is_empty().then_some(())))?;
    assert!(!process::is_gone(app.pid()), "it was to run on as sleep");
    assert_eq!(std::fs::read_to_string(format!("/proc/{}/comm", app.pid()))?, "sleep\n");
    app.kill()?;
    node.finish()
}
