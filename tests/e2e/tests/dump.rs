//! What a dump and a restore are for: a program goes on as if nothing had been, from the moment of the dump.

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::counter::Counter;
use rekindle_e2e::{App, Image, Node, Result, process};

/// `name` is dumped when it has come to `middle`, killed, and restored: what it then prints is what it prints alone.
fn goes_on_after_a_kill(name: &str, arguments: &[&str], middle: u64) -> Result {
    let node = Node::start()?;
    let app = node.run(name, arguments)?;
    app.reaches(middle)?;
    let image = node.dump_and_kill(app)?;
    let app = restore_in_the_middle(&node, &image)?;
    assert_eq!(app.finish()?, undisturbed(name, arguments)?);
    node.finish()
}

/// That it had not come to its end when it was dumped, or there would be nothing to see.
fn restore_in_the_middle(node: &Node, image: &Image) -> Result<App> {
    assert_eq!(std::fs::read_to_string(&image.app.out)?, "", "{} was dumped too late", image.app.name);
    node.restore(image)
}

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
fn a_tree_of_two_gpu_processes_and_one_without_goes_on() -> Result {
    let arguments = ["--rounds", "200", "--sleep-us", "5000"];
    let node = Node::start()?;
    let app = node.run("tree", &arguments)?;
    app.reaches(50)?;
    assert_eq!(process::tree(app.pid()).len(), 3);
    assert_eq!(node.clients()?.len(), 2);
    let image = node.dump_and_kill(app)?;
    let app = restore_in_the_middle(&node, &image)?;
    assert_eq!(process::tree(app.pid()).len(), 3);
    assert_eq!(node.clients()?.len(), 2);
    assert_eq!(app.finish()?, undisturbed("tree", &arguments)?);
    node.finish()
}

#[test]
fn an_original_left_running_is_undisturbed() -> Result {
    let arguments = ["--iterations", "150", "--sleep-us", "5000"];
    let node = Node::start()?;
    let app = node.run_quietly("streams4", &arguments)?;
    let pid = app.pid();
    let started = node.client(pid)?.commands;
    rekindle_e2e::until("commands are executed", || Ok((node.client(pid)?.commands > started + 1000).then_some(())))?;
    let image = node.dump(&app)?;
    assert_eq!(app.output()?, "", "dumped too late");

    let expected = undisturbed("streams4", &arguments)?;
    assert_eq!(app.finish()?, expected, "the original");
    assert_eq!(node.restore(&image)?.finish()?, expected, "the restored one");
    node.finish()
}

#[test]
fn an_original_left_running_and_killed_later_comes_back_at_the_moment_of_the_dump() -> Result {
    let node = Node::start()?;
    let (app, counter) = Counter::start(&node, 16)?;
    let before = counter.reaches(50)?;
    let image = node.dump(&app)?;
    let after = counter.count()?;
    let later = counter.reaches(after + 100)?;
    counter.check()?;
    app.kill()?;

    let app = node.restore(&image)?;
    let restored = counter.count()?;
    assert!(before <= restored, "at {restored}, and it was at {before} before the dump");
    assert!(restored < later, "at {restored}, and the original was killed at {later}");
    counter.check()?;
    counter.reaches(later + 1)?;
    counter.check()?;
    counter.quit()?;
    app.finish()?;
    node.finish()
}

#[test]
fn three_generations_go_on_from_each_other() -> Result {
    let arguments = ["--iterations", "400", "--sleep-us", "5000"];
    let node = Node::start()?;
    let mut app = node.run("streams4", &arguments)?;
    for generation in 1..=3 {
        app.reaches(generation * 200)?;
        let image = node.dump_and_kill(app)?;
        app = restore_in_the_middle(&node, &image)?;
        app.advances()?;
    }
    assert_eq!(app.finish()?, undisturbed("streams4", &arguments)?);
    node.finish()
}

#[test]
fn three_generations_left_running_in_between_come_back_at_their_moments() -> Result {
    let node = Node::start()?;
    let (mut app, counter) = Counter::start(&node, 8)?;
    let mut moments = Vec::new();
    for _ in 1..=3 {
        let now = counter.count()?;
        counter.reaches(now + 20)?;
        let image = node.dump(&app)?;
        moments.push((counter.count()?, image.clone()));
        counter.check()?;
        let now = counter.count()?;
        counter.reaches(now + 50)?;
        app.kill()?;
        app = node.restore(&image)?;
        counter.check()?;
    }
    app.kill()?;
    // The oldest image is as good as the newest, after all that came of it.
    for (after, image) in moments.iter().rev() {
        app = node.restore(image)?;
        let restored = counter.count()?;
        assert!(restored < after + 50, "at {restored}, and the dump was before {after}");
        counter.check()?;
        app.kill()?;
    }
    node.finish()
}
