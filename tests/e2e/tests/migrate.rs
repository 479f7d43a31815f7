//! `rekindle migrate`: programs that move to another host while they run.

use std::ffi::OsStr;
use std::process::Output;

use anyhow::ensure;
use rekindle_e2e::app::{Identity, undisturbed};
use rekindle_e2e::{App, Elsewhere, Node, Result, process, stage, until};
use serde_json::Value;

const ARGUMENTS: [&str; 4] = ["--iterations", "1500", "--sleep-us", "2000"];

/// Moves a program from a host to another by `rekindle migrate`.
fn migrate(here: &Node, pid: i32, there: &Elsewhere, more: &[&str]) -> Result<Output> {
    let arguments = arguments(here, pid, &there.via(), more)?;
    here.rekindle(&arguments.iter().map(OsStr::new).collect::<Vec<_>>())
}

/// Moves it back.
fn migrate_back(there: &Elsewhere, pid: i32, here: &Node, more: &[&str]) -> Result<Output> {
    // Out of the namespaces again.
    let via = format!("nsenter --target={} --pid --mount env REKINDLE_SOCKET={}", std::process::id(), here.socket().display());
    let arguments = arguments(here, pid, &via, more)?;
    there.rekindle(&arguments.iter().map(OsStr::new).collect::<Vec<_>>())
}

fn arguments(here: &Node, pid: i32, via: &str, more: &[&str]) -> Result<Vec<String>> {
    let text = |path: std::path::PathBuf| path.to_string_lossy().into_owned();
    let (out, into) = (text(here.path("moves/out")), text(here.path("moves/in")));
    let rekindle = text(stage::program("rekindle")?);
    let pid = pid.to_string();
    let words = ["migrate", &pid, "there", "--via", via, "--rekindle", &rekindle, "--dir", &out, "--dir-there", &into, "--json"];
    Ok(words.iter().chain(more).map(|it| (*it).to_owned()).collect())
}

/// The report of a migration that has succeeded.
fn report(output: &Output) -> Result<Value> {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.code() == Some(0), "{} {out} {err}", output.status);
    Ok(serde_json::from_str(&out)?)
}

/// Waits until a program that has moved here ends, and returns its output.
fn finish_elsewhere(app: App) -> Result<String> {
    app.lift();
    until("the program ends on the other host", || Ok(process::is_gone(app.pid()).then_some(())))?;
    app.output()
}

/// The program, which was handed over: all of it is gone here.
fn handed_over(app: App) -> Result<Identity> {
    let tree = process::tree(app.pid());
    app.was_killed(&tree)
}

#[test]
fn a_program_moves_to_another_host_and_ends_there_as_it_would_have_here() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let here = Node::start()?;
    let there = Elsewhere::beside(&here)?;
    let app = here.run("globals", &ARGUMENTS)?;
    app.reaches(300)?;
    let said = report(&migrate(&here, app.pid(), &there, &[])?)?;
    assert_eq!((&said["moved"], &said["host"]), (&true.into(), &"there".into()), "{said}");
    assert!(said["pause_ms"].is_u64() && said["last_sent"].as_u64() > Some(0), "{said}");
    let identity = handed_over(app)?;
    let app = there.app(&identity)?;
    assert!(app.progress()? >= 300);
    assert_eq!(finish_elsewhere(app)?, expected);
    there.finish()?;
    here.finish()
}

#[test]
fn a_program_moves_to_and_fro() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let here = Node::start()?;
    let there = Elsewhere::beside(&here)?;
    let mut app = here.run("globals", &ARGUMENTS)?;
    for round in 1..=4 {
        app.reaches(round * 150)?;
        report(&migrate(&here, app.pid(), &there, &[])?)?;
        let identity = handed_over(app)?;
        let moved = there.app(&identity)?;
        moved.advances()?;
        let tree = process::tree(moved.pid());
        report(&migrate_back(&there, identity.pid, &here, &[])?)?;
        tree.iter().try_for_each(|pid| process::wait_gone("a process of a tree that has moved", *pid))?;
        std::mem::forget(moved);
        app = App::adopt(identity);
        app.advances()?;
    }
    assert_eq!(app.finish()?, expected);
    there.finish()?;
    here.finish()
}
