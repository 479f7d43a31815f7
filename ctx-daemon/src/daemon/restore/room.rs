//! Whether GPUs have room for what is loaded in advance, or beside it.

use std::collections::HashMap;
use std::sync::Arc;

use rekindle_images::Manifest;

use super::super::grants::Uuid;
use super::super::worker::Worker;
use super::check;
use super::preloads::ToCopy;

/// Bytes of a GPU that are left for what the list of allocations does not tell: rounding, arrays, the driver's own.
const MARGIN: u64 = 64 << 20;

/// The first GPU on which less is free than `wanted` of the bytes that the clients need there and of those that are held for them: how much
/// is wanted, and how much is free; nothing, where a worker does not say. None where there is room.
pub(super) fn shortage(
    manifest: &Manifest,
    workers: &[Arc<Worker>],
    held: &[Option<ToCopy>],
    wanted: impl Fn(u64, u64) -> u64,
) -> Option<(u64, u64)> {
    #[derive(Default)]
    struct Gpu {
        needed: u64,
        held: u64,
        free: Option<u64>,
    }
    let mut all: HashMap<Uuid, Gpu> = HashMap::new();
    for (place, (record, worker)) in check::attached(manifest).zip(workers).enumerate() {
        let memory = worker.memory().unwrap_or_default();
        for (ordinal, device) in worker.attached().devices.iter().enumerate() {
            // Virtual GPUs have one memory.
            let gpu = all.entry(device.part_of.unwrap_or(device.uuid)).or_default();
            let here = record.allocations.iter().filter(|it| it.device as usize == ordinal);
            gpu.needed = here.fold(gpu.needed, |sum, it| sum.saturating_add(it.size));
            gpu.held += held.get(place).and_then(Option::as_ref).map_or(0, |it| it.bytes_on(ordinal));
            let free = memory.get(ordinal).map_or(0, |it| it.free);
            gpu.free = Some(gpu.free.map_or(free, |other| other.min(free)));
        }
    }
    let on = |gpu: Gpu| match wanted(gpu.needed, gpu.held) {
        0 => (0, 0),
        wanted => (wanted.saturating_add(MARGIN), gpu.free.unwrap_or(0)),
    };
    all.into_values().map(on).find(|(wanted, free)| wanted > free)
}
