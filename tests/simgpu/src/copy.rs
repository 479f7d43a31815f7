//! Copies and fills: their checks and staging in the call, and their execution in a stream.
//!
//! As the driver documents: a copy from pageable memory has read the bytes when the call returns, and a copy to pageable memory
//! has written them. A copy between devices or page-locked memory waits only if the call is synchronous and the host is
//! involved.

use std::sync::Arc;

use rekindle_cuda_abi::types::{
    CU_MEMORYTYPE_DEVICE, CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CopyMemory, CopyPlace, CudaMemcpy3dSide,
};

use crate::array::Array;
use crate::context::Context;
use crate::device::Direction;
use crate::fault;
use crate::handles;
use crate::memory::space::{self, Kind, Region, View};
use crate::status::{Result, ensure};
use crate::stream::Stream;

/// The amount that is copied between two checks whether the memory still exists.
const CHUNK: usize = 1 << 20;

/// One side of a copy: `depth` slices of `height` rows, the first of which begins at `address`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    /// The address of the first byte.
    pub(crate) address: u64,
    /// Bytes from one row to the next.
    pub(crate) pitch: usize,
    /// Bytes from one slice to the next.
    pub(crate) slice: usize,
    /// Whether it must be memory that a device knows.
    pub(crate) device_only: bool,
}

impl Side {
    /// Bytes in a row, in memory of any kind.
    pub(crate) fn any(address: u64) -> Self {
        Self { address, pitch: 0, slice: 0, device_only: false }
    }

    /// Bytes in a row, in memory that a device knows.
    pub(crate) fn device(address: u64) -> Self {
        Self { device_only: true, ..Self::any(address) }
    }

    /// One side of a copy as the caller describes it.
    pub(crate) fn described(s: &CudaMemcpy3dSide, size: [usize; 3]) -> Result<Self> {
        match s.place(size)? {
            CopyPlace::Memory(CopyMemory { address, pitch, rows, .. }) => {
                let slice = pitch.checked_mul(rows).ok_or(CUDA_ERROR_INVALID_VALUE)?;
                Ok(Self { address, pitch, slice, device_only: s.kind == CU_MEMORYTYPE_DEVICE })
            }
            CopyPlace::Array(array, [x, y, z]) => {
                let array = handles::get::<Array>(array)?;
                s.check_in_array(&array.desc, size)?;
                let [pitch, rows, _] = array.extent();
                let slice = pitch * rows;
                let address = array.base + (z * slice + y * pitch + x) as u64;
                Ok(Self { address, pitch, slice, device_only: true })
            }
        }
    }

    fn row(&self, y: usize, z: usize) -> u64 {
        self.address + (z * self.slice + y * self.pitch) as u64
    }

    /// Bytes from the first to behind the last.
    fn extent(&self, [width, height, depth]: [usize; 3]) -> Option<u64> {
        let slices = self.slice.checked_mul(depth - 1)?;
        let rows = self.pitch.checked_mul(height - 1)?;
        slices.checked_add(rows)?.checked_add(width).map(|n| n as u64)
    }

    /// The memory that the side lies in, `None` for pageable memory of the host.
    fn memory(&self, context: &Context, size: [usize; 3], write: bool) -> Result<Option<Region>> {
        let extent = self.extent(size).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let Some(region) = space::find(self.address) else {
            ensure(!self.device_only && self.address != 0, CUDA_ERROR_INVALID_VALUE)?;
            return Ok(None);
        };
        let device = context.device.ordinal;
        let good = space::is_covered(self.address, extent, |r| may_copy(r, device, write));
        ensure(good, CUDA_ERROR_INVALID_VALUE)?;
        Ok(Some(region))
    }
}

/// Whether a device's copies may access a region. Copies reach memory that kernels cannot: other devices' memory without peer
/// access, and constants.
pub(crate) fn may_copy(region: &Region, device: usize, write: bool) -> bool {
    let mask = if write { region.writers } else { region.readers };
    region.kind != Kind::Mapped || mask & (1 << device | 1 << region.device) != 0
}

/// Copies `width` bytes of each of `height` rows of each of `depth` slices. With `wait`, the call is a synchronous
/// one.
pub(crate) fn copy(stream: &Arc<Stream>, dst: Side, src: Side, size: [usize; 3], wait: bool) -> Result<()> {
    let context = stream.context()?;
    context.check()?;
    if size.contains(&0) {
        return Ok(());
    }
    let to = dst.memory(&context, size, true)?;
    let from = src.memory(&context, size, false)?;
    let is_host = |region: Option<Region>| region.is_none_or(|r| r.kind.is_host());
    let direction = match (is_host(from), is_host(to)) {
        (true, false) => Some(Direction::In),
        (false, true) => Some(Direction::Out),
        _ => None,
    };
    let wait = to.is_none() || (wait && (is_host(from) || is_host(to)));
    let mut work = Copy { dst, src, size, direction, staged: None, pageable: [to.is_none(), from.is_none()] };
    if from.is_none() && !wait {
        // SAFETY: the caller of the driver's function vouches for the memory it copies from.
        unsafe { work.stage() };
    }
    let done = stream.submit(move |context| work.run(context))?;
    if wait {
        done.wait();
        context.flush_prints();
        context.check()?;
    }
    Ok(())
}

/// The errors that [`copy`] returns at once.
pub(crate) fn check(context: &Context, dst: Side, src: Side, size: [usize; 3]) -> Result<()> {
    ensure(!size.contains(&0), CUDA_ERROR_INVALID_VALUE)?;
    dst.memory(context, size, true)?;
    src.memory(context, size, false)?;
    Ok(())
}

/// The errors that [`fill`] returns at once for rows of bytes.
pub(crate) fn check_fill(context: &Context, dst: Side, [row, height]: [usize; 2]) -> Result<()> {
    dst.memory(context, [row, height, 1], true)?.map(drop).ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// A copy in a graph that is launched: it runs when the stream comes to it, also to pageable memory. But bytes that go from
/// pageable memory to a device are read now (driver 580 does so).
pub(crate) fn of_launch(stream: &Stream, dst: Side, src: Side, size: [usize; 3]) -> Result<Copy> {
    let context = stream.context()?;
    let [to, from] = [dst.memory(&context, size, true)?, src.memory(&context, size, false)?];
    let is_host = |region: Option<Region>| region.is_none_or(|r| r.kind.is_host());
    let direction = match (is_host(from), is_host(to)) {
        (true, false) => Some(Direction::In),
        (false, true) => Some(Direction::Out),
        _ => None,
    };
    let mut work = Copy { dst, src, size, direction, staged: None, pageable: [to.is_none(), from.is_none()] };
    if from.is_none() && direction == Some(Direction::In) {
        // SAFETY: the application has promised that its memory is there when its graph is launched.
        unsafe { work.stage() };
    }
    Ok(work)
}

/// A copy that is under way, or will be.
pub(crate) struct Copy {
    dst: Side,
    src: Side,
    size: [usize; 3],
    direction: Option<Direction>,
    /// The source bytes, row by row, if they had to be read at once.
    staged: Option<Vec<u8>>,
    /// Whether destination and source are pageable.
    pageable: [bool; 2],
}

impl Copy {
    /// Reads the source bytes now.
    ///
    /// # Safety
    ///
    /// The source must be readable.
    unsafe fn stage(&mut self) {
        let [width, height, depth] = self.size;
        let mut bytes = Vec::with_capacity(width * height * depth);
        for z in 0..depth {
            for y in 0..height {
                // SAFETY: the caller's promise.
                let row = unsafe { std::slice::from_raw_parts(self.src.row(y, z) as *const u8, width) };
                bytes.extend_from_slice(row);
            }
        }
        self.staged = Some(bytes);
    }

    /// Does the copy.
    pub(crate) fn run(&self, context: &Context) -> Result<()> {
        fault::point("copy")?;
        let view = View::open(context.device.ordinal);
        let [width, height, depth] = self.size;
        for z in 0..depth {
            for y in 0..height {
                let from = match &self.staged {
                    Some(bytes) => bytes.as_ptr() as u64 + ((z * height + y) * width) as u64,
                    None => self.src.row(y, z),
                };
                self.row(context, &view, self.dst.row(y, z), from, width)?;
            }
        }
        Ok(())
    }

    fn row(&self, context: &Context, view: &View, to: u64, from: u64, width: usize) -> Result<()> {
        let device = context.device.ordinal;
        let reach = |address: u64, pageable: bool, write: bool| match pageable {
            true => Ok(CHUNK as u64),
            false => view
                .find(address)
                .filter(|region| may_copy(region, device, write))
                .map(|region| region.end() - address)
                .ok_or(CUDA_ERROR_ILLEGAL_ADDRESS),
        };
        let mut at = 0;
        while at < width {
            view.refresh();
            context.check()?;
            let (to, from) = (to + at as u64, from + at as u64);
            let there = reach(to, self.pageable[0], true)?.min(reach(from, self.pageable[1], false)?);
            let count = (width - at).min(CHUNK).min(there as usize);
            // SAFETY: device memory is there until the view is refreshed; for the rest, the caller of the driver's
            // function vouches. Both may overlap, and may be accessed by others meanwhile.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, count) };
            at += count;
            if let Some(direction) = self.direction {
                // A thread that unmaps memory need not wait for the link.
                view.rest(|| context.device.pass_link(direction, count as u64));
            }
        }
        Ok(())
    }
}

/// Sets `width` elements of each of `height` rows to a value of 1, 2 or 4 bytes.
pub(crate) fn fill(
    stream: &Arc<Stream>,
    dst: Side,
    value: u32,
    bytes: usize,
    [width, height]: [usize; 2],
    wait: bool,
) -> Result<()> {
    let context = stream.context()?;
    context.check()?;
    ensure(dst.address.is_multiple_of(bytes as u64), CUDA_ERROR_INVALID_VALUE)?;
    ensure(height <= 1 || dst.pitch.is_multiple_of(bytes), CUDA_ERROR_INVALID_VALUE)?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    let row = width.checked_mul(bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let region = dst.memory(&context, [row, height, 1], true)?.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let done = stream.submit(move |context| {
        fault::point("copy")?;
        let view = View::open(context.device.ordinal);
        let pattern = value.to_le_bytes();
        for y in 0..height {
            let (mut at, end) = (dst.row(y, 0), dst.row(y, 0) + row as u64);
            while at < end {
                view.refresh();
                context.check()?;
                let region = view.find(at).filter(|r| may_copy(r, context.device.ordinal, true));
                let region = region.ok_or(CUDA_ERROR_ILLEGAL_ADDRESS)?;
                let count = (end.min(region.end()) - at).min(CHUNK as u64) as usize;
                // SAFETY: the memory is there until the view is refreshed.
                let place = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, count) };
                match bytes {
                    1 => place.fill(pattern[0]),
                    _ => place.chunks_mut(bytes).for_each(|p| p.copy_from_slice(&pattern[..p.len()])),
                }
                at += count as u64;
            }
        }
        Ok(())
    })?;
    if wait && region.kind.is_host() {
        done.wait();
        context.check()?;
    }
    Ok(())
}
