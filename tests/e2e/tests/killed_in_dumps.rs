//! SIGKILL in each phase of a dump: every victim in every phase, every protocol in every phase, and every other two
//! values of a [`Case`]; with `REKINDLE_SOAK` all cases, repeatedly.

use rekindle_e2e::faults::{Bench, Program, Victim, protocols};
use rekindle_e2e::random::repetitions;
use rekindle_e2e::{Fate, Moment, Result, pairs};

/// The moments, in the order of a dump.
const MOMENTS: [Moment; 10] = [
    // No process is stopped yet.
    Moment::Before("Pause"),
    // The worker is about to quiesce.
    Moment::During("Pause"),
    // The worker is quiesced, and the program runs on.
    Moment::After("Pause"),
    // The program is frozen.
    Moment::Before("Frozen"),
    // GPU memory is being copied.
    Moment::After("Frozen"),
    // CRIU has injected its code into the program.
    Moment::After("Socket"),
    // All of CRIU's image is written.
    Moment::Script("post-dump"),
    // With `--leave-running` the program runs again.
    Moment::Before("Finish"),
    // The image is still being written.
    Moment::During("Finish"),
    // The image is durable.
    Moment::After("Finish"),
];

/// One dump and the kill during it.
#[derive(Clone)]
struct Case {
    /// The program and its fate, which are one factor.
    subject: (Program, Fate),
    victim: Victim,
    moment: Moment,
    protocol: &'static str,
}

/// The cases to try, in the order of a dump.
fn cases() -> Result<Vec<Case>> {
    let mut all = Vec::new();
    let (steady, hidden) = (Program::Steady, Program::Hidden);
    for subject in [(steady, Fate::Killed), (steady, Fate::Running), (hidden, Fate::Running)] {
        for victim in Victim::ALL {
            for moment in MOMENTS {
                all.extend(protocols()?.into_iter().map(|protocol| Case { subject, victim, moment, protocol }));
            }
        }
    }
    Ok(pairs::cases(&all, |it| [&it.subject, &it.victim, &it.moment, &it.protocol]))
}

/// One program goes through all cases that it can survive.
fn killed_in_each_phase(victim: Victim) -> Result {
    let mut bench = Bench::start()?;
    for _ in 0..repetitions() {
        for case in cases()?.into_iter().filter(|it| (it.subject.0, it.victim) == (Program::Steady, victim)) {
            bench.kill_in_dump(case.moment, victim, case.subject.1, case.protocol)?;
        }
    }
    bench.finish()
}

/// In every phase in which the program runs, it makes writes that no dump can predict.
#[test]
fn a_mispredicted_write_beside_a_kill_in_any_phase_of_a_dump_is_in_no_image() -> Result {
    let mut bench = Bench::start_with(Program::Hidden)?;
    for case in cases()?.into_iter().filter(|it| it.subject.0 == Program::Hidden) {
        bench.kill_in_dump(case.moment, case.victim, case.subject.1, case.protocol)?;
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
