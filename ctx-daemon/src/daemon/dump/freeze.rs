//! Finds when CRIU stopped a tree's processes. CRIU says so only once it has looked at all of them, which takes milliseconds;
//! that time is CRIU's, not the GPU's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::process::Process;

/// The pause between two looks at the processes, at first and after a while.
const POLL_INTERVAL: [Duration; 2] = [Duration::from_micros(100), Duration::from_millis(5)];
/// The number of checks at the first interval.
const OFTEN: u32 = 2000;

/// Watches processes until all of them are stopped.
pub(super) struct FreezeWatch {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<Instant>>>,
}

impl FreezeWatch {
    /// Begins to watch. If a process was stopped before, the watch finds nothing, since CRIU's part cannot be told apart.
    pub(super) fn start(processes: Vec<Process>) -> Self {
        let over = Arc::new(AtomicBool::new(processes.iter().any(Process::is_stopped)));
        let of_thread = Arc::clone(&over);
        let named = std::thread::Builder::new().name("freeze".into());
        let started = named.spawn(move || watch(&processes, &of_thread));
        Self { over, thread: started.ok() }
    }

    /// When the processes stopped; now, where the watch has not seen it.
    pub(super) fn stopped_at(mut self) -> Instant {
        let now = Instant::now();
        self.end().unwrap_or(now).min(now)
    }

    fn end(&mut self) -> Option<Instant> {
        self.over.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()?
    }
}

impl Drop for FreezeWatch {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns when all were stopped at once; a process that has ended counts as stopped.
fn watch(processes: &[Process], over: &AtomicBool) -> Option<Instant> {
    let mut looks = 0;
    while !over.load(Ordering::Relaxed) {
        if processes.iter().all(Process::is_stopped) {
            return Some(Instant::now());
        }
        looks += 1;
        std::thread::sleep(POLL_INTERVAL[usize::from(looks > OFTEN)]);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    struct Sleeper(Child);

    impl Sleeper {
        fn signal(&self, name: &str) {
            let pid = self.0.id().to_string();
            assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
        }

        fn process(&self) -> Process {
            Process::with_pid(self.0.id() as i32).unwrap()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn it_is_seen_when_all_are_stopped() {
        let [one, other] = [0; 2].map(|_| Sleeper(Command::new("sleep").arg("1000").spawn().unwrap()));
        let watch = FreezeWatch::start(vec![one.process(), other.process()]);
        one.signal("-STOP");
        let before = Instant::now();
        other.signal("-STOP");
        let seen = || watch.thread.as_ref().unwrap().is_finished();
        while !seen() {
            std::thread::yield_now();
        }
        let after = Instant::now();
        assert!((before..after).contains(&watch.stopped_at()));
        let again = FreezeWatch::start(vec![other.process()]);
        let asked = Instant::now();
        assert!(again.stopped_at() >= asked);
        other.signal("-CONT");
        let running = FreezeWatch::start(vec![other.process()]);
        let asked = Instant::now();
        assert!(running.stopped_at() >= asked);
    }
}
