//! Restored programs that run while the content of their GPU memory is still being loaded.

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Image, Node, Result, process, stage, until};
use serde_json::Value;

/// Copies so slow that loading the memory of a program takes several seconds.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.01")];
const BALLAST_KIB: &str = "49152";

/// Dumps and kills `steady` where copies are fast, and makes copies slow then.
fn dumped(node: &mut Node) -> Result<(Image, PathBuf)> {
    let until_file = node.path("until");
    let arguments = ["--until", &*until_file.to_string_lossy(), "--ballast-kib", BALLAST_KIB, "--sleep-us", "2000"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&SLOW)?;
    Ok((image, until_file))
}

/// Dumps and kills `steady` where copies are fast, and restores it where they are slow.
fn restored_slowly(node: &mut Node) -> Result<(Image, App, PathBuf)> {
    let (image, until_file) = dumped(node)?;
    let app = node.restore(&image)?;
    Ok((image, app, until_file))
}

/// Runs `rekindle restore -d` with more arguments.
fn rekindle_restore(node: &Node, image: &Image, more: &[&str]) -> Result<Output> {
    let arguments: Vec<_> =
        ["restore", "-d"].iter().chain(more).map(OsStr::new).chain([image.dir.as_os_str()]).collect();
    until("the numbers of the killed threads are free", || {
        let output = node.rekindle(&arguments)?;
        let log = fs::read_to_string(image.path("restore.log"))?;
        let too_early = !output.status.success() && log.contains("Unable to create a thread: -17");
        Ok((!too_early).then_some(output))
    })
}

fn json(output: &Output) -> Result<Value> {
    let said = || format!("{} {}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).with_context(said)
}

fn inspected(node: &Node, image: &Image) -> Result<Value> {
    json(&node.rekindle(&["inspect".as_ref(), "--json".as_ref(), image.dir.as_os_str()])?)
}

fn names(phases: &Value) -> Vec<&str> {
    phases.as_array().into_iter().flatten().filter_map(|it| it["name"].as_str()).collect()
}

fn is_loading(node: &Node, app: &App) -> Result<bool> {
    Ok(node.client(app.pid())?.state == "loading")
}

fn log(node: &Node) -> Result<String> {
    Ok(fs::read_to_string(node.path("daemon.log"))?)
}

#[test]
fn a_program_runs_while_its_memory_is_loaded_and_is_dumped_when_the_memory_is_complete() -> Result {
    let mut node = Node::start()?;
    let (_, app, until_file) = restored_slowly(&mut node)?;
    // CRIU has ended by now.
    ensure!(is_loading(&node, &app)?, "{:?}", node.client(app.pid())?.state);
    let image = node.dump(&app)?;
    ensure!(log(&node)?.contains("the dump waits until its memory is loaded"));
    app.advances()?;
    app.kill()?;
    let app = node.restore(&image)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_program_goes_on_when_the_daemon_is_killed_while_memory_is_loaded() -> Result {
    let mut node = Node::start()?;
    let (_, app, until_file) = restored_slowly(&mut node)?;
    ensure!(is_loading(&node, &app)?);
    node.kill_daemon()?;
    app.advances()?;
    node.start_daemon(&[])?;
    until("the worker has joined the new daemon", || {
        Ok(node.clients()?.into_iter().find(|it| it.pid == app.pid() && it.state == "running"))
    })?;
    let image = node.dump(&app)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    fs::remove_file(&until_file)?;
    let app = node.restore(&image)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn content_that_is_corrupt_ends_the_running_program_and_the_log_says_why() -> Result {
    let mut node = Node::start()?;
    let until_file = node.path("until");
    let arguments = ["--until", &*until_file.to_string_lossy(), "--ballast-kib", BALLAST_KIB, "--sleep-us", "2000"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    let before = image.app.progress.as_ref().map(fs::read_to_string).transpose()?;
    let file = image.file("rekindle-data")?;
    // Pieces are loaded in the order of the file, so the program runs by the time when this one is read.
    image.flip(&file, fs::metadata(image.path(&file))?.len() - (1 << 20))?;
    node.stop_daemon()?;
    node.start_daemon(&SLOW)?;
    let app = node.restore(&image)?;
    app.was_killed(&image.tree)?;
    let log = log(&node)?;
    let why = log.lines().find(|line| line.contains("its memory cannot be restored"));
    ensure!(why.is_some_and(|it| it.contains(&format!("{file} is corrupt"))), "{why:?}");
    // No step was made on wrong memory.
    assert_eq!(image.app.progress.as_ref().map(fs::read_to_string).transpose()?, before);
    node.finish()
}

/// The first library of a client takes so long, and the seconds of a restore do not.
const REPLAYS_SLOWLY: &str = "cuLibraryLoadData:1:delay=10000";

/// Dumps and kills `steady`, and restores it to a process that runs while its worker loads code.
fn restored_ahead(node: &mut Node, fault: &str) -> Result<(Image, App, PathBuf)> {
    let until_file = node.path("until");
    let arguments = ["--until", &*until_file.to_string_lossy(), "--sleep-us", "2000"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&[("SIMGPU_FAULT", fault)])?;
    let app = node.restore(&image)?;
    // CRIU has ended by now.
    let state = node.client(app.pid())?.state;
    let log = log(node)?;
    ensure!(state == "loading" && log.contains("Loading -> Assured") && !log.contains("Assured ->"), "{state}\n{log}");
    Ok((image, app, until_file))
}

#[test]
fn a_program_runs_before_its_code_is_loaded_and_goes_on_when_the_daemon_is_killed_then() -> Result {
    let mut node = Node::start()?;
    let (_, app, until_file) = restored_ahead(&mut node, REPLAYS_SLOWLY)?;
    node.kill_daemon()?;
    node.start_daemon(&[])?;
    app.advances()?;
    until("the worker has joined the new daemon", || {
        Ok(node.clients()?.into_iter().find(|it| it.pid == app.pid() && it.state == "running"))
    })?;
    let image = node.dump_and_kill(app)?;
    let app = node.restore(&image)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_dump_of_a_program_whose_code_is_not_loaded_waits_for_that() -> Result {
    let mut node = Node::start()?;
    let (_, app, until_file) = restored_ahead(&mut node, REPLAYS_SLOWLY)?;
    let image = node.dump_and_kill(app)?;
    ensure!(log(&node)?.contains("the dump waits until its memory is loaded"));
    let app = node.restore(&image)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn code_that_does_not_load_ends_the_running_program_and_the_image_stays() -> Result {
    let mut node = Node::start()?;
    let fault = format!("{REPLAYS_SLOWLY},cuLibraryLoadData:1:2");
    let (image, app, until_file) = restored_ahead(&mut node, &fault)?;
    let before = image.app.progress.as_ref().map(fs::read_to_string).transpose()?;
    app.was_killed(&image.tree)?;
    let log = log(&node)?;
    let why = log.lines().find(|line| line.contains("cannot be restored"));
    ensure!(why.is_some_and(|it| it.contains("LIBRARY_LOAD")), "{why:?}\n{log}");
    assert_eq!(image.app.progress.as_ref().map(fs::read_to_string).transpose()?, before);
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    let app = node.restore(&image)?;
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn programs_of_a_tree_wait_each_for_its_own_memory_and_one_that_ends_meanwhile_ends_no_other() -> Result {
    let arguments = ["--rounds", "40", "--words", "131072", "--sleep-us", "2000"];
    let expected = undisturbed("tree", &arguments)?;
    let mut node = Node::start()?;
    let app = node.run("tree", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&[("SIMGPU_COPY_GBPS", "0.0002")])?;
    let app = node.restore(&image)?;
    let states = until("a process of the tree is loading", || {
        let states: Vec<_> = node.clients()?.into_iter().map(|it| it.state).collect();
        Ok(states.iter().any(|it| it == "loading").then_some(states))
    })?;
    ensure!(states.len() == 2, "{states:?}");
    assert_eq!(app.finish()?, expected);
    process::wait_group_gone(image.app.pid)?;
    node.finish()
}

#[test]
fn a_restore_tells_what_each_part_took_and_so_does_the_image_until_the_next_dump() -> Result {
    let mut node = Node::start()?;
    let (image, until_file) = dumped(&mut node)?;
    let said = json(&rekindle_restore(&node, &image, &["--json", "--wait-loaded"])?)?;
    let app = App::adopt(image.app.clone());
    ensure!(said["outcome"] == "done", "{said}");
    let restore = &said["restore"];
    let (running, loaded) = (restore["running_ms"].as_f64(), restore["loaded_ms"].as_f64());
    ensure!(running.is_some() && loaded > running, "{said}");
    assert_eq!(names(&restore["phases"]), ["check", "workers", "prepare", "criu", "wait", "connect", "open"]);
    let client = &restore["clients"][0];
    ensure!(client["pid"] == app.pid() && client["bytes"].as_u64() > Some(48 << 20), "{said}");
    assert_eq!(names(&client["phases"]), ["code", "replay", "map", "content", "hash"]);
    ensure!(client["phases"][3]["duration_ns"].as_f64() > running.map(|it| it * 1e6), "{said}");
    // The daemon has no dump of it to wait for, and the image has the same to say.
    ensure!(!is_loading(&node, &app)?);
    let last = inspected(&node, &image)?["last_restore"].clone();
    assert_eq!(last["loaded_ns"].as_u64().map(|it| it as f64 / 1e6), loaded);
    assert_eq!((&last["phases"], &last["clients"][0]["phases"]), (&restore["phases"], &client["phases"]));
    let verified = node.rekindle(&["verify".as_ref(), image.dir.as_os_str()])?;
    ensure!(verified.status.success(), "{verified:?}");

    // A restore of the same image by `criu` alone is the last one then.
    app.kill()?;
    let app = node.restore(&image)?;
    let second = until("the account of the second restore is there", || {
        let now = inspected(&node, &image)?["last_restore"].clone();
        // While the content is being loaded there is none.
        Ok((!now.is_null() && now != last).then_some(now))
    })?;
    ensure!(second["loaded_ns"].is_u64(), "{second}");
    let pid = app.pid().to_string();
    let arguments = [OsStr::new("checkpoint"), "--kill".as_ref(), pid.as_ref(), image.dir.as_os_str()];
    let dumped = node.rekindle(&arguments)?;
    ensure!(dumped.status.success(), "{dumped:?}");
    app.was_killed(&image.tree)?;
    ensure!(inspected(&node, &image)?["last_restore"].is_null());
    ensure!(!image.files()?.iter().any(|it| it.starts_with("rekindle-restore")), "{:?}", image.files()?);

    let output = rekindle_restore(&node, &image, &[])?;
    let line = String::from_utf8(output.stdout)?;
    let begins = format!("restored process {pid} from ");
    ensure!(line.starts_with(&begins) && line.ends_with(", its content is still being loaded\n"), "{line}");
    let app = App::adopt(image.app.clone());
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn who_waits_for_all_content_learns_that_it_is_corrupt() -> Result {
    let mut node = Node::start()?;
    let (image, _) = dumped(&mut node)?;
    let file = image.file("rekindle-data")?;
    image.flip(&file, fs::metadata(image.path(&file))?.len() - (1 << 20))?;
    let output = rekindle_restore(&node, &image, &["--json", "--wait-loaded"])?;
    let said = json(&output)?;
    ensure!(output.status.code() == Some(4), "{said}");
    assert_eq!((&said["outcome"], &said["kind"]), (&"failed".into(), &"bad_image".into()), "{said}");
    let reason = said["reason"].as_str().unwrap_or_default();
    ensure!(reason.contains(&format!("{file} is corrupt")), "{said}");
    App::adopt(image.app.clone()).was_killed(&image.tree)?;
    ensure!(inspected(&node, &image)?["last_restore"].is_null());
    node.finish()
}

#[test]
fn a_terminal_shows_how_far_a_restore_is_until_the_processes_run() -> Result {
    let mut node = Node::start()?;
    let (image, until_file) = dumped(&mut node)?;
    // CRIU has made the processes, and does not go on as long as this file exists.
    let (script, held) = (node.path("script"), node.path("held"));
    fs::write(&held, "")?;
    let wait = format!(
        "while [ \"$CRTOOLS_SCRIPT_ACTION\" = post-restore ] && [ -e '{}' ]; do sleep 0.02; done",
        held.display()
    );
    stage::write_script(&script, &format!("#!/bin/sh\n{wait}\n"))?;
    let (program, typescript) = (stage::program("rekindle")?, node.path("shown"));
    let (program, dir, script) = (program.display(), image.dir.display(), script.display());
    let line = format!("{program} restore -d {dir} -- --action-script {script}");
    let mut terminal = Command::new("script");
    stage::clean_environment(&mut terminal);
    terminal.args(["--quiet", "--return", "--flush", "--command", &line]).arg(&typescript);
    terminal.env("REKINDLE_SOCKET", node.socket()).stdin(Stdio::null()).stdout(Stdio::null());
    let mut terminal = terminal.spawn()?;
    let shown = || String::from_utf8_lossy(&fs::read(&typescript).unwrap_or_default()).into_owned();
    until("the terminal shows how much content is loaded", || {
        ensure!(terminal.try_wait()?.is_none(), "it has ended: {}", shown());
        Ok(shown().contains("content  [##").then_some(()))
    })?;
    fs::remove_file(&held)?;
    let status = until("it ends", || Ok(terminal.try_wait()?))?;
    let shown = shown();
    ensure!(status.success(), "{shown}");
    // The line is gone when the report comes.
    let report = format!("\r\u{1b}[Krestored process {} from ", image.app.pid);
    ensure!(shown.contains(&report), "{shown}");
    let app = App::adopt(image.app.clone());
    fs::write(&until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}
