//! Every program of `tests/apps` that has an expected output, a test for each: it prints the same directly on the GPU, under
//! the interposer, and dumped in its middle, killed and restored. A new program is tested by being there.

use std::fs;

use anyhow::{Context, ensure};
use rekindle_e2e::{Node, Result, stage};

/// The tests, as the build script names them.
mod program {
    use super::{Result, alike, all_ways};

    include!(concat!(env!("OUT_DIR"), "/programs.rs"));
}

/// Directly and under the interposer it prints what is expected.
fn alike(name: &str) -> Result {
    let expected = expected(name)?;
    assert_eq!(directly(name, &[])?, expected, "directly");
    let node = Node::start()?;
    assert_eq!(node.run(name, &[])?.finish()?, expected, "under the interposer");
    node.finish()
}

/// And dumped, killed and restored. A program goes at its own speed until the dump, and stops by itself before its end as
/// long as the dump is not done: so it is in its middle however slow this machine is.
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
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected, "restored");
    node.finish()
}

fn expected(name: &str) -> Result<String> {
    let file = stage::repository()?.join("tests/apps/expected").join(name).with_extension("txt");
    fs::read_to_string(&file).with_context(|| file.display().to_string())
}

fn directly(name: &str, arguments: &[&str]) -> Result<String> {
    rekindle_e2e::app::undisturbed(name, arguments)
}
