//! The thread that maps memory while its content is being loaded (`map_beside.rs`).

use std::mem;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::gpu::driver::CallFailed;
use crate::resources::job::EngineError;

/// Loading takes some twenty times as long as mapping, so this part of the memory is being loaded while the rest is mapped.
pub(crate) const FIRST_PART: u64 = 16;

/// The thread that maps.
#[derive(Default)]
pub(crate) enum Mapping {
    #[default]
    Nothing,
    UnderWay(JoinHandle<Result<Duration, CallFailed>>),
    Over(Result<Duration, CallFailed>),
}

impl Mapping {
    /// Waits until all is mapped. Returns how long that took.
    pub(crate) fn end(&mut self) -> Result<Duration, EngineError> {
        match mem::take(self) {
            Self::Nothing => Ok(Duration::ZERO),
            Self::UnderWay(thread) => {
                let ended = thread.join().map_err(|_| EngineError::Lost)?;
                *self = Self::Over(ended);
                Ok(ended?)
            }
            Self::Over(ended) => {
                *self = Self::Over(ended);
                Ok(ended?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: CallFailed = CallFailed { call: "cuMemMap", code: 1 };

    #[test]
    fn the_end_of_the_mapping_is_told_as_often_as_it_is_asked_for() {
        assert_eq!(Mapping::Nothing.end().unwrap(), Duration::ZERO);
        for ended in [Ok(Duration::from_millis(3)), Err(FAILED)] {
            let mut mapping = Mapping::UnderWay(std::thread::spawn(move || ended));
            for _ in 0..2 {
                match (mapping.end(), ended) {
                    (Ok(took), Ok(expected)) => assert_eq!(took, expected),
                    (Err(EngineError::Driver(failed)), Err(_)) => assert_eq!(failed.call, FAILED.call),
                    (found, _) => panic!("{found:?}"),
                }
            }
        }
    }
}
