//! Selects the tests that run at the same time, and records how long each ran.
//!
//! `tests/e2e/run` has libtest start the threads of all tests at once. When a test first makes a [`Node`](crate::Node)
//! or asks for a path of [`stage`](crate::stage), it waits until fewer than `REKINDLE_E2E_THREADS` tests run. Tests
//! that use a resource that exists once per host (the default socket, podman's storage, its default network, `/etc`)
//! hold the [`HostLock`], so they run one after the other. A test that waits for the lock keeps no other test from
//! running. Tests start in the order in which they asked first, which is the order of their names.
//!
//! A test runs until its thread ends. Its time is then appended to the file that `REKINDLE_E2E_TIMES` names.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The number of tests that run at the same time; without the variable, the number of cores.
const THREADS: &str = "REKINDLE_E2E_THREADS";
/// A file that gets a line for each test: seconds, and the test's name.
const TIMES: &str = "REKINDLE_E2E_TIMES";

static QUEUE: Mutex<Queue> = Mutex::new(Queue::new());
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// The test of this thread, once it has begun.
    static TEST: RefCell<Option<Test>> = const { RefCell::new(None) };
}

/// Waits until this thread's test may run; only the first call waits. Only the thread of a test may call this: any
/// other thread would count as a separate test.
pub fn enter() {
    TEST.with_borrow_mut(|test| {
        test.get_or_insert_with(|| Test::waits_for(take_ticket(), Duration::ZERO, false));
    });
}

/// Exclusive use of the resources that exist once per host.
#[derive(Debug)]
pub struct HostLock(());

impl HostLock {
    /// Waits until no other test holds the lock and this thread's test may run.
    pub fn take() -> Self {
        TEST.with_borrow_mut(|test| {
            // The test does not run while it waits. It keeps its ticket, so it is served before the tests that asked
            // later.
            let (ticket, ran) = test.take().map_or_else(|| (take_ticket(), Duration::ZERO), |mut test| test.stop());
            *test = Some(Test::waits_for(ticket, ran, true));
        });
        Self(())
    }
}

impl Drop for HostLock {
    fn drop(&mut self) {
        queue().host_in_use = false;
        CHANGED.notify_all();
    }
}

/// A running test.
#[derive(Debug)]
struct Test {
    ticket: u64,
    since: Instant,
    /// The time that the test ran before it last waited.
    ran: Duration,
    running: bool,
}

impl Test {
    fn waits_for(ticket: u64, ran: Duration, host: bool) -> Self {
        let limit = limit();
        let mut queue = queue();
        queue.waiting.insert(ticket, host);
        while queue.next(limit) != Some(ticket) {
            queue = CHANGED.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        queue.starts(ticket);
        // There may be room for the next test in the queue.
        CHANGED.notify_all();
        Self { ticket, since: Instant::now(), ran, running: true }
    }

    /// Stops the test's clock, and returns its ticket and how long it ran.
    fn stop(&mut self) -> (u64, Duration) {
        if std::mem::take(&mut self.running) {
            self.ran += self.since.elapsed();
            queue().running -= 1;
            CHANGED.notify_all();
        }
        (self.ticket, self.ran)
    }
}

impl Drop for Test {
    fn drop(&mut self) {
        if !self.running {
            return;
        }
        let (_, ran) = self.stop();
        let Some(file) = std::env::var_os(TIMES) else { return };
        let thread = std::thread::current();
        let line = format!("{:.1} {}\n", ran.as_secs_f64(), thread.name().unwrap_or("?"));
        // A time that cannot be written fails no test.
        let _ =
            File::options().append(true).create(true).open(file).and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// The waiting and the running tests.
#[derive(Debug, Default)]
pub struct Queue {
    tickets: u64,
    /// The number of running tests.
    pub running: usize,
    /// Whether one of the running tests holds the host lock.
    pub host_in_use: bool,
    /// The waiting tests by ticket; the value says whether the test needs the host lock.
    pub waiting: BTreeMap<u64, bool>,
}

impl Queue {
    /// An empty queue.
    pub const fn new() -> Self {
        Self { tickets: 0, running: 0, host_in_use: false, waiting: BTreeMap::new() }
    }

    /// The ticket that starts next, if one may start now.
    pub fn next(&self, limit: usize) -> Option<u64> {
        let may_start = |(_, host): &(&u64, &bool)| !(**host && self.host_in_use);
        self.waiting.iter().find(may_start).filter(|_| self.running < limit).map(|(ticket, _)| *ticket)
    }

    /// The test of this ticket runs from now on.
    pub fn starts(&mut self, ticket: u64) {
        self.running += 1;
        self.host_in_use |= self.waiting.remove(&ticket) == Some(true);
    }
}

fn queue() -> MutexGuard<'static, Queue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn take_ticket() -> u64 {
    let mut queue = queue();
    queue.tickets += 1;
    queue.tickets
}

fn limit() -> usize {
    let given = std::env::var(THREADS).ok().and_then(|text| text.parse().ok()).filter(|limit| *limit > 0);
    given.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, Into::into))
}
