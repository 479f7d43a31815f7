//! Questions of users about a running program: `rekindle ps --calls`, `rekindle check`, and the fate of a program that
//! has lost its worker.

use std::ffi::OsStr;
use std::fs;

use anyhow::ensure;
use rekindle_e2e::fake::FakeDaemon;
use rekindle_e2e::{App, Fate, Node, Result, process, until};
use serde_json::{Value, json};

/// Runs `rekindle VERB... PID --json`, and returns its exit code and output.
fn ask(node: &Node, verb: &[&str], app: &App) -> Result<(Option<i32>, Value)> {
    let pid = app.pid().to_string();
    let arguments: Vec<_> = verb.iter().copied().chain([pid.as_str(), "--json"]).map(OsStr::new).collect();
    let output = node.rekindle(&arguments)?;
    Ok((output.status.code(), serde_json::from_slice(&output.stdout)?))
}

/// Starts `idle`, and returns when it waits.
fn idle(node: &Node, arguments: &[&str]) -> Result<App> {
    let until = node.path("never").display().to_string();
    let app = node.run("idle", &[arguments, &["--until", &until]].concat())?;
    app.reaches(1)?;
    Ok(app)
}

fn reasons(checked: &Value) -> Vec<&str> {
    let processes = checked["processes"].as_array().into_iter().flatten();
    processes.flat_map(|it| it["reasons"].as_array().into_iter().flatten()).filter_map(Value::as_str).collect()
}

#[test]
fn calls_are_counted_with_those_that_were_refused() -> Result {
    let node = Node::start()?;
    let app = idle(&node, &["--launches", "20", "--refused", "3"])?;
    let (code, calls) = ask(&node, &["ps", "--calls"], &app)?;
    assert_eq!(code, Some(0));
    let count = |name: &str| {
        let call = calls.as_array().into_iter().flatten().find(|it| it["call"] == name);
        call.map(|it| (it["asked"].as_u64(), it["refused"].as_u64()))
    };
    assert_eq!(count("cuCheckpointProcessLock"), Some((Some(3), Some(3))), "{calls}");
    assert_eq!(count("cuLaunchKernel"), Some((Some(20), Some(0))), "{calls}");
    assert_eq!(count("cuGraphCreate"), None, "{calls}");
    app.kill()?;
    node.finish()
}

#[test]
fn a_program_can_be_checkpointed_until_its_kernels_have_a_heap_that_no_image_holds() -> Result {
    let node = Node::start()?;
    let app = idle(&node, &[])?;
    let (code, checked) = ask(&node, &["check"], &app)?;
    assert_eq!((code, &checked["checkpointable"]), (Some(0), &Value::Bool(true)), "{checked}");
    node.dump(&app)?;
    app.kill()?;

    let app = idle(&node, &["--heap", "1"])?;
    let (code, checked) = ask(&node, &["check"], &app)?;
    assert_eq!(code, Some(0), "{checked}");
    node.dump(&app)?;
    app.kill()?;

    let app = idle(&node, &["--heap", "1", "--heap-mib", "1500"])?;
    let (code, checked) = ask(&node, &["check"], &app)?;
    assert_eq!(code, Some(3), "{checked}");
    assert!(reasons(&checked).iter().any(|it| it.contains("a heap of 1500 MiB for malloc")), "{checked}");
    // The dump reports the same.
    let (criu, _) = node.start_dump(&app, Fate::Killed)?;
    criu.wait()?.fails_with("a heap of 1500 MiB for malloc")?;
    app.kill()?;
    node.finish()
}

#[test]
fn processes_that_a_program_makes_meanwhile_are_no_obstacle() -> Result {
    let node = Node::start()?;
    let until_file = node.path("until");
    let arguments = ["--until", &*until_file.to_string_lossy(), "--fork-steps", "1", "--sleep-us", "100"];
    let app = node.run("steady", &arguments)?;
    app.reaches(5)?;
    for _ in 0..100 {
        let (status, checked) = ask(&node, &["check"], &app)?;
        ensure!(status == Some(0) && reasons(&checked).is_empty(), "{checked}");
    }
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_program_that_has_lost_its_worker_is_named_and_not_dumped() -> Result {
    let node = Node::start()?;
    let app = idle(&node, &[])?;
    let worker = node.client(app.pid())?.worker;
    process::signal(worker, libc::SIGKILL)?;
    until("ps says that it has lost its worker", || {
        Ok(node.clients()?.iter().any(|it| it.pid == app.pid() && it.state == "lost").then_some(()))
    })?;
    let (code, checked) = ask(&node, &["check"], &app)?;
    assert_eq!(code, Some(3), "{checked}");
    let name = format!("process {} (idle) has lost its worker", app.pid());
    assert!(reasons(&checked).iter().any(|it| it.contains(&name)), "{checked}");
    for fate in [Fate::Killed, Fate::Running] {
        let (criu, image) = node.start_dump(&app, fate)?;
        criu.wait()?.fails_with(&name)?;
        assert!(image.files()?.is_empty(), "an image of nothing: {:?}", image.files()?);
    }
    assert!(!process::is_gone(app.pid()), "it was to go on");
    app.kill()?;
    until("it is forgotten", || Ok(node.clients()?.is_empty().then_some(())))?;
    node.finish()
}

/// The verdict of `rekindle doctor` on one subject, and its whole output.
fn doctor(node: &Node, subject: &str) -> Result<(String, Value)> {
    let output = node.rekindle(&["doctor", "--json"].map(OsStr::new))?;
    let findings: Value = serde_json::from_slice(&output.stdout)?;
    let found = findings.as_array().into_iter().flatten().find(|it| it["subject"] == subject);
    let verdict = found.and_then(|it| it["verdict"].as_str()).unwrap_or("none").to_owned();
    Ok((verdict, findings))
}

#[test]
fn doctor_finds_what_is_there_and_says_what_is_not() -> Result {
    let mut node = Node::start()?;
    // The driver is the software GPU's, and no worker of it is missing.
    for (subject, expected) in
        [("kernel", "ok"), ("daemon", "ok"), ("driver", "note"), ("GPU", "ok"), ("plugin", "ok"), ("interposer", "ok")]
    {
        let (verdict, findings) = doctor(&node, subject)?;
        assert!(verdict == expected || (subject, &*verdict) == ("kernel", "note"), "{subject}: {findings:#}");
    }
    let daemon = node.daemon_pid()?;
    process::signal(daemon, libc::SIGSTOP)?;
    let (verdict, findings) = doctor(&node, "daemon")?;
    process::signal(daemon, libc::SIGCONT)?;
    assert_eq!(verdict, "bad", "{findings:#}");
    assert!(findings.to_string().contains(&format!("kill -CONT {daemon}")), "{findings:#}");
    assert!(node.stop_daemon()?.success());
    let (verdict, findings) = doctor(&node, "daemon")?;
    assert_eq!(verdict, "bad", "{findings:#}");
    assert!(findings.to_string().contains("start `rekindled`"), "{findings:#}");
    let other = FakeDaemon::start(node.socket(), json!({ "Failed": { "reason": "this rekindled 9.9 speaks 99" } }))?;
    let (verdict, findings) = doctor(&node, "daemon")?;
    assert_eq!(verdict, "bad", "{findings:#}");
    let said = findings.to_string();
    assert!(said.contains("9.9 speaks 99") && said.contains("install one version"), "{findings:#}");
    drop(other);
    node.finish()
}

/// `nvidia-smi` and `ps` show workers.
#[test]
fn the_title_of_a_worker_names_its_program_also_after_a_restore() -> Result {
    let node = Node::start()?;
    let title = |app: &App| -> Result<String> {
        let line = std::fs::read(format!("/proc/{}/cmdline", node.client(app.pid())?.worker))?;
        Ok(String::from_utf8_lossy(&line).trim_end_matches('\0').to_owned())
    };
    let app = idle(&node, &[])?;
    assert_eq!(title(&app)?, "rekindled: worker of idle");
    let image = node.dump_and_kill(app)?;
    let app = node.restore(&image)?;
    assert_eq!(title(&app)?, "rekindled: worker of idle");
    app.kill()?;
    node.finish()
}
