//! Words of memory that a stream writes, and waits for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rekindle_cuda_abi::types::{CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CUstreamBatchMemOpParams};

use crate::context::Context;
use crate::copy::may_copy;
use crate::memory::space::{self, View};
use crate::status::{Result, ensure};
use crate::stream::Stream;

/// A word of memory that a stream writes, or waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word {
    /// The address of the word.
    pub(crate) address: u64,
    /// Whether the word has 64 bits instead of 32.
    pub(crate) wide: bool,
}

impl Word {
    /// Checks the word's address and alignment.
    pub(crate) fn check(self, context: &Context) -> Result<()> {
        let bytes = if self.wide { 8 } else { 4 };
        let device = context.device.ordinal;
        ensure(self.address.is_multiple_of(bytes), CUDA_ERROR_INVALID_VALUE)?;
        let good = space::is_covered(self.address, bytes, |r| may_copy(r, device, true));
        ensure(good, CUDA_ERROR_INVALID_VALUE)
    }

    fn find(self, view: &View) -> Result<()> {
        view.refresh();
        view.find(self.address).map(|_| ()).ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)
    }
}

/// Writes a word when the stream comes to it.
pub(crate) fn write_word(stream: &Arc<Stream>, word: Word, value: u64) -> Result<()> {
    word.check(&*stream.context()?)?;
    stream.submit(move |context| {
        let view = View::open(context.device.ordinal);
        word.find(&view)?;
        // SAFETY: the word is there until the view is refreshed, and aligned.
        unsafe {
            match word.wide {
                true => AtomicU64::from_ptr(word.address as *mut u64).store(value, Ordering::SeqCst),
                false => AtomicU32::from_ptr(word.address as *mut u32).store(value as u32, Ordering::SeqCst),
            }
        }
        Ok(())
    })?;
    Ok(())
}

/// Holds the stream until a word fulfils a condition, `CU_STREAM_WAIT_VALUE_*`.
pub(crate) fn wait_word(stream: &Arc<Stream>, word: Word, value: u64, condition: u32) -> Result<()> {
    ensure(condition & !0x4000_0003 == 0, CUDA_ERROR_INVALID_VALUE)?;
    word.check(&*stream.context()?)?;
    stream.submit(move |context| {
        let view = View::open(context.device.ordinal);
        loop {
            context.check()?;
            word.find(&view)?;
            // SAFETY: the word is there until the view is refreshed, and aligned.
            let now = unsafe {
                match word.wide {
                    true => AtomicU64::from_ptr(word.address as *mut u64).load(Ordering::SeqCst),
                    false => u64::from(AtomicU32::from_ptr(word.address as *mut u32).load(Ordering::SeqCst)),
                }
            };
            let reached = match (condition & 3, word.wide) {
                (0, true) => now.wrapping_sub(value) as i64 >= 0,
                (0, false) => (now as u32).wrapping_sub(value as u32) as i32 >= 0,
                (1, _) => now == value,
                (2, _) => now & value != 0,
                _ => !(now | value) & if word.wide { u64::MAX } else { 0xffff_ffff } != 0,
            };
            if reached {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    })?;
    Ok(())
}

const FLUSH: u32 = 3;
const BARRIER: u32 = 6;

fn word_of(op: &CUstreamBatchMemOpParams) -> Option<Word> {
    match op.operation {
        1 | 2 => Some(Word { address: op.address, wide: false }),
        4 | 5 => Some(Word { address: op.address, wide: true }),
        _ => None,
    }
}

/// Does the checks of operations that are possible before they run.
pub(crate) fn words_are_good(context: &Context, operations: &[CUstreamBatchMemOpParams]) -> Result<()> {
    operations.iter().try_for_each(|op| match word_of(op) {
        Some(word) => word.check(context),
        None => ensure(matches!(op.operation, FLUSH | BARRIER), CUDA_ERROR_INVALID_VALUE),
    })
}

/// Runs operations in a stream, in their order.
pub(crate) fn perform_words(stream: &Arc<Stream>, operations: &[CUstreamBatchMemOpParams]) -> Result<()> {
    for op in operations {
        let word = |wide| Word { address: op.address, wide };
        match op.operation {
            1 => wait_word(stream, word(false), op.value & 0xffff_ffff, op.flags)?,
            2 => write_word(stream, word(false), op.value & 0xffff_ffff)?,
            4 => wait_word(stream, word(true), op.value, op.flags)?,
            5 => write_word(stream, word(true), op.value)?,
            // The operations of a stream follow each other anyway.
            BARRIER | FLUSH => {}
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    Ok(())
}
