//! Waiting without blocking: actions that happen once the device has reached a certain place.
//!
//! The executor never waits for the device. Where a command must wait, the executor records a private event at the
//! command's place in the order, and queries the event between commands.
//!
//! Nor may the executor block in a launch. A context has few hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default).
//! A launch into a queue that holds about a thousand commands, of whichever streams, blocks until one of them is done. A
//! stream that gets work takes a queue that no stream has, or else the queue that was taken longest ago, and keeps it as
//! long as the stream has work (measured on an H100, driver 580: 1,021 commands). So a stream may have [`CREDITS`] commands
//! in flight where no more streams are busy than there are queues. Streams that come to a queue later share what is left of
//! it: each may have half as many as the stream before it, so one stream more or less does not overfill a queue.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

use crate::gpu::driver::Driver;

/// The most commands in flight on a stream that is the first in its hardware queue.
pub(crate) const CREDITS: u64 = 768;
/// The most commands in flight on the second stream in a hardware queue.
const SHARED_CREDITS: u64 = 64;
/// The number of commands after which a private event is recorded in a stream, to learn how far the stream is.
const TICK: u64 = 64;
/// The fewest private events while a stream fills its allowance of commands in flight. These events take room, too.
const TICKS_IN_FLIGHT: u64 = 4;

/// Streams are asked whether they are busy once in this many times that more seem busy than there are queues.
const ASK_EVERY: u32 = 64;

/// The most commands in flight on a stream whose hardware queue already has this many other streams.
const fn credits(others: usize) -> u64 {
    match others {
        0 => CREDITS,
        1..=7 => SHARED_CREDITS >> (others - 1),
        _ => 1,
    }
}

/// The number of hardware queues of a context, as the driver takes it from the environment: 1 to 32, or 8.
fn connections() -> usize {
    let given = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
    given.and_then(|text| text.trim().parse::<usize>().ok()).unwrap_or(8).clamp(1, 32)
}

/// A stream as the executor tracks it: the commands that it enqueued there, and how many of them are known to be done.
#[derive(Debug, Default)]
pub(crate) struct Track {
    pub(crate) real: CUstream,
    enqueued: u64,
    done: u64,
    /// The most commands in flight, as determined when the stream last became busy.
    credits: u64,
    /// Private events at places of the stream, the oldest first.
    ticks: VecDeque<(u64, CUevent)>,
    last_tick: u64,
    /// Kernels that were launched and are not known to be done: place and function.
    launches: VecDeque<(u64, u64)>,
}

impl Track {
    fn is_idle(&self) -> bool {
        self.done == self.enqueued
    }

    /// The number of commands between private events, if the stream may have this many in flight at most.
    fn tick(&self, most: u64) -> u64 {
        (self.credits.min(most) / TICKS_IN_FLIGHT).clamp(1, TICK)
    }

    fn in_flight(&self) -> u64 {
        self.enqueued - self.done
    }

    /// Notes that everything up to a place is done; returns the events that are no longer needed.
    fn reached(&mut self, place: u64, spare: &mut Vec<CUevent>) {
        self.done = self.done.max(place);
        while self.ticks.front().is_some_and(|t| t.0 <= self.done) {
            spare.extend(self.ticks.pop_front().map(|t| t.1));
        }
        while self.launches.front().is_some_and(|l| l.0 <= self.done) {
            self.launches.pop_front();
        }
    }
}

/// Names a stream: the client's handle, or a default stream of a context and thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamKey {
    pub(crate) context: u64,
    pub(crate) handle: CUstream,
    /// The client's thread if the stream is a thread's default stream, or 0.
    pub(crate) thread: u32,
}

/// A private event, recorded in a stream at a certain place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    /// The client's context that the event belongs to.
    pub(crate) context: u64,
    event: CUevent,
    stream: StreamKey,
    place: u64,
}

/// The name of the streams in which the worker waits for events of the client's. `thread` numbers these streams, since the
/// wait for one event must not delay another.
const EVENT_STREAM: CUstream = u64::MAX;
/// The name of streams that the client has destroyed, numbered by `thread`, while commands run in them.
const DYING_STREAM: CUstream = u64::MAX - 1;

/// A stream of the worker's, one in each context, in which nothing is ever enqueued (see `resources/prints.rs`).
pub(crate) const PRINT_STREAM: CUstream = u64::MAX - 1;

/// A transfer of the application's that a copy has counted, so as to give way to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub(crate) device: usize,
    /// The copy that was under way.
    pub(crate) copy: u64,
}

/// A stream-ordered allocation that the client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolAllocation {
    pub(crate) pool: u64,
    pub(crate) size: u64,
    pub(crate) key: StreamKey,
}

/// The action once the marked places are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// The call in this reply slot returns.
    Reply(u16),
    /// The client may use the staging chunk again.
    Chunk(usize),
    /// A transfer of the application's is done, to which copies have given way.
    Transferred(Transfer),
    /// Device memory is freed, and the call returns.
    Free { address: u64, reply: u16 },
    /// A mapping of the client's is unmapped, and the call returns.
    Unmap { address: u64, size: u64, reply: u16 },
    /// Pinned memory is unregistered, and the call returns.
    Unpin { address: u64, reply: u16 },
    /// An array is destroyed, and the call returns.
    DestroyArray { array: u64, reply: u16 },
    /// Frees have happened whose memory an allocation needs: the allocation is tried again, and the call returns.
    PoolAlloc { wanted: PoolAllocation, reply: u16 },
    /// A stream that the client has destroyed is destroyed.
    Destroy(StreamKey),
    /// A graph of the driver's that the client has destroyed is destroyed.
    DestroyGraph { exec: CUgraphExec, graph: CUgraph },
    /// A deferred command goes on: the device has reached the place that it waited for.
    Deferred(u64),
}

/// For a while streams have only so many commands in flight: soon the client is not far ahead of its devices.
#[derive(Clone, Copy, Debug)]
struct Calm {
    most: u64,
    until: Instant,
}

/// Everything that waits for the device.
pub(crate) struct Waiting {
    tracks: HashMap<StreamKey, Track>,
    /// The number of hardware queues of a context.
    queues: usize,
    /// How often a stream got work while every queue was taken.
    crowded: u32,
    spare: HashMap<u64, Vec<CUevent>>,
    list: Vec<(Vec<Mark>, Then)>,
    next_dying: u32,
    calm: Option<Calm>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self::with_queues(connections())
    }
}

impl Waiting {
    fn with_queues(queues: usize) -> Self {
        Self {
            tracks: HashMap::new(),
            queues,
            crowded: 0,
            spare: HashMap::new(),
            list: Vec::new(),
            next_dying: 0,
            calm: None,
        }
    }

    /// From now on a stream may have this many commands in flight at most, for this time.
    pub(crate) fn calm(&mut self, most: u64, time: Duration) {
        self.calm = Some(Calm { most: most.max(1), until: Instant::now() + time });
    }

    /// Ends a [`Self::calm`].
    pub(crate) fn uncalm(&mut self) {
        self.calm = None;
    }

    /// The most commands in flight on a stream, whatever its credits are.
    fn most(&self) -> u64 {
        self.calm.filter(|calm| Instant::now() < calm.until).map_or(u64::MAX, |calm| calm.most)
    }

    /// A stream that has more commands in flight than a [`Self::calm`] lets it have.
    pub(crate) fn not_calm(&mut self, driver: &Driver) -> Option<StreamKey> {
        let most = self.most();
        for (key, track) in &mut self.tracks {
            if track.in_flight() > most {
                Self::look(driver, track, self.spare.entry(key.context).or_default());
            }
        }
        self.tracks.iter().find(|(_, track)| track.in_flight() > most).map(|(key, _)| *key)
    }

    /// The stream's track; a new track gets `real`.
    fn track(
        &mut self,
        key: StreamKey,
        real: impl FnOnce() -> Result<CUstream, CUresult>,
    ) -> Result<&mut Track, CUresult> {
        Ok(match self.tracks.entry(key) {
            std::collections::hash_map::Entry::Occupied(o) => o.into_mut(),
            std::collections::hash_map::Entry::Vacant(v) => {
                v.insert(Track { real: real()?, credits: CREDITS, ..Default::default() })
            }
        })
    }

    /// The driver's handle of a stream in which nothing is enqueued; a new track gets `real`.
    pub(crate) fn stream(
        &mut self,
        key: StreamKey,
        real: impl FnOnce() -> Result<CUstream, CUresult>,
    ) -> Result<CUstream, CUresult> {
        Ok(self.track(key, real)?.real)
    }

    /// A command is about to be enqueued in a stream; a new track gets `real`. Returns the driver's handle. `is_busy` asks
    /// the driver.
    pub(crate) fn enqueue(
        &mut self,
        key: StreamKey,
        is_busy: impl Fn(CUstream) -> bool,
        real: impl FnOnce() -> Result<CUstream, CUresult>,
    ) -> Result<CUstream, CUresult> {
        let track = self.track(key, real)?;
        let (real, was_idle) = (track.real, track.is_idle());
        track.enqueued += 1;
        if was_idle {
            self.takes_queue(key, is_busy);
        }
        Ok(real)
    }

    /// A stream that was idle has work. Its allowance from here on depends on which other streams have work. For streams in
    /// which little was enqueued the worker does not know when they are idle again, so now and then it asks the driver.
    fn takes_queue(&mut self, key: StreamKey, is_busy: impl Fn(CUstream) -> bool) {
        let is_other = |k: &StreamKey, t: &Track| k.context == key.context && *k != key && !t.is_idle();
        let mut others = self.tracks.iter().filter(|(k, t)| is_other(k, t)).count();
        if others >= self.queues {
            if self.crowded.is_multiple_of(ASK_EVERY) {
                let spare = self.spare.entry(key.context).or_default();
                // The default stream's name means the current context's, which may be another context.
                let asked = |k: &StreamKey, t: &Track| is_other(k, t) && k.handle != CU_STREAM_LEGACY;
                for (_, track) in self.tracks.iter_mut().filter(|(k, t)| asked(k, t)) {
                    if !is_busy(track.real) {
                        track.reached(track.enqueued, spare);
                    }
                }
                others = self.tracks.iter().filter(|(k, t)| is_other(k, t)).count();
            }
            self.crowded = self.crowded.wrapping_add(1);
        }
        if let Some(track) = self.tracks.get_mut(&key) {
            track.credits = credits(others / self.queues);
        }
    }

    /// Whether something may still run.
    pub(crate) fn has_work(&self) -> bool {
        self.tracks.values().any(|it| !it.is_idle())
    }

    /// Streams of a context (of all, for 0) in which something may still run.
    pub(crate) fn busy(&self, context: u64) -> Vec<StreamKey> {
        self.tracks
            .iter()
            .filter(|(k, t)| (context == 0 || k.context == context) && !t.is_idle())
            .map(|(k, _)| *k)
            .collect()
    }

    /// The driver's handle of a tracked stream.
    pub(crate) fn real(&self, key: StreamKey) -> Option<CUstream> {
        self.tracks.get(&key).map(|t| t.real)
    }

    /// Notes that everything enqueued in the stream so far is done.
    pub(crate) fn all_done(&mut self, key: StreamKey) {
        if let Some(track) = self.tracks.get_mut(&key) {
            track.reached(track.enqueued, self.spare.entry(key.context).or_default());
        }
    }

    /// Whether a stream takes another command without blocking.
    pub(crate) fn has_room(&mut self, driver: &Driver, key: StreamKey) -> bool {
        let most = self.most();
        let Some(track) = self.tracks.get_mut(&key) else { return true };
        let allowed = track.credits.min(most);
        if track.in_flight() < allowed {
            return true;
        }
        Self::look(driver, track, self.spare.entry(key.context).or_default());
        track.in_flight() < allowed
    }

    /// Whether everything in a stream is known to be done.
    pub(crate) fn is_idle(&self, key: StreamKey) -> bool {
        self.tracks.get(&key).is_none_or(Track::is_idle)
    }

    /// Whether a wait for a stream returns at once. For the legacy stream the streams of its context must be idle too,
    /// since it waits for most of them.
    pub(crate) fn is_at_rest(&self, key: StreamKey) -> bool {
        match key.handle {
            CU_STREAM_LEGACY => self.tracks.iter().all(|(k, t)| k.context != key.context || t.is_idle()),
            _ => self.is_idle(key),
        }
    }

    /// Updates how far a stream is.
    fn look(driver: &Driver, track: &mut Track, spare: &mut Vec<CUevent>) {
        while let Some(&(place, event)) = track.ticks.front() {
            // SAFETY: the event is ours; a query has no other effect. An error ends all that runs, so it counts as done.
            if unsafe { (driver.cuEventQuery)(event) } == CUDA_ERROR_NOT_READY {
                break;
            }
            track.reached(place, spare);
        }
    }

    /// Whether so many commands were enqueued in the stream since its last private event that it is time for another.
    pub(crate) fn wants_tick(&self, key: StreamKey) -> bool {
        self.tracks.get(&key).is_some_and(|t| t.enqueued - t.last_tick >= t.tick(self.most()))
    }

    /// Records a private event in a stream whose context is current.
    pub(crate) fn tick(&mut self, driver: &Driver, key: StreamKey) {
        let Ok(event) = self.event(driver, key.context) else { return };
        let spare = self.spare.entry(key.context).or_default();
        let Some(track) = self.tracks.get_mut(&key) else { return spare.push(event) };
        Self::look(driver, track, spare);
        track.last_tick = track.enqueued;
        // SAFETY: both handles are the driver's own.
        match unsafe { (driver.cuEventRecord)(event, track.real) } {
            CUDA_SUCCESS => track.ticks.push_back((track.enqueued, event)),
            _ => spare.push(event),
        }
    }

    /// The client's command enqueued `more` commands beyond the first in a stream.
    pub(crate) fn add_to(&mut self, key: StreamKey, more: u64) {
        if let Some(track) = self.tracks.get_mut(&key) {
            track.enqueued += more;
        }
    }

    /// Notes that a kernel was launched in a stream.
    pub(crate) fn launched(&mut self, key: StreamKey, function: u64) {
        if let Some(track) = self.tracks.get_mut(&key) {
            track.launches.push_back((track.enqueued, function));
        }
    }

    /// The functions that were launched in a stream and are not known to be done.
    pub(crate) fn launches(&self, key: StreamKey) -> impl Iterator<Item = u64> {
        self.tracks.get(&key).into_iter().flat_map(|t| t.launches.iter().map(|l| l.1))
    }

    /// A stream of the worker's in which no command waits.
    pub(crate) fn event_stream(&self, context: u64) -> StreamKey {
        let key = |thread| StreamKey { context, handle: EVENT_STREAM, thread };
        let idle = |key: &StreamKey| self.tracks.get(key).is_none_or(Track::is_idle);
        (1..).map(key).find(idle).unwrap_or(key(0))
    }

    /// The default streams of a client's thread.
    pub(crate) fn streams_of_thread(&self, thread: u32) -> Vec<StreamKey> {
        let of_thread = |k: &&StreamKey| k.handle == CU_STREAM_PER_THREAD && k.thread == thread;
        self.tracks.keys().filter(of_thread).copied().collect()
    }

    /// Records a private event in a stream whose context is current.
    pub(crate) fn mark(&mut self, driver: &Driver, key: StreamKey) -> Result<Mark, CUresult> {
        let (real, place) = self.tracks.get(&key).map(|t| (t.real, t.enqueued)).ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let event = self.event(driver, key.context)?;
        // SAFETY: both handles are the driver's own.
        match unsafe { (driver.cuEventRecord)(event, real) } {
            CUDA_SUCCESS => Ok(Mark { context: key.context, event, stream: key, place }),
            error => {
                self.spare.entry(key.context).or_default().push(event);
                Err(error)
            }
        }
    }

    /// A private event of a context that is current.
    fn event(&mut self, driver: &Driver, context: u64) -> Result<CUevent, CUresult> {
        if let Some(event) = self.spare.get_mut(&context).and_then(Vec::pop) {
            return Ok(event);
        }
        let mut event = 0;
        const DISABLE_TIMING: u32 = 2;
        // SAFETY: the out parameter is a local.
        match unsafe { (driver.cuEventCreate)(&raw mut event, DISABLE_TIMING) } {
            CUDA_SUCCESS => Ok(event),
            error => Err(error),
        }
    }

    /// Adds an action that waits for these marks.
    pub(crate) fn add(&mut self, marks: Vec<Mark>, then: Then) {
        self.list.push((marks, then));
    }

    /// Whether anything waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Removes the actions whose marks are reached, in the order they were added, each with success or the device's error.
    pub(crate) fn finished(&mut self, driver: &Driver, finished: &mut Vec<(Then, CUresult)>) {
        let mut i = 0;
        while i < self.list.len() {
            let marks = &mut self.list[i].0;
            let result = loop {
                let Some(mark) = marks.last().copied() else { break CUDA_SUCCESS };
                // SAFETY: the event is ours; a query has no other effect.
                let result = unsafe { (driver.cuEventQuery)(mark.event) };
                if result != CUDA_SUCCESS {
                    break result;
                }
                marks.pop();
                let spare = self.spare.entry(mark.context).or_default();
                spare.push(mark.event);
                if let Some(track) = self.tracks.get_mut(&mark.stream) {
                    track.reached(mark.place, spare);
                }
            };
            if result == CUDA_ERROR_NOT_READY {
                i += 1;
            } else {
                finished.push((self.list.remove(i).1, result));
            }
        }
    }

    /// The client has destroyed a stream. Commands enqueued in it still run: unless the stream is known to be idle, it is
    /// kept until it is, under a new name, which is returned.
    pub(crate) fn retire(&mut self, key: StreamKey) -> Option<StreamKey> {
        let mut track = self.tracks.remove(&key)?;
        if track.is_idle() {
            track.reached(track.enqueued, self.spare.entry(key.context).or_default());
            return None;
        }
        self.next_dying += 1;
        let dying = StreamKey { thread: self.next_dying, handle: DYING_STREAM, ..key };
        self.tracks.insert(dying, track);
        Some(dying)
    }

    /// Removes a stream, and returns the driver's handle.
    pub(crate) fn remove(&mut self, key: StreamKey) -> Option<CUstream> {
        let track = self.tracks.remove(&key)?;
        self.spare.entry(key.context).or_default().extend(track.ticks.iter().map(|t| t.1));
        Some(track.real)
    }

    /// The streams in a context that are the worker's own, and the private events there, for a context whose end ends neither.
    pub(crate) fn own_streams(&self, context: u64) -> (Vec<CUstream>, Vec<CUevent>) {
        let of_client = |k: &StreamKey| k.handle == CU_STREAM_LEGACY || Kind::Stream.owns(k.handle);
        let here = || self.tracks.iter().filter(|(k, _)| k.context == context);
        let streams = here().filter(|(k, _)| !of_client(k)).map(|(_, track)| track.real).collect();
        let ticks = here().flat_map(|(_, track)| track.ticks.iter().map(|tick| tick.1));
        (streams, self.spare.get(&context).into_iter().flatten().copied().chain(ticks).collect())
    }

    /// Forgets a context that is about to be reset or destroyed, in which nothing runs any more: actions that still wait
    /// for it no longer need to.
    pub(crate) fn forget_context(&mut self, context: u64) {
        self.tracks.retain(|k, _| k.context != context);
        self.spare.remove(&context);
        for (marks, _) in &mut self.list {
            marks.retain(|m| m.context != context);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of commands that a hardware queue of an H100 takes before it blocks.
    const ROOM: u64 = 1017;

    fn key(handle: u64) -> StreamKey {
        StreamKey { context: 1, handle, thread: 0 }
    }

    fn enqueue(waiting: &mut Waiting, handle: u64, is_busy: bool) -> u64 {
        let real = waiting.enqueue(key(handle), |_| is_busy, || Ok(handle));
        assert_eq!(real, Ok(handle));
        waiting.tracks.get(&key(handle)).map_or(0, |track| track.credits)
    }

    #[test]
    fn streams_that_share_a_hardware_queue_do_not_fill_it() {
        let room = |others| {
            let track = Track { credits: credits(others), ..Default::default() };
            track.credits + track.credits.div_ceil(track.tick(u64::MAX))
        };
        assert!((0..40).map(room).sum::<u64>() < ROOM);
        assert!((0..1000).all(|others| credits(others) > 0));
    }

    #[test]
    fn a_calm_stream_is_asked_often_enough_to_have_few_in_flight_until_the_calm_is_over() {
        let mut waiting = Waiting::with_queues(2);
        let wants_tick_after = |waiting: &mut Waiting| {
            waiting.tracks.clear();
            (1..).find(|_| {
                enqueue(waiting, 1, true);
                waiting.wants_tick(key(1))
            })
        };
        assert_eq!((waiting.most(), wants_tick_after(&mut waiting)), (u64::MAX, Some(TICK)));
        waiting.calm(16, Duration::from_secs(3600));
        assert_eq!((waiting.most(), wants_tick_after(&mut waiting)), (16, Some(4)));
        waiting.uncalm();
        assert_eq!(waiting.most(), u64::MAX);
        waiting.calm(16, Duration::ZERO);
        assert_eq!(waiting.most(), u64::MAX, "its time is over");
    }

    #[test]
    fn a_stream_may_have_less_in_flight_the_more_are_busy_when_it_gets_work() {
        let mut waiting = Waiting::with_queues(2);
        let credits: Vec<u64> = (1..=6).map(|handle| enqueue(&mut waiting, handle, true)).collect();
        assert_eq!(credits, [CREDITS, CREDITS, SHARED_CREDITS, SHARED_CREDITS, SHARED_CREDITS / 2, SHARED_CREDITS / 2]);
        assert_eq!(enqueue(&mut waiting, 3, true), SHARED_CREDITS, "it has its queue");
        for handle in 1..=5 {
            waiting.all_done(key(handle));
        }
        assert_eq!(enqueue(&mut waiting, 3, true), CREDITS);
    }

    #[test]
    fn streams_that_are_idle_without_being_known_to_be_are_found_out() {
        let mut waiting = Waiting::with_queues(2);
        for handle in 1..=9 {
            enqueue(&mut waiting, handle, true);
        }
        waiting.crowded = 0;
        assert_eq!(enqueue(&mut waiting, 10, false), CREDITS);
    }
}
