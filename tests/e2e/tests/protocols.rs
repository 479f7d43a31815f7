//! Dumps of programs that go on while they are copied. The software GPU copies slowly here, so that the programs make
//! progress meanwhile. Writes after the dump's moment must not be in the image, and the copy must not disturb the
//! program.

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::disk::is_written_back;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::{Fate, Node, Result};
use rekindle_wire::control::FailureKind;

/// 40 MB per second, and room for clones.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.04")];

/// Dumps a program at random moments, leaves it running, and checks its output at the end. Then the program is restored
/// from each image, and must print the same.
fn goes_on_from_each(protocol: &str, pool: u64, name: &str, arguments: &[&str], moments: u64) -> Result {
    let expected = undisturbed(name, arguments)?;
    let configuration = format!("[checkpoint]\nprotocol = \"{protocol}\"\ncow_pool = {pool}\n");
    let node = Node::configured(&configuration, &SLOW)?;
    let mut random = Random::new();
    for _ in 0..repetitions() {
        let app = node.run(name, arguments)?;
        let mut images = Vec::new();
        for _ in 0..moments {
            app.advances_by(1 + random.below(20))?;
            std::thread::sleep(std::time::Duration::from_micros(random.below(3000)));
            images.push(node.dump(&app)?);
        }
        assert_eq!(app.finish()?, expected, "{name}, left running under {protocol}");
        for image in images {
            let verified = node.rekindle(&["verify".as_ref(), image.dir.as_os_str()])?;
            ensure!(verified.status.success(), "{protocol}: {}", String::from_utf8_lossy(&verified.stdout));
            if (protocol, name) == ("clone", "streams4") {
                let about = node.rekindle(&["inspect".as_ref(), "--json".as_ref(), image.dir.as_os_str()])?;
                let about = String::from_utf8_lossy(&about.stdout).replace(' ', "");
                ensure!(about.contains(r#""name":"clone""#), "nothing was cloned: {about}");
            }
            assert_eq!(node.restore(&image)?.finish()?, expected, "{name}, restored from an image by {protocol}");
        }
    }
    node.finish()
}

const STREAMS: [&str; 4] = ["--iterations", "300", "--words", "8192"];

#[test]
fn four_threads_go_on_while_their_memory_is_cloned() -> Result {
    goes_on_from_each("clone", 1 << 30, "streams4", &STREAMS, 3)
}

#[test]
fn four_threads_go_on_while_what_they_write_is_copied_before() -> Result {
    goes_on_from_each("cow", 1 << 30, "streams4", &STREAMS, 3)
}

#[test]
fn without_a_pool_a_command_waits_for_the_copy() -> Result {
    goes_on_from_each("cow", 0, "streams4", &STREAMS, 2)
}

#[test]
fn four_threads_are_copied_while_they_run_and_again_what_has_changed() -> Result {
    goes_on_from_each("recopy", 0, "streams4", &STREAMS, 3)
}

#[test]
fn memory_that_comes_and_goes_meanwhile() -> Result {
    let arguments = ["--iterations", "250", "--largest-kib", "1024", "--sleep-us", "10000"];
    for protocol in ["cow", "clone", "recopy"] {
        goes_on_from_each(protocol, 1 << 20, "memory", &arguments, 2)?;
    }
    Ok(())
}

/// Writes to a disk's file system bypass the page cache. They come from the lanes' buffers, and from host memory of the
/// daemon that has room for only one piece, and go to several files.
#[test]
fn images_on_a_disk_are_as_good_as_in_memory() -> Result {
    let (name, arguments) = ("memory", ["--iterations", "60", "--largest-kib", "16384", "--sleep-us", "10000"]);
    let expected = undisturbed(name, &arguments)?;
    let disk = tempfile::tempdir_in(rekindle_e2e::stage::app(name)?.parent().context("an app has a folder")?)?;
    for (protocol, staging) in [("clone", 4 << 20), ("recopy", 0)] {
        let configuration =
            format!("[checkpoint]\nprotocol = \"{protocol}\"\nstaging = {staging}\n[image]\nfile_mib = 1\n");
        let node = Node::configured(&configuration, &[])?;
        let app = node.run(name, &arguments)?;
        app.reaches(10)?;
        let dir = disk.path().join(protocol);
        std::fs::create_dir(&dir)?;
        let (criu, image) = node.start_dump_into(dir, &app, Fate::Killed)?;
        criu.wait()?.succeeds()?;
        // CRIU's files must be on the disk too.
        match is_written_back(&image.dir.join("pages-1.img"))? {
            Some(written) => ensure!(written, "{protocol}: the processes' memory is not on the disk"),
            None => eprintln!("whether CRIU's files are on the disk cannot be seen here"),
        }
        let verified = node.rekindle(&["verify".as_ref(), image.dir.as_os_str()])?;
        ensure!(verified.status.success(), "{protocol}: {}", String::from_utf8_lossy(&verified.stdout));
        assert_eq!(node.restore(&image)?.finish()?, expected, "{name}, restored from an image by {protocol}");
        node.finish()?;
    }
    Ok(())
}

/// The number of dumps to try: a dump may hit a moment in which nothing is written, or copy the written memory first.
const TRIES: usize = 20;

/// The first dump cannot know that the program writes memory that no command names; it detects that. The next dump
/// predicts the write.
#[test]
fn what_no_command_names_is_found_out_and_the_next_dump_is_right() -> Result {
    // The copy starts with ballast, which takes longer to copy than CRIU's own work.
    let slower = [("SIMGPU_COPY_GBPS", "0.004")];
    let node = Node::configured("[checkpoint]\nprotocol = \"cow\"\n", &slower)?;
    let until = node.path("until");
    let arguments = ["--kib", "64", "--ballast-kib", "8192", "--until", &until.display().to_string()];
    let app = node.run("hidden", &arguments)?;
    app.reaches(3)?;
    let mut failed = false;
    for _ in 0..TRIES {
        let (dump, image) = node.start_dump(&app, Fate::Running)?;
        let outcome = dump.wait()?;
        app.advances()?;
        failed = !outcome.status.success();
        if failed {
            ensure!(outcome.failure_kind() == Some(FailureKind::Mispredicted), "{outcome:?}");
            ensure!(!image.dir.join("rekindle.commit").exists(), "an image that is not what it should be");
            break;
        }
    }
    ensure!(failed, "it was never found out");
    let image = node.dump(&app)?;
    app.advances()?;
    app.kill()?;
    let app = node.restore(&image)?;
    app.advances()?;
    std::fs::write(&until, "")?;
    assert_eq!(app.finish()?, "hidden ok\n");
    node.finish()
}
