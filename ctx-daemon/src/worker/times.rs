//! The times of events across a checkpoint.
//!
//! A save notes how long before it each event came. A restore records the events again, all at its own moment, and the
//! time between two is corrected by what was noted: between events of before it is what it was, and from one of before
//! to one of after it is as if the program had gone on at once.

use std::collections::HashMap;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};

use super::executor::Executor;
use super::uses::word;

/// Events that were recorded before a restore: how many milliseconds before the save.
pub(crate) type Ages = HashMap<u64, f64>;

impl Executor {
    /// How many milliseconds ago each recorded event came, of those whose times are kept. The device is at rest.
    pub(crate) fn event_ages(&mut self) -> Ages {
        let mut ages = Ages::new();
        let mut now: HashMap<u64, CUevent> = HashMap::new();
        let events: Vec<u64> = self.recorded.keys().copied().collect();
        for event in events {
            let Some(object) = self.objects.get(event).copied() else { continue };
            if self.enter_context(object.context).is_err() {
                continue;
            }
            let base = match now.get(&object.context) {
                Some(base) => *base,
                None => {
                    let Some(base) = self.record_now() else { continue };
                    now.insert(object.context, base);
                    base
                }
            };
            let mut elapsed = 0.0;
            // SAFETY: the out parameter is a local, the handles are the driver's own. An event without times is an error.
            if unsafe { (self.driver().cuEventElapsedTime)(&raw mut elapsed, object.real, base) } == CUDA_SUCCESS {
                let before = self.ages.get(&event).copied().unwrap_or(0.0);
                ages.insert(event, f64::from(elapsed) + before);
            }
        }
        for base in now.into_values() {
            // SAFETY: made above.
            unsafe { (self.driver().cuEventDestroy_v2)(base) };
        }
        ages
    }

    fn record_now(&self) -> Option<CUevent> {
        let (driver, mut event) = (self.driver(), 0);
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

    /// Corrects the answer of `cuEventElapsedTime` where one of the events comes from before a restore.
    pub(crate) fn correct_elapsed(&self, parameters: &[u8], payload: &mut Writer) {
        let age = |at| word(parameters, at).and_then(|event| self.ages.get(&event));
        let Ok(measured) = Reader::new(payload.bytes()).word() else { return };
        let measured = f64::from(f32::from_bits(measured as u32));
        let milliseconds = match (age(0), age(1)) {
            (None, None) => return,
            (Some(start), Some(end)) => start - end,
            (Some(start), None) => measured + start,
            (None, Some(end)) => measured - end,
        };
        let mut corrected = Writer::new();
        corrected.word(u64::from((milliseconds as f32).to_bits()));
        *payload = corrected;
    }
}
