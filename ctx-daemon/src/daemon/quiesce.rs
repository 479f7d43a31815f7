//! Brings clients to rest together, and lets them go on in every case.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use rekindle_wire::control::{Failing, FailureKind, WorkerReply, WorkerRequest};
use thiserror::Error;
use tracing::{debug, warn};

use super::clients::{Client, ClientState};
use super::thread;
use super::worker::{At, Timeout, WorkerError};
use crate::limit::{Deadline, Limit};

/// The last part of the limit is for workers' answers: by then devices have come to rest, or are busy.
const FOR_ANSWERS: u32 = 10;
/// The most commands in flight on a stream of clients that are about to come to rest together, and how long they may take to have
/// no more.
const IN_FLIGHT: u32 = 16;
const CALM: Duration = Duration::from_millis(100);
/// How long devices may take before the daemon assumes that a kernel waits for a command that is still in a ring. A worker whose
/// own device is busy waits longer before it assumes this of its own commands.
const REST_TIMEOUT: Duration = Duration::from_millis(10);
/// How long a device may take to come to rest that is idle as far as is known.
const IDLE_REST: Duration = Duration::from_millis(20);
/// How long a device may take for the commands of an advance before it counts as busy.
const STEP: Duration = Duration::from_millis(5);
/// How long the daemon waits for a busy device before it looks at the others again.
const LOOK: Duration = Duration::from_millis(1);
/// A device that an advance has made busy gets this long to come to rest by itself, or this part of the time until then.
const PATIENCE: Duration = Duration::from_millis(2);
const PART_FOR_PATIENCE: u32 = 32;
/// What was busy for so long by itself gets twice as long the next time.
const LONG: Duration = Duration::from_millis(100);
/// The pause between two checks whether a former dump has let a client go.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Why clients are not at rest.
#[derive(Debug, Error)]
pub(crate) enum QuiesceError {
    #[error("{client} is being dumped or restored already, and still was after {limit}: {}", held(*.at))]
    Held { client: String, limit: Limit, at: At },
    #[error("cannot quiesce {client}: {what} after {limit}, and may never end; the process goes on")]
    Busy { client: String, what: String, limit: Limit },
    #[error("{0} has ended")]
    Ended(String),
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    #[error("cannot quiesce {client}: {source}; the process goes on")]
    Client { client: String, source: WorkerError },
}

impl Failing for QuiesceError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Held { .. } => FailureKind::Refused,
            Self::Busy { .. } => FailureKind::Timeout,
            Self::Ended(_) => FailureKind::LostPeer,
            Self::Thread(error) => Failing::kind(error),
            Self::Client { source, .. } => source.kind(),
        }
    }
}

/// How often a worker hears that the daemon is there: several times in the silence after which it goes on by itself.
const HEARTBEAT: Duration = Duration::from_secs(2);

/// A client that executes nothing. The client goes on when this value is dropped.
pub(crate) struct ClosedRing {
    client: Arc<Client>,
    when_dropped: WhenDropped,
    /// While this sender exists, a thread tells the worker that the daemon is there.
    _heartbeat: Sender<()>,
}

/// The remaining step for a client to go on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WhenDropped {
    /// Its worker must open the ring.
    Open,
    /// Its worker has opened the ring, so that the client runs.
    Note,
    /// An [`OpenRing`] does the rest.
    Nothing,
}

impl ClosedRing {
    /// The client.
    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Lets the client go on, and waits until it does, within the limit. The client counts as being saved until the result is
    /// dropped.
    pub(crate) fn open(mut self, limit: Limit) -> Result<OpenRing, WorkerError> {
        let worker = &self.client.worker;
        worker.ask(&WorkerRequest::Open, &[], limit)?;
        self.when_dropped = WhenDropped::Nothing;
        Ok(OpenRing { client: Arc::clone(&self.client) })
    }

    /// The worker has given the client's memory back, and opens the ring by itself when it is there again.
    pub(crate) fn suspended(mut self) {
        self.when_dropped = WhenDropped::Note;
    }
}

/// A client that goes on while its memory is copied.
pub(crate) struct OpenRing {
    client: Arc<Client>,
}

impl Drop for OpenRing {
    fn drop(&mut self) {
        self.client.set_state(ClientState::Running);
    }
}

impl Drop for ClosedRing {
    /// Lets the client go in the background, since its worker may have to end an earlier request first.
    fn drop(&mut self) {
        match self.when_dropped {
            WhenDropped::Nothing => {}
            WhenDropped::Open if !self.client.worker.is_dead() => open_in_background(&self.client),
            WhenDropped::Open | WhenDropped::Note => self.client.set_state(ClientState::Running),
        }
    }
}

/// Has a client go on, unless another dump or restore has it meanwhile. The client's worker may be stopped or busy for any
/// time.
fn open_in_background(client: &Arc<Client>) {
    let opened = Arc::clone(client);
    let open = move || {
        match opened.worker.ask(&WorkerRequest::Open, &[], Timeout::Endless) {
            Ok(()) => debug!("{opened} goes on"),
            // The tasks were killed, as they should be in a dump that does not leave them running.
            Err(WorkerError::Dead(_)) => {}
            Err(error) => warn!("{opened} cannot go on: {error}"),
        }
        opened.set_state(ClientState::Running);
    };
    if let Err(error) = thread("open", open) {
        warn!("{client} cannot go on: {error}");
    }
}

/// Has a running client's worker give back what was prepared for a dump that does not begin, unless another dump has it.
pub(crate) fn release(client: &Arc<Client>) {
    if client.leave_running(ClientState::Releasing) {
        open_in_background(client);
    }
}

/// The reason why a released client does not run yet.
fn held(at: At) -> String {
    match at {
        At::Stopped => format!("its worker {}", At::Stopped.what()),
        At::Busy => "wait until that is over".to_owned(),
    }
}

/// Says that the daemon is there until the result is dropped. Each client has a thread for this, since a stopped worker may
/// keep its thread waiting.
fn heartbeat(client: &Arc<Client>) -> Result<Sender<()>, QuiesceError> {
    let (until_dropped, over) = channel::<()>();
    let worker = Arc::clone(&client.worker);
    let begun = thread("heartbeat", move || {
        while over.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) && !worker.is_dead() {
            worker.say_alive();
        }
    });
    match begun {
        Ok(_) => Ok(until_dropped),
        Err(error) => {
            client.set_state(ClientState::Running);
            Err(QuiesceError::Thread(error))
        }
    }
}

/// Brings clients to rest together, stepwise; on an error all of them go on.
///
/// ```text
///   all have few commands in flight (so they run on, and none is far ahead)
///        │
///   all stop and wait for their devices ──all at rest──> done
///        │ some are busy                     ^
///        └──> those at rest execute n commands (all one, if none is at rest), the others wait ──┐
///                 ^──────────────────────────┴──────────────────────────────────────────────────┘
/// ```
///
/// A kernel may wait for another that is still in a ring, of its own process or another, or for something that a process does
/// after another command has run. If a kernel is merely long, no client needs to go on, so waiting comes first; and a device that
/// an advance has made busy gets time to come to rest before others advance for it.
///
/// A rank may have launched hundreds of collectives that wait for a rank that is slower. So n doubles while the same devices are
/// busy, and is 1 again when others are: a rank that has caught up, and is ahead now, is so by less than it was behind, and after
/// a few turns all are at rest.
pub(crate) fn quiesce(clients: &[Arc<Client>], limit: Limit) -> Result<Vec<ClosedRing>, QuiesceError> {
    let (began, deadline) = (Instant::now(), limit.begins());
    let for_devices = limit.time - limit.time / FOR_ANSWERS;
    let mut closing = clients.iter().map(|it| Closing::begin(it, deadline)).collect::<Result<Vec<_>, _>>()?;
    calm(&closing, deadline);
    let mut turns = Turns::new();
    let mut step = Step::Stop;
    loop {
        let asked = Instant::now();
        let left = for_devices.saturating_sub(began.elapsed());
        let none_at_rest = closing.iter().all(|it| it.busy.is_some());
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                closing.iter_mut().map(|it| scope.spawn(move || it.ask(step, none_at_rest, left, deadline))).collect();
            threads.into_iter().filter_map(|it| it.join().ok()).collect()
        });
        results.into_iter().collect::<Result<(), _>>()?;
        let Some(busy) = closing.iter().find(|it| it.busy.is_some()) else {
            return Ok(closing.into_iter().map(|it| it.ring).collect());
        };
        if began.elapsed() >= for_devices {
            return Err(QuiesceError::Busy {
                client: busy.ring.client().to_string(),
                what: busy.busy.clone().unwrap_or_default(),
                limit,
            });
        }
        let busy: Vec<bool> = closing.iter().map(|it| it.busy.is_some()).collect();
        let longest = closing.iter().filter(|it| it.busy.is_some()).map(|it| it.took).max().unwrap_or_default();
        debug!(?step, ?busy, ms = began.elapsed().as_millis(), "devices are not at rest together");
        step = turns.next((step, asked.elapsed() >= STEP), busy, longest, began.elapsed());
    }
}

/// Lets no client be far ahead of the others any more, while all run. Without success, the quiesce takes longer.
fn calm(closing: &[Closing], deadline: Deadline) {
    let (began, for_ms) = (Instant::now(), 2 * CALM.as_millis() as u64);
    let request = WorkerRequest::Calm { most: IN_FLIGHT, for_ms };
    let mut calm = closing.len() < 2;
    while !calm && began.elapsed() < CALM {
        let answers: Vec<_> =
            closing.iter().map(|it| it.ring.client.worker.call(&request, &[], &[], deadline)).collect();
        // An older worker fails, and what else went wrong the next request says.
        calm = !answers.iter().any(|it| matches!(it, Ok(answer) if matches!(answer.reply, WorkerReply::Busy { .. })));
        if !calm {
            std::thread::sleep(LOOK);
        }
    }
    debug!(calm, ms = began.elapsed().as_millis(), "few commands are in flight");
}

/// Who advances for whom, until all are at rest together.
struct Turns {
    /// The clients that the others advance for.
    waited_for: Vec<bool>,
    /// The commands of the next advance.
    commands: u32,
    /// Until when a device that an advance has made busy may come to rest by itself.
    until: Option<Duration>,
}

impl Turns {
    fn new() -> Self {
        Self { waited_for: Vec::new(), commands: 1, until: None }
    }

    /// The step after this one, which has left these clients busy at this time of the quiesce. The longest that one of them was
    /// busy by itself before is a sign of long kernels. A step is slow that has taken all its time, because the process did not
    /// make more commands.
    fn next(&mut self, (step, is_slow): (Step, bool), busy: Vec<bool>, longest: Duration, now: Duration) -> Step {
        if step == Step::Stop {
            self.waited_for = busy;
            return Step::Advance { commands: 1 };
        }
        let is_new = busy.iter().zip(&self.waited_for).any(|(now, before)| *now && !before);
        let has_ended = busy.iter().zip(&self.waited_for).any(|(now, before)| !now && *before);
        if is_new {
            // Two clients with long kernels must not take turns for ever.
            let patience = PATIENCE.max(now / PART_FOR_PATIENCE).max(longest * 2);
            if now < *self.until.get_or_insert(now + patience) {
                return Step::Wait;
            }
        }
        if is_new || has_ended {
            (self.waited_for, self.commands) = (busy, 1);
        } else if !is_slow && self.until.is_none() {
            self.commands = self.commands.saturating_mul(2);
        }
        self.until = None;
        Step::Advance { commands: self.commands }
    }
}

/// Brings clients to rest that are idle as far as is known. One that is not goes on at once, and with it all others.
pub(crate) fn quiesce_idle(clients: &[Arc<Client>], limit: Limit) -> Result<Vec<ClosedRing>, QuiesceError> {
    let now = Limit::fixed(Duration::ZERO).begins();
    let mut closing = clients.iter().map(|it| Closing::begin(it, now)).collect::<Result<Vec<_>, _>>()?;
    let deadline = limit.begins();
    let results: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> =
            closing.iter_mut().map(|it| scope.spawn(move || it.ask(Step::Stop, false, IDLE_REST, deadline))).collect();
        asked.into_iter().filter_map(|it| it.join().ok()).collect()
    });
    results.into_iter().collect::<Result<(), _>>()?;
    let busy = closing.iter().find_map(|it| Some((it.ring.client().to_string(), it.busy.clone()?)));
    match busy {
        None => Ok(closing.into_iter().map(|it| it.ring).collect()),
        Some((client, what)) => Err(QuiesceError::Busy { client, what, limit: Limit::fixed(IDLE_REST) }),
    }
}

/// Waits until no other dump has the client: a dump that was just given up, or is durable, lets its clients go in the
/// background.
pub(crate) fn wait_until_let_go(client: &Client, deadline: Deadline) -> Result<(), QuiesceError> {
    wait_for(client, deadline, || client.state() == ClientState::Running)
}

/// Waits until the dump before has let a client go, in the background.
fn wait_for(client: &Client, deadline: Deadline, is_let_go: impl Fn() -> bool) -> Result<(), QuiesceError> {
    while !is_let_go() {
        if deadline.is_over() {
            let (client, at) = (client.to_string(), client.worker.is_at());
            return Err(QuiesceError::Held { client, limit: deadline.limit, at });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// The next request to clients that are not at rest together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// To all, at first: stop.
    Stop,
    /// To busy clients: wait.
    Wait,
    /// To the clients at rest: execute so many commands, one after the other. To all, if none is at rest: execute one.
    Advance { commands: u32 },
}

/// A client that executes nothing any more. Its device may still be busy, with the named work.
struct Closing {
    ring: ClosedRing,
    busy: Option<String>,
    /// Since when the device is busy, if an advance has made it so.
    since: Option<Instant>,
    /// How long it was busy then, if that was long, the last time that no other client advanced until it came to rest.
    took: Duration,
}

impl Closing {
    fn begin(client: &Arc<Client>, deadline: Deadline) -> Result<Self, QuiesceError> {
        wait_for(client, deadline, || client.leave_running(ClientState::Quiesced))?;
        let ring =
            ClosedRing { client: Arc::clone(client), when_dropped: WhenDropped::Open, _heartbeat: heartbeat(client)? };
        Ok(Self { ring, busy: None, since: None, took: Duration::ZERO })
    }

    /// Asks for a step, for which the device may take as long as is `left`. The worker itself may be in a call of the driver,
    /// and has until the limit to return from it.
    fn ask(&mut self, step: Step, none_at_rest: bool, left: Duration, deadline: Deadline) -> Result<(), QuiesceError> {
        let commands = match (step, &self.busy) {
            (Step::Wait, None) => return Ok(()),
            (Step::Stop, _) | (Step::Wait, Some(_)) => 0,
            (Step::Advance { .. }, Some(_)) => u32::from(none_at_rest),
            (Step::Advance { commands }, None) => commands,
        };
        let timeout_ms = |timeout: Duration| u64::try_from(timeout.min(left).as_millis()).unwrap_or(u64::MAX);
        // What ends while others advance may have waited for them.
        let mut since = self.since.take().filter(|_| commands > 0 || step == Step::Wait);
        if commands > 0 {
            since.get_or_insert_with(Instant::now);
            self.request(&WorkerRequest::Advance { timeout_ms: timeout_ms(STEP), commands }, deadline)?;
        } else {
            let timeout_ms = timeout_ms(if step == Step::Stop { REST_TIMEOUT } else { LOOK });
            self.request(&WorkerRequest::Quiesce { timeout_ms }, deadline)?;
        }
        match since {
            since if self.busy.is_some() => self.since = since,
            Some(since) if (none_at_rest || step == Step::Wait) && since.elapsed() >= LONG => {
                self.took = since.elapsed()
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends one request, and notes what keeps the device busy after it.
    fn request(&mut self, request: &WorkerRequest, deadline: Deadline) -> Result<(), QuiesceError> {
        let answered = self.ring.client.worker.call(request, &[], &[], deadline);
        let source = match answered.map(|it| it.reply) {
            Ok(WorkerReply::Busy { what }) => {
                self.busy = Some(what);
                return Ok(());
            }
            Ok(WorkerReply::Done) => {
                self.busy = None;
                return Ok(());
            }
            Ok(_) => WorkerError::Protocol("Quiesce"),
            Err(source) => source,
        };
        // A worker that has failed has opened its ring; a worker that has not answered may close its ring yet.
        if matches!(source, WorkerError::Failed(_)) {
            self.ring.when_dropped = WhenDropped::Note;
        }
        let client = self.ring.client.to_string();
        Err(match self.ring.client.explain(source) {
            WorkerError::Ended => QuiesceError::Ended(client),
            source => QuiesceError::Client { client, source },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ranks that have launched so many collectives, which end when all ranks have launched them. Returns the rounds until all
    /// ranks are at rest.
    fn rounds(mut launched: Vec<u32>) -> u32 {
        let (mut turns, mut step) = (Turns::new(), Step::Stop);
        let mut round = 0;
        loop {
            let slowest = launched.iter().copied().min().unwrap_or_default();
            let busy: Vec<bool> = launched.iter().map(|it| *it > slowest).collect();
            if !busy.contains(&true) {
                return round;
            }
            round += 1;
            step = turns.next((step, false), busy.clone(), Duration::ZERO, LOOK * round);
            if let Step::Advance { commands } = step {
                for (launched, busy) in launched.iter_mut().zip(busy) {
                    *launched += if busy { 0 } else { commands };
                }
            }
        }
    }

    #[test]
    fn ranks_that_wait_for_a_slower_one_come_to_rest_in_few_rounds() {
        for lead in 1..2000 {
            let two = rounds(vec![1000, 1000 + lead]);
            let four = rounds(vec![1000 + lead, 1000, 1000 + lead / 3, 1000 + lead / 2]);
            assert!(two < 100 && four < 200, "a lead of {lead} takes {two} rounds, or {four}");
        }
    }

    #[test]
    fn a_device_with_long_kernels_is_waited_for() {
        let (mut turns, milliseconds, long) = (Turns::new(), Duration::from_millis, Duration::from_millis(300));
        let advance = Step::Advance { commands: 1 };
        assert_eq!(turns.next((Step::Stop, false), vec![true, false], Duration::ZERO, milliseconds(50)), advance);
        // The second is busy with what it was given.
        assert_eq!(turns.next((advance, false), vec![true, true], long, milliseconds(70)), Step::Wait);
        assert_eq!(turns.next((Step::Wait, false), vec![true, true], long, milliseconds(400)), Step::Wait);
        // The first has ended: the second still has its time.
        assert_eq!(turns.next((Step::Wait, false), vec![false, true], long, milliseconds(669)), Step::Wait);
        assert_eq!(turns.next((Step::Wait, false), vec![false, true], long, milliseconds(670)), advance);
    }

    #[test]
    fn what_is_merely_slow_to_advance_goes_on_as_fast_as_before() {
        let (mut turns, now) = (Turns::new(), Duration::from_millis(50));
        let mut step = turns.next((Step::Stop, false), vec![true, false], Duration::ZERO, now);
        for commands in [2, 4, 8] {
            step = turns.next((step, false), vec![true, false], Duration::ZERO, now);
            assert_eq!(step, Step::Advance { commands });
        }
        // Eight take longer than an advance may, or the process is slow to make eight: then eight again.
        step = turns.next((step, true), vec![true, true], Duration::ZERO, now);
        assert_eq!(step, Step::Wait);
        step = turns.next((step, false), vec![true, false], Duration::ZERO, now);
        assert_eq!(step, Step::Advance { commands: 8 });
        assert_eq!(turns.next((step, true), vec![true, false], Duration::ZERO, now), Step::Advance { commands: 8 });
    }
}
