//! A disk that is full from some phase of a dump on. The dump fails and reports that, leaves nothing but CRIU's own
//! files, and the program goes on. Once there is room, the program can be dumped into the same directory.

use rekindle_e2e::faults::{Bench, protocols};
use rekindle_e2e::random::repetitions;
use rekindle_e2e::{Fate, Moment, Result, pairs};

/// The moments, in the order of a dump.
const MOMENTS: [Moment; 6] = [
    Moment::Before("Pause"),
    Moment::After("Pause"),
    Moment::Before("Frozen"),
    // GPU memory is being written.
    Moment::After("Frozen"),
    // CRIU has written all of its files.
    Moment::Script("post-dump"),
    Moment::Before("Finish"),
];

/// The cases to try: every two values of a moment, a protocol and the fate of the program; with `REKINDLE_SOAK` all.
fn cases() -> Result<Vec<(Fate, Moment, &'static str)>> {
    let mut all = Vec::new();
    for fate in [Fate::Killed, Fate::Running] {
        for moment in MOMENTS {
            all.extend(protocols()?.into_iter().map(|protocol| (fate, moment, protocol)));
        }
    }
    Ok(pairs::cases(&all, |(fate, moment, protocol)| [fate, moment, protocol]))
}

fn full_in_each_phase(fate: Fate) -> Result {
    let mut bench = Bench::start()?;
    for _ in 0..repetitions() {
        for (_, moment, protocol) in cases()?.into_iter().filter(|it| it.0 == fate) {
            bench.fill_disk_in_dump(moment, fate, protocol)?;
        }
    }
    bench.finish()
}

#[test]
fn a_disk_full_in_any_phase_fails_a_dump_that_was_to_kill() -> Result {
    full_in_each_phase(Fate::Killed)
}

#[test]
fn a_disk_full_in_any_phase_fails_a_dump_that_leaves_running() -> Result {
    full_in_each_phase(Fate::Running)
}
