//! `rekindle migrate --lazy`: programs that run on the other host before they have all pages of their own.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, anyhow, ensure};
use rekindle_e2e::app::Identity;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Elsewhere, Node, Result, process, stage, until};

use super::migrate::{finish_elsewhere, handed_over, options, report, tells_the_pause};

/// A program on the other host.
struct Moved {
    app: App,
    /// As it was here.
    identity: Identity,
    until_file: PathBuf,
}

/// Starts a program that reads memory of its own again and again, and moves it.
fn move_with(here: &Node, there: &Elsewhere, ballast_kib: u64) -> Result<Moved> {
    let (until_file, ballast) = (here.fresh("until"), ballast_kib.to_string());
    let until = until_file.to_string_lossy().into_owned();
    let arguments = ["--until", &until, "--ballast-kib", &ballast, "--sleep-us", "500", "--fork-steps", "5"];
    let app = here.run("steady", &arguments)?;
    app.reaches(20)?;
    let said = report(&migrate(here, app.pid(), there)?)?;
    tells_the_pause(&said)?;
    let identity = handed_over(app)?;
    Ok(Moved { app: there.app(&identity)?, identity, until_file })
}

fn migrate(here: &Node, pid: i32, there: &Elsewhere) -> Result<Output> {
    let mut words = ["migrate", &pid.to_string(), "there", "--json", "--lazy"].map(str::to_owned).to_vec();
    words.extend(options(here, &there.via()?)?);
    here.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
}

/// The directories of migrations whose images are on the other host.
fn images(into: &Path) -> Result<Vec<PathBuf>> {
    let Ok(all) = fs::read_dir(into) else { return Ok(Vec::new()) };
    let all = all.map(|it| Ok(it?.path())).collect::<Result<Vec<_>>>()?;
    Ok(all.into_iter().filter(|it| it.is_dir()).collect())
}

/// Where these are.
fn into(here: &Node) -> PathBuf {
    here.path("moves/in")
}

/// CRIU's server of pages on the other host.
fn server(socket: &Path) -> Option<i32> {
    let variable = format!("REKINDLE_SOCKET={}", socket.display());
    let is_it = |pid: &i32| process::command_line(*pid).contains("lazy-pages --images-dir");
    process::with_environment(&variable).into_iter().find(is_it)
}

fn lacks_pages(pid: i32) -> Result<bool> {
    Ok(rekindle_wire::lazy_pages::lacks_pages(&fs::read_to_string(format!("/proc/{pid}/smaps"))?))
}

#[test]
fn a_program_runs_before_its_pages_are_there_and_the_images_go_when_they_are() -> Result {
    let here = Node::start()?;
    let there = Elsewhere::beside(&here)?;
    let Moved { app, until_file, .. } = move_with(&here, &there, 64 << 10)?;
    app.advances()?;
    until_true("the images are gone", || Ok(images(&into(&here))?.is_empty()))?;
    ensure!(!lacks_pages(app.pid())?, "the images are gone, and pages are missing");
    app.advances()?;
    until_true("no server is left", || Ok(server(here.socket()).is_none()))?;
    fs::write(&until_file, "")?;
    assert_eq!(finish_elsewhere(app)?, "steady ok\n");
    there.finish()?;
    here.finish()
}

/// A script of CRIU's that stops the server of pages when the processes are made, before they run, and a file that has CRIU call it.
fn stopping(here: &Node) -> Result<PathBuf> {
    let (script, config) = (here.fresh("script"), here.fresh("config"));
    let find = format!("pgrep -f 'lazy-pages --images-dir {}'", into(here).display());
    let text = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-restore ] || exit 0\nkill -STOP $({find})\n");
    stage::write_script(&script, &text)?;
    fs::write(&config, format!("action-script {}\n", script.display()))?;
    Ok(config)
}

#[test]
fn a_program_whose_pages_do_not_come_is_killed_and_can_be_restored_from_what_has_moved() -> Result {
    let here = Node::start()?;
    let there = Elsewhere::beside_with(&here, &[("CRIU_CONFIG_FILE", &stopping(&here)?)])?;
    let Moved { app, identity, until_file } = move_with(&here, &there, 64 << 10)?;
    ensure!(lacks_pages(app.pid())?, "the server was not stopped");
    let server = server(here.socket()).context("CRIU serves no pages")?;
    let [migration] = images(&into(&here))?.try_into().map_err(|all| anyhow!("images of one migration: {all:?}"))?;
    process::signal(server, libc::SIGKILL)?;
    until_true("the program is killed", || Ok(process::is_gone(app.pid())))?;
    let image = migration.join("last");
    let log = fs::read_to_string(image.join("lazy-pages.log"))?;
    ensure!(log.contains("they are killed") && log.contains("restore again"), "{log}");
    let progress = app.progress()?;
    std::mem::forget(app);
    until("the numbers of the killed processes are free", || {
        let output = there.rekindle(&["restore".as_ref(), "-d".as_ref(), image.as_os_str()])?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success() || said.contains("File exists") || said.contains("-17"), "{said}");
        Ok(output.status.success().then_some(()))
    })?;
    let app = there.app(&identity)?;
    ensure!(app.progress()? >= 20 && app.progress()? <= progress + 20);
    app.advances()?;
    fs::write(&until_file, "")?;
    assert_eq!(finish_elsewhere(app)?, "steady ok\n");
    fs::remove_dir_all(&migration)?;
    there.finish()?;
    here.finish()
}
