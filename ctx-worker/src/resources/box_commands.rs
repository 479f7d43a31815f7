//! Commands that copy boxes between memory, arrays and staging.

use rekindle_cuda_abi::types::*;
use rekindle_wire::boxes::{self, End};
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, CopyBox, CopyBoxBytes, CopyBoxChunk};
use rekindle_wire::layout::{CHUNK_SIZE, CHUNKS};
use rekindle_wire::window;

use crate::resources::Memory;
use crate::resources::arrays::array as array_of;
use crate::resources::boxes::{between, in_array, packed};
use crate::resources::globals::Globals;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::StreamKey;

/// An end of a copy as the driver takes it, and the context of its array, if the end is an array.
pub(crate) struct Checked {
    pub(crate) side: CudaMemcpy3dSide,
    array_context: Option<u64>,
}

impl Memory {
    /// Executes a command about boxes, arrays, textures and surfaces.
    pub(crate) fn shape_command(
        &mut self,
        call: &mut Call,
        globals: &Globals,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::COPY_BOX => self.copy_box(call, globals, args),
            command::COPY_BOX_BYTES => self.copy_box_bytes(call, globals, args),
            _ => self.array_command(call, globals, number, args, reply),
        }
    }

    /// Checks an end of a copy: the worker's own memory must not be read or written for a client.
    pub(crate) fn check_end(
        &mut self,
        call: &mut Call,
        globals: &Globals,
        end: End,
        size: [u64; 3],
    ) -> Result<Checked, Refused> {
        const INVALID: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);
        match end {
            End::Memory { address, pitch, rows } => {
                if pitch < size[0] || size[2] > 1 && rows < size[1] {
                    return Err(INVALID);
                }
                let span = boxes::span(size, pitch, rows).ok_or(INVALID)?;
                self.reachable(globals, address, span)?;
                self.allow_peer(call, address)?;
                let owner = window::device_of(address).and_then(|d| self.devices.get(d));
                let context = match owner {
                    Some(device) => device.primary,
                    None => call.session.objects.get(call.owner()).map_or(0, |o| o.real),
                };
                let side = CudaMemcpy3dSide {
                    kind: CU_MEMORYTYPE_UNIFIED,
                    device: address,
                    context,
                    pitch: pitch as usize,
                    height: rows as usize,
                    ..Default::default()
                };
                Ok(Checked { side, array_context: None })
            }
            End::Array { array, at } => {
                let (real, context) = array_of(&call.session, array)?;
                let extent = self.arrays.extent(array).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
                let inside = |axis: usize| at[axis].checked_add(size[axis]).is_some_and(|end| end <= extent[axis]);
                if !(0..3).all(inside) {
                    return Err(INVALID);
                }
                Ok(Checked { side: in_array(real, at), array_context: Some(context) })
            }
        }
    }

    fn copy_box(&mut self, call: &mut Call, globals: &Globals, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let CopyBox { end, source, size, stream, .. } = CopyBox::read(args)?;
        let (target, source) =
            (self.check_end(call, globals, end, size)?, self.check_end(call, globals, source, size)?);
        let stream = call.stream(stream)?;
        let mut copy = between(target.side, source.side, size);
        enqueue_box(call, &mut copy, [target.array_context, source.array_context], stream)?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Executes a deferred copy. The driver takes the bytes at once: they are few, and in ordinary memory of this process.
    fn copy_box_bytes(
        &mut self,
        call: &mut Call,
        globals: &Globals,
        args: &mut Reader<'_>,
    ) -> Result<Outcome, Refused> {
        let CopyBoxBytes { end, size, stream, bytes, .. } = CopyBoxBytes::read(args)?;
        if boxes::bytes(size) != Some(bytes.len() as u64) {
            return Err(Malformed("a box without its bytes").into());
        }
        let target = self.check_end(call, globals, end, size)?;
        let real = call.stream(stream)?;
        let mut copy = between(target.side, packed(bytes.as_ptr().cast_mut(), size), size);
        enqueue_box(call, &mut copy, [target.array_context, None], real)?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Enqueues a copy of a box between a staging chunk and memory or an array. Returns the chunk, and the stream.
    pub(crate) fn copy_box_chunk(
        &mut self,
        call: &mut Call,
        globals: &Globals,
        args: &mut Reader<'_>,
        to_device: bool,
    ) -> Result<(usize, StreamKey), Refused> {
        let CopyBoxChunk { chunk, end, size, stream, .. } = CopyBoxChunk::read(args)?;
        let chunk = usize::try_from(chunk).ok().filter(|chunk| *chunk < CHUNKS);
        let (Some(chunk), Some(1..)) = (chunk, boxes::bytes(size).filter(|n| *n <= CHUNK_SIZE as u64)) else {
            return Err(Malformed("a staging chunk that does not exist, or cannot hold the copy").into());
        };
        let device = self.check_end(call, globals, end, size)?;
        let key = call.stream_key(stream)?;
        let real = call.stream(stream)?;
        let host = packed(call.staged(chunk, self.first_primary())?, size);
        let (mut copy, arrays) = if to_device {
            (between(device.side, host, size), [device.array_context, None])
        } else {
            (between(host, device.side, size), [None, device.array_context])
        };
        enqueue_box(call, &mut copy, arrays, real)?;
        Ok((chunk, key))
    }
}

/// Enqueues a copy in the current context. A copy between peers reaches arrays of other contexts.
fn enqueue_box(
    call: &Call,
    copy: &mut CudaMemcpy3d,
    arrays: [Option<u64>; 2],
    stream: CUstream,
) -> Result<(), Refused> {
    let current = call.owner();
    if arrays.iter().flatten().all(|context| *context == current) {
        (copy.dst.context, copy.src.context) = (0, 0);
        // SAFETY: the descriptor lives through the call; both sides were checked.
        return check(unsafe { (call.driver().cuMemcpy3DAsync_v2)(copy, stream) });
    }
    for (side, context) in [&mut copy.dst, &mut copy.src].into_iter().zip(arrays) {
        if let Some(object) = context.and_then(|c| call.session.objects.get(c)) {
            side.context = object.real;
        }
    }
    // SAFETY: as above.
    check(unsafe { (call.driver().cuMemcpy3DPeerAsync)(copy, stream) })
}
