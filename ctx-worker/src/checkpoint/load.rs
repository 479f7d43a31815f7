//! The parts of a restore: device memory at its addresses, its content, and the client's other state.

use rekindle_cuda_abi::types::CUcontext;
use rekindle_images::{Allocation, Blob, BlobKind, Client, DataReader, HashKey, Piece};

use crate::checkpoint::engine::Fill;
use crate::checkpoint::layers::Layers;
use crate::checkpoint::parts::load_part;
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::job::Job;
use crate::resources::memory::to_map::ToMap;
use crate::resources::memory::{Allocation as Allocated, DeviceMemory};
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::resources::vmm::Vmm;
use crate::resources::vmm::aliases::Alias;
use crate::session::state::{self, Mapped, State};

/// Whether an allocation belongs to no pool, and is no piece that the client maps itself: it can be mapped before there are any.
fn is_plain(allocation: &Allocation) -> bool {
    allocation.flags & (Allocation::PHYSICAL | Allocation::POOLED) == 0
}

/// Whether a client has memory on devices besides its plain allocations and its variables.
pub(crate) fn has_memory_besides_plain(client: &Client) -> bool {
    let has_memory = |blob: &Blob| {
        [BlobKind::ArrayContent, BlobKind::KernelHeap, BlobKind::Mapped].into_iter().any(|kind| blob.is(kind))
    };
    client.blobs.iter().any(has_memory) || !client.allocations.iter().all(is_plain)
}

/// Maps a saved client's plain device memory again at its old addresses.
pub(crate) fn restore_plain(memory: &mut Memory, driver: &Driver, client: &Client) -> Result<(), NotLoaded> {
    plain_has_devices(memory, client)?;
    for (ordinal, device) in memory.devices.iter_mut().enumerate() {
        // The driver maps in the current context's process; any context of the device suffices.
        device.memory.map_many(driver, |memory| allocate_plain(memory, driver, client, ordinal))?;
    }
    Ok(())
}

/// Plans a saved client's plain device memory at its old addresses. Returns what is to be made and mapped on each device.
pub(crate) fn plan_plain(memory: &mut Memory, driver: &Driver, client: &Client) -> Result<Vec<ToMap>, NotLoaded> {
    plain_has_devices(memory, client)?;
    let devices = memory.devices.iter_mut().enumerate();
    let planned = devices
        .map(|(ordinal, device)| device.memory.plan_many(|memory| allocate_plain(memory, driver, client, ordinal)));
    planned.collect()
}

fn plain_has_devices(memory: &Memory, client: &Client) -> Result<(), NotLoaded> {
    let has_device = |it: &Allocation| !is_plain(it) || (it.device as usize) < memory.devices.len();
    if client.allocations.iter().all(has_device) { Ok(()) } else { Err(NotLoaded::NoDevice) }
}

/// Allocates what a client has on a device.
fn allocate_plain(
    memory: &mut DeviceMemory,
    driver: &Driver,
    client: &Client,
    ordinal: usize,
) -> Result<(), NotLoaded> {
    let here = client.allocations.iter().filter(|it| is_plain(it) && it.device as usize == ordinal);
    for it in here {
        let allocated = Allocated { size: it.size, context: it.handle, pool: 0 };
        let done = memory.allocate_at(driver, it.address, allocated);
        done.map_err(|source| NotLoaded::Memory { what: "device", address: it.address, source })?;
    }
    Ok(())
}

/// Maps a saved client's device memory of pools again at its old addresses.
pub(crate) fn restore_pools(memory: &mut Memory, driver: &Driver, client: &Client) -> Result<(), NotLoaded> {
    memory.restore_pools(driver)?;
    for allocation in client.allocations.iter().filter(|it| it.flags & Allocation::POOLED != 0) {
        let allocated = Allocated { size: allocation.size, context: 0, pool: allocation.handle };
        memory.restore_pooled(allocation.device as usize, allocation.address, allocated)?;
    }
    Ok(())
}

/// Bytes of a saved client's plain device memory that files have.
pub(crate) fn stored_of_plain(client: &Client) -> u64 {
    let pieces = client.allocations.iter().filter(|it| is_plain(it)).flat_map(|it| &it.pieces);
    pieces.filter(|piece| piece.storage.place().is_some()).map(|piece| piece.length).sum()
}

/// Checks that each piece's content is loaded through its own mapping.
pub(crate) fn check_pieces(client: &Client, aliases: &[Alias]) -> Result<(), NotLoaded> {
    let saved = client.allocations.iter().filter(|a| a.flags & Allocation::PHYSICAL != 0);
    let saved = saved.map(|a| (a.address, a.handle, a.size, a.device as usize));
    let here = aliases.iter().map(|a| (a.address, a.handle, a.piece.size, a.piece.device));
    if saved.eq(here) { Ok(()) } else { Err(NotLoaded::Image("the image's memory is not what its state says")) }
}

/// Addresses of variables and functions may be stored anywhere in the client's memory: each must be the same as before, as far
/// as that can be determined.
pub(crate) fn compare_globals(layers: &Layers<'_>, client: &Client) -> Result<(), NotLoaded> {
    let (session, memory, code) = (&layers.call.session, &*layers.memory, &*layers.code);
    for global in &client.globals {
        let (key, placed) = code
            .globals
            .iter()
            .filter(|((module, context), _)| {
                *module == global.module
                    && session.device_of_context(*context).is_ok_and(|d| d == global.device as usize)
            })
            .flat_map(|(key, placed)| placed.iter().map(move |p| (key, p)))
            .find(|(_, p)| p.address == global.address && p.size == global.size && *p.name == *c_name(&global.name))
            .ok_or_else(|| NotLoaded::Moved { name: global.name.clone(), address: global.address })?;
        code.compare_initial(session, memory, *key, placed, global)?;
    }
    Ok(())
}

/// All pieces of content that a saved client's memory has.
pub(crate) fn content(layers: &Layers<'_>, client: &Client, key: HashKey) -> Result<Fill, NotLoaded> {
    content_besides(layers, client, key, |_| false)
}

/// The content of a saved client's memory without that of its plain allocations.
pub(crate) fn content_besides_plain(layers: &Layers<'_>, client: &Client, key: HashKey) -> Result<Fill, NotLoaded> {
    content_besides(layers, client, key, is_plain)
}

/// The content of a saved client's plain allocations.
pub(crate) fn content_of_plain(memory: &Memory, client: &Client, key: HashKey) -> Result<Fill, NotLoaded> {
    Ok(fill(memory, content_of_allocations(memory, client, is_plain)?, key))
}

fn content_besides(
    layers: &Layers<'_>,
    client: &Client,
    key: HashKey,
    without: impl Fn(&Allocation) -> bool,
) -> Result<Fill, NotLoaded> {
    let mut list = content_of_allocations(layers.memory, client, |it| !without(it))?;
    for g in &client.globals {
        let context =
            context_of_global(layers, g.module, g.address).ok_or(NotLoaded::Image("a variable's context is gone"))?;
        add(&mut list, g.address, (g.device as usize, context), &g.pieces);
    }
    for blob in client.blobs.iter().filter(|blob| blob.is(BlobKind::ArrayContent)) {
        list.extend(layers.memory.arrays.saved_jobs(&layers.call.session, blob)?);
    }
    Ok(fill(layers.memory, list, key))
}

/// The content of a saved client's allocations and pieces, without that of variables and arrays.
pub(crate) fn content_of_memory(memory: &Memory, client: &Client, key: HashKey) -> Result<Fill, NotLoaded> {
    Ok(fill(memory, content_of_allocations(memory, client, |_| true)?, key))
}

fn content_of_allocations(
    memory: &Memory,
    client: &Client,
    of: impl Fn(&Allocation) -> bool,
) -> Result<Vec<(Job, Piece)>, NotLoaded> {
    let mut list = Vec::new();
    for a in client.allocations.iter().filter(|it| of(it)) {
        let device = a.device as usize;
        let context = memory.devices.get(device).ok_or(NotLoaded::NoDevice)?.primary;
        add(&mut list, a.address, (device, context), &a.pieces);
    }
    Ok(list)
}

fn add(list: &mut Vec<(Job, Piece)>, address: u64, (device, context): (usize, CUcontext), pieces: &[Piece]) {
    list.extend(pieces.iter().map(|p| {
        let job = Job { address: address + p.offset, offset: p.offset, length: p.length, device, context, array: None };
        (job, *p)
    }));
}

fn fill(memory: &Memory, list: Vec<(Job, Piece)>, key: HashKey) -> Fill {
    let primaries: Vec<_> = memory.devices.iter().map(|device| device.primary).collect();
    let can_hash = |job: &Job| {
        matches!(key, HashKey::Content(_)) && job.array.is_none() && primaries.get(job.device) == Some(&job.context)
    };
    Fill::new(list, can_hash)
}

fn context_of_global(layers: &Layers<'_>, module: u64, address: u64) -> Option<u64> {
    let holds = |placed: &Vec<crate::resources::globals::Placed>| placed.iter().any(|p| p.address == address);
    let key = layers.code.globals.iter().find(|((m, _), placed)| *m == module && holds(placed))?.0;
    Some(layers.call.session.objects.get(key.1)?.real)
}

/// Loads the client's state that is kept in parts of its own.
pub(crate) fn restore_parts(layers: &mut Layers<'_>, client: &Client, reader: &DataReader) -> Result<(), NotLoaded> {
    for blob in &client.blobs {
        let kind = BlobKind::try_from(blob.kind).map_err(|unknown| NotLoaded::UnknownPart(unknown.0))?;
        // The content of arrays is loaded with that of memory, and the client's own mappings were read before.
        if !matches!(kind, BlobKind::ArrayContent | Vmm::KIND) {
            load_part(layers, kind, Part { handle: blob.handle, bytes: read_blob(blob, reader)? })?;
        }
    }
    Ok(())
}

/// The content of a blob.
fn read_blob(blob: &Blob, reader: &DataReader) -> Result<Vec<u8>, NotLoaded> {
    let mut bytes = vec![0; blob.size as usize];
    for piece in &blob.pieces {
        let start = piece.offset as usize;
        let place = bytes
            .get_mut(start..start + piece.length as usize)
            .ok_or(NotLoaded::Image("a blob's piece lies outside it"))?;
        reader.read(piece, place)?;
    }
    Ok(bytes)
}

/// Reads the client's own mappings.
pub(crate) fn read_mapped(client: &Client, state: &State, reader: &DataReader) -> Result<Mapped, NotLoaded> {
    let mut blobs = client.blobs.iter().filter(|blob| blob.is(Vmm::KIND));
    let blob = blobs.next().map(|blob| read_blob(blob, reader)).transpose()?;
    if blobs.next().is_some() {
        return Err(NotLoaded::Image("the image has two lists of what the client maps itself"));
    }
    state::mapped(state, blob.as_deref()).map_err(|why| NotLoaded::Part { part: "mappings", why })
}

fn c_name(name: &str) -> std::ffi::CString {
    std::ffi::CString::new(name).unwrap_or_default()
}
