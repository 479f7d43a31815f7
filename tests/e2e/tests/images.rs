//! Damaged images, and good ones where they cannot be restored: the restore fails before anything runs, reports the
//! reason, and leaves nothing.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::Context;
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::image::{COMMIT, MANIFEST, length};
use rekindle_e2e::{App, Image, Node, Result, process};
use rekindle_images::code_name;
use rekindle_wire::layout::CHUNK_SIZE;
use serde_json::Value;

const ARGUMENTS: [&str; 4] = ["--iterations", "150", "--sleep-us", "5000"];

/// An image of `streams4` in the middle of its work.
fn image(node: &Node) -> Result<Image> {
    // The program has four threads, and the progress counts all of them.
    let app = node.run_held("streams4", &ARGUMENTS, Some(300))?;
    app.reaches(100)?;
    let image = node.dump_and_kill(app)?;
    assert!(image.path(COMMIT).exists());
    Ok(image)
}

/// Programs run when their memory is complete, so that a bad image fails the restore. `loading.rs` has the other way.
const COMPLETE: &str = "[restore]\nrun_before_loaded = false\n";

/// Checks that a restore fails for this reason before the program has done anything.
fn is_refused(node: &Node, image: &Image, reason: &str) -> Result {
    let progress = image.app.progress.as_deref().unwrap_or(Path::new("/"));
    let before = fs::read_to_string(progress)?;
    node.try_restore(image)?.fails_with(reason)?;
    for pid in &image.tree {
        process::wait_gone("a process that could not be restored", *pid)?;
    }
    assert_eq!(fs::read_to_string(progress)?, before, "{reason}: the program has run");
    node.is_idle()
}

/// Checks that the image can still be restored.
fn is_restored(node: &Node, image: &Image) -> Result {
    assert_eq!(node.restore(image)?.finish()?, undisturbed("streams4", &ARGUMENTS)?);
    Ok(())
}

/// Damages an image, and returns the message that a restore must then report.
type Damage<'a> = &'a dyn Fn(&Image) -> Result<String>;

/// Applies each kind of damage to a copy of one image; then restores the image itself.
fn damaged(damages: &[(&str, Damage<'_>)]) -> Result {
    let node = Node::configured(COMPLETE, &[])?;
    let image = image(&node)?;
    for (what, damage) in damages {
        eprintln!("{what}");
        let copy = image.copy(node.fresh("copy"))?;
        let reason = damage(&copy)?;
        is_refused(&node, &copy, &reason)?;
    }
    is_restored(&node, &image)?;
    node.finish()
}

#[test]
fn a_flipped_bit_in_any_file_that_a_restore_reads_fails_it() -> Result {
    let flipped = |kind: &str, image: &Image| {
        let file = image.file(kind)?;
        image.flip(&file, length(&image.path(&file))? / 2)?;
        Ok(format!("{file} is corrupt"))
    };
    damaged(&[
        ("the manifest", &|image| flipped(MANIFEST, image)),
        ("the commit record", &|image| flipped(COMMIT, image)),
        // Code of the process, and not a library of Rekindle's, which a host that has the same one does not read.
        ("code", &|image| {
            let opened = rekindle_images::Image::open(&image.dir)?;
            let mut code = opened.manifest().clients.iter().flat_map(|it| &it.objects).flat_map(|it| &it.code);
            flipped(&code_name(*code.next().context("the process has no code")?), image)
        }),
        ("data", &|image| {
            let file = image.file("rekindle-data")?;
            // A piece begins at that offset; a restore does not read between pieces.
            image.flip(&file, 0)?;
            Ok(format!("{file} is corrupt"))
        }),
    ])
}

#[test]
fn one_corrupt_process_ends_the_restore_of_its_whole_tree() -> Result {
    let arguments = ["--rounds", "200", "--sleep-us", "5000"];
    let expected = undisturbed("tree", &arguments)?;
    let node = Node::configured(COMPLETE, &[])?;
    let app = node.run("tree", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    for file in ["rekindle-data-0.raw", "rekindle-data-1.raw"] {
        let copy = image.copy(node.fresh("copy"))?;
        copy.flip(file, 0)?;
        is_refused(&node, &copy, &format!("{file} is corrupt"))?;
    }
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_truncated_file_fails_the_restore() -> Result {
    let truncated = |kind: &str, image: &Image| {
        let file = image.file(kind)?;
        image.truncate(&file)?;
        Ok(format!("{file} is corrupt"))
    };
    damaged(&[
        ("the manifest", &|image| truncated(MANIFEST, image)),
        ("the commit record", &|image| truncated(COMMIT, image)),
        ("code", &|image| truncated("rekindle-code", image)),
        ("data", &|image| truncated("rekindle-data", image)),
    ])
}

#[test]
fn a_missing_file_fails_the_restore() -> Result {
    let missing = |kind: &str, image: &Image| {
        let file = image.file(kind)?;
        image.remove(&file)?;
        Ok(format!("{file} is missing"))
    };
    damaged(&[
        ("the manifest", &|image| missing(MANIFEST, image)),
        ("the commit record: nobody knows whether the dump came to its end", &|image| {
            image.remove(COMMIT)?;
            Ok("is not committed: the dump did not finish".to_owned())
        }),
        ("code", &|image| missing("rekindle-code", image)),
        ("data", &|image| missing("rekindle-data", image)),
    ])
}

#[test]
fn a_newer_format_fails_the_restore() -> Result {
    let newer = |file: &str, image: &Image| {
        let version = image.age_into_the_future(file)?;
        Ok(format!("{file} has format version {version}, and this program reads up to {}", version - 1))
    };
    damaged(&[("the manifest", &|image| newer(MANIFEST, image)), ("the commit record", &|image| newer(COMMIT, image))])
}

/// Tries to restore a good image on a host with these GPUs, and checks that it fails for this reason.
fn elsewhere(gpu: &[(&str, &str)], reason: &str) -> Result {
    let mut node = Node::start()?;
    let image = image(&node)?;
    node.stop_daemon()?;
    node.start_daemon(gpu)?;
    is_refused(&node, &image, reason)?;
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    is_restored(&node, &image)?;
    node.finish()
}

#[test]
fn another_compute_capability_fails_the_restore() -> Result {
    elsewhere(&[("SIMGPU_CC", "8.0")], "compute capability 9.0 and is")
}

#[test]
fn another_model_or_size_of_gpu_fails_the_restore() -> Result {
    elsewhere(&[("SIMGPU_NAME", "Other GPU")], "and is a Other GPU with 16 multiprocessors and 4096 MiB here")?;
    elsewhere(&[("SIMGPU_MULTIPROCESSORS", "14")], "and is a Rekindle software GPU with 14 multiprocessors")?;
    elsewhere(&[("SIMGPU_MEMORY", "5G")], "with 16 multiprocessors and 5120 MiB")
}

#[test]
fn a_driver_that_places_functions_elsewhere_fails_the_restore_though_no_variable_has_moved() -> Result {
    // The program has machine code for 9.0, in which pointers to functions are places in tables. The software GPU
    // executes the program's PTX; with this compute capability the worker examines the PTX too.
    let older = ("SIMGPU_CC", "8.0");
    let mut node = Node::configured(COMPLETE, &[older])?;
    let app = node.run_held("funcptr", &[], Some(45))?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&[older, ("SIMGPU_CODE_OFFSET", "16")])?;
    is_refused(&node, &image, "held other addresses when its code was loaded; it points to _Z")?;
    node.stop_daemon()?;
    node.start_daemon(&[older])?;
    assert_eq!(node.restore(&image)?.finish()?, undisturbed("funcptr", &[])?);
    node.finish()
}

#[test]
fn another_driver_or_gpu_is_refused_until_the_restore_or_the_configuration_allows_it() -> Result {
    let mut node = Node::without_daemon()?;
    node.use_driver("580.159.04")?;
    node.start_daemon(&[])?;
    let image = image(&node)?;
    node.stop_daemon()?;
    node.use_driver("580.159.05")?;
    node.start_daemon(&[])?;
    let reason = "the GPU's driver was 580.159.04 (CUDA 13.0) and is 580.159.05 (CUDA 13.0) here";
    is_refused(&node, &image, reason)?;
    // The option applies to one restore. It does not allow another driver.
    let restore = |node: &Node| {
        node.rekindle(
            &["restore", "-d", "--allow-other-gpu"]
                .map(OsStr::new)
                .into_iter()
                .chain([image.dir.as_os_str()])
                .collect::<Vec<_>>(),
        )
    };
    let output = restore(&node)?;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(reason), "{said}");
    node.stop_daemon()?;
    // The setting applies to all restores. It does not allow another GPU.
    node.configure("[restore]\nallow_other_driver = true\n");
    node.start_daemon(&[("SIMGPU_NAME", "Other GPU")])?;
    is_refused(&node, &image, "and is a Other GPU")?;
    App::forget_output(&image.app, image.written)?;
    let output = restore(&node)?;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(App::adopt(image.app.clone()).finish()?, undisturbed("streams4", &ARGUMENTS)?);
    node.finish()
}

#[test]
fn too_little_gpu_memory_fails_the_restore() -> Result {
    let mut node = Node::start()?;
    let until = node.path("until");
    let until_text = until.display().to_string();
    let app = node.run("steady", &["--until", &until_text, "--ballast-kib", "32768", "--sleep-us", "3000"])?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    // The GPU memory is enough for a worker's own allocations.
    node.start_daemon(&[("SIMGPU_MEMORY", "16M")])?;
    is_refused(&node, &image, "restore on a GPU with more memory")?;
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    let app = node.restore(&image)?;
    fs::write(&until, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn too_few_gpus_fail_the_restore() -> Result {
    let arguments = ["--iterations", "100", "--sleep-us", "5000"];
    let expected = undisturbed("twodev", &arguments)?;
    let mut node = Node::start()?;
    let app = node.run("twodev", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&[("SIMGPU_DEVICES", "1")])?;
    is_refused(&node, &image, "needs 2 GPUs, and there are 1 here")?;
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn without_a_daemon_the_restore_fails() -> Result {
    let mut node = Node::start()?;
    let image = image(&node)?;
    node.stop_daemon()?;
    node.try_restore(&image)?.fails_with("the processes used a GPU and cannot be restored")?;
    assert!(image.tree.iter().all(|pid| process::is_gone(*pid)));
    node.start_daemon(&[])?;
    is_restored(&node, &image)?;
    node.finish()
}

/// Runs `rekindle VERB DIR`, and returns its exit code and output.
fn rekindle(node: &Node, verb: &str, image: &Image) -> Result<(Option<i32>, String)> {
    let output = node.rekindle(&[verb.as_ref(), image.dir.as_os_str()])?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
}

#[test]
fn verify_finds_what_is_wrong_and_names_the_file() -> Result {
    const BAD: Option<i32> = Some(4);
    let node = Node::start()?;
    let image = image(&node)?;
    let (code, said) = rekindle(&node, "verify", &image)?;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("good: "), "{said}");

    for kind in ["rekindle-data", "rekindle-code", MANIFEST, COMMIT] {
        let copy = image.copy(node.fresh("copy"))?;
        let file = copy.file(kind)?;
        let middle = length(&copy.path(&file))? / 2;
        // `verify` detects a flip also where no content is: it checks every byte of a data file.
        copy.flip(&file, middle)?;
        let (code, said) = rekindle(&node, "verify", &copy)?;
        assert_eq!(code, BAD, "{said}");
        assert!(said.contains(&file), "{said}");
    }
    let copy = image.copy(node.fresh("copy"))?;
    copy.remove(COMMIT)?;
    let (code, said) = rekindle(&node, "verify", &copy)?;
    assert_eq!(code, BAD, "{said}");
    assert!(said.contains("is not committed"), "{said}");
    node.finish()
}

#[test]
fn inspect_and_ps_show_what_there_is() -> Result {
    let node = Node::start()?;
    let app = node.run("streams4", &ARGUMENTS)?;
    app.reaches(20)?;
    let output = node.rekindle(&["ps".as_ref()])?;
    let shown = String::from_utf8(output.stdout)?;
    let line = shown.lines().find(|line| line.trim_start().starts_with(&app.pid().to_string()));
    assert!(line.is_some_and(|line| line.contains("running") && line.ends_with("streams4")), "{shown}");
    let image = node.dump_and_kill(app)?;
    let (code, shown) = rekindle(&node, "inspect", &image)?;
    assert_eq!(code, Some(0), "{shown}");
    assert!(shown.contains("streams4"), "{shown}");
    for phase in ["quiesce", "freeze", "copy", "write"] {
        assert!(shown.contains(phase), "{phase}: {shown}");
    }
    node.finish()
}

/// CRIU writes memory that processes share slowly, while the processes are frozen.
#[test]
fn what_rekindle_adds_to_the_image_of_a_process_is_little() -> Result {
    const MOST: u64 = 10_000_000;
    let node = Node::start()?;
    let app = node.run("streams4", &ARGUMENTS)?;
    app.reaches(20)?;
    let pinned = node.client(app.pid())?.pinned_memory;
    let cpu = cpu_memory(&node, &node.dump_and_kill(app)?)?;
    let bytes = |part: &str| cpu[part].as_u64().with_context(|| format!("{part}: {cpu}"));
    let parts = [bytes("ring")?, bytes("staging")?, bytes("interposer")?];
    assert!(parts.iter().all(|part| *part > 0) && parts.iter().sum::<u64>() < MOST, "{cpu}");
    // The program has used all of its pinned memory.
    assert!(pinned > 0 && bytes("pinned")? == pinned, "{pinned}: {cpu}");
    // A program whose copies follow each other uses few chunks of the staging.
    let end = node.path("end").display().to_string();
    let app = node.run("steady", &["--until", &end, "--words", "65536"])?;
    app.reaches(3)?;
    let cpu = cpu_memory(&node, &node.dump_and_kill(app)?)?;
    let staging = cpu["staging"].as_u64().with_context(|| cpu.to_string())?;
    assert!(staging > 0 && staging <= 2 * CHUNK_SIZE as u64, "{cpu}");
    node.finish()
}

/// What `inspect` says of an image's CPU memory.
fn cpu_memory(node: &Node, image: &Image) -> Result<Value> {
    let output = node.rekindle(&["inspect".as_ref(), "--json".as_ref(), image.dir.as_os_str()])?;
    Ok(serde_json::from_slice::<Value>(&output.stdout)?["cpu"].take())
}
