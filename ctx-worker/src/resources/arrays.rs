//! Arrays: made and destroyed for the client, and their content in a checkpoint.
//!
//! The object log makes the arrays again. The content of each is a blob, cut into boxes whose rows follow each other.

use std::collections::BTreeMap;

use rekindle_cuda_abi::types::*;
use rekindle_images::{Blob, BlobKind, PIECE_LENGTH, Piece};
use rekindle_wire::boxes::cut;
use rekindle_wire::command::Kind;
use thiserror::Error;

use crate::resources::boxes::ArrayPart;
use crate::resources::job::Job;
use crate::session::Session;
use crate::session::objects::Object;
use crate::session::outcome::Refused;

/// The shapes of the client's arrays, by handle.
#[derive(Default)]
pub(crate) struct Arrays {
    pub(crate) shapes: BTreeMap<u64, CudaArray3dDescriptor>,
}

impl Arrays {
    /// The bytes of a row, the number of rows, and the number of slices or layers.
    pub(crate) fn extent(&self, array: u64) -> Option<[u64; 3]> {
        Some(self.shapes.get(&array)?.extent()?.map(|n| n as u64))
    }

    /// The bytes of the arrays on a device.
    pub(crate) fn bytes(&self, session: &Session, device: usize) -> u64 {
        let here = |handle: u64| {
            let context = session.objects.get(handle).map_or(0, |o| o.context);
            session.device_of_context(context).is_ok_and(|d| d == device)
        };
        let bytes = self.shapes.iter().filter(|(h, _)| here(**h)).filter_map(|(_, d)| d.bytes());
        bytes.sum::<usize>() as u64
    }

    /// The blobs of all arrays, and for each the copies that make its pieces.
    pub(crate) fn describe(&self, session: &Session) -> Result<Vec<(Blob, Vec<Job>)>, ArrayError> {
        let describe = |(&handle, desc): (&u64, &CudaArray3dDescriptor)| {
            let jobs = self.jobs(session, handle)?;
            let device = jobs.first().map_or(0, |j| j.device as u32);
            let size = desc.bytes().ok_or(ArrayError::NoSize)? as u64;
            Ok((Blob { kind: BlobKind::ArrayContent.into(), handle, device, size, pieces: Vec::new() }, jobs))
        };
        self.shapes.iter().map(describe).collect()
    }

    /// The copies of a saved array's pieces.
    pub(crate) fn saved_jobs(&self, session: &Session, blob: &Blob) -> Result<Vec<(Job, Piece)>, ArrayError> {
        let jobs = self.jobs(session, blob.handle)?;
        let same = |(job, piece): (&Job, &Piece)| job.offset == piece.offset && job.length == piece.length;
        if jobs.len() != blob.pieces.len() || !jobs.iter().zip(&blob.pieces).all(same) {
            return Err(ArrayError::Shape(blob.handle));
        }
        Ok(jobs.into_iter().zip(blob.pieces.iter().copied()).collect())
    }

    fn jobs(&self, session: &Session, handle: u64) -> Result<Vec<Job>, ArrayError> {
        let missing = || ArrayError::Missing(handle);
        let (array, context) = array(session, handle).map_err(|_| missing())?;
        let extent = self.extent(handle).ok_or_else(missing)?;
        let device = session.device_of_context(context)?;
        let context = session.objects.get(context).ok_or_else(missing)?.real;
        let mut offset = 0;
        let job = |part: rekindle_wire::boxes::Part| {
            let (at, length) = (offset, part.bytes());
            offset += length;
            Job { address: 0, offset: at, length, device, context, array: Some(ArrayPart { array, part }) }
        };
        Ok(cut(extent, PIECE_LENGTH).map(job).collect())
    }
}

/// The driver's handle of an array, and its context.
pub(crate) fn array(session: &Session, handle: u64) -> Result<(CUarray, u64), Refused> {
    match session.objects.get(handle) {
        Some(o) if o.kind == Kind::Array => Ok((o.real, o.context)),
        _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
    }
}

/// A descriptor as the driver takes it.
pub(crate) fn descriptor(size: [u64; 3], format: u32, channels: u32, flags: u32) -> CudaArray3dDescriptor {
    let [width, height, depth] = size.map(|n| n as usize);
    CudaArray3dDescriptor { width, height, depth, format, channels, flags }
}

/// Why the content of an array cannot be saved or loaded.
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

/// The bytes of memory that an array takes.
pub(crate) fn bytes(desc: &CudaArray3dDescriptor) -> u64 {
    desc.bytes().unwrap_or(0) as u64
}

/// Whether an object is an array, mipmapped or not.
pub(crate) fn is_array(object: &Object) -> bool {
    matches!(object.kind, Kind::Array | Kind::MipmappedArray)
}

/// Refuses arrays that cannot be saved: only those can that are copied by rows of whole elements.
pub(crate) fn ensure_savable(desc: &CudaArray3dDescriptor) -> Result<(), Refused> {
    if desc.flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) != 0 {
        return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED));
    }
    desc.bytes().map(|_| ()).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))
}
