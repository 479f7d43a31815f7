//! Containers: podman and runc know nothing of GPUs, and the container's program knows nothing of checkpoints.

use std::fs;
use std::path::Path;

use rekindle_e2e::app::{Hold, no_progress, undisturbed};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result, until};

const ARGUMENTS: [&str; 4] = ["--iterations", "1500", "--sleep-us", "4000"];
const ANNOTATION: [&str; 2] = ["--annotation", "dev.rekindle/enable=true"];

/// The progress that the program reports.
fn progress(file: &Path) -> Result<u64> {
    Ok(fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}

fn reaches(file: &Path, least: u64) -> Result<u64> {
    until(&format!("the container's program reaches {least}"), || {
        let now = progress(file)?;
        Ok((now >= least).then_some(now))
    })
}

/// The progress of a program that was just restored.
fn position(file: &Path) -> Result<u64> {
    no_progress(file)?;
    reaches(file, 1)
}

#[test]
fn a_container_is_exported_while_it_runs_checkpointed_restored_and_imported() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let file = shared.join("progress");
    let volume = format!("{}:/shared", shared.display());
    let hold = Hold::new(shared.join("hold"), 1400)?;
    let held = ["--volume", &volume, "--env", "APP_HOLD=/shared/hold"];
    let mut program = vec!["globals", "--progress", "/shared/progress"];
    program.extend(ARGUMENTS);
    podman.run("original", &[&ANNOTATION[..], &held].concat(), &program)?;

    let before = reaches(&file, 100)?;
    let devices = podman.call(&["exec", "original", "ls", "/dev"])?;
    assert!(!devices.contains("nvidia"), "{devices}");
    let maps = fs::read_to_string(format!("/proc/{}/maps", podman.pid("original")?))?;
    assert!(maps.contains("/usr/lib/rekindle/libcuda.so.1"), "{maps}");

    let export = node.path("export.tar");
    let export_text = export.to_string_lossy();
    let options = ["--leave-running", "--compress", "none", "--export", &export_text, "original"];
    podman.call(&[&["container", "checkpoint"], &options[..]].concat())?;
    let later = progress(&file)? + 300;
    reaches(&file, later)?;

    podman.call(&["container", "checkpoint", "original"])?;
    let stopped = progress(&file)?;
    hold.lift();
    podman.call(&["container", "restore", "original"])?;
    let restored = position(&file)?;
    assert!(stopped <= restored, "at {restored}, and it was stopped at {stopped}");
    assert_eq!(podman.exit_code("original")?, 0);
    assert_eq!(podman.call(&["logs", "original"])?, expected, "the original");

    podman.will_restore("other");
    podman.call(&["container", "restore", "--import", &export_text, "--name", "other"])?;
    let imported = position(&file)?;
    assert!(before <= imported && imported < later, "at {imported}: exported after {before} and before {later}");
    assert_eq!(podman.exit_code("other")?, 0);
    assert!(expected.ends_with(&podman.call(&["logs", "other"])?), "the imported one");
    drop(podman);
    node.finish()
}

#[test]
fn a_container_without_the_annotation_gets_nothing_of_ours() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.run("plain", &[], &["firstkernel"])?;
    assert_eq!(podman.exit_code("plain")?, 3, "there is no GPU in it");
    let mounts = podman.call(&["inspect", "--format", "{{.Mounts}} {{.Config.Env}}", "plain"])?;
    // These names do not match the checkout, which is mounted for the container's programs and may be named `rekindle`.
    let ours = ["/run/rekindle", "/usr/lib/rekindle", "REKINDLE_", "libcuda", "libnvidia-ml"];
    assert!(!ours.iter().any(|it| mounts.contains(it)), "{mounts}");
    drop(podman);
    node.finish()
}
