//! Arrays: made and destroyed for the client, and their content as a checkpoint keeps it.
//!
//! The object log makes them again; their content is a blob for each, cut into boxes whose rows follow each other.

use std::collections::{BTreeMap, BTreeSet};

use rekindle_cuda_abi::types::*;
use rekindle_images::{Blob, PIECE_LENGTH, Piece};
use rekindle_wire::boxes::cut;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind};
use thiserror::Error;

use crate::resources::boxes::ArrayPart;
use crate::resources::job::Job;
use crate::serve::executor::Executor;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::Then;

/// The kind of blob that holds an array's content.
pub(crate) const ARRAY_CONTENT: u32 = 2;

/// The shapes of the client's arrays, by handle.
#[derive(Default)]
pub(crate) struct Arrays {
    shapes: BTreeMap<u64, CudaArray3dDescriptor>,
}

impl Arrays {
    /// Bytes of a row, rows, and slices or layers.
    pub(crate) fn extent(&self, array: u64) -> Option<[u64; 3]> {
        Some(self.shapes.get(&array)?.extent()?.map(|n| n as u64))
    }
}

/// Takes what the client's side wrote of a descriptor.
fn descriptor(args: &mut Reader<'_>) -> Result<CudaArray3dDescriptor, Malformed> {
    let size = [args.word()?, args.word()?, args.word()?];
    let [width, height, depth] = size.map(|n| n as usize);
    Ok(CudaArray3dDescriptor {
        width,
        height,
        depth,
        format: args.word32()?,
        channels: args.word32()?,
        flags: args.word32()?,
    })
}

/// Why the content of an array is not saved or loaded.
#[derive(Debug, Error)]
pub(crate) enum ArrayError {
    #[error("the array {0:#x} does not exist")]
    Missing(u64),
    #[error("an array without size")]
    NoSize,
    #[error("the content of array {0:#x} is not of its shape")]
    Shape(u64),
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl Executor {
    pub(crate) fn array_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match call {
            command::ARRAY_CREATE => self.array_create(args),
            command::ARRAY_DESTROY => self.array_destroy(args),
            command::MIPMAP_CREATE => self.mipmap_create(args),
            command::MIPMAP_DESTROY => self.array_destroy(args),
            _ => self.texture_command(call, args, reply),
        }
    }

    /// The driver's handle of an array, and its context.
    pub(crate) fn array(&self, handle: u64) -> Result<(CUarray, u64), Refused> {
        match self.session.objects.get(handle) {
            Some(o) if o.kind == Kind::Array => Ok((o.real, o.context)),
            _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
        }
    }

    fn array_create(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let handle = args.word()?;
        let desc = descriptor(args)?;
        args.end()?;
        ensure_savable(&desc)?;
        let (driver, context) = (self.driver(), self.header.context);
        let real = self.make_counted(self.device_of_context(context)?, bytes(&desc), || {
            let mut real = 0;
            // SAFETY: the out parameter is a local, the descriptor lives through the call.
            match unsafe { (driver.cuArray3DCreate_v2)(&raw mut real, &raw const desc) } {
                CUDA_SUCCESS => Ok(real),
                code => Err(code),
            }
        })?;
        self.keep_array(handle, real, 0, desc)?;
        self.count_arrays();
        self.session.objects.record(command::ARRAY_CREATE, handle, context, args.all(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Adds an array's object and shape. [`Executor::count_arrays`] is the caller's.
    pub(crate) fn keep_array(
        &mut self,
        handle: u64,
        real: CUarray,
        parent: u64,
        desc: CudaArray3dDescriptor,
    ) -> Result<(), Refused> {
        let object = Object { kind: Kind::Array, real, context: self.header.context, parent, allocates: false };
        if !self.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.memory.arrays.shapes.insert(handle, desc);
        Ok(())
    }

    fn mipmap_create(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let handle = args.word()?;
        let (desc, count) = (descriptor(args)?, args.word32()?);
        if count > desc.most_levels() {
            return Err(Malformed("more levels than an array of this size has").into());
        }
        let levels = (0..count).map(|_| args.word()).collect::<Result<Vec<u64>, _>>()?;
        args.end()?;
        ensure_savable(&desc)?;
        let (driver, context) = (self.driver(), self.header.context);
        let all = (0..count).map(|level| bytes(&desc.level(level))).fold(0, u64::saturating_add);
        let real = self.make_counted(self.device_of_context(context)?, all, || {
            let mut real = 0;
            // SAFETY: the out parameter is a local, the descriptor lives through the call.
            match unsafe { (driver.cuMipmappedArrayCreate)(&raw mut real, &raw const desc, count) } {
                CUDA_SUCCESS => Ok(real),
                code => Err(code),
            }
        })?;
        let object = Object { kind: Kind::MipmappedArray, real, context, parent: 0, allocates: false };
        if !self.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        for (level, array) in (0..).zip(levels) {
            let mut real = 0;
            // SAFETY: the out parameter is a local, the mipmapped array was made just now.
            check(unsafe { (driver.cuMipmappedArrayGetLevel)(&raw mut real, object.real, level) })?;
            self.keep_array(array, real, handle, desc.level(level))?;
        }
        // All levels at once: they are counted already.
        self.count_arrays();
        self.session.objects.record(command::MIPMAP_CREATE, handle, context, args.all(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn array_destroy(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let handle = args.word()?;
        args.end()?;
        match self.session.objects.get(handle) {
            Some(o) if is_array(o) && o.parent == 0 => {}
            _ => return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
        }
        // Like freed memory: everything before it may still use it.
        let busy = self.session.waiting.busy(0);
        self.when_done(busy, Then::DestroyArray { array: handle, reply: self.header.reply })?;
        Ok(Outcome::Later)
    }

    /// Destroys an array that the device no longer uses.
    pub(crate) fn destroy_array(&mut self, handle: u64) -> CUresult {
        let Some(object) = self.session.objects.get(handle).copied().filter(is_array) else {
            return CUDA_ERROR_INVALID_HANDLE;
        };
        let gone = self.session.objects.remove(handle);
        for (handle, _) in &gone {
            self.memory.arrays.shapes.remove(handle);
        }
        self.count_arrays();
        if self.enter_context(object.context).is_err() {
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        self.destroy_textures(&gone);
        // SAFETY: the array is the driver's own, idle, and nobody has a handle of it any more.
        unsafe {
            match object.kind {
                Kind::MipmappedArray => (self.driver().cuMipmappedArrayDestroy)(object.real),
                _ => (self.driver().cuArrayDestroy)(object.real),
            }
        }
    }

    /// Destroys what a context holds that takes memory. Nothing runs in it.
    pub(crate) fn clear_arrays(&mut self, context: u64) {
        // A level goes with the whole.
        let whole = |handle: &u64| {
            let object = self.session.objects.get(*handle).filter(|o| o.context == context)?;
            Some(if object.parent == 0 { *handle } else { object.parent })
        };
        let gone: BTreeSet<u64> = self.memory.arrays.shapes.keys().filter_map(whole).collect();
        for handle in gone {
            self.destroy_array(handle);
        }
    }

    /// Bytes of the arrays on a device.
    fn array_bytes(&self, device: usize) -> u64 {
        let here = |handle: u64| {
            let context = self.session.objects.get(handle).map_or(0, |o| o.context);
            self.device_of_context(context).is_ok_and(|d| d == device)
        };
        let bytes = self.memory.arrays.shapes.iter().filter(|(h, _)| here(**h)).filter_map(|(_, d)| d.bytes());
        bytes.sum::<usize>() as u64
    }

    /// Has the client's arrays count towards its limits.
    fn count_arrays(&mut self) {
        for device in 0..self.memory.devices.len() {
            let bytes = self.array_bytes(device);
            if let Some(device) = self.memory.devices.get_mut(device) {
                device.memory.set_beside(bytes);
            }
        }
    }

    /// Bytes that the client has on each device.
    pub(crate) fn device_bytes(&self) -> Vec<u64> {
        let devices = self.memory.devices.iter().enumerate();
        devices.map(|(i, d)| d.memory.bytes() + self.array_bytes(i) + self.memory.vmm.bytes(i)).collect()
    }

    /// The blobs of all arrays, and for each the copies that make its pieces.
    pub(crate) fn describe_arrays(&self) -> Result<Vec<(Blob, Vec<Job>)>, ArrayError> {
        let describe = |(&handle, desc): (&u64, &CudaArray3dDescriptor)| {
            let jobs = self.array_jobs(handle)?;
            let device = jobs.first().map_or(0, |j| j.device as u32);
            let size = desc.bytes().ok_or(ArrayError::NoSize)? as u64;
            Ok((Blob { kind: ARRAY_CONTENT, handle, device, size, pieces: Vec::new() }, jobs))
        };
        self.memory.arrays.shapes.iter().map(describe).collect()
    }

    /// The copies of a saved array's pieces.
    pub(crate) fn saved_array_jobs(&self, blob: &Blob) -> Result<Vec<(Job, Piece)>, ArrayError> {
        let jobs = self.array_jobs(blob.handle)?;
        let same = |(job, piece): (&Job, &Piece)| job.offset == piece.offset && job.length == piece.length;
        if jobs.len() != blob.pieces.len() || !jobs.iter().zip(&blob.pieces).all(same) {
            return Err(ArrayError::Shape(blob.handle));
        }
        Ok(jobs.into_iter().zip(blob.pieces.iter().copied()).collect())
    }

    fn array_jobs(&self, handle: u64) -> Result<Vec<Job>, ArrayError> {
        let missing = || ArrayError::Missing(handle);
        let (array, context) = self.array(handle).map_err(|_| missing())?;
        let extent = self.memory.arrays.extent(handle).ok_or_else(missing)?;
        let device = self.device_of_context(context)?;
        let context = self.session.objects.get(context).ok_or_else(missing)?.real;
        let mut offset = 0;
        let job = |part: rekindle_wire::boxes::Part| {
            let (at, length) = (offset, part.bytes());
            offset += length;
            Job { address: 0, offset: at, length, device, context, array: Some(ArrayPart { array, part }) }
        };
        Ok(cut(extent, PIECE_LENGTH).map(job).collect())
    }
}

/// What an array takes of memory.
fn bytes(desc: &CudaArray3dDescriptor) -> u64 {
    desc.bytes().unwrap_or(0) as u64
}

/// Whether an object is an array, mipmapped or not.
fn is_array(object: &Object) -> bool {
    matches!(object.kind, Kind::Array | Kind::MipmappedArray)
}

/// Only what can be copied out by rows of whole elements can be saved.
pub(crate) fn ensure_savable(desc: &CudaArray3dDescriptor) -> Result<(), Refused> {
    if desc.flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) != 0 {
        return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
    }
    desc.bytes().map(|_| ()).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))
}
