//! SIGKILL in each phase of a restore.

use rekindle_e2e::faults::{Bench, Victim};
use rekindle_e2e::random::repetitions;
use rekindle_e2e::{Moment, Result};

/// The moments, in the order of a restore, and whether the rings are open by then.
const MOMENTS: [(Moment, bool); 10] = [
    // Neither a process nor a worker belongs to the restore yet.
    (Moment::Before("Restore"), false),
    // A worker loads the image.
    (Moment::After("Restore"), false),
    // CRIU is about to make processes.
    (Moment::Script("pre-restore"), false),
    // The first process exists, and waits until CRIU tells it to go on. The daemon does not know the process yet.
    (Moment::Script("setup-namespaces"), false),
    // The first process goes on, creates the others, and connects.
    (Moment::Script("post-setup-namespaces"), false),
    // All processes exist, and are stopped.
    (Moment::Script("post-restore"), false),
    (Moment::Before("Resume"), false),
    // The ring is open.
    (Moment::After("Resume"), true),
    (Moment::Script("pre-resume"), true),
    // The program runs.
    (Moment::Script("post-resume"), true),
];

/// The worker is about to take the process's memory, where the process waits for that.
const WAITS: [(Moment, bool); 1] = [(Moment::During("Resume"), false)];

fn can_be_killed(victim: Victim, moment: Moment) -> bool {
    match victim {
        Victim::Daemon => true,
        // CRIU as the victim is held only by its scripts.
        Victim::Criu => matches!(moment, Moment::Script(_) | Moment::During("Resume")),
        // Before this moment no worker belongs to the restore.
        Victim::Worker => moment != Moment::Before("Restore"),
        // Before these moments there are no processes.
        Victim::Application => {
            !matches!(moment, Moment::Before("Restore") | Moment::After("Restore") | Moment::Script("pre-restore"))
        }
    }
}

/// The number of kills of each victim per repetition where tests may take long; otherwise each is killed once in each
/// phase.
const KILLS: u64 = 10;

fn killed_in_each_phase(victim: Victim) -> Result {
    killed_at(victim, Bench::start()?, &MOMENTS)?;
    killed_at(victim, Bench::start_waiting()?, &WAITS)
}

/// All restores use one image.
fn killed_at(victim: Victim, mut bench: Bench, moments: &[(Moment, bool)]) -> Result {
    let image = bench.image()?;
    let moments: Vec<_> = moments.iter().copied().filter(|it| can_be_killed(victim, it.0)).collect();
    let kills = if repetitions() > 1 { (KILLS * repetitions()) as usize } else { moments.len() };
    for (moment, opens) in moments.into_iter().cycle().take(kills) {
        // The daemon completes the request, whether anybody waits for the answer or not.
        let opens = opens || (victim, moment) == (Victim::Criu, Moment::During("Resume"));
        bench.kill_in_restore(&image, moment, victim, opens)?;
    }
    let criu = bench.node.criu();
    bench.node.start_restore(&criu, &image)?.wait()?.succeeds()?;
    bench.adopt(&image);
    bench.finish()
}

#[test]
fn a_daemon_killed_in_any_phase_of_a_restore_leaves_nothing_of_it() -> Result {
    killed_in_each_phase(Victim::Daemon)
}

#[test]
fn a_worker_killed_in_any_phase_of_a_restore_leaves_nothing_of_it() -> Result {
    killed_in_each_phase(Victim::Worker)
}

#[test]
fn a_criu_killed_in_any_phase_of_a_restore_leaves_nothing_of_it() -> Result {
    killed_in_each_phase(Victim::Criu)
}

#[test]
fn a_program_killed_in_any_phase_of_its_restore_leaves_nothing_of_it() -> Result {
    killed_in_each_phase(Victim::Application)
}
