//! Code images and other large texts, which travel in parts ahead of the command that takes them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{CODE_PART, CodePart};

use crate::call::Call;

/// Bytes of an image in one command.
const PART: usize = 96 << 10;

/// Sends the parts of an image: their number, for each its length, then all bytes.
pub(crate) fn send_parts(parts: &[&[u8]]) -> Result<u64, CUresult> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut head = (parts.len() as u64).to_le_bytes().to_vec();
    for part in parts {
        head.extend_from_slice(&(part.len() as u64).to_le_bytes());
    }
    let total: usize = head.len() + parts.iter().map(|p| p.len()).sum::<usize>();
    let number = NEXT.fetch_add(1, Relaxed);
    let mut offset = 0;
    for piece in std::iter::once(&head[..]).chain(parts.iter().copied()).flat_map(|bytes| bytes.chunks(PART)) {
        let mut call = Call::new(CODE_PART)?;
        call.put(&CodePart { image: number, offset: offset as u64, total: total as u64, bytes: piece });
        check(call.send())?;
        offset += piece.len();
    }
    Ok(number)
}
