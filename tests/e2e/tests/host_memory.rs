//! Host memory that a kernel and the CPU use at the same time, dumped while both use it.

use rekindle_e2e::Result;
use rekindle_e2e::kill::goes_on_after_a_kill;

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
