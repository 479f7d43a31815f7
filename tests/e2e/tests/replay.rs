//! Where code lies after a restore: programs that load code beside other allocations of the driver, and programs that have unloaded more
//! code than the object log keeps, with the rehearsal before the commit, and restores with holders.

use std::fs;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::image::MANIFEST;
use rekindle_e2e::{App, Fate, Image, Node, Result};

/// Limits the object log to few entries of unloaded code and destroyed contexts.
const FEW: (&str, &str) = ("REKINDLE_MOST_LIVES", "24");

/// From which load of a module on a new worker's loads fail, if so many of a client's succeed. The worker loads itself, on each of two
/// devices, the hasher's kernels, and fillers of 256 KiB for 64 MiB of reserve.
pub(crate) fn failing_loads(after: u64) -> String {
    format!("cuModuleLoadData:{}+:2", 2 * (1 + 256) + after + 1)
}

/// The number of rehearsals that have shown that a restore is possible.
fn rehearsals(node: &Node) -> Result<usize> {
    Ok(fs::read_to_string(node.path("daemon.log"))?.matches("a rehearsal has shown").count())
}

fn dumped(node: &Node, app: App, expected: &str) -> Result<Image> {
    let before = rehearsals(node)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(expected)?;
    let more = rehearsals(node)? - before;
    assert!(more == 1 || more == 0 && !cfg!(debug_assertions), "one for each dump: {more}");
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
    node.start_daemon(&[FEW, ("SIMGPU_FAULT", &failing_loads(9))])?;
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
    dump.wait()?.fails_with("a rehearsal has not placed its code where it is")?;
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
    node.start_daemon(&[("SIMGPU_FAULT", &failing_loads(0))])?;
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

/// The driver makes the buffer of kernels that print when one is launched, which no replay does. It lies among the addresses of code.
#[test]
fn code_that_is_loaded_behind_the_drivers_own_allocations_lies_where_it_was() -> Result {
    let arguments = ["--sleep-us", "5000", "--iterations", "200"];
    let expected = undisturbed("latecode", &arguments)?;
    let node = Node::start()?;
    let app = node.run("latecode", &arguments)?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    // What the restored program loads lies beside what it had.
    let app = node.restore(&image)?;
    app.reaches(60)?;
    let again = node.dump_and_kill(app)?;
    assert_eq!(rehearsals(&node)?, 0, "all code has room in the reserve");
    assert_eq!(node.restore(&again)?.finish()?, expected);
    node.finish()
}

/// The reserve holds 64 MiB.
const BEYOND: [&str; 8] = ["--modules", "130", "--kib", "600", "--iterations", "400", "--sleep-us", "2000"];

#[test]
fn code_beyond_the_reserve_is_rehearsed() -> Result {
    let arguments = [&BEYOND[..], &["--print", "0"]].concat();
    let expected = undisturbed("latecode", &arguments)?;
    let node = Node::start()?;
    let app = node.run("latecode", &arguments)?;
    app.reaches(135)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(rehearsals(&node)?, 1);
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn code_beyond_the_reserve_that_no_restore_could_place_refuses_a_dump() -> Result {
    let expected = undisturbed("latecode", &BEYOND)?;
    let node = Node::start()?;
    let app = node.run_held("latecode", &BEYOND, Some(200))?;
    app.reaches(135)?;
    let (dump, image) = node.start_dump(&app, Fate::Running)?;
    dump.wait()?.fails_with("a rehearsal has not placed its code where it is")?;
    assert!(!image.path(MANIFEST).exists(), "no image is left that could not be restored");
    assert_eq!(app.finish()?, expected);
    node.finish()
}
