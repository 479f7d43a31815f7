//! SIGKILL in each phase of a dump.

use rekindle_e2e::faults::{Bench, Program, Victim};
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::{Fate, Moment, Result};

/// In the order of a dump.
const MOMENTS: [Moment; 10] = [
    // Nothing is stopped.
    Moment::Before("Pause"),
    // The worker is about to come to rest.
    Moment::During("Pause"),
    // It is at rest, and the program runs on.
    Moment::After("Pause"),
    // The program is frozen.
    Moment::Before("Frozen"),
    // GPU memory is being copied.
    Moment::After("Frozen"),
    // CRIU's code is in the program.
    Moment::After("Socket"),
    // All of CRIU's image is written.
    Moment::Script("post-dump"),
    // With `--leave-running` the program runs again.
    Moment::Before("Finish"),
    // The image is being written still.
    Moment::During("Finish"),
    // The image is durable.
    Moment::After("Finish"),
];

/// One program outlives all that it can. With one repetition each phase is tried with one protocol, with more with all.
fn killed_in_each_phase(victim: Victim) -> Result {
    let mut bench = Bench::start()?;
    for _ in 0..repetitions() {
        for fate in [Fate::Killed, Fate::Running] {
            for moment in MOMENTS {
                for protocol in bench.protocols()? {
                    bench.kill_in_dump(moment, victim, fate, protocol)?;
                }
            }
        }
    }
    bench.finish()
}

/// The program writes, in every phase in which it runs, what no dump can foresee.
#[test]
fn a_wrong_guess_beside_a_kill_in_any_phase_of_a_dump_is_in_no_image() -> Result {
    let mut bench = Bench::start_with(Program::Hidden)?;
    let mut random = Random::new();
    let mut cells: Vec<_> = MOMENTS.into_iter().flat_map(|moment| Victim::ALL.map(|victim| (moment, victim))).collect();
    let count = if repetitions() > 1 { cells.len() } else { 16 };
    for _ in 0..count {
        let (moment, victim) = cells.swap_remove(random.below(cells.len() as u64) as usize);
        for protocol in bench.protocols()? {
            bench.kill_in_dump(moment, victim, Fate::Running, protocol)?;
        }
    }
    bench.finish()
}

#[test]
fn a_daemon_killed_in_any_phase_of_a_dump_leaves_no_half_an_image_and_the_program_goes_on() -> Result {
    killed_in_each_phase(Victim::Daemon)
}

#[test]
fn a_worker_killed_in_any_phase_of_a_dump_is_an_error_in_its_program_and_leaves_no_half_an_image() -> Result {
    killed_in_each_phase(Victim::Worker)
}

#[test]
fn a_criu_killed_in_any_phase_of_a_dump_leaves_no_half_an_image_and_the_program_goes_on() -> Result {
    killed_in_each_phase(Victim::Criu)
}

#[test]
fn a_program_killed_in_any_phase_of_its_dump_leaves_no_half_an_image() -> Result {
    killed_in_each_phase(Victim::Application)
}
