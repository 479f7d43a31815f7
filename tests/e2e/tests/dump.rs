//! The purpose of a dump and a restore: a program goes on from the moment of the dump, undisturbed.

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::kill::goes_on_after_a_kill;
use rekindle_e2e::{Node, Result, process};

#[test]
fn a_killed_program_of_four_threads_goes_on() -> Result {
    goes_on_after_a_kill("streams4", &["--iterations", "120", "--sleep-us", "5000"], 150)
}

#[test]
fn a_killed_program_on_two_devices_goes_on() -> Result {
    goes_on_after_a_kill("twodev", &["--iterations", "150", "--sleep-us", "5000"], 50)
}

#[test]
fn a_killed_program_with_module_globals_goes_on() -> Result {
    goes_on_after_a_kill("globals", &["--iterations", "150", "--sleep-us", "5000"], 50)
}

#[test]
fn a_killed_program_with_allocations_of_all_sizes_goes_on() -> Result {
    goes_on_after_a_kill("memory", &["--iterations", "150", "--largest-kib", "4096", "--sleep-us", "5000"], 50)
}

#[test]
fn a_killed_program_with_modules_and_contexts_goes_on() -> Result {
    goes_on_after_a_kill("modules", &["--iterations", "100", "--sleep-us", "10000"], 30)
}

#[test]
fn a_killed_program_that_has_reset_its_device_and_unloaded_code_goes_on() -> Result {
    goes_on_after_a_kill("corners", &["--iterations", "100", "--sleep-us", "10000"], 30)
}

#[test]
fn a_tree_of_two_gpu_processes_and_one_without_goes_on() -> Result {
    let arguments = ["--rounds", "200", "--sleep-us", "5000"];
    let expected = undisturbed("tree", &arguments)?;
    let node = Node::start()?;
    let app = node.run("tree", &arguments)?;
    app.reaches(50)?;
    assert_eq!(process::tree(app.pid()).len(), 3);
    assert_eq!(node.clients()?.len(), 2);
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    let app = node.restore(&image)?;
    assert_eq!(process::tree(app.pid()).len(), 3);
    assert_eq!(node.clients()?.len(), 2);
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn an_original_left_running_is_undisturbed_and_so_is_what_is_restored_later() -> Result {
    let arguments = ["--iterations", "150", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let node = Node::start()?;
    let app = node.run("streams4", &arguments)?;
    app.reaches(150)?;
    let image = node.dump(&app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(app.finish()?, expected, "the original");
    assert_eq!(node.restore(&image)?.finish()?, expected, "the restored one");
    node.finish()
}

#[test]
fn an_original_left_running_and_killed_later_comes_back_at_the_moment_of_the_dump() -> Result {
    let arguments = ["--iterations", "1000", "--sleep-us", "4000"];
    let expected = undisturbed("globals", &arguments)?;
    let node = Node::start()?;
    let app = node.run("globals", &arguments)?;
    app.reaches(100)?;
    let before = app.progress()?;
    let image = node.dump(&app)?;
    let later = app.progress()? + 400;
    app.reaches(later)?;
    app.kill()?;

    let app = node.restore(&image)?;
    let restored = app.position()?;
    assert!(before <= restored, "at {restored}, and it was at {before} before the dump");
    assert!(restored < later, "at {restored}, and the original was killed at {later}");
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn three_generations_go_on_from_each_other() -> Result {
    let arguments = ["--iterations", "250", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let node = Node::start()?;
    let mut app = node.run("streams4", &arguments)?;
    for generation in 1..=3 {
        app.reaches(generation * 200)?;
        let image = node.dump_and_kill(app)?;
        image.must_be_of_the_middle(&expected)?;
        app = node.restore(&image)?;
        app.advances()?;
    }
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn three_generations_left_running_in_between_each_come_back_at_their_moment() -> Result {
    let arguments = ["--iterations", "1600", "--sleep-us", "2000"];
    let expected = undisturbed("globals", &arguments)?;
    let node = Node::start()?;
    let mut app = node.run("globals", &arguments)?;
    let mut images = Vec::new();
    for generation in 1..=3 {
        app.reaches(generation * 100)?;
        let image = node.dump(&app)?;
        let later = app.progress()? + 300;
        app.reaches(later)?;
        app.kill()?;
        app = node.restore(&image)?;
        let restored = app.position()?;
        assert!(generation * 100 <= restored && restored < later, "generation {generation} is at {restored}");
        images.push((image, later));
    }
    assert_eq!(app.finish()?, expected);
    // Later dumps leave the first image intact.
    let (first, later) = images.first().expect("three images");
    let app = node.restore(first)?;
    let restored = app.position()?;
    assert!((100..*later).contains(&restored), "the first is at {restored}, and was at {later} later");
    assert_eq!(app.finish()?, expected);
    node.finish()
}
