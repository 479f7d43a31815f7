//! A client without GPU memory: suspended, or loaded in advance for a restore. Its GPU memory, whose content is saved, goes back to the devices, and comes back when the client resumes.
//!
//! ```text
//!   saved content ──> give_back: unmapped and released; addresses, objects, code, arrays and pinned memory stay
//!                         │
//!                     bring_back: made and mapped at the same addresses ──> content loads as in a restore
//!                                 a part first, so that the link works while the driver maps the rest
//! ```
//!
//! The driver keeps graphs, textures and tensor maps that name the memory's addresses: they work with the new memory
//! (measured, `tests/facts/exchange.cu`). So nothing else is destroyed or made again.

use std::sync::Arc;
use std::time::Instant;

use rekindle_cuda_abi::types::CUDA_ERROR_OUT_OF_MEMORY;
use rekindle_images::{Client, DataReader};
use rekindle_wire::control::{Failing, FailureKind, LoadTimes};
use thiserror::Error;
use tracing::info;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::borrowing::Borrowing;
use crate::checkpoint::content::Source;
use crate::checkpoint::layers::Layers;
use crate::checkpoint::load::{check_pieces, content, content_of_memory};
use crate::checkpoint::mapping::FIRST_PART;
use crate::checkpoint::template::Template;
use crate::gpu::driver::{CallFailed, Driver};
use crate::resources::Memory;
use crate::resources::job::{EngineError, Job};
use crate::resources::memory::MemoryError;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::vmm::aliases::{AliasError, unmap_aliases};
use crate::session::call::Call;

/// Why a client cannot be suspended.
#[derive(Debug, Error)]
pub(crate) enum SuspendError {
    #[error(
        "it shares GPU memory with other processes, or may share it, and they use the memory: end the sharing, or checkpoint it with them"
    )]
    Shared,
    #[error("its memory is being copied: suspend it when that is over")]
    Copying,
    #[error(transparent)]
    Content(#[from] NotLoaded),
    /// The memory is in an undefined state.
    #[error("giving its memory back failed: {0}")]
    Driver(#[from] CallFailed),
}

impl Failing for SuspendError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Shared | Self::Copying => FailureKind::Refused,
            Self::Content(error) => error.kind(),
            Self::Driver(_) => FailureKind::Internal,
        }
    }
}

/// The saved content of a client that has no GPU memory now.
pub(crate) struct Kept {
    pub(crate) client: Box<Client>,
    /// Reads the content; none once the content is being loaded.
    pub(crate) reader: Option<DataReader>,
    /// Content that is on the devices already.
    pub(crate) template: Template,
    pub(crate) origin: Origin,
    /// For a client that borrows memory.
    pub(crate) borrowing: Option<Borrowing>,
}

/// Where the saved content comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The client was suspended: its variables and arrays have their content, and nobody else has the files.
    Suspension,
    /// An image: variables and arrays have no content yet.
    Image,
}

impl Checkpoint {
    /// Whether the client, whose content was just saved, can be suspended.
    pub(crate) fn can_suspend(&mut self, layers: &mut Layers<'_>, kept: &Kept) -> Result<(), SuspendError> {
        let memory = &mut *layers.memory;
        self.discard_finished(memory);
        if self.engine.is_none() || self.copying.background.is_some() {
            return Err(SuspendError::Copying);
        }
        let has_names = memory.devices.iter().any(|device| device.memory.has_names()) || memory.vmm.has_names();
        if has_names || memory.pools.have_names() {
            return Err(SuspendError::Shared);
        }
        let key = kept.reader.as_ref().ok_or(NotLoaded::Busy)?.key();
        content_of_memory(memory, &kept.client, key)?;
        Ok(())
    }

    /// The bytes of physical memory that the client has.
    pub(crate) fn physical(&self, layers: &Layers<'_>) -> u64 {
        physical(layers.memory)
    }

    /// Gives the client's physical memory back, whose content is saved. What is borrowed stays if `keep_borrowed` says so. Returns
    /// the number of bytes.
    ///
    /// # Errors
    /// Errors of the driver. The memory is of no use then.
    pub(crate) fn give_back(&mut self, layers: &mut Layers<'_>, keep_borrowed: bool) -> Result<u64, CallFailed> {
        let Layers { call, memory, .. } = layers;
        enter_any(call, memory);
        let driver = call.driver();
        let bytes = physical(memory);
        let result = release(memory, driver, keep_borrowed);
        call.gpu.leave();
        result.map(|()| bytes)
    }

    /// Makes the client's memory again, and begins to load its content; `over` is called at the end of the load. Until then
    /// the client executes nothing.
    ///
    /// # Errors
    /// [`is_out_of_memory`]: the client is suspended as before. After any other error it has no memory.
    pub(crate) fn bring_back(
        &mut self,
        layers: &mut Layers<'_>,
        kept: &mut Kept,
        over: impl FnOnce() + Send + 'static,
    ) -> Result<(), NotLoaded> {
        let began = Instant::now();
        // An attempt without room would take what is free from other processes for a moment.
        let free = layers.memory.memory_of_devices(&mut layers.call.gpu)?;
        let needed = |place: usize| physical_on(layers.memory, place);
        if free.iter().enumerate().any(|(place, memory)| memory.free < needed(place)) {
            return Err(CallFailed { call: "cuMemCreate", code: CUDA_ERROR_OUT_OF_MEMORY }.into());
        }
        let driver = layers.call.driver();
        let lacking: Vec<_> = layers.memory.devices.iter().map(|device| device.memory.without_physical()).collect();
        let (first, rest): (Vec<_>, Vec<_>) = lacking.into_iter().map(halve).unzip();
        enter_any(layers.call, layers.memory);
        make_first(layers.memory, driver, &first)?;
        let aliases = match layers.map_aliases() {
            Ok(aliases) => aliases,
            Err(error) => {
                // The mappings themselves take memory of the device.
                release(layers.memory, driver, true)?;
                return Err(error.into());
            }
        };
        check_pieces(&kept.client, &aliases)?;
        let reader = kept.reader.take().ok_or(NotLoaded::Busy)?;
        let mut fill = match kept.origin {
            Origin::Suspension => content_of_memory(layers.memory, &kept.client, reader.key())?,
            Origin::Image => content(layers, &kept.client, reader.key())?,
        };
        fill.is_there(|job| {
            let device = layers.memory.devices.get(job.device);
            job.array.is_none() && device.is_some_and(|it| it.memory.borrowed_at(job.address).is_some())
        });
        let template = std::mem::take(&mut kept.template);
        // It is of the same image.
        fill.copy_from(|part| template.find(part.job.device, part.job.address, part.job.length));
        let source = Source { reader: Arc::new(reader), is_last_use: kept.origin == Origin::Suspension };
        self.begin_load(&mut layers.call.gpu, &layers.memory.devices, (source, template), over)?;
        let later = fill.split_off(|job| job.array.is_none() && rest.get(job.device).is_some_and(|it| holds(it, job)));
        self.load_more(fill);
        enter_any(layers.call, layers.memory);
        if let Err(error) = make_rest(layers.memory, driver, &rest) {
            let source = self.abandon_load();
            unmap_aliases(driver, &aliases);
            enter_any(layers.call, layers.memory);
            release(layers.memory, driver, true)?;
            let (Source { reader, .. }, template) = source.ok_or(EngineError::Lost)?;
            (kept.reader, kept.template) = (Arc::into_inner(reader), template);
            return Err(error.into());
        }
        layers.call.gpu.leave();
        self.borrowing = kept.borrowing.take();
        if self.borrowing.is_some() {
            let bytes: u64 = layers.memory.devices.iter().map(|it| it.memory.borrowed_bytes()).sum();
            info!(bytes, "the client borrows memory");
        }
        let times = LoadTimes { map_ns: began.elapsed().as_nanos() as u64, ..LoadTimes::default() };
        self.load_rest(later, aliases, times);
        Ok(())
    }
}

impl Memory {
    /// The bytes of physical memory on each device that the client gives back when it is suspended.
    pub(crate) fn physical(&self) -> Vec<u64> {
        (0..self.devices.len()).map(|place| physical_on(self, place)).collect()
    }
}

/// The bytes of physical memory that the client gives back when it is suspended.
fn physical(memory: &Memory) -> u64 {
    memory.physical().into_iter().sum()
}

fn physical_on(memory: &Memory, place: usize) -> u64 {
    memory.devices[place].memory.physical() + memory.vmm.physical(place)
}

/// Whether a client cannot resume because a device has no room for its memory now.
pub(crate) fn is_out_of_memory(error: &NotLoaded) -> bool {
    let code = match error {
        NotLoaded::Driver(failed) | NotLoaded::Memory { source: MemoryError::Driver(failed), .. } => failed.code,
        NotLoaded::Alias(AliasError::Driver(failed)) => failed.code,
        NotLoaded::NotToBeHad { code, .. } => *code,
        _ => return false,
    };
    code == CUDA_ERROR_OUT_OF_MEMORY
}

/// Releases all physical memory, or all that is not borrowed. Returns the first error.
fn release(memory: &mut Memory, driver: &Driver, keep_borrowed: bool) -> Result<(), CallFailed> {
    let of_pieces = memory.vmm.release_physical(driver);
    let of_devices = memory.devices.iter_mut().map(|device| device.memory.release_physical(driver, keep_borrowed));
    of_devices.fold(of_pieces, Result::and)
}

/// Ranges of addresses: the start and the length of each, in order.
type Ranges = Vec<(u64, u64)>;

/// The ranges whose memory is made before the load begins, and those whose memory is made beside it.
fn halve(mut ranges: Ranges) -> (Ranges, Ranges) {
    let enough = ranges.iter().map(|(_, length)| length).sum::<u64>() / FIRST_PART;
    let mut sum = 0;
    let first = ranges.iter().take_while(|(_, length)| {
        let is_needed = sum < enough;
        sum += length;
        is_needed
    });
    let rest = ranges.split_off(first.count());
    (ranges, rest)
}

/// Whether one of the ranges has a job's memory.
fn holds(ranges: &Ranges, job: &Job) -> bool {
    let behind = ranges.partition_point(|(start, _)| *start <= job.address);
    behind.checked_sub(1).is_some_and(|last| job.address < ranges[last].0 + ranges[last].1)
}

/// Makes the client's own pieces, and the memory of these ranges of each device; or none of all this.
fn make_first(memory: &mut Memory, driver: &Driver, ranges: &[Ranges]) -> Result<(), NotLoaded> {
    memory.bring_back_pieces(driver)?;
    make_rest(memory, driver, ranges).map_err(|error| {
        // The first error is the reason.
        let _ = release(memory, driver, true);
        error.into()
    })
}

/// Makes the memory of these ranges of each device.
fn make_rest(memory: &mut Memory, driver: &Driver, ranges: &[Ranges]) -> Result<(), CallFailed> {
    let mut devices = memory.devices.iter_mut().zip(ranges);
    devices.try_for_each(|(device, ranges)| device.memory.bring_back_physical(driver, ranges))
}

/// Makes a context current: the driver maps in the current context's process, so any context serves.
pub(crate) fn enter_any(call: &mut Call, memory: &Memory) {
    if let Some(device) = memory.devices.first() {
        let _ = call.gpu.enter(device.primary);
    }
}
