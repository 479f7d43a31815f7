//! Restored programs that run while the content of their GPU memory is still being loaded.

use std::fs;
use std::path::PathBuf;

use anyhow::ensure;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Image, Node, Result, process, until};

/// Copies so slow that loading the memory of a program takes several seconds.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.01")];
const BALLAST_KIB: &str = "49152";

/// Dumps and kills `steady` where copies are fast, and restores it where they are slow.
fn restored_slowly(node: &mut Node) -> Result<(Image, App, PathBuf)> {
    let until_file = node.path("until");
    let arguments = ["--until", &*until_file.to_string_lossy(), "--ballast-kib", BALLAST_KIB, "--sleep-us", "2000"];
    let app = node.run("steady", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&SLOW)?;
    let app = node.restore(&image)?;
    Ok((image, app, until_file))
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

#[test]
fn programs_of_a_tree_wait_each_for_its_own_memory_and_one_that_ends_meanwhile_ends_no_other() -> Result {
    let arguments = ["--rounds", "40", "--words", "131072", "--sleep-us", "2000"];
    let expected = undisturbed("tree", &arguments)?;
    let mut node = Node::start()?;
    let app = node.run("tree", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&[("SIMGPU_COPY_GBPS", "0.0005")])?;
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
