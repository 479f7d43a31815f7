//! For how long a program has had work on a GPU, as the daemon tells it.

use std::fs;
use std::time::{Duration, Instant};

use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Node, Result, until};

/// The GPU time of a program.
fn time(node: &Node, app: &App) -> Result<Duration> {
    Ok(Duration::from_nanos(node.client(app.pid())?.gpu_time_ns.iter().sum()))
}

#[test]
fn time_passes_while_a_kernel_runs_and_not_while_a_program_does_nothing() -> Result {
    let node = Node::start()?;
    let end = node.path("until");
    let file = end.display().to_string();
    let app = node.run("hidden", &["--way", "held", "--kib", "4", "--sleep-us", "300", "--until", &file])?;
    app.reaches(3)?;
    let idle = node.run("idle", &["--until", &file])?;
    node.client(idle.pid())?;

    // A kernel runs from now on, and the program only waits for it.
    fs::write(node.path("until.go"), "")?;
    until_true("the kernel is alone", || Ok(node.client(app.pid())?.idle_ms == 0))?;
    let (began, before) = (Instant::now(), time(&node, &app)?);
    let first_question = began.elapsed();
    let (asked, measured, answered) = until("two seconds of GPU time", || {
        let (asked, measured, answered) = (began.elapsed(), time(&node, &app)? - before, began.elapsed());
        Ok((measured >= Duration::from_secs(2)).then_some((asked, measured, answered)))
    })?;
    // Five standard deviations of what is sampled every 5 ms. Both questions took a while.
    let error = Duration::from_secs_f64(5.0 * (0.005 * answered.as_secs_f64()).sqrt());
    assert!(measured <= answered + error, "{measured:?} in {answered:?}");
    assert!(measured + error + first_question >= asked, "{measured:?} in {asked:?}");

    until_true("the other program has nothing to do", || Ok(node.client(idle.pid())?.idle_ms > 100))?;
    let rested = time(&node, &idle)?;
    until_true("it does nothing for longer", || Ok(node.client(idle.pid())?.idle_ms > 400))?;
    assert_eq!(time(&node, &idle)?, rested);

    fs::write(&end, "")?;
    assert_eq!(app.finish()?, "hidden ok\n");
    idle.finish()?;
    node.finish()
}
