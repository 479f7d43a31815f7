//! Mistakes that other projects have made, and that no other test here would detect. `docs/mistakes.md` lists the test
//! for each.

use std::fs;
use std::path::Path;

use anyhow::Context;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::image::{MANIFEST, length};
use rekindle_e2e::{App, Fate, Image, Node, Result, process};

/// Starts a program that checks all its memory when it is told to end; it never touches `kib` of that memory.
fn steady(node: &Node, kib: &str) -> Result<App> {
    let until = node.path("until").display().to_string();
    let app = node.run("steady", &["--until", &until, "--ballast-kib", kib, "--sleep-us", "2000"])?;
    app.advances()?;
    Ok(app)
}

fn ends_well(node: Node, app: App) -> Result {
    app.advances()?;
    fs::write(node.path("until"), "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

/// Dumps a program and kills it. The image can be restored however long that takes.
fn dump(node: &Node, app: App) -> Result<Image> {
    let image = node.dump(&app)?;
    app.kill()?;
    Ok(image)
}

#[test]
fn memory_that_nobody_touched_since_a_restore_is_in_the_next_image_too() -> Result {
    let node = Node::start()?;
    let mut app = steady(&node, "4096")?;
    for _ in 0..3 {
        let image = dump(&node, app)?;
        let data = image.file("rekindle-data")?;
        assert!(length(&image.path(&data))? >= 4 << 20, "{data} has not all of the program's memory");
        app = node.restore(&image)?;
    }
    ends_well(node, app)
}

#[test]
fn the_manifest_does_not_grow_with_what_memory_holds() -> Result {
    let node = Node::start()?;
    let manifest = |kib| -> Result<u64> {
        let app = steady(&node, kib)?;
        let image = node.dump(&app)?;
        app.kill()?;
        node.is_idle()?;
        length(&image.path(MANIFEST))
    };
    let (small, large) = (manifest("64")?, manifest("65536")?);
    assert!(large < small + 4096, "{small} bytes with 64 KiB, {large} with 64 MiB");
    node.finish()
}

#[test]
fn files_of_others_in_the_image_directory_stay_as_they_are() -> Result {
    const OTHERS: [&str; 3] = ["notes.txt", "rekindle-notes.txt", "rekindle-data-0.raw.bak"];
    let node = Node::start()?;
    let dir = node.path("images");
    fs::create_dir(&dir)?;
    for name in OTHERS {
        fs::write(dir.join(name), name)?;
    }
    let stay = |what: &str| -> Result {
        for name in OTHERS {
            let text = fs::read_to_string(dir.join(name)).with_context(|| format!("{name} after {what}"))?;
            assert_eq!(text, name, "after {what}");
        }
        Ok(())
    };
    let app = steady(&node, "64")?;
    let worker = node.client(app.pid())?.worker;
    let dump = |fate| node.start_dump_into(dir.clone(), &app, fate);
    dump(Fate::Running)?.0.wait()?.succeeds()?;
    stay("a dump")?;
    dump(Fate::Running)?.0.wait()?.succeeds()?;
    stay("another in the same place")?;
    process::kill_all(&[worker])?;
    assert!(!dump(Fate::Killed)?.0.wait()?.status.success(), "a program without its worker was dumped");
    stay("a dump that failed")?;
    app.end()?;
    node.finish()
}

#[test]
fn a_client_whose_worker_stands_still_holds_up_nobody_else() -> Result {
    let node = Node::start()?;
    let held = steady(&node, "64")?;
    let worker = node.client(held.pid())?.worker;
    process::signal(worker, libc::SIGSTOP)?;
    // Another program starts, works, is listed, is dumped and restored, and ends.
    let arguments = ["--iterations", "400", "--sleep-us", "5000"];
    let expected = undisturbed("globals", &arguments)?;
    let other = node.run("globals", &arguments)?;
    other.reaches(10)?;
    assert_eq!(node.clients()?.len(), 2);
    let image = node.dump_and_kill(other)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    process::signal(worker, libc::SIGCONT)?;
    ends_well(node, held)
}

#[test]
fn a_dump_whose_gpu_side_cannot_be_and_one_whose_criu_side_cannot_both_fail() -> Result {
    let node = Node::start()?;
    let app = steady(&node, "64")?;
    // CRIU cannot write: the directory has its files as folders.
    let dir = node.path("images");
    fs::create_dir_all(dir.join("inventory.img"))?;
    let (criu, image) = node.start_dump_into(dir, &app, Fate::Running)?;
    assert!(!criu.wait()?.status.success(), "CRIU's failure is hidden");
    assert!(!image.path("rekindle.commit").exists(), "half a dump is committed");
    app.advances()?;
    // The daemon cannot write.
    let dir = node.path("more-images");
    fs::create_dir_all(dir.join(MANIFEST).join("in the way"))?;
    let (criu, image) = node.start_dump_into(dir, &app, Fate::Running)?;
    assert!(!criu.wait()?.status.success(), "the daemon's failure is hidden");
    assert!(!Path::new(&image.path("rekindle.commit")).exists(), "half a dump is committed");
    ends_well(node, app)
}
