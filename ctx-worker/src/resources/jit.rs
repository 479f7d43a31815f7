//! Options of the driver's compiler and linker, and their logs.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, c_void};

use rekindle_cuda_abi::types::*;
use rekindle_images::BlobKind;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{CodeLog, Kind};
use rekindle_wire::layout::REPLY_BYTES;

use crate::gpu::driver::Driver;
use crate::resources::code_store::Image;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::session::outcome::{Outcome, Refused};
use crate::session::state::StateError;

/// `CU_JIT_*`.
const THREADS_PER_BLOCK: u32 = 1;
const WALL_TIME: u32 = 2;
const INFO_BUFFER: u32 = 3;
const INFO_SIZE: u32 = 4;
const ERROR_BUFFER: u32 = 5;
const ERROR_SIZE: u32 = 6;
/// The first number that is not an option of driver 580.
const OPTIONS: u32 = 34;
/// Options that point to names or addresses.
const POINTERS: [u32; 4] = [17, 18, 25, 27];

/// The most bytes that a log may have.
const LOG_LIMIT: usize = 1 << 20;

/// A compilation's options as the driver takes them. Logs are written into buffers of the worker's, which do not move.
#[derive(Default)]
pub(crate) struct JitOptions {
    numbers: Vec<u32>,
    values: Vec<*mut c_void>,
    logs: [Vec<u8>; 2],
}

impl JitOptions {
    /// Reads the options of a command.
    pub(crate) fn read(blob: &[u8]) -> Result<Self, Refused> {
        let mut options = Self::default();
        let mut words = Reader::new(blob);
        let mut list = Vec::new();
        while words.end().is_err() {
            let word = words.word()?;
            list.push((word as u32, (word >> 32) as u32));
        }
        let size = |option: u32| list.iter().find(|(o, _)| *o == option).map_or(0, |(_, value)| *value as usize);
        options.logs = [INFO_SIZE, ERROR_SIZE].map(|option| vec![0; size(option).min(LOG_LIMIT)]);
        for &(option, value) in &list {
            let value = match option {
                INFO_BUFFER | ERROR_BUFFER if value == 0 => std::ptr::null_mut(),
                INFO_BUFFER => options.logs[0].as_mut_ptr().cast(),
                ERROR_BUFFER => options.logs[1].as_mut_ptr().cast(),
                INFO_SIZE => std::ptr::without_provenance_mut(options.logs[0].len()),
                ERROR_SIZE => std::ptr::without_provenance_mut(options.logs[1].len()),
                _ => std::ptr::without_provenance_mut(value as usize),
            };
            if POINTERS.contains(&option) {
                return Err(Malformed("a compiler's option that does not travel").into());
            }
            if option >= OPTIONS {
                return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
            }
            options.numbers.push(option);
            options.values.push(value);
        }
        Ok(options)
    }

    /// The number of options, their numbers and their values.
    pub(crate) fn arrays(&mut self) -> (u32, *mut u32, *mut *mut c_void) {
        (self.numbers.len() as u32, self.numbers.as_mut_ptr(), self.values.as_mut_ptr())
    }

    /// Has the driver load an image as a module in the current context, or as a library. Returns the driver's handle, or its error.
    pub(crate) fn load(&mut self, driver: &Driver, kind: Kind, image: &Image) -> Result<u64, CUresult> {
        let (count, numbers, values) = self.arrays();
        let mut real = 0;
        // SAFETY: the pointer is an image as the driver takes it, which it has copied when it returns; the arrays hold
        // `count` options; the other parameters are locals or null.
        let answer = image.with_pointer(|pointer| unsafe {
            let none = std::ptr::null_mut;
            match kind {
                Kind::Module if count == 0 => (driver.cuModuleLoadData)(&raw mut real, pointer),
                Kind::Module => (driver.cuModuleLoadDataEx)(&raw mut real, pointer, count, numbers, values),
                _ => {
                    let library = &raw mut real;
                    (driver.cuLibraryLoadData)(library, pointer, numbers, values, count, none(), none().cast(), 0)
                }
            }
        });
        if answer == CUDA_SUCCESS { Ok(real) } else { Err(answer) }
    }

    fn log(&self, which: usize) -> Vec<u8> {
        CStr::from_bytes_until_nul(&self.logs[which]).map_or_else(|_| Vec::new(), |text| text.to_bytes().to_vec())
    }

    /// Writes the lengths of the logs, and the final value of each option.
    fn answer(&self, reply: &mut Writer) {
        reply.word(self.log(0).len() as u64);
        reply.word(self.log(1).len() as u64);
        for (number, value) in self.numbers.iter().zip(&self.values) {
            let out = matches!(*number, THREADS_PER_BLOCK | WALL_TIME);
            reply.word(if out { value.addr() as u64 & 0xffff_ffff } else { 0 });
        }
    }
}

/// The logs of the last compilation of each of the client's threads, until the thread has read them.
#[derive(Default)]
pub(crate) struct CodeLogs {
    /// By thread: the information log and the error log.
    of_threads: HashMap<u32, [Vec<u8>; 2]>,
}

impl CodeLogs {
    /// Answers with the logs of a compilation of this thread, which can be fetched from now on, once.
    pub(crate) fn answer(&mut self, thread: u32, options: &JitOptions, reply: &mut Writer) {
        if options.numbers.is_empty() {
            return;
        }
        options.answer(reply);
        let logs = [options.log(0), options.log(1)];
        if logs.iter().all(Vec::is_empty) {
            self.of_threads.remove(&thread);
        } else {
            self.of_threads.insert(thread, logs);
        }
    }

    /// Executes `CODE_LOG` of this thread.
    pub(crate) fn fetch(&mut self, thread: u32, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let CodeLog { which, offset } = CodeLog::read(args)?;
        let (which, offset) = (which as usize, offset as usize);
        let Entry::Occupied(mut logs) = self.of_threads.entry(thread) else {
            reply.blob(&[]);
            return Ok(Outcome::Done(CUDA_SUCCESS));
        };
        let log = logs.get_mut().get_mut(which);
        let rest = log.as_ref().and_then(|log| log.get(offset..)).unwrap_or_default();
        let part = &rest[..rest.len().min(REPLY_BYTES - 16)];
        reply.blob(part);
        // The client then has the whole log, which is dropped: a client may have any number of threads in its life.
        if part.len() == rest.len() {
            log.into_iter().for_each(Vec::clear);
        }
        if logs.get().iter().all(Vec::is_empty) {
            logs.remove();
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

/// Logs that their threads may be about to fetch: the handle is twice the thread's number, plus one for the error log.
impl Saved for CodeLogs {
    const KIND: BlobKind = BlobKind::CodeLog;
    type With<'a> = ();

    fn save(&self) -> Result<Vec<Part>, StateError> {
        let logs = self.of_threads.iter().flat_map(|(thread, logs)| (u64::from(*thread) << 1..).zip(logs));
        Ok(logs.map(|(handle, text)| Part { handle, bytes: text.clone() }).collect())
    }

    fn load(&mut self, part: Part, (): ()) -> Result<(), NotLoaded> {
        let logs = self.of_threads.entry((part.handle >> 1) as u32).or_default();
        logs[(part.handle & 1) as usize] = part.bytes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob(options: &[(u32, u32)]) -> Vec<u8> {
        options.iter().flat_map(|(o, v)| (u64::from(*o) | u64::from(*v) << 32).to_le_bytes()).collect()
    }

    #[test]
    fn logs_are_as_large_as_the_client_says_and_no_larger_than_may_be() {
        let options = [(INFO_BUFFER, 1), (INFO_SIZE, 100), (ERROR_BUFFER, 0), (ERROR_SIZE, u32::MAX), (7, 3)];
        let mut read = JitOptions::read(&blob(&options)).unwrap();
        assert_eq!(read.arrays().0, 5);
        assert_eq!((read.logs[0].len(), read.logs[1].len()), (100, LOG_LIMIT));
        assert!(!read.values[0].is_null() && read.values[2].is_null());
        assert_eq!(read.values[4].addr(), 3);
        read.logs[0][..4].copy_from_slice(b"said");
        assert_eq!(read.log(0), b"said");
    }

    #[test]
    fn a_log_goes_when_its_thread_has_read_it_to_its_end() {
        let mut logs = CodeLogs::default();
        let long = vec![b'x'; REPLY_BYTES];
        let read = |logs: &mut CodeLogs, thread, which: u64, offset: usize| {
            let (mut args, mut reply) = (Writer::new(), Writer::new());
            CodeLog { which, offset: offset as u64 }.write(&mut args);
            logs.fetch(thread, &mut Reader::new(args.bytes()), &mut reply).unwrap();
            Reader::new(reply.bytes()).blob().unwrap().to_vec()
        };
        for thread in 1..=1000 {
            logs.of_threads.insert(thread, [b"said".to_vec(), long.clone()]);
            assert_eq!(read(&mut logs, thread, 0, 0), b"said");
            let part = read(&mut logs, thread, 1, 0);
            assert!(!part.is_empty() && part.len() < long.len() && logs.of_threads.len() == 1);
            assert_eq!(part.len() + read(&mut logs, thread, 1, part.len()).len(), long.len());
            assert!(logs.of_threads.is_empty());
            assert_eq!(read(&mut logs, thread, 1, 0), b"");
        }
    }

    #[test]
    fn a_compilation_that_says_nothing_leaves_no_log() {
        let mut logs = CodeLogs::default();
        let options = JitOptions::read(&blob(&[(7, 3)])).unwrap();
        logs.of_threads.insert(0, [b"before".to_vec(), Vec::new()]);
        logs.answer(0, &options, &mut Writer::new());
        assert!(logs.of_threads.is_empty());
    }

    #[test]
    fn options_that_are_pointers_or_unknown_are_refused() {
        assert!(matches!(JitOptions::read(&blob(&[(17, 1)])), Err(Refused::Malformed(_))));
        assert!(matches!(JitOptions::read(&blob(&[(99, 1)])), Err(Refused::Code(CUDA_ERROR_INVALID_VALUE))));
        assert!(JitOptions::read(&[1, 2, 3]).is_err());
    }
}
