//! Kernels that write memory in every way that could be mispredicted, while that memory is copied. Under each protocol
//! the write is either predicted, or detected and reported. No image contains such a write.

use std::fs;

use anyhow::{Context, ensure};
use rekindle_e2e::twin::{Manner, Source, Taken, same};
use rekindle_e2e::{App, Node, Result};
use rekindle_wire::control::{Failure, FailureKind, ProtocolChange, Request};

/// 4 MB per second: the copy starts with memory whose copy takes many steps of the program, before the written memory.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.004")];
/// Ways of writing of the program `hidden` that parameters name.
const FORESEEN: [&str; 6] = ["late", "struct", "extern", "atomic", "bulk", "copy"];
/// Ways of writing that parameters do not name, and their kernels.
const HIDDEN: [(&str, &str); 5] = [
    ("table", "turn"),
    ("global", "through_global"),
    ("neighbour", "beyond"),
    ("const_cast", "against_its_word"),
    ("graph", "turn"),
];
/// The number of dumps to try: a dump may hit a moment in which nothing is written.
const TRIES: usize = 200;

/// Runs `hidden`, calls `work` on it, lets the program end, and checks every word of its memory.
fn way(node: &Node, name: &str, protocol: &str, work: impl FnOnce(&App, &Source) -> Result) -> Result {
    let until = node.fresh("until");
    let file = until.display().to_string();
    let arguments = ["--way", name, "--kib", "4", "--ballast-kib", "256", "--sleep-us", "300", "--until", &file];
    let app = node.run("hidden", &arguments)?;
    app.reaches(3)?;
    node.ask(&Request::Protocol { pid: app.pid(), change: ProtocolChange::Choose(protocol.to_owned()) })?;
    work(&app, &Source::new(node, &app)?).with_context(|| format!("{name} under {protocol}"))?;
    fs::write(&until, "")?;
    assert_eq!(app.finish()?, "hidden ok\n", "{name} under {protocol}");
    Ok(())
}

/// Dumps the program, and checks the image if there is one.
fn dump(node: &Node, app: &App, source: &Source) -> Result<Option<Failure>> {
    let dir = node.fresh("image");
    fs::create_dir(&dir)?;
    let taken = source.take(&dir, Manner::PLAIN)?;
    app.advances()?;
    match taken {
        Taken::Both(image, stop) => {
            ensure!(same(&image, &stop)? > 128 << 10, "too little was compared");
            Ok(None)
        }
        Taken::Failed(failure) => {
            ensure!(fs::read_dir(&dir)?.next().is_none(), "something is left of an image that is none");
            Ok(Some(failure))
        }
        Taken::Gone | Taken::GivenUp => anyhow::bail!("it has ended"),
    }
}

fn right_at_once(node: &Node, app: &App, source: &Source) -> Result {
    for _ in 0..2 {
        let failed = dump(node, app, source)?;
        ensure!(failed.is_none(), "{failed:?}");
    }
    Ok(())
}

/// Checks that a mispredicted write is detected and reported with the kernel's name, and that later dumps predict it.
fn found_out(node: &Node, app: &App, source: &Source, kernel: &str) -> Result {
    let failure = (0..TRIES).find_map(|_| dump(node, app, source).transpose()).context("it was never found out")??;
    ensure!(failure.kind == FailureKind::Mispredicted && failure.reason.contains(kernel), "{failure:?}");
    ensure!(failure.reason.contains("4096 bytes at 0x20000"), "{failure}");
    right_at_once(node, app, source)
}

#[test]
fn what_parameters_tell_is_foreseen_under_each_protocol() -> Result {
    for pool in [1 << 20, 0] {
        let node = Node::configured(&format!("[checkpoint]\ncow_pool = {pool}\n"), &SLOW)?;
        for name in FORESEEN {
            for protocol in if pool > 0 { &["cow", "clone", "recopy"][..] } else { &["cow"] } {
                way(&node, name, protocol, |app, source| right_at_once(&node, app, source))?;
            }
        }
        node.finish()?;
    }
    Ok(())
}

#[test]
fn what_parameters_do_not_tell_is_found_out_under_cow_and_harmless_under_others() -> Result {
    let node = Node::configured("", &SLOW)?;
    for (name, kernel) in HIDDEN {
        way(&node, name, "cow", |app, source| found_out(&node, app, source, kernel))?;
        for protocol in ["clone", "recopy"] {
            way(&node, name, protocol, |app, source| right_at_once(&node, app, source))?;
        }
    }
    node.finish()
}

/// The copy never waits for the legacy stream, which waits for the program, and nothing in that stream waits for the
/// copy.
#[test]
fn an_image_becomes_whole_while_a_kernel_of_the_legacy_stream_does_not_end() -> Result {
    for protocol in ["cow", "clone"] {
        let node = Node::configured("", &SLOW)?;
        let until = node.path("until");
        let file = until.display().to_string();
        let arguments = ["--way", "held", "--kib", "4", "--ballast-kib", "512", "--sleep-us", "300", "--until", &file];
        let app = node.run("hidden", &arguments)?;
        app.reaches(3)?;
        node.ask(&Request::Protocol { pid: app.pid(), change: ProtocolChange::Choose(protocol.to_owned()) })?;
        let dir = node.path("image");
        fs::create_dir(&dir)?;
        // The program goes on, and its kernel waits from now on.
        let held = || {
            fs::write(node.path("until.go"), "")?;
            app.reaches(1_000_000)
        };
        match Source::new(&node, &app)?.take_while(&dir, Manner::PLAIN, held)? {
            Taken::Both(image, stop) => ensure!(same(&image, &stop)? > 512 << 10, "too little was compared"),
            other => anyhow::bail!("{protocol}: {other:?}"),
        }
        fs::write(&until, "")?;
        assert_eq!(app.finish()?, "hidden ok\n", "{protocol}");
        node.finish()?;
    }
    Ok(())
}
