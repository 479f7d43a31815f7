//! Hardware queues, which streams share, and a launch's wait for room in a full queue.
//!
//! A context has few of them, `CUDA_DEVICE_MAX_CONNECTIONS`. A stream without work takes a queue that has none, or the queue
//! that was taken longest ago, and keeps it as long as the stream has work. A queue holds about a thousand commands; a call
//! that adds a command to a full queue blocks its thread, and no other. (Measured on an H100 with driver 580: 1,021 launches of
//! all streams of a queue. A command behind a wait in its queue waits too, whatever its stream; that is not modelled.)

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::config::config;

/// A context's queues.
#[derive(Debug)]
pub(crate) struct Channels {
    state: Mutex<State>,
    left: Condvar,
}

#[derive(Debug)]
struct State {
    /// The number of commands in each queue.
    pending: Vec<usize>,
    /// The queues' numbers, the one that was taken longest ago first.
    order: VecDeque<usize>,
    /// The queue of each stream with work, and the number of its commands.
    streams: HashMap<u64, (usize, usize)>,
}

impl State {
    fn take(&mut self) -> usize {
        let free = self.order.iter().position(|queue| self.pending[*queue] == 0).unwrap_or(0);
        let queue = self.order.remove(free).unwrap_or(0);
        self.order.push_back(queue);
        queue
    }
}

impl Channels {
    /// Makes this number of queues.
    pub(crate) fn new(count: usize) -> Self {
        let state = State { pending: vec![0; count], order: (0..count).collect(), streams: HashMap::new() };
        Self { state: Mutex::new(state), left: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes room for a stream's command; waits for room until `cancelled` holds.
    pub(crate) fn enter(&self, stream: u64, cancelled: impl Fn() -> bool) {
        let mut state = self.state();
        let queue = loop {
            let known = state.streams.get(&stream).map(|(queue, _)| *queue);
            let queue = known.unwrap_or_else(|| state.take());
            state.streams.entry(stream).or_insert((queue, 0));
            if state.pending[queue] < config().queue_depth || cancelled() {
                break queue;
            }
            let waited = self.left.wait_timeout(state, Duration::from_millis(20));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        };
        state.pending[queue] += 1;
        if let Some((_, count)) = state.streams.get_mut(&stream) {
            *count += 1;
        }
    }

    /// A stream's command is done.
    pub(crate) fn leave(&self, stream: u64) {
        let mut state = self.state();
        let Some((queue, count)) = state.streams.get_mut(&stream) else { return };
        *count = count.saturating_sub(1);
        let (queue, idle) = (*queue, *count == 0);
        state.pending[queue] = state.pending[queue].saturating_sub(1);
        if idle {
            state.streams.remove(&stream);
        }
        drop(state);
        self.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_takes_a_free_queue_or_the_one_taken_longest_ago_and_keeps_it_while_it_has_work() {
        let channels = Channels::new(2);
        let queue = |stream: u64| {
            channels.enter(stream, || false);
            channels.state().streams.get(&stream).map(|(queue, _)| *queue)
        };
        assert_eq!([queue(1), queue(2), queue(3), queue(1)], [Some(0), Some(1), Some(0), Some(0)]);
        channels.leave(2);
        assert_eq!(queue(4), Some(1), "it is free");
        channels.leave(1);
        assert_eq!(queue(1), Some(0), "one of its two commands is left");
        assert_eq!(channels.state().pending, [3, 1]);
    }
}
