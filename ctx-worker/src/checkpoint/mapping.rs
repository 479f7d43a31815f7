//! The thread that makes and maps memory while its content is being loaded (`map_beside.rs`).

use std::mem;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::gpu::driver::CallFailed;
use crate::resources::device::Device;
use crate::resources::job::EngineError;
use crate::resources::memory::to_map::ToMap;

/// Loading takes some twenty times as long as mapping, so this part of the memory is being loaded while the rest is mapped.
pub(crate) const FIRST_PART: u64 = 16;

/// The thread that makes and maps memory.
#[derive(Default)]
pub(crate) enum Mapping {
    #[default]
    Nothing,
    UnderWay(JoinHandle<Result<Mapped, CallFailed>>),
    /// How long it took, or why it has failed; without a reason if the thread panicked.
    Over(Result<Duration, Option<CallFailed>>),
}

/// What is mapped, and how long that took.
pub(crate) struct Mapped {
    pub(crate) parts: Vec<ToMap>,
    pub(crate) took: Duration,
}

impl Mapping {
    /// Waits until all is mapped, which the devices know from then on. Returns how long that took.
    pub(crate) fn end(&mut self, devices: &mut [Device]) -> Result<Duration, EngineError> {
        let ended = match mem::take(self) {
            Self::Nothing => return Ok(Duration::ZERO),
            Self::UnderWay(thread) => thread.join().map_or(Err(None), |mapped| mapped.map_err(Some)).map(|mapped| {
                for device in devices {
                    mapped.parts.iter().for_each(|it| device.memory.take_made(it));
                }
                mapped.took
            }),
            Self::Over(ended) => ended,
        };
        *self = Self::Over(ended);
        ended.map_err(|failed| failed.map_or(EngineError::Lost, EngineError::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: CallFailed = CallFailed { call: "cuMemMap", code: 1 };

    #[test]
    fn the_end_of_the_mapping_is_told_as_often_as_it_is_asked_for() {
        assert_eq!(Mapping::Nothing.end(&mut []).unwrap(), Duration::ZERO);
        for ended in [Ok(Duration::from_millis(3)), Err(FAILED)] {
            let mapped = move || ended.map(|took| Mapped { parts: Vec::new(), took });
            let mut mapping = Mapping::UnderWay(std::thread::spawn(mapped));
            for _ in 0..2 {
                match (mapping.end(&mut []), ended) {
                    (Ok(took), Ok(expected)) => assert_eq!(took, expected),
                    (Err(EngineError::Driver(failed)), Err(_)) => assert_eq!(failed.call, FAILED.call),
                    (found, _) => panic!("{found:?}"),
                }
            }
        }
    }

    #[test]
    fn a_thread_that_panics_has_mapped_nothing_however_often_that_is_asked() {
        let mut mapping = Mapping::UnderWay(std::thread::spawn(|| std::panic::resume_unwind(Box::new(()))));
        for _ in 0..2 {
            assert!(matches!(mapping.end(&mut []), Err(EngineError::Lost)));
        }
    }
}
