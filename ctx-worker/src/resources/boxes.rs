//! Copies of boxes, between memory, arrays and staging.

use rekindle_cuda_abi::types::*;
use rekindle_wire::boxes::{self, BoxCopy, End, Part};
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command;
use rekindle_wire::layout::{CHUNK_SIZE, CHUNKS};
use rekindle_wire::window;

use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::Then;

/// A part of a box that lies in host memory with nothing between its rows.
pub(crate) fn packed(host: *mut u8, size: [u64; 3]) -> CudaMemcpy3dSide {
    let [width, height, _] = size.map(|n| n as usize);
    CudaMemcpy3dSide { kind: CU_MEMORYTYPE_HOST, host: host as u64, pitch: width, height, ..Default::default() }
}

/// A part of an array.
pub(crate) fn in_array(array: CUarray, at: [u64; 3]) -> CudaMemcpy3dSide {
    let [x, y, z] = at.map(|n| n as usize);
    CudaMemcpy3dSide { kind: CU_MEMORYTYPE_ARRAY, array, x, y, z, ..Default::default() }
}

/// The copy of a box between two sides.
pub(crate) fn between(dst: CudaMemcpy3dSide, src: CudaMemcpy3dSide, size: [u64; 3]) -> CudaMemcpy3d {
    let [width, height, depth] = size.map(|n| n as usize);
    CudaMemcpy3d { dst, src, width, height, depth }
}

/// One end as the driver takes it, and the context of its array, if it is one.
pub(crate) struct Checked {
    pub(crate) side: CudaMemcpy3dSide,
    array_context: Option<u64>,
}

impl Executor {
    /// Executes a command around boxes, arrays, textures and surfaces.
    pub(crate) fn shape_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match call {
            command::COPY_BOX => self.copy_box(args),
            command::COPY_BOX_FROM_CHUNK => self.copy_box_chunk(args, true),
            command::COPY_BOX_TO_CHUNK => self.copy_box_chunk(args, false),
            command::COPY_BOX_BYTES => self.copy_box_bytes(args),
            _ => self.array_command(call, args, reply),
        }
    }

    /// Checks an end of a copy: the worker's own memory must not be read or written for a client.
    pub(crate) fn check_end(&mut self, end: End, size: [u64; 3]) -> Result<Checked, Refused> {
        const INVALID: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);
        match end {
            End::Memory { address, pitch, rows } => {
                if pitch < size[0] || size[2] > 1 && rows < size[1] {
                    return Err(INVALID);
                }
                let span = boxes::span(size, pitch, rows).ok_or(INVALID)?;
                self.reachable(address, span)?;
                self.allow_peer(address)?;
                let owner = window::device_of(address).and_then(|d| self.memory.devices.get(d));
                let context = match owner {
                    Some(device) => device.primary,
                    None => self.session.objects.get(self.header.context).map_or(0, |o| o.real),
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
                let (real, context) = self.array(array)?;
                let extent = self.memory.arrays.extent(array).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
                let inside = |axis: usize| at[axis].checked_add(size[axis]).is_some_and(|end| end <= extent[axis]);
                if !(0..3).all(inside) {
                    return Err(INVALID);
                }
                Ok(Checked { side: in_array(real, at), array_context: Some(context) })
            }
        }
    }

    /// Enqueues a copy in the current context. Arrays of other contexts are reached by a copy between peers.
    fn enqueue_box(&self, copy: &mut CudaMemcpy3d, arrays: [Option<u64>; 2], stream: CUstream) -> Result<(), Refused> {
        let current = self.header.context;
        if arrays.iter().flatten().all(|context| *context == current) {
            (copy.dst.context, copy.src.context) = (0, 0);
            // SAFETY: the descriptor lives through the call; both sides were checked.
            return check(unsafe { (self.driver().cuMemcpy3DAsync_v2)(copy, stream) });
        }
        for (side, context) in [&mut copy.dst, &mut copy.src].into_iter().zip(arrays) {
            if let Some(object) = context.and_then(|c| self.session.objects.get(c)) {
                side.context = object.real;
            }
        }
        // SAFETY: as above.
        check(unsafe { (self.driver().cuMemcpy3DPeerAsync)(copy, stream) })
    }

    fn copy_box(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let BoxCopy { end, source, size, stream, .. } = BoxCopy::read(args, true)?;
        let source = source.ok_or(Malformed("a copy without source"))?;
        let (target, source) = (self.check_end(end, size)?, self.check_end(source, size)?);
        let stream = self.handle_stream(stream)?;
        let mut copy = between(target.side, source.side, size);
        self.enqueue_box(&mut copy, [target.array_context, source.array_context], stream)?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// A copy that was held. The driver takes the bytes at once: they are few, and this process's ordinary memory.
    fn copy_box_bytes(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let (BoxCopy { end, size, stream, .. }, bytes) = BoxCopy::read_with_bytes(args)?;
        let target = self.check_end(end, size)?;
        let real = self.handle_stream(stream)?;
        let mut copy = between(target.side, packed(bytes.as_ptr().cast_mut(), size), size);
        self.enqueue_box(&mut copy, [target.array_context, None], real)?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn copy_box_chunk(&mut self, args: &mut Reader<'_>, to_device: bool) -> Result<Outcome, Refused> {
        let BoxCopy { chunk, end, size, stream, .. } = BoxCopy::read(args, false)?;
        let bytes = size.iter().try_fold(1_u64, |product, n| product.checked_mul(*n));
        let chunk = usize::try_from(chunk).ok().filter(|chunk| *chunk < CHUNKS);
        let (Some(chunk), Some(1..)) = (chunk, bytes.filter(|n| *n <= CHUNK_SIZE as u64)) else {
            return Err(Malformed("a staging chunk that does not exist, or cannot hold the copy").into());
        };
        let device = self.check_end(end, size)?;
        let key = self.stream_key(stream)?;
        let real = self.handle_stream(stream)?;
        // SAFETY: inside the staging, which is mapped and registered as long as there is a client.
        let host = packed(unsafe { self.session.staging.add(chunk * CHUNK_SIZE) }, size);
        let (mut copy, arrays) = if to_device {
            (between(device.side, host, size), [device.array_context, None])
        } else {
            (between(host, device.side, size), [None, device.array_context])
        };
        self.enqueue_box(&mut copy, arrays, real)?;
        if !to_device {
            self.note_transfer(self.device_of_context(key.context).ok(), key);
        }
        self.when_done(vec![key], Then::Chunk(chunk))?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}

/// A part of an array that is saved or loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrayPart {
    /// The driver's handle.
    pub(crate) array: CUarray,
    pub(crate) part: Part,
}

impl ArrayPart {
    /// The copy from the array to `host`, where the part's rows lie with nothing between them, or back.
    pub(crate) fn copy(&self, host: *mut u8, to_host: bool) -> CudaMemcpy3d {
        let (array, host) = (in_array(self.array, self.part.at), packed(host, self.part.size));
        let (dst, src) = if to_host { (host, array) } else { (array, host) };
        between(dst, src, self.part.size)
    }
}
