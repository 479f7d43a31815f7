use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::*;
use crate::futex;
use crate::layout::MAX_COMMAND;
use crate::reply;
use crate::ring::{CommandHeader, Consumer, HEADER_BYTES, end, enqueue, ring_doorbell};
use crate::standstill;

/// Nothing waits so long.
const EVER: Duration = Duration::MAX;
/// The most parameters of a command of one unit.
const ONE_UNIT: usize = UNIT - HEADER_BYTES;

/// Tries all orders with so many switches from a thread that could go on.
fn check(preemptions: usize, run: impl Fn(Shared) + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(move || run(Shared::fresh()));
}

fn send(shared: &Shared, thread: u32, call: u16, length: usize) {
    let header = CommandHeader { call, thread, ..Default::default() };
    let parameters = vec![call as u8; length];
    assert!(enqueue(shared, header, &parameters, || true).is_ok());
}

/// Takes so many commands, sleeping in between. Returns who sent them, and which.
fn take(consumer: &mut Consumer, count: usize) -> Vec<(u32, u16)> {
    let mut taken = Vec::new();
    while taken.len() < count {
        match consumer.take().unwrap() {
            Some((header, parameters)) => {
                assert!(parameters.iter().all(|byte| *byte == header.call as u8), "not what was sent");
                taken.push((header.thread, header.call));
            }
            None => consumer.sleep(EVER, || false),
        }
    }
    assert_eq!(consumer.take(), Ok(None));
    taken
}

#[test]
fn two_producers_commands_arrive_once_and_wake_a_worker_that_sleeps() {
    check(3, |shared| {
        let producers = [1, 2].map(|id| thread::spawn(move || send(&shared, id, id as u16 * 10, ONE_UNIT)));
        let mut taken = take(&mut Consumer::new(shared, 0), 2);
        taken.sort_unstable();
        assert_eq!(taken, [(1, 10), (2, 20)]);
        for producer in producers {
            producer.join().unwrap();
        }
        assert_eq!(end(&shared), 2);
    });
}

#[test]
fn a_producer_waits_for_room_in_a_full_ring_and_is_woken() {
    check(3, |shared| {
        let producer = thread::spawn(move || (1..=3).for_each(|call| send(&shared, 1, call, ONE_UNIT)));
        assert_eq!(take(&mut Consumer::new(shared, 0), 3), [(1, 1), (1, 2), (1, 3)]);
        producer.join().unwrap();
    });
}

#[test]
fn all_producers_that_wait_for_room_are_woken() {
    check(2, |shared| {
        (1..=2).for_each(|call| send(&shared, 0, call, 0));
        let producers = [1, 2].map(|id| thread::spawn(move || send(&shared, id, 7, 0)));
        let mut taken = take(&mut Consumer::new(shared, 0), 4);
        taken[2..].sort_unstable();
        assert_eq!(taken, [(0, 1), (0, 2), (1, 7), (2, 7)]);
        for producer in producers {
            producer.join().unwrap();
        }
    });
}

#[test]
fn a_command_as_long_as_the_ring_and_over_its_end_is_whole() {
    check(3, |shared| {
        let producer = thread::spawn(move || {
            send(&shared, 1, 1, 0);
            send(&shared, 1, 2, MAX_COMMAND - HEADER_BYTES);
            send(&shared, 1, 3, 0);
        });
        assert_eq!(take(&mut Consumer::new(shared, 0), 3), [(1, 1), (1, 2), (1, 3)]);
        producer.join().unwrap();
    });
}

#[test]
fn a_place_that_is_taken_and_not_published_holds_up_what_follows_and_loses_nothing() {
    check(3, |shared| {
        // Its thread stands still between the two, as CRIU may stop it.
        let ticket = shared.header().tail.fetch_add(1, Relaxed);
        let late = thread::spawn(move || {
            let mut bytes = [0; HEADER_BYTES];
            bytes[0] = 1;
            // SAFETY: the unit belongs to this ticket.
            unsafe { shared.store(ticket as usize * UNIT, &bytes) };
            shared.seq(ticket as usize).store(ticket + 1, Release);
            crate::sync::fence(std::sync::atomic::Ordering::SeqCst);
            if shared.header().worker_asleep.load(Relaxed) != 0 {
                ring_doorbell(&shared);
            }
        });
        let other = thread::spawn(move || send(&shared, 2, 2, 0));
        assert_eq!(take(&mut Consumer::new(shared, 0), 2), [(0, 1), (2, 2)]);
        late.join().unwrap();
        other.join().unwrap();
    });
}

#[test]
fn news_that_come_while_a_worker_falls_asleep_wake_it() {
    check(4, |shared| {
        // Any word that both sides have.
        let teller = thread::spawn(move || {
            shared.header().moment.store(1, Release);
            ring_doorbell(&shared);
        });
        let consumer = Consumer::new(shared, 0);
        let has_come = || shared.header().moment.load(Acquire) != 0;
        while !has_come() {
            consumer.sleep(EVER, has_come);
        }
        teller.join().unwrap();
    });
}

#[test]
fn a_standstill_is_never_at_the_time_of_a_quiesce_and_begins_after_it() {
    check(4, |shared| {
        let client = thread::spawn(move || {
            let standstill = standstill::begin(&shared, || true);
            // SAFETY: the model reports if the other thread uses the unit at this time.
            unsafe { shared.store(0, &[1]) };
            drop(standstill);
        });
        standstill::forbid(&shared);
        while standstill::is_under_way(&shared) {
            thread::yield_now();
        }
        // SAFETY: as above.
        unsafe { shared.store(0, &[2]) };
        standstill::allow(&shared);
        client.join().unwrap();
    });
}

/// A call that waits: its command names the slot, its answer is the command's number and as many bytes.
fn call(shared: &Shared, number: u16) {
    let slot = loop {
        match reply::claim(shared, 0) {
            Some(slot) => break slot,
            None => thread::yield_now(),
        }
    };
    let header = CommandHeader { call: number, reply: slot as u16 + 1, ..Default::default() };
    assert!(enqueue(shared, header, &[], || true).is_ok());
    assert!(reply::wait(&shared.reply(slot).state, Duration::ZERO, || true));
    let mut payload = Vec::new();
    assert_eq!(reply::take(shared, slot, &mut payload), i32::from(number));
    assert_eq!(payload, vec![number as u8; usize::from(number)]);
    reply::release(shared, slot);
}

/// The worker: answers so many calls.
fn answer(shared: Shared, count: usize) {
    let mut consumer = Consumer::new(shared, 0);
    let mut answered = 0;
    while answered < count {
        let Some((header, _)) = consumer.take().unwrap() else {
            consumer.sleep(EVER, || false);
            continue;
        };
        let payload = vec![header.call as u8; usize::from(header.call)];
        assert!(reply::answer(&shared, usize::from(header.reply) - 1, i32::from(header.call), &payload));
        answered += 1;
    }
}

#[test]
fn each_call_gets_its_own_answer_from_a_slot_that_is_used_again() {
    check(3, |shared| {
        let caller = thread::spawn(move || (1..=2).for_each(|number| call(&shared, number)));
        answer(shared, 2);
        caller.join().unwrap();
    });
}

#[test]
fn callers_that_share_a_slot_get_their_own_answers() {
    check(2, |shared| {
        let callers = [3, 5].map(|number| thread::spawn(move || call(&shared, number)));
        answer(shared, 2);
        for caller in callers {
            caller.join().unwrap();
        }
    });
}

#[test]
fn a_caller_that_is_woken_early_waits_on() {
    check(3, |shared| {
        // As a signal or a restore does, at any moment.
        let early = thread::spawn(move || futex::wake(&shared.reply(0).state, 1));
        let caller = thread::spawn(move || call(&shared, 4));
        answer(shared, 1);
        early.join().unwrap();
        caller.join().unwrap();
    });
}

#[test]
fn a_chunk_that_fails_wakes_who_waits_and_is_used_again() {
    check(4, |shared| {
        // A word that stays as it was until its next use.
        let word = &shared.0.replies[0].state;
        word.store(reply::PENDING, Relaxed);
        let worker = thread::spawn(move || reply::fail(&shared.0.replies[0].state, 2));
        assert!(reply::wait(word, Duration::ZERO, || true));
        assert_eq!(reply::chunk_result(word), Err(2));
        worker.join().unwrap();
        word.store(reply::PENDING, Release);
        let worker = thread::spawn(move || reply::finish(&shared.0.replies[0].state));
        assert!(reply::wait(word, Duration::ZERO, || true));
        assert_eq!(reply::chunk_result(word), Ok(()));
        worker.join().unwrap();
    });
}
