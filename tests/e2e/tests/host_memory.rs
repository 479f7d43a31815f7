//! Host memory that a kernel and the CPU use at the same time, dumped while both use it.

use std::fs;

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::kill::goes_on_after_a_kill;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::{Node, Result};

/// A kernel runs nearly all the time, and ends when the CPU has written the value that the kernel waits for.
#[test]
fn mapped_memory_that_a_kernel_reads_as_the_cpu_writes_comes_back() -> Result {
    goes_on_after_a_kill("mapped", &["--iterations", "150", "--sleep-us", "16000"], 10)
}

/// Copies of registered memory wait in a stream nearly all the time.
#[test]
fn registered_memory_comes_back_with_copies_under_way() -> Result {
    goes_on_after_a_kill("registered", &["--iterations", "150", "--sleep-us", "16000"], 10)
}

/// The worker has the file of the memory; CRIU makes it anew.
#[test]
fn registered_memory_that_processes_share_comes_back() -> Result {
    goes_on_after_a_kill("sharedhost", &["--iterations", "150", "--sleep-us", "16000"], 10)
}

/// While the program moves pages of registered memory, it holds its own threads by ptrace, which CRIU does too: they take turns. No
/// dump fails, and memory that is registered has a device pointer.
#[test]
fn a_program_that_registers_memory_without_a_break_is_dumped_at_random_moments() -> Result {
    let iterations = 60 * repetitions();
    let arguments = ["--iterations", &iterations.to_string(), "--threads", "24", "--mib", "32"];
    let expected = undisturbed("pinning", &arguments)?;
    let node = Node::start()?;
    let app = node.run_held("pinning", &arguments, Some(iterations))?;
    let (mut random, mut last) = (Random::new(), None);
    for dump in 1..=10 * repetitions() {
        app.advances_by(1 + random.below(4))?;
        std::thread::sleep(std::time::Duration::from_micros(random.below(20_000)));
        let image = node.dump(&app).with_context(|| format!("dump {dump}"))?;
        if let Some(before) = last.replace(image) {
            fs::remove_dir_all(before.dir)?;
        }
    }
    app.kill()?;
    let image = last.context("there is an image")?;
    let printed = node.restore(&image)?.finish()?;
    ensure!(printed == expected, "the program prints {printed:?} in the end, and alone {expected:?}");
    node.finish()
}
