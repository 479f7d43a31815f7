//! Describes a client in an image, besides its memory's content: each function writes one part of the manifest.

use std::collections::BTreeSet;

use rekindle_images::{Allocation, ClientGpu, Global, Object, ObjectKind, Pinned, Window, WindowKind};
use rekindle_wire::{command, window};

use crate::checkpoint::copying::Place;
use crate::checkpoint::cut::write_cut;
use crate::checkpoint::draft::Region;
use crate::checkpoint::layers::Layers;
use crate::checkpoint::save_error::SaveError;
use crate::resources::job::{Job, jobs};
use crate::resources::vmm::aliases::Alias;
use crate::resources::{Code, Memory};
use crate::schedule::times::Ages;
use crate::session::Session;
use crate::session::state::{self, State, StateError};

/// The client's device memory, and the jobs that copy its content.
pub(crate) fn describe_allocations(
    memory: &Memory,
    aliases: &[Alias],
    all: &mut Vec<(Region, Place, Job)>,
) -> Vec<Allocation> {
    let mut list = Vec::new();
    for (ordinal, device) in memory.devices.iter().enumerate() {
        for (&address, allocation) in device.memory.allocations() {
            let region = Region::Allocation(list.len());
            let place = Place::Allocation(address);
            all.extend(jobs(address, allocation.size, ordinal, device.primary).map(|j| (region, place, j)));
            list.push(Allocation {
                device: ordinal as u32,
                address,
                size: allocation.size,
                requested_size: allocation.size,
                flags: if allocation.pool == 0 { 0 } else { Allocation::POOLED },
                handle: if allocation.pool == 0 { allocation.context } else { allocation.pool },
                pieces: Vec::new(),
            });
        }
    }
    for Alias { address, handle, piece } in aliases {
        let Some(device) = memory.devices.get(piece.device) else { continue };
        let region = Region::Allocation(list.len());
        let place = Place::Piece(*handle);
        all.extend(jobs(*address, piece.size, piece.device, device.primary).map(|j| (region, place, j)));
        list.push(Allocation {
            device: piece.device as u32,
            address: *address,
            size: piece.size,
            requested_size: piece.size,
            flags: Allocation::PHYSICAL,
            handle: *handle,
            pieces: Vec::new(),
        });
    }
    list
}

/// The variables of the client's code, and the jobs that copy their content.
pub(crate) fn describe_globals(
    session: &Session,
    code: &Code,
    all: &mut Vec<(Region, Place, Job)>,
) -> Result<Vec<Global>, SaveError> {
    let mut list = Vec::new();
    let mut places: Vec<_> = code.globals.iter().collect();
    places.sort_by_key(|(key, _)| **key);
    for (&(module, context), globals) in places {
        let known = session.objects.get(context).ok_or(SaveError::NoContext)?;
        let ordinal = known.parent as usize;
        for global in globals {
            if global.size == 0 {
                continue;
            }
            let region = Region::Global(list.len());
            let jobs = jobs(global.address, global.size, ordinal, known.real);
            all.extend(jobs.map(|j| (region, Place::Other, j)));
            list.push(Global {
                device: ordinal as u32,
                module,
                name: global.name.to_string_lossy().into_owned(),
                address: global.address,
                size: global.size,
                pieces: Vec::new(),
                initial: global.initial,
            });
        }
    }
    Ok(list)
}

/// The client's devices.
pub(crate) fn describe_gpus(session: &Session) -> Vec<ClientGpu> {
    let gpus = session.attached.devices.iter().enumerate();
    gpus.map(|(i, d)| ClientGpu { ordinal: i as u32, uuid: d.uuid }).collect()
}

/// The windows that the client has reserved.
pub(crate) fn describe_windows(memory: &Memory) -> Vec<Window> {
    let device = |(i, d): (usize, &crate::resources::device::Device)| {
        let start = window::device(i).start;
        let size = d.memory.client_reserved() - start;
        (size > 0).then_some(Window { kind: WindowKind::Device, address: start, size })
    };
    let mut windows: Vec<_> = memory.devices.iter().enumerate().filter_map(device).collect();
    let allocations = memory.pinned.allocations();
    if let Some((last, allocation)) = allocations.last_key_value() {
        let size = last + allocation.size - window::PINNED_BASE;
        windows.push(Window { kind: WindowKind::Pinned, address: window::PINNED_BASE, size });
    }
    windows
}

/// The driver calls that the object log's records name.
pub(crate) fn describe_kinds(session: &Session) -> Vec<ObjectKind> {
    let calls: BTreeSet<u16> = session.objects.log().iter().map(|r| r.call).collect();
    let name = |call| command::name(&session.table, call).unwrap_or("?").to_owned();
    calls.into_iter().map(|call| ObjectKind { kind: u32::from(call), name: name(call) }).collect()
}

/// The object log.
pub(crate) fn describe_objects(session: &Session) -> Vec<Object> {
    let records = session.objects.log().iter();
    records
        .map(|r| Object {
            sequence: r.sequence,
            kind: u32::from(r.call),
            handle: r.owner,
            device: session.device_of_context(r.context).unwrap_or(0) as u32,
            context: r.context,
            args_version: state::version(),
            args: r.args.clone(),
            code: r.code.into_iter().collect(),
        })
        .collect()
}

/// The client's pinned memory.
pub(crate) fn describe_pinned(memory: &Memory) -> Vec<Pinned> {
    let pinned = memory.pinned.allocations().iter();
    pinned
        .map(|(&address, p)| Pinned { address, size: p.size, flags: u64::from(p.flags), pieces: Vec::new() })
        .collect()
}

/// Whether the driver may have placed code by more than what code there was: a variable lies outside of the reserve.
fn lies_beyond_reserve(memory: &Memory, code: &Code, session: &Session) -> bool {
    code.globals.iter().any(|((_, context), placed)| {
        let device = session.device_of_context(*context).ok().and_then(|ordinal| memory.devices.get(ordinal));
        let of_primary = device.filter(|it| session.objects.get(*context).is_some_and(|o| o.real == it.primary));
        placed.iter().any(|it| of_primary.is_none_or(|device| !device.code_reserve.holds(it.address, it.size)))
    })
}

/// State that has no field of its own in the manifest.
pub(crate) fn state_bytes(layers: &Layers<'_>, ages: &Ages) -> Result<Vec<u8>, StateError> {
    let (memory, scheduler) = (&*layers.memory, &*layers.scheduler);
    let mut state = State::default();
    memory.write_shared(&mut state);
    scheduler.times.write(ages, &mut state);
    memory.pinned.write(&mut state);
    memory.managed.write(&mut state);
    for (ordinal, device) in memory.devices.iter().enumerate() {
        let reserved_to = device.memory.client_reserved();
        let mut saved = state::Device {
            reserved_to,
            reset: device.reset,
            placed_after: Some(device.placed_after),
            code_reserve: device.code_reserve.bytes(),
            kernel_heap: memory.kernel_heaps.describe(ordinal).into(),
            ..state::Device::default()
        };
        device.memory.write_names(&mut saved);
        state.devices.push(saved);
    }
    memory.pools.write(&mut state);
    // The driver places such a heap where it will, too.
    let has_heap = !memory.kernel_heaps.is_empty();
    state.beyond_reserve = has_heap || lies_beyond_reserve(memory, layers.code, &layers.call.session);
    write_cut(&layers.call.session, layers.code, &mut state);
    state::opaque(&state)
}
