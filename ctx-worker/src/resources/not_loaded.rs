//! Why a worker cannot become the client of an image.

use std::io;

use rekindle_cuda_abi::types::{CUresult, result_name};
use rekindle_images::ImageError;
use rekindle_wire::NotServed;
use rekindle_wire::codec::Malformed;
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use crate::gpu::driver::CallFailed;
use crate::resources::arrays::ArrayError;
use crate::resources::broken_image::BrokenImage;
use crate::resources::job::EngineError;
use crate::resources::kernel_heap_error::HeapError;
use crate::resources::memory::MemoryError;
use crate::resources::memory::borrowed::TemplateError;
use crate::resources::vmm::aliases::AliasError;
use crate::session::failure;
use crate::session::outcome::Refused;
use crate::session::state::StateError;

/// Why a worker cannot become the client of an image.
#[derive(Debug, Error)]
pub(crate) enum NotLoaded {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    NotServed(#[from] NotServed),
    #[error(transparent)]
    File(#[from] ImageError),
    #[error(transparent)]
    Array(#[from] ArrayError),
    #[error(transparent)]
    Alias(#[from] AliasError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The error in the image, as a complete phrase.
    #[error("{0}")]
    Image(&'static str),
    #[error("the image's {part}: {why}")]
    Part { part: &'static str, why: Malformed },
    #[error("the image has a part of the unknown kind {0}")]
    UnknownPart(u32),
    #[error("the image uses {0}, which is unknown here")]
    UnknownCall(String),
    #[error("the image uses a device that is not here")]
    NoDevice,
    #[error("code image {hash}: {source}")]
    ReadCode { hash: String, source: io::Error },
    #[error("code image {hash}: {why}")]
    BrokenCode { hash: String, why: BrokenImage },
    #[error("{0} is corrupt: content does not match its hash")]
    CodeContent(String),
    #[error("{call} of object {handle:#x} failed: {why}")]
    Replay { call: String, handle: u64, why: Why },
    #[error("device {device} cannot be reset: {why}")]
    Reset { device: usize, why: Refused },
    #[error("{what} memory at {address:#x}: {source}")]
    Memory { what: &'static str, address: u64, source: MemoryError },
    #[error("device memory at {0:#x} does not lie in its pool")]
    OutsidePool(u64),
    #[error("{what} {at:#x} is not to be had: {}", result_name(*.code))]
    NotToBeHad { what: &'static str, at: u64, code: CUresult },
    #[error(
        "the variable `{name}` does not lie at {address:#x} any more: the driver has placed the code otherwise; restore on the same driver and kind of GPU"
    )]
    Moved { name: String, address: u64 },
    #[error(
        "the variable `{variable}` held other addresses when its code was loaded; it points to {}: the driver has placed these otherwise; restore on the same driver and kind of GPU",
        .names.join(", ")
    )]
    CodeMoved { variable: String, names: Vec<String> },
    #[error(
        "the variable `{0}` holds addresses that the driver has chosen, and they cannot be read here, to compare them; restore again"
    )]
    NotCompared(String),
    #[error(
        "the heap for malloc in kernels does not lie at {:#x} any more, with {} bytes, but at {:#x}, with {}: restore on the same driver and kind of GPU",
        .saved.0, .saved.1, .found.0, .found.1
    )]
    HeapMoved { saved: (u64, u64), found: (u64, u64) },
    /// Its words about a client are true of a saved one.
    #[error(transparent)]
    Heap(HeapError),
    #[error("shared memory cannot be {what}: {}", result_name(*.code))]
    Shared { what: &'static str, code: CUresult },
    #[error("shared events cannot be made")]
    NoEvents,
    #[error("shared events cannot be mapped: {}", result_name(*.0))]
    Events(CUresult),
    #[error("no descriptor of shared memory: {0}")]
    NoDescriptor(io::Error),
    #[error("a copy is under way")]
    Busy,
    #[error(
        "code that lay at {address:#x} cannot be placed there again: the driver places code otherwise than from the lowest free room on, or what lay there was something else"
    )]
    NotHeld { address: u64 },
    #[error(
        "code cannot be placed where it lay: {holders} place holders of {bytes} bytes do not suffice to take the free room below it"
    )]
    TooManyHolders { holders: usize, bytes: u64 },
}

/// Why a record of the object log cannot be executed again.
#[derive(Debug, Error)]
pub(crate) enum Why {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("no code image")]
    NoCode,
    #[error("its code image is missing")]
    CodeMissing,
    #[error("it is no record")]
    NoRecord,
}

impl NotLoaded {
    pub(crate) fn worker_state(why: Malformed) -> Self {
        Self::Part { part: "worker state", why }
    }
}

impl Failing for NotLoaded {
    fn kind(&self) -> FailureKind {
        match self {
            Self::State(error) => error.kind(),
            Self::Heap(HeapError::TooLarge(_) | HeapError::NotFound) => FailureKind::Refused,
            Self::NotServed(_) | Self::UnknownCall(_) => FailureKind::Version,
            Self::File(error) => failure::of_image(error),
            Self::Engine(error) => error.kind(),
            Self::Image(_)
            | Self::Part { .. }
            | Self::UnknownPart(_)
            | Self::BrokenCode { .. }
            | Self::CodeContent(_)
            | Self::OutsidePool(_)
            | Self::Array(_) => FailureKind::BadImage,
            Self::NoDevice
            | Self::Moved { .. }
            | Self::CodeMoved { .. }
            | Self::HeapMoved { .. }
            | Self::NotHeld { .. }
            | Self::TooManyHolders { .. } => FailureKind::Refused,
            Self::ReadCode { source, .. } | Self::NoDescriptor(source) => Failing::kind(source),
            Self::Alias(_)
            | Self::Driver(_)
            | Self::Heap(HeapError::Driver(_))
            | Self::Template(_)
            | Self::Refused(_)
            | Self::Replay { .. }
            | Self::Reset { .. }
            | Self::Memory { .. }
            | Self::NotToBeHad { .. }
            | Self::Shared { .. }
            | Self::NoEvents
            | Self::Events(_)
            | Self::NotCompared(_)
            | Self::Busy => FailureKind::Internal,
        }
    }
}
