//! Programs dumped at random moments while their GPU is busy: one of four threads, and one of green contexts. Whichever command or
//! wait a dump interrupts, nothing is lost and nothing is done twice.

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::{Node, Result};

/// Dumps the program at random moments. Each dump either kills the program, or leaves it running for a while until the
/// test kills it; the program then goes on from the image. A mistake at any moment shows in the output at the end.
/// At its end the program's progress is `end`.
fn at_random_moments(program: &str, arguments: &[&str], moments: u64, end: u64) -> Result {
    let expected = undisturbed(program, arguments)?;
    let mut random = Random::new();
    let node = Node::start()?;
    let mut app = node.run(program, arguments)?;
    for moment in 0..moments {
        // The dumps are spread over the first half of the work of all threads: the thread that reports progress may be
        // done before the others.
        let now = app.progress()?;
        let left = (end / 2).saturating_sub(now) / (moments - moment);
        app.reaches(now + 1 + random.below(2 * left + 1))?;
        // The sleep selects a random moment between two iterations; it does not wait for a condition.
        std::thread::sleep(std::time::Duration::from_micros(random.below(3000)));
        let image = if random.below(2) == 0 {
            node.dump_and_kill(app)?
        } else {
            let image = node.dump(&app)?;
            std::thread::sleep(std::time::Duration::from_micros(random.below(20_000)));
            app.kill()?;
            image
        };
        image.must_be_of_the_middle(&expected)?;
        app = node.restore(&image)?;
        eprintln!("moment {moment}: progress {now}");
        std::fs::remove_dir_all(&image.dir)?;
    }
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn dumped_at_25_random_moments_with_small_work() -> Result {
    (0..repetitions())
        .try_for_each(|_| at_random_moments("streams4", &["--iterations", "12000", "--words", "512"], 25, 4 * 12_000))
}

#[test]
fn dumped_at_25_random_moments_with_larger_work() -> Result {
    (0..repetitions())
        .try_for_each(|_| at_random_moments("streams4", &["--iterations", "3000", "--words", "8192"], 25, 4 * 3000))
}

/// A moment may lie while a green context is made, while it ends, or while one waits for all of another.
#[test]
fn dumped_at_20_random_moments_in_green_contexts() -> Result {
    (0..repetitions()).try_for_each(|_| at_random_moments("green", &["--iterations", "4000"], 20, 4000))
}
