//! Programs that have unloaded more code than the object log keeps: the rehearsal before the commit, and restores with
//! holders.

use std::fs;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Fate, Image, Node, Result};

/// Limits the object log to few entries of unloaded code and destroyed contexts.
const FEW: (&str, &str) = ("REKINDLE_MOST_LIVES", "24");

/// The number of rehearsals that have shown that a restore is possible.
fn rehearsals(node: &Node) -> Result<usize> {
    Ok(fs::read_to_string(node.path("daemon.log"))?.matches("a rehearsal has shown").count())
}

fn dumped(node: &Node, app: App, expected: &str) -> Result<Image> {
    let before = rehearsals(node)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(expected)?;
    assert_eq!(rehearsals(node)?, before + usize::from(cfg!(debug_assertions)), "one for each dump");
    Ok(image)
}

/// Dumps, kills and restores a program twice, each time after the object log has dropped unloaded code.
fn restored_behind_a_cut(name: &str, arguments: &[&str], at: [u64; 2]) -> Result {
    let expected = undisturbed(name, arguments)?;
    let node = Node::with_gpu(&[FEW])?;
    let app = node.run(name, arguments)?;
    app.reaches(at[0])?;
    let image = dumped(&node, app, &expected)?;
    let app = node.restore(&image)?;
    app.reaches(at[1])?;
    let again = dumped(&node, app, &expected)?;
    assert_eq!(node.restore(&again)?.finish()?, expected);
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn a_program_that_unloads_code_without_end_is_restored_from_a_log_that_was_cut() -> Result {
    restored_behind_a_cut("unloads", &["--iterations", "160", "--sleep-us", "2000"], [70, 110])
}

#[test]
fn a_program_that_compiles_code_without_end_is_restored_from_a_log_that_was_cut() -> Result {
    restored_behind_a_cut("jit", &["--iterations", "160", "--sleep-us", "2000"], [70, 110])
}

/// Lets the program advance by one step. The program is held later, so it has not ended when the next daemon has
/// started.
fn goes_on(app: &App) -> Result {
    app.reaches(app.progress()? + 1)
}

#[test]
fn a_rehearsal_that_fails_leaves_the_program_and_the_older_image() -> Result {
    let arguments = ["--iterations", "800", "--sleep-us", "5000"];
    let expected = undisturbed("unloads", &arguments)?;
    let mut node = Node::with_gpu(&[FEW])?;
    let app = node.run("unloads", &arguments)?;
    app.reaches(60)?;
    let older = node.dump(&app)?;
    // A worker of the next daemon can load as much code as it needs for itself.
    assert!(node.stop_daemon()?.success());
    node.start_daemon(&[FEW, ("SIMGPU_FAULT", "cuModuleLoadData:12+:2")])?;
    // The program's worker has joined that daemon.
    node.client(app.pid())?;
    goes_on(&app)?;
    let (dump, _) = node.start_dump(&app, Fate::Running)?;
    if !cfg!(debug_assertions) {
        eprintln!(
            "SKIPPED: this build keeps more of what is unloaded; `checked` and `debug` keep as little as they are told"
        );
        dump.wait()?.succeeds()?;
        drop(app);
        return node.finish();
    }
    dump.wait()?.fails_with("a rehearsal has not placed the code that it has now where it is")?;
    goes_on(&app)?;
    assert!(node.stop_daemon()?.success());
    node.start_daemon(&[FEW])?;
    node.client(app.pid())?;
    let later = node.dump_and_kill(app)?;
    later.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&later)?.finish()?, expected);
    assert_eq!(node.restore(&older)?.finish()?, expected);
    node.finish()
}

#[test]
fn an_image_that_could_not_be_restored_is_not_made_if_each_is_rehearsed() -> Result {
    const REHEARSE: &str = "[checkpoint]\nrehearse = true\n";
    let expected = undisturbed("modules", &[])?;
    let mut node = Node::configured(REHEARSE, &[])?;
    let app = node.run_held("modules", &[], Some(40))?;
    app.reaches(10)?;
    let first = node.dump(&app)?;
    assert_eq!(rehearsals(&node)?, 1);
    // The next daemon's workers find a driver that loads less code.
    assert!(node.stop_daemon()?.success());
    node.start_daemon(&[("SIMGPU_FAULT", "cuModuleLoadData:3+:2")])?;
    node.client(app.pid())?;
    app.reaches(20)?;
    let (dump, _) = node.start_dump(&app, Fate::Running)?;
    dump.wait()?.fails_with("a rehearsal has shown that the image could not be restored here")?;
    app.reaches(30)?;
    node.configure("");
    assert!(node.stop_daemon()?.success());
    node.start_daemon(&[])?;
    node.client(app.pid())?;
    let last = node.dump_and_kill(app)?;
    for image in [last, first] {
        assert_eq!(node.restore(&image)?.finish()?, expected);
    }
    node.finish()
}

/// No driver call tells where a function lies, so nothing could place the function again at its address.
#[test]
fn code_behind_a_cut_that_keeps_addresses_of_functions_refuses_a_dump_until_it_is_unloaded() -> Result {
    let arguments = ["--iterations", "800", "--sleep-us", "5000", "--table", "60"];
    let expected = undisturbed("unloads", &arguments)?;
    let node = Node::with_gpu(&[FEW])?;
    let app = node.run_held("unloads", &arguments, Some(80))?;
    app.reaches(80)?;
    let (dump, _) = node.start_dump(&app, Fate::Running)?;
    if cfg!(debug_assertions) {
        dump.wait()?.fails_with("has placed code since that keeps addresses of functions")?;
    } else {
        dump.wait()?.succeeds()?;
    }
    app.lift();
    app.reaches(115)?;
    let image = dumped(&node, app, &expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}
