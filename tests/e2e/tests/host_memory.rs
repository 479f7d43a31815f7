//! Host memory that a kernel and the CPU use at the same time, dumped while both do.

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{Node, Result};

/// Runs a program, dumps and kills it while it is at work, restores it, and compares its end with an undisturbed one.
fn survives(name: &str, arguments: &[&str], moment: u64) -> Result {
    let expected = undisturbed(name, arguments)?;
    let node = Node::start()?;
    let app = node.run(name, arguments)?;
    app.reaches(moment)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

/// A kernel runs nearly all the time, and ends when the CPU has written what it waits for.
#[test]
fn mapped_memory_that_a_kernel_reads_as_the_cpu_writes_comes_back() -> Result {
    survives("mapped", &["--iterations", "150", "--sleep-us", "16000"], 10)
}

/// Copies of registered memory wait in a stream nearly all the time.
#[test]
fn registered_memory_comes_back_with_copies_under_way() -> Result {
    survives("registered", &["--iterations", "150", "--sleep-us", "16000"], 10)
}
