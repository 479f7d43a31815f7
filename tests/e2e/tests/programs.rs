//! Every program of `tests/apps` that has an expected output, with a test for each: the program prints the same
//! directly on the GPU, under the interposer, and suspended, in both ways, and dumped in its middle, killed and restored. A new program gets a test
//! automatically.

use std::fs;

use anyhow::{Context, bail, ensure};
use rekindle_e2e::{App, Image, Node, Result, stage};
use rekindle_wire::control::{Reply, Request, Resident};

/// The tests, as the build script names them.
mod program {
    use super::{Result, alike, all_ways};

    include!(concat!(env!("OUT_DIR"), "/programs.rs"));
}

/// Checks that a program prints the expected output directly and under the interposer.
fn alike(name: &str) -> Result {
    let expected = expected(name)?;
    assert_eq!(directly(name, &[])?, expected, "directly");
    let node = Node::start()?;
    assert_eq!(node.run(name, &[])?.finish()?, expected, "under the interposer");
    node.finish()
}

/// Suspends a program, unless it shares memory with others. It resumes with its next command.
fn suspended(node: &Node, app: &App, deep: bool) -> Result {
    match node.ask(&Request::Suspend { pid: app.pid(), hold: false, deep })? {
        Reply::Suspended(all) => ensure!(!all.is_empty() && all.iter().all(|it| it.deep == deep), "{all:?}"),
        Reply::Failed(failure) => {
            ensure!(failure.reason.contains("shares GPU memory"), "{failure}");
        }
        other => bail!("Suspend was answered by {other:?}"),
    }
    Ok(())
}

/// Keeps the image of a program ready for a restore, for some programs with its memory on the GPU. Some
/// share memory with others, and load it when they are restored.
fn warmed(node: &Node, name: &str, image: &Image) -> Result {
    let resident = [None, Some(Resident::Each), Some(Resident::Once), Some(Resident::Shared)][name.len() % 4];
    match node.ask_about(&Request::Warm { copies: 1, resident }, &image.dir)? {
        Reply::Warm(images) => {
            let [info] = &images[..] else { bail!("{images:?}") };
            let shares = info.problem.as_ref().is_some_and(|it| it.contains("share GPU memory"));
            ensure!(info.ready == 1 || shares, "{info:?}");
        }
        other => bail!("Warm was answered by {other:?}"),
    }
    Ok(())
}

/// Checks in addition both kinds of suspension, and a dump, a kill and two restores. A program runs at its own speed until the dump, and waits before
/// its end until the dump is done: so the dump finds it in its middle however slow this machine is.
fn all_ways(name: &str) -> Result {
    let expected = expected(name)?;
    let node = Node::start()?;
    let file = node.path("progress");
    let argument = file.to_str().context("a path that is no text")?;
    assert_eq!(directly(name, &["--progress", argument])?, expected, "directly");
    let last: u64 = fs::read_to_string(&file)?.trim().parse()?;
    ensure!(last >= 8, "{name} makes {last} steps, too few to be dumped in its middle");
    assert_eq!(node.run(name, &[])?.finish()?, expected, "under the interposer");

    let app = node.run_held(name, &[], Some(last * 3 / 4))?;
    app.reaches(last / 3)?;
    suspended(&node, &app, false).with_context(|| format!("{name} is suspended"))?;
    app.reaches(last / 2)?;
    suspended(&node, &app, true).with_context(|| format!("{name} is suspended deeply"))?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected, "restored");
    warmed(&node, name, &image)?;
    assert_eq!(node.restore(&image)?.finish()?, expected, "restored from a warm image");
    node.ask_about(&Request::ForgetWarm, &image.dir)?;
    node.finish()
}

fn expected(name: &str) -> Result<String> {
    let file = stage::repository()?.join("tests/apps/expected").join(name).with_extension("txt");
    fs::read_to_string(&file).with_context(|| file.display().to_string())
}

fn directly(name: &str, arguments: &[&str]) -> Result<String> {
    rekindle_e2e::app::undisturbed(name, arguments)
}
