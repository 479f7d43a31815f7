//! Waiting without blocking: what has to happen once the device has come to a certain place.
//!
//! The executor never waits for the device. Where a command must wait, a private event is recorded at its place in the
//! order, and the executor looks at it between commands.

use std::collections::HashMap;

use rekindle_cuda_abi::types::*;

use super::driver::Driver;

/// A stream as the executor tracks it: what it enqueued there, and how much of that is known to be done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Track {
    pub(crate) real: CUstream,
    pub(crate) enqueued: u64,
    pub(crate) done: u64,
}

/// Names a stream: the client's handle, or a default stream of a context and thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StreamKey {
    pub(crate) context: u64,
    pub(crate) handle: CUstream,
    /// 0 unless it is the thread's default stream.
    pub(crate) thread: u32,
}

/// A private event, recorded in a stream at a certain place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark {
    /// The client's context, whose event this is.
    pub(crate) context: u64,
    event: CUevent,
    stream: StreamKey,
    place: u64,
}

/// The stream, one in each context, in which the worker waits for events of the client's.
pub(crate) const EVENT_STREAM: CUstream = u64::MAX;

/// What happens then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    /// The call in this reply slot returns.
    Reply(u16),
    /// The staging chunk may be used by the client.
    Chunk(usize),
    /// Device memory is freed, and the call returns.
    Free { address: u64, reply: u16 },
    /// Pinned memory is unregistered, and the call returns.
    Unpin { address: u64, reply: u16 },
    /// An array is destroyed, and the call returns.
    DestroyArray { array: u64, reply: u16 },
    /// A stream that the client has destroyed is destroyed.
    Destroy(StreamKey),
}

/// Everything that waits.
#[derive(Default)]
pub(crate) struct Waiting {
    tracks: HashMap<StreamKey, Track>,
    spare: HashMap<u64, Vec<CUevent>>,
    list: Vec<(Vec<Mark>, Then)>,
    next_dying: u32,
}

impl Waiting {
    /// The stream's track, made if new with `real`.
    pub(crate) fn track(
        &mut self,
        key: StreamKey,
        real: impl FnOnce() -> Result<CUstream, CUresult>,
    ) -> Result<&mut Track, CUresult> {
        Ok(match self.tracks.entry(key) {
            std::collections::hash_map::Entry::Occupied(o) => o.into_mut(),
            std::collections::hash_map::Entry::Vacant(v) => v.insert(Track { real: real()?, ..Default::default() }),
        })
    }

    /// Streams of a context (of all, for 0) in which something may still run.
    pub(crate) fn busy(&self, context: u64) -> Vec<StreamKey> {
        self.tracks
            .iter()
            .filter(|(k, t)| (context == 0 || k.context == context) && t.enqueued > t.done)
            .map(|(k, _)| *k)
            .collect()
    }

    /// The driver's handle of a tracked stream.
    pub(crate) fn real(&self, key: StreamKey) -> Option<CUstream> {
        self.tracks.get(&key).map(|t| t.real)
    }

    /// Everything enqueued in the stream so far is known to be done.
    pub(crate) fn all_done(&mut self, key: StreamKey) {
        if let Some(track) = self.tracks.get_mut(&key) {
            track.done = track.enqueued;
        }
    }

    /// Records a private event in a stream. Its context is current.
    pub(crate) fn mark(&mut self, driver: &Driver, key: StreamKey) -> Result<Mark, CUresult> {
        let track = self.tracks.get(&key).copied().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
        let event = match self.spare.get_mut(&key.context).and_then(Vec::pop) {
            Some(event) => event,
            None => {
                let mut event = 0;
                const DISABLE_TIMING: u32 = 2;
                // SAFETY: the out parameter is a local.
                match unsafe { (driver.cuEventCreate)(&raw mut event, DISABLE_TIMING) } {
                    CUDA_SUCCESS => event,
                    error => return Err(error),
                }
            }
        };
        // SAFETY: both handles are the driver's own.
        match unsafe { (driver.cuEventRecord)(event, track.real) } {
            CUDA_SUCCESS => Ok(Mark { context: key.context, event, stream: key, place: track.enqueued }),
            error => {
                self.spare.entry(key.context).or_default().push(event);
                Err(error)
            }
        }
    }

    /// Adds something that waits.
    pub(crate) fn add(&mut self, marks: Vec<Mark>, then: Then) {
        self.list.push((marks, then));
    }

    /// Whether anything waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Takes out what is done, in the order it was added, with success or the device's error.
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
                self.spare.entry(mark.context).or_default().push(mark.event);
                if let Some(track) = self.tracks.get_mut(&mark.stream) {
                    track.done = track.done.max(mark.place);
                }
            };
            if result == CUDA_ERROR_NOT_READY {
                i += 1;
            } else {
                finished.push((self.list.remove(i).1, result));
            }
        }
    }

    /// The client has destroyed a stream. What is enqueued in it still runs: unless it is known to be idle, it is kept
    /// under a name that nobody else has, which is returned, until it is.
    pub(crate) fn retire(&mut self, key: StreamKey) -> Option<StreamKey> {
        let track = self.tracks.remove(&key)?;
        if track.done == track.enqueued {
            return None;
        }
        self.next_dying += 1;
        let dying = StreamKey { thread: self.next_dying, ..key };
        self.tracks.insert(dying, track);
        Some(dying)
    }

    /// Takes a stream out, and returns the driver's handle.
    pub(crate) fn remove(&mut self, key: StreamKey) -> Option<CUstream> {
        self.tracks.remove(&key).map(|t| t.real)
    }

    /// Forgets a context that is about to be reset or destroyed, in which nothing runs any more: what still waits for
    /// it need not.
    pub(crate) fn forget_context(&mut self, context: u64) {
        self.tracks.retain(|k, _| k.context != context);
        self.spare.remove(&context);
        for (marks, _) in &mut self.list {
            marks.retain(|m| m.context != context);
        }
    }
}
