//! The times of events across a checkpoint.
//!
//! ```text
//!   events of before   a ──── b ─ c ────────── save ┆ restore ─── d ──── e   events of after
//!   age                |<───────────────────────>|       ^
//!                               |<──────────────>|       └ the moment of the restore: an event of the worker's
//! ```
//!
//! A save notes how long before it each event was recorded. A restore records the events again, since their queries must report
//! that they are done. It also records one event of its own in each context: the moment of the restore, which stands for all of
//! them. The time between two old events is the same as before. The time from an old event to a new one is as if the program
//! had continued at once.
//!
//! The driver returns times as `f32`, whose error grows with the time: the time to an event an hour ago is accurate to a
//! quarter of a millisecond. So ages are sums of the times from event to event. The driver returns each of these as exactly as
//! it would return it to the program.

use std::collections::HashMap;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};

use crate::gpu::driver::{Driver, checked};
use crate::resources::not_loaded::NotLoaded;
use crate::schedule::dependencies::word;
use crate::session::call::Call;
use crate::session::state::{RecordedEvent, State};

/// Events that were recorded before a restore and not since, each with its age in milliseconds at the save.
pub(crate) type Ages = HashMap<u64, f64>;

/// The times at which events were recorded, also before a restore.
#[derive(Default)]
pub(crate) struct Times {
    /// The number of commands so far.
    pub(crate) commands: u64,
    /// The recorded events, each with the number of the command that recorded it.
    pub(crate) recorded: HashMap<u64, u64>,
    /// Events that were recorded before a restore.
    pub(crate) ages: Ages,
    /// In each context that has such events, an event that was recorded at the restore.
    pub(crate) restored_at: HashMap<u64, CUevent>,
}

/// The age in milliseconds of each event at `now`; `None` for an event that keeps no time. `elapsed` is the time from one event
/// to another, `None` if there is none.
fn ages_before(
    now: CUevent,
    events: &[CUevent],
    mut elapsed: impl FnMut(CUevent, CUevent) -> Option<f32>,
) -> Vec<Option<f64>> {
    let rough = events.iter().enumerate().filter_map(|(place, event)| Some((elapsed(*event, now)?, place, *event)));
    let mut latest_first: Vec<(f32, usize, CUevent)> = rough.collect();
    latest_first.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut ages = vec![None; events.len()];
    let (mut age, mut next) = (0.0, now);
    for (rough, place, event) in latest_first {
        age = elapsed(event, next).map_or(f64::from(rough), |before_next| age + f64::from(before_next));
        next = event;
        if let Some(of_this) = ages.get_mut(place) {
            *of_this = Some(age);
        }
    }
    ages
}

impl Times {
    /// Called when a command has recorded an event.
    pub(crate) fn event_recorded(&mut self, event: u64) {
        self.recorded.insert(event, self.commands);
        self.ages.remove(&event);
    }

    /// Called when an object is destroyed, which may be an event.
    pub(crate) fn forget(&mut self, handle: u64) {
        self.recorded.remove(&handle);
        self.ages.remove(&handle);
    }

    /// Called before a context is destroyed.
    pub(crate) fn forget_context(&mut self, driver: &Driver, context: u64) {
        if let Some(moment) = self.restored_at.remove(&context) {
            // SAFETY: made by `mark_restore`, and not used again.
            unsafe { (driver.cuEventDestroy_v2)(moment) };
        }
    }

    /// Writes the recorded events for the image, in their order, with their ages.
    pub(crate) fn write(&self, ages: &Ages, state: &mut State) {
        let mut recorded: Vec<(u64, u64)> = self.recorded.iter().map(|(event, when)| (*when, *event)).collect();
        recorded.sort_unstable();
        let event = |(_, handle): (u64, u64)| RecordedEvent {
            handle,
            timed: ages.contains_key(&handle),
            age: ages.get(&handle).copied().unwrap_or_default(),
            ..RecordedEvent::default()
        };
        state.recorded = recorded.into_iter().map(event).collect();
    }

    /// Reads the data that [`Times::write`] wrote.
    pub(crate) fn read(&mut self, state: &State) {
        for (when, event) in (0..).zip(&state.recorded) {
            self.recorded.insert(event.handle, when);
            if event.timed && event.age.is_finite() {
                self.ages.insert(event.handle, event.age);
            }
        }
    }

    /// The age in milliseconds of each recorded event that keeps its time. The device is idle.
    pub(crate) fn event_ages(&self, call: &mut Call) -> Ages {
        let mut by_context: HashMap<u64, Vec<(u64, CUevent)>> = HashMap::new();
        for event in self.recorded.keys() {
            if let Some(object) = call.session.objects.get(*event) {
                by_context.entry(object.context).or_default().push((*event, object.real));
            }
        }
        let mut ages = Ages::new();
        for (context, events) in by_context {
            if call.enter(context).is_ok()
                && let Some(now) = record_now(call.driver())
            {
                self.add_ages(call.driver(), &mut ages, context, &events, now);
                // SAFETY: made above.
                unsafe { (call.driver().cuEventDestroy_v2)(now) };
            }
        }
        ages
    }

    /// Adds the ages of the events of a context, which is current.
    fn add_ages(&self, driver: &Driver, ages: &mut Ages, context: u64, events: &[(u64, CUevent)], now: CUevent) {
        // An event from before the restore has the time of the restore.
        let moment = self.restored_at.get(&context).copied();
        let stands_for = |event: u64, real| self.ages.get(&event).and(moment).unwrap_or(real);
        let reals: Vec<CUevent> = events.iter().map(|(event, real)| stands_for(*event, *real)).collect();
        for ((event, _), since) in events.iter().zip(ages_before(now, &reals, |a, b| elapsed(driver, a, b))) {
            let before = self.ages.get(event).copied().unwrap_or(0.0);
            ages.extend(since.map(|since| (*event, since + before)));
        }
    }

    /// From now on the moment of the restore stands for the events from before it.
    fn mark_restore(&mut self, call: &mut Call) {
        let mut contexts: Vec<u64> =
            self.ages.keys().filter_map(|event| call.session.objects.get(*event)).map(|event| event.context).collect();
        contexts.sort_unstable();
        contexts.dedup();
        for context in contexts {
            if call.enter(context).is_ok()
                && let Some(moment) = record_now(call.driver())
            {
                self.restored_at.insert(context, moment);
            }
        }
    }

    /// Corrects the answer of `cuEventElapsedTime`, which has succeeded, if one of the events is from before a restore.
    pub(crate) fn correct_elapsed(&self, call: &Call, parameters: &[u8], payload: &mut Writer) {
        let event = |at| word(parameters, at).and_then(|event| Some((event, call.session.objects.get(event)?)));
        let Some(((start, of_start), (end, of_end))) = event(0).zip(event(1)) else { return };
        let Ok(measured) = Reader::new(payload.bytes()).word() else { return };
        let measured = f32::from_bits(measured as u32);
        let moment = self.restored_at.get(&of_start.context).copied();
        let from_moment = || moment.and_then(|moment| elapsed(call.driver(), moment, of_end.real)).unwrap_or(measured);
        let to_moment = || moment.and_then(|moment| elapsed(call.driver(), of_start.real, moment)).unwrap_or(measured);
        let milliseconds = match (self.ages.get(&start), self.ages.get(&end)) {
            (None, None) => return,
            (Some(start), Some(end)) => start - end,
            (Some(start), None) => f64::from(from_moment()) + start,
            (None, Some(end)) => f64::from(to_moment()) - end,
        };
        let mut corrected = Writer::new();
        corrected.word(u64::from((milliseconds as f32).to_bits()));
        *payload = corrected;
    }

    /// Records the recorded events again: their work is done, and queries must report so. The events are recorded in their
    /// original order, so that no time between two is negative.
    pub(crate) fn record_events(&mut self, call: &mut Call) -> Result<(), NotLoaded> {
        let mut events: Vec<(u64, u64)> = self.recorded.iter().map(|(event, when)| (*when, *event)).collect();
        events.sort_unstable();
        // Later records have higher numbers.
        self.commands = self.commands.max(events.len() as u64);
        for (_, event) in events {
            let Some(object) = call.session.objects.get(event).copied() else { continue };
            call.enter(object.context)?;
            // SAFETY: the handles are the driver's own.
            let result = unsafe { (call.driver().cuEventRecord)(object.real, CU_STREAM_LEGACY) };
            checked("cuEventRecord", result)?;
        }
        self.mark_restore(call);
        Ok(())
    }
}

/// The time between two events, as the driver returns it.
fn elapsed(driver: &Driver, start: CUevent, end: CUevent) -> Option<f32> {
    let mut elapsed = 0.0;
    // SAFETY: the out parameter is a local, the handles are the driver's own. An event without times is an error.
    let result = unsafe { (driver.cuEventElapsedTime)(&raw mut elapsed, start, end) };
    (result == CUDA_SUCCESS).then_some(elapsed)
}

/// Records a new event in the current context.
fn record_now(driver: &Driver) -> Option<CUevent> {
    let mut event = 0;
    // SAFETY: the out parameter is a local, the context current; nothing runs that the wait could be long for.
    unsafe {
        if (driver.cuEventCreate)(&raw mut event, 0) != CUDA_SUCCESS {
            return None;
        }
        (driver.cuEventRecord)(event, CU_STREAM_LEGACY);
        (driver.cuStreamSynchronize)(CU_STREAM_LEGACY);
    }
    Some(event)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::executor::Executor;
    use crate::serve::fixture::{self, clock};
    use proptest::prelude::*;
    use rekindle_wire::command::Kind;

    const HOUR: u64 = 3_600_000_000_000;

    /// The time between two moments in nanoseconds, as a driver would give it.
    fn given(start: u64, end: u64) -> f32 {
        ((end as f64 - start as f64) / 1e6) as f32
    }

    /// The answer to the client.
    fn answered(worker: &mut Executor, start: u64, end: u64) -> f32 {
        let real = |event: u64| worker.call.session.objects.get(event).unwrap().real;
        let (mut parameters, mut payload) = (Writer::new(), Writer::new());
        parameters.word(start);
        parameters.word(end);
        payload.word(u64::from(elapsed(worker.driver(), real(start), real(end)).unwrap().to_bits()));
        let Executor { call, scheduler, .. } = worker;
        scheduler.times.correct_elapsed(call, parameters.bytes(), &mut payload);
        f32::from_bits(Reader::new(payload.bytes()).word().unwrap() as u32)
    }

    /// The age of each event.
    fn ages(worker: &mut Executor) -> Ages {
        let Executor { call, scheduler, .. } = worker;
        scheduler.times.event_ages(call)
    }

    /// A worker with these recorded events, in that order: their numbers and times.
    fn recorded(events: &[(u64, u64)]) -> (Executor, u64) {
        let mut worker = fixture::executor();
        let context = fixture::context(&mut worker);
        for (number, when) in events {
            let event = Kind::Event.handle(*number);
            clock::set(*when);
            fixture::event(&mut worker, context, event);
            clock::record(worker.call.session.objects.get(event).unwrap().real);
            worker.scheduler.times.commands += 1;
            worker.scheduler.times.event_recorded(event);
        }
        (worker, context)
    }

    /// A worker that was restored from the state that another would save now. The restore takes some time for each event.
    fn restored(saved: &mut Executor, events: &[(u64, u64)]) -> Executor {
        let (ages, now) = (ages(saved), clock::now());
        let (mut worker, _) = recorded(events);
        worker.scheduler.times.ages = ages;
        clock::set(now + HOUR);
        clock::advance_at_each_record(5_000);
        let Executor { call, scheduler, .. } = &mut worker;
        scheduler.times.record_events(call).unwrap();
        clock::advance_at_each_record(0);
        worker
    }

    #[test]
    fn times_between_events_of_before_a_restore_are_exact_however_old_they_are() {
        let [a, b, c] = [1, 2, 3].map(|number| Kind::Event.handle(number));
        let events = [(1, 0), (2, 1_234_567), (3, 1_234_568 + HOUR)];
        let (mut saved, _) = recorded(&events);
        clock::set(30 * HOUR);
        let mut worker = restored(&mut saved, &events);
        for generation in 0..3 {
            assert_eq!(answered(&mut worker, a, b), given(0, 1_234_567), "{generation}");
            assert_eq!(answered(&mut worker, b, a), given(1_234_567, 0), "{generation}");
            assert_eq!(answered(&mut worker, b, c), given(1_234_567, 1_234_568 + HOUR), "{generation}");
            clock::advance(20 * HOUR);
            worker = restored(&mut worker, &events);
        }
    }

    #[test]
    fn a_time_across_a_restore_does_not_depend_on_how_long_the_restore_took_for_each_event() {
        let events: Vec<(u64, u64)> = (0..200).map(|i| (i + 1, i)).collect();
        let (mut saved, context) = recorded(&events);
        // The worker is saved a second later, and an event is recorded a second after the restore.
        clock::set(1_000_000_000);
        let mut worker = restored(&mut saved, &events);
        clock::advance(1_000_000_000);
        let new = Kind::Event.handle(1000);
        fixture::event(&mut worker, context, new);
        clock::record(worker.call.session.objects.get(new).unwrap().real);
        worker.scheduler.times.event_recorded(new);
        for (number, _) in &events {
            let old = Kind::Event.handle(*number);
            for between in [answered(&mut worker, old, new), -answered(&mut worker, new, old)] {
                assert!((between - 2000.0).abs() < 0.001, "{number}: {between}");
            }
        }
        // The same holds after another restore.
        let ages = ages(&mut worker);
        let between = ages.get(&Kind::Event.handle(1)).unwrap() - ages.get(&new).unwrap();
        assert!((between - 2000.0).abs() < 0.001, "{between}");
    }

    #[test]
    fn an_event_that_is_recorded_anew_or_gone_has_no_age() {
        let events = [(1, 0), (2, 1_000_000)];
        let (mut saved, context) = recorded(&events);
        clock::set(HOUR);
        let mut worker = restored(&mut saved, &events);
        let [a, b] = [1, 2].map(|number| Kind::Event.handle(number));
        clock::advance(2_000_000);
        clock::record(worker.call.session.objects.get(b).unwrap().real);
        worker.scheduler.times.event_recorded(b);
        assert!(worker.scheduler.times.ages.contains_key(&a) && !worker.scheduler.times.ages.contains_key(&b));
        worker.scheduler.times.forget(a);
        assert!(worker.scheduler.times.ages.is_empty() && worker.scheduler.times.recorded.len() == 1);
        assert_eq!(worker.scheduler.times.restored_at.len(), 1);
        let driver = worker.driver();
        worker.scheduler.times.forget_context(driver, context);
        assert!(worker.scheduler.times.restored_at.is_empty());
    }

    proptest! {
        #[test]
        fn an_age_differs_from_anothers_by_what_the_driver_says_of_the_two(
            times in proptest::collection::vec(0..100 * HOUR, 2..40),
            close in 1..10_000_000_u64,
        ) {
            // Each event has a neighbour.
            let times: Vec<u64> = times.iter().flat_map(|time| [*time, time + close]).collect();
            let now = 200 * HOUR;
            let ages = ages_before(now, &times, |start, end| Some(given(start, end)));
            for (i, start) in times.iter().enumerate() {
                for (j, end) in times.iter().enumerate() {
                    let exact = (*end as f64 - *start as f64) / 1e6;
                    let between = ages[i].unwrap() - ages[j].unwrap();
                    // The error of an f32, and the error from the order of nearly equal times.
                    let allowed = exact.abs() * f64::from(f32::EPSILON) + 1e-3;
                    prop_assert!((between - exact).abs() <= allowed, "{} {}", between, exact);
                }
            }
        }
    }
}
