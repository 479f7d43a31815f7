//! Containers of any image: images with older C libraries, with other C libraries, and with a driver library of their
//! own.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::ensure;
use rekindle_e2e::app::{Hold, undisturbed};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result, stage, until};

const ANNOTATION: [&str; 2] = ["--annotation", "dev.rekindle/enable=true"];
const ARGUMENTS: [&str; 4] = ["--iterations", "400", "--sleep-us", "4000"];

/// Copies an image's root directory for this test.
fn copy(node: &Node, image: &Path, name: &str) -> Result<PathBuf> {
    let root = node.path(name);
    let status = Command::new("cp").arg("-a").arg(image).arg(&root).status()?;
    ensure!(status.success(), "cp ended with {status}");
    Ok(root)
}

/// Runs a program in a container of the image, checkpoints it and restores it. In the end it prints the same as without
/// a checkpoint.
fn runs_and_is_restored(podman: &Podman, node: &Node, image: &str, more: &[&str]) -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let shared = node.path(&format!("{image}-shared"));
    fs::create_dir(&shared)?;
    let file = shared.join("progress");
    let volume = format!("{}:/shared", shared.display());
    let hold = Hold::new(shared.join("hold"), 300)?;
    let options = ["--volume", &volume, "--env", "APP_HOLD=/shared/hold"];
    let mut program = vec!["globals", "--progress", "/shared/progress"];
    program.extend(ARGUMENTS);
    podman.run_in(image, image, &[&ANNOTATION[..], &options, more].concat(), &program)?;
    until("the container's program is in its middle", || {
        let now = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse::<u64>().ok());
        Ok(now.filter(|now| *now >= 20))
    })?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", podman.pid(image)?))?;
    let driver = maps.lines().find(|line| line.contains("libcuda")).unwrap_or_default();
    podman.call(&["container", "checkpoint", image])?;
    hold.lift();
    podman.call(&["container", "restore", image])?;
    assert_eq!(podman.exit_code(image)?, 0, "{driver}");
    assert_eq!(podman.call(&["logs", image])?, expected);
    Ok(())
}

#[test]
fn images_of_older_releases_run_and_are_restored() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    for name in ["bookworm", "bullseye"] {
        let Some(root) = stage::image(name)? else {
            eprintln!("SKIPPED: the mirror has no {name}");
            continue;
        };
        podman.image(name, &root)?;
        runs_and_is_restored(&podman, &node, name, &[])?;
    }
    drop(podman);
    node.finish()
}

#[test]
fn an_images_own_driver_library_is_covered() -> Result {
    let Some(root) = stage::image("bookworm")? else {
        eprintln!("SKIPPED: the mirror has no bookworm");
        return Ok(());
    };
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    // The image has two driver libraries of its own: one in the loader's default path, and one that only the image's
    // own variable leads to. Both are invalid: a program that loaded one would end.
    let root = copy(&node, &root, "own")?;
    let lib = root.join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(&lib)?;
    fs::write(lib.join("libcuda.so.580.0"), "the image's own")?;
    symlink("libcuda.so.580.0", lib.join("libcuda.so.1"))?;
    fs::create_dir_all(root.join("opt/cuda"))?;
    fs::write(root.join("opt/cuda/libcuda.so.1"), "the image's other")?;
    podman.image("own", &root)?;
    runs_and_is_restored(&podman, &node, "own", &["--env", "LD_LIBRARY_PATH=/opt/cuda"])?;
    // A variable that hides Rekindle's folder from the loader still leads to the interposer.
    let covered = ["/bin/sh", "-c", "cmp /opt/cuda/libcuda.so.1 /usr/lib/rekindle/libcuda.so.1 && echo same"];
    let options = [&ANNOTATION[..], &["--env", "LD_LIBRARY_PATH=/opt/cuda"]].concat();
    podman.run_in("own", "covered", &options, &covered)?;
    assert_eq!(podman.exit_code("covered")?, 0);
    assert_eq!(podman.call(&["logs", "covered"])?, "same\n");
    drop(podman);
    node.finish()
}

#[test]
fn images_in_which_the_interposer_cannot_run_are_refused_in_podmans_output() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let refused = |image: &str, root: &Path, words: &[&str]| -> Result {
        podman.image(image, root)?;
        for (how, options) in [("annotated", ANNOTATION), ("device", ["--device", "rekindle.dev/gpu=0"])] {
            let said = podman.refuses_to_run_in(image, &format!("{image}-{how}"), &options, &["/bin/true"])?;
            for word in words {
                assert!(said.contains(word), "{image}, {how}: {said}");
            }
        }
        Ok(())
    };
    if let Some(musl) = stage::image("musl")? {
        refused("musl", &musl, &["musl", "use an image with glibc"])?;
        // Without the annotation the hook ignores the container.
        podman.run_in("musl", "plain", &[], &["/bin/true"])?;
        assert_eq!(podman.exit_code("plain")?, 0);
    } else {
        eprintln!("SKIPPED: the mirror has no musl");
    }
    // The C library is the only part of an old image that the hook examines.
    let old = node.path("old");
    fs::create_dir_all(old.join("lib/x86_64-linux-gnu"))?;
    fs::write(old.join("lib/x86_64-linux-gnu/libc.so.6"), "GLIBC_2.2.5\0GLIBC_2.24\0")?;
    refused("old", &old, &["glibc 2.24", "or newer"])?;
    drop(podman);
    node.finish()
}

#[test]
fn without_a_daemon_an_annotated_container_is_refused_and_others_run() -> Result {
    let mut node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    node.stop_daemon()?;
    let said = podman.refuses_to_run_in("rekindle-e2e", "none", &ANNOTATION, &["/bin/true"])?;
    assert!(said.contains("no daemon at") && said.contains("start rekindled"), "{said}");
    podman.run("others", &[], &["/bin/true"])?;
    assert_eq!(podman.exit_code("others")?, 0);
    drop(podman);
    node.start_daemon(&[])?;
    node.finish()
}
