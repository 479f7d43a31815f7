//! Quiescing: kernels that wait for later launches are allowed to go on, and a kernel that never ends is named.

use std::fs;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::random::Random;
use rekindle_e2e::{Fate, Node, Result};

/// Dumps, kills and restores a program repeatedly, each time a little later.
fn goes_on_after_each_of(dumps: u64, name: &str, arguments: &[&str], every: u64) -> Result {
    let expected = undisturbed(name, arguments)?;
    let mut random = Random::new();
    let node = Node::start()?;
    let mut app = node.run(name, arguments)?;
    for dump in 1..=dumps {
        app.reaches(dump * every + random.below(every / 2))?;
        let image = node.dump_and_kill(app)?;
        image.must_be_of_the_middle(&expected)?;
        app = node.restore(&image)?;
    }
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn kernels_of_two_devices_that_wait_for_each_other_go_on() -> Result {
    goes_on_after_each_of(3, "meet", &["--rounds", "200", "--sleep-us", "3000"], 40)
}

#[test]
fn kernels_of_two_processes_that_wait_for_each_other_go_on() -> Result {
    goes_on_after_each_of(3, "meet2", &["--rounds", "600", "--sleep-us", "10000"], 40)
}

/// As ranks are whose collectives wait for one that is slower: what is ahead cannot be called back, so the slow one catches up.
#[test]
fn a_process_whose_kernels_are_hundreds_of_launches_ahead_of_another_waits_for_it() -> Result {
    let arguments = ["--rounds", "900", "--ahead", "900", "--lead", "600", "--sleep-us", "1000"];
    goes_on_after_each_of(1, "meet2", &arguments, 60)
}

#[test]
fn streams_that_wait_for_words_of_memory_go_on() -> Result {
    goes_on_after_each_of(2, "waitvalue", &["--rounds", "150", "--sleep-us", "5000"], 40)
}

#[test]
fn a_kernel_that_never_ends_fails_the_dump_and_is_named_and_the_program_goes_on() -> Result {
    let node = Node::start()?;
    let until = node.path("until");
    let app = node.run("never", &["--until", &until.display().to_string()])?;
    app.says("launched")?;
    let (criu, image) = node.start_dump(&app, Fate::Killed)?;
    let outcome = criu.wait()?;
    assert!(!outcome.status.success(), "a dump whose kernel never ends has succeeded");
    assert!(outcome.log.contains("never_ends"), "the kernel is not named: {}", outcome.log);
    assert!(outcome.log.contains("never"), "nor the program: {}", outcome.log);
    assert!(image.files()?.is_empty(), "something is left of the image: {:?}", image.files()?);
    fs::write(&until, "")?;
    assert_eq!(app.finish()?, undisturbed("never", &[])?);
    node.finish()
}
