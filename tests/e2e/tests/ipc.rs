//! Memory and events that two processes share. The processes are dumped together or not at all, and handles that they
//! exchanged before remain valid afterwards.

use std::ffi::OsStr;
use std::fs;

use anyhow::Context;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::criu::Fate;
use rekindle_e2e::{App, Node, Result, stage, until};

/// A device this small has pieces of 2 MiB, so allocations of the programs here are made of several.
const SMALL_PIECES: [(&str, &str); 1] = [("SIMGPU_MEMORY", "256M")];

/// Starts `ipc`, and returns it and the id of its second process when both are in their middle.
fn in_the_middle(node: &Node, arguments: &[&str]) -> Result<(App, i32)> {
    let app = node.run_held("ipc", arguments, Some(20))?;
    app.reaches(20)?;
    let other = node.clients()?.into_iter().find(|it| it.pid != app.pid());
    let other = other.context("there is no second process")?.pid;
    Ok((app, other))
}

#[test]
fn one_of_two_that_share_memory_cannot_be_dumped_and_both_can() -> Result {
    let arguments = ["--rounds", "60"];
    let expected = undisturbed("ipc", &arguments)?;
    let node = Node::start()?;
    let (app, other) = in_the_middle(&node, &arguments)?;

    let reason = format!("shares GPU memory with process {}", app.pid());
    let output = node.rekindle(&["check".as_ref(), OsStr::new(&other.to_string())])?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    assert!(output.status.code() == Some(3) && said.contains(&reason), "{said}");
    let output = node.rekindle(&["check".as_ref(), OsStr::new(&app.pid().to_string())])?;
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stdout));

    let dir = node.path("of-one");
    std::fs::create_dir(&dir)?;
    let dump = node.criu().dump(other, &dir, Fate::Running, node.path("of-one.log"))?;
    dump.wait()?.fails_with(&reason)?;
    until("both run again", || Ok(node.clients()?.iter().all(|client| client.state == "running").then_some(())))?;

    node.dump(&app)?;
    assert_eq!(app.finish()?, expected, "left running");
    node.finish()
}

#[test]
fn what_names_shared_memory_is_good_after_a_restore_under_another_daemon() -> Result {
    let arguments = ["--rounds", "60"];
    let expected = undisturbed("ipc", &arguments)?;
    let mut node = Node::with_gpu(&SMALL_PIECES)?;
    let (app, _) = in_the_middle(&node, &arguments)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    node.stop_daemon()?;
    node.start_daemon(&SMALL_PIECES)?;
    // The second process opens everything again by the handles that it was given before the dump.
    assert_eq!(node.restore(&image)?.finish()?, expected, "restored");
    node.finish()
}

/// On the driver alone, a handle is the only protection of another user's memory; under Rekindle the daemon knows which
/// user asks.
#[test]
fn another_users_memory_is_not_to_be_had() -> Result {
    let node = Node::configured("socket_mode = \"0666\"\n", &[])?;
    // The other user can read the interposer there.
    let lib = node.path("lib");
    fs::create_dir(&lib)?;
    fs::copy(stage::interposer()?.join("libcuda.so.1"), lib.join("libcuda.so.1"))?;
    let mut command = node.command(&stage::app("heirs")?)?;
    let output = command.args(["--user", "65534"]).env("LD_LIBRARY_PATH", lib).output()?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    let expected = ["cuIpcOpenMemHandle", "cuMemImportFromShareableHandle"]
        .map(|call| format!("{call}: CUDA_ERROR_INVALID_HANDLE\n"));
    assert_eq!(said, expected.concat());
    node.finish()
}

/// Starts `poolmates`, and returns it when both of its processes are in their middle.
fn mates_in_the_middle(node: &Node, arguments: &[&str]) -> Result<App> {
    let app = node.run_held("poolmates", arguments, Some(40))?;
    app.reaches(40)?;
    Ok(app)
}

#[test]
fn a_pool_that_two_processes_share_is_theirs_after_a_restore_under_another_daemon() -> Result {
    let arguments = ["--rounds", "80"];
    let expected = undisturbed("poolmates", &arguments)?;
    let mut node = Node::with_gpu(&SMALL_PIECES)?;
    let app = mates_in_the_middle(&node, &arguments)?;
    node.dump(&app)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    node.stop_daemon()?;
    node.start_daemon(&SMALL_PIECES)?;
    // The second process imports pool and memory again by what it was given before the dump, and memory that is new.
    assert_eq!(node.restore(&image)?.finish()?, expected, "restored");
    node.finish()
}

#[test]
fn one_of_two_that_share_a_pool_cannot_be_dumped() -> Result {
    let arguments = ["--rounds", "60"];
    let expected = undisturbed("poolmates", &arguments)?;
    let node = Node::start()?;
    let app = mates_in_the_middle(&node, &arguments)?;
    let other = node.clients()?.into_iter().find(|it| it.pid != app.pid());
    let other = other.context("there is no second process")?.pid;
    let output = node.rekindle(&["check".as_ref(), OsStr::new(&other.to_string())])?;
    let said = String::from_utf8([output.stdout, output.stderr].concat())?;
    let reason = format!("shares GPU memory with process {}", app.pid());
    assert!(output.status.code() == Some(3) && said.contains(&reason), "{said}");
    assert_eq!(app.finish()?, expected, "running");
    node.finish()
}

/// The page that the record goes to is in the second's part of the image, and the first's wait, after the restore, is for it.
#[test]
fn a_shared_event_that_is_recorded_behind_a_host_function_is_so_after_a_restore() -> Result {
    let arguments = ["--rounds", "20"];
    let expected = undisturbed("ipc", &arguments)?;
    let node = Node::start()?;
    let app = node.run_held("ipc", &arguments, Some(1))?;
    app.reaches(1)?;
    let image = node.dump_and_kill(app)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}
