//! NVML under Rekindle: its answers agree with CUDA's (the program compares them), before and after a restore, under a
//! restarted daemon, and in a container. NVML takes no worker.

use std::fs;

use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Fate, Node, Result};

const ROUNDS: [&str; 4] = ["--iterations", "90", "--sleep-us", "2000"];

#[test]
fn nvml_agrees_with_cuda_before_and_after_a_restore_and_a_restart_of_the_daemon() -> Result {
    let mut node = Node::start()?;
    let app = node.run_held("nvml", &ROUNDS, Some(70))?;
    // The program is held there, between questions.
    app.reaches(70)?;
    for _ in 0..2 {
        node.dump(&app)?;
    }
    let image = node.dump_and_kill(app)?;
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    let app = node.restore(&image)?;
    let version = "2 devices, CUDA 13000";
    assert_eq!(app.finish()?, format!("{version}\nok\n"));
    node.finish()
}

#[test]
fn a_process_that_asks_nvml_alone_is_no_client_and_outlives_its_daemon() -> Result {
    let mut node = Node::start()?;
    let arguments = [&ROUNDS[..], &["--cuda", "0"]].concat();
    let app = node.run_held("nvml", &arguments, Some(50))?;
    // It waits there, and asks nothing: no question meets a daemon that is gone, and the dump interrupts none, which would make the
    // process a client.
    app.reaches(50)?;
    assert!(node.clients()?.is_empty(), "{:?}", node.clients()?);
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    let image = node.dump_and_kill(app)?;
    assert!(!image.files()?.iter().any(|file| file == "rekindle.img"), "there is no GPU state in it");
    assert!(node.restore(&image)?.finish()?.ends_with("ok\n"));
    node.finish()
}

#[test]
fn a_container_has_nvml() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.run("nvml", &["--annotation", "dev.rekindle/enable=true"], &["nvml"])?;
    assert_eq!(podman.exit_code("nvml")?, 0, "{}", podman.call(&["logs", "nvml"])?);
    assert!(podman.call(&["logs", "nvml"])?.ends_with("ok\n"));
    drop(podman);
    node.finish()
}

/// Runs a program that asks NVML all the time, so that dumps interrupt its questions. No question fails, and the
/// restored program asks again.
fn dumped_while_it_asks(more: &[&str]) -> Result {
    let node = Node::start()?;
    let mut app = node.run_held("nvml", &[&["--iterations", "100000"], more].concat(), None)?;
    app.reaches(10)?;
    for _ in 0..20 {
        let (criu, image) = node.start_dump(&app, Fate::Running)?;
        criu.wait()?.succeeds()?;
        fs::remove_dir_all(&image.dir)?;
        app.advances()?;
    }
    let mut met = 0;
    for turn in 0..60 {
        let image = node.dump_and_kill(app)?;
        met += usize::from(image.files()?.iter().any(|file| file == "rekindle.img"));
        app = node.restore(&image)?;
        app.advances()?;
        if turn >= 11 && met > 0 {
            break;
        }
    }
    assert!(met > 0, "no dump met a question");
    app.kill()?;
    node.finish()
}

#[test]
fn a_client_is_dumped_in_the_middle_of_a_question() -> Result {
    dumped_while_it_asks(&[])
}

#[test]
fn a_process_that_is_no_client_is_dumped_in_the_middle_of_a_question() -> Result {
    dumped_while_it_asks(&["--cuda", "0"])
}
