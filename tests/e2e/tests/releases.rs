//! Daemons, workers and programs of this release and of one that pretends to be the next, in turn. The pretended
//! release has higher versions, and all its messages have more fields (`rekindle_wire::version::AHEAD`).

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, process};
use rekindle_wire::CONTROL_VERSION;

const NEXT: [(&str, &str); 1] = [("REKINDLE_RELEASES_AHEAD", "1")];
const ARGUMENTS: [&str; 4] = ["--iterations", "400", "--sleep-us", "5000"];

/// Replaces the daemon by another.
fn replace(node: &mut Node, by: &[(&str, &str)]) -> Result {
    assert!(node.stop_daemon()?.success());
    node.start_daemon(by)
}

/// Whether the daemon pretends to be of the next release: builds without debug assertions do not.
fn pretends(node: &Node) -> Result<bool> {
    let pretends = node.status()?.wire == CONTROL_VERSION + 1;
    if !pretends {
        eprintln!("SKIPPED: this build does not pretend to be another release; `checked` and `debug` do");
    }
    Ok(pretends)
}

fn worker(node: &Node, app: &App) -> Result<i32> {
    Ok(node.client(app.pid())?.worker)
}

#[test]
fn workers_serve_on_under_daemons_of_other_releases_and_are_dumped_by_them() -> Result {
    let expected = undisturbed("streams4", &ARGUMENTS)?;
    let mut node = Node::start()?;
    let app = node.run("streams4", &ARGUMENTS)?;
    app.reaches(50)?;
    let older = worker(&node, &app)?;

    replace(&mut node, &NEXT)?;
    if !pretends(&node)? {
        drop(app);
        return node.finish();
    }
    assert_eq!(worker(&node, &app)?, older);
    let first = node.dump(&app)?;
    // This program is older than its worker.
    let late = node.run("streams4", &ARGUMENTS)?;
    late.reaches(50)?;
    let newer = worker(&node, &late)?;

    replace(&mut node, &[])?;
    assert_eq!((worker(&node, &app)?, worker(&node, &late)?), (older, newer));
    let second = node.dump_and_kill(app)?;
    let of_newer = node.dump_and_kill(late)?;
    process::wait_gone("the newer worker", newer)?;
    // A newer worker may have saved state that this release does not know. This release restores the state of its own
    // workers.
    node.try_restore(&of_newer)?.fails_with("restore it with a newer one")?;
    second.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&second)?.finish()?, expected);

    replace(&mut node, &NEXT)?;
    for image in [first, of_newer] {
        image.must_be_of_the_middle(&expected)?;
        assert_eq!(node.restore(&image)?.finish()?, expected);
    }
    node.finish()
}

#[test]
fn a_program_of_the_next_release_is_refused_by_this_one_with_what_to_do() -> Result {
    let mut node = Node::without_daemon()?;
    node.start_daemon(&NEXT)?;
    if !pretends(&node)? {
        return node.finish();
    }
    let newer = |node: &Node| {
        let mut command = node.command(&rekindle_e2e::stage::app("firstkernel")?)?;
        command.envs(NEXT);
        node.run_command("firstkernel", command, &[])
    };
    assert!(newer(&node)?.end()?.success());
    replace(&mut node, &[])?;
    let app = newer(&node)?;
    assert!(!app.end()?.success());
    let errors = app.errors()?;
    assert!(errors.contains("install a newer Rekindle"), "{errors}");
    node.finish()
}
