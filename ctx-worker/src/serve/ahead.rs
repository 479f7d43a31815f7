//! A restored process that runs before its worker has replayed the client's log. Its commands wait in the ring, as they wait for
//! content.
//!
//! ```text
//!   daemon:   Load ───────────────── Comes, Ahead(Connect), Ahead(Open) ─► the process runs
//!   channel:    │       ┌─ "assured"   │ the client is known, and its connection is read
//!   worker:     └ code ─┴──── replay ──┼────────── map ─► answer ─► Connect ─► Open ─► takes commands when content is there
//!                                      └─ wait in the channel ──────┘
//! ```
//!
//! Such a process dies if the rest of the load fails, while otherwise the restore fails before any process runs. So the worker gives
//! its word only where nothing is left that can fail but the driver itself: the code is read, the log is replayed exactly as it was
//! recorded, and the GPU has room for all that it makes. The daemon adds what it knows: the same driver, and the same kind of GPU.

use std::collections::HashSet;

use rekindle_cuda_abi::types::MEMORY_GRANULARITY;
use rekindle_images::{Allocation, Client};
use rekindle_wire::attach::Device;
use rekindle_wire::control::{Failing, Failure, WorkerRequest};
use rekindle_wire::frame::Message;
use rekindle_wire::nvml;
use tracing::{debug, error};

use crate::checkpoint::load::has_memory_besides_plain;
use crate::serve::executor::Executor;
use crate::serve::request_loop::Server;
use crate::serve::state::State;
use crate::session::outcome::Refused;

/// Memory is made beside the process if the GPU has this part of its memory free besides: for the tables of pages, and so that the
/// process does not die if another program takes memory at this moment.
const LEFT_FREE: u64 = 64;

impl Executor {
    /// Whether the GPUs have room for all memory of a client, whose code is read, and more. None is known for a client that has memory
    /// besides its plain allocations, which is made when its log is replayed.
    pub(crate) fn has_room_for(&mut self, client: &Client) -> Result<bool, Refused> {
        if has_memory_besides_plain(client) {
            return Ok(false);
        }
        let hashes: HashSet<_> = client.objects.iter().flat_map(|object| &object.code).collect();
        let code = hashes.into_iter().filter_map(|hash| self.code.store.get(hash));
        let code: u64 = code.map(|image| image.bytes().len() as u64).sum();
        let found = self.memory.memory_of_devices(&mut self.call.gpu)?;
        let bytes = |ordinal| mapped_bytes(&client.allocations, ordinal).saturating_add(code);
        let fits = has_room(&self.call.session.attached.devices, &found, bytes);
        debug!(fits, code, "whether the GPUs have room for all of the client's memory, and more");
        Ok(fits)
    }
}

/// Whether the GPUs have room for these bytes of each device, and [`LEFT_FREE`].
pub(crate) fn has_room(devices: &[Device], found: &[nvml::Memory], bytes: impl Fn(usize) -> u64) -> bool {
    // Virtual GPUs of one GPU have one memory.
    let gpu = |number: usize| devices.get(number).map(|it| it.part_of.unwrap_or(it.uuid));
    found.iter().enumerate().all(|(number, of_device)| {
        let there = (0..found.len()).filter(|other| gpu(*other) == gpu(number)).map(&bytes);
        match there.fold(0, u64::saturating_add) {
            0 => true,
            bytes => of_device.free >= bytes.saturating_add(of_device.total / LEFT_FREE),
        }
    })
}

/// The bytes that a device maps for plain allocations. Small ones share memory.
fn mapped_bytes(allocations: &[Allocation], ordinal: usize) -> u64 {
    let here = allocations.iter().filter(|it| it.device as usize == ordinal);
    let mut ranges: Vec<_> = here
        .map(|it| {
            let end = it.address.saturating_add(it.size).checked_next_multiple_of(MEMORY_GRANULARITY);
            (it.address & !(MEMORY_GRANULARITY - 1), end.unwrap_or(u64::MAX))
        })
        .collect();
    ranges.sort_unstable();
    let (mut bytes, mut reached) = (0_u64, 0);
    for (start, end) in ranges {
        bytes = bytes.saturating_add(end.saturating_sub(start.max(reached)));
        reached = reached.max(end);
    }
    bytes
}

impl Server {
    /// Does a part of connecting a process that may run by now. Nobody waits for an answer: a failure leaves a failed worker, of which
    /// the daemon hears when it asks how far the load is.
    pub(super) fn goes_ahead(&mut self, state: State, message: Message<WorkerRequest>) -> State {
        if matches!(state, State::Failed(_)) {
            return state;
        }
        let (state, answered) = self.request(state, message);
        let Err(refusal) = answered else { return state };
        error!("the restored process cannot be connected: {refusal}");
        match state {
            State::Failed(failure) => State::Failed(failure),
            _ => State::Failed(Failure::new(refusal.kind(), refusal.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn allocation(address: u64, size: u64, device: u32) -> Allocation {
        Allocation { address, size, device, ..Allocation::default() }
    }

    #[test]
    fn what_is_mapped_is_counted_once() {
        let granularity = MEMORY_GRANULARITY;
        let all = [
            allocation(granularity + 512, 256, 0),
            allocation(granularity, 256, 0),
            allocation(4 * granularity, granularity + 1, 0),
            allocation(8 * granularity, 3 * granularity, 1),
        ];
        assert_eq!(mapped_bytes(&all, 0), 3 * granularity);
        assert_eq!(mapped_bytes(&all, 1), 3 * granularity);
        assert_eq!(mapped_bytes(&all, 2), 0);
        assert!(mapped_bytes(&[allocation(u64::MAX - 1, u64::MAX, 0)], 0) > 0, "a hostile image overflows nothing");
    }

    #[test]
    fn parts_of_a_gpu_share_its_room() {
        let device = |uuid: u8, part_of: Option<u8>| Device {
            uuid: [uuid; 16],
            part_of: part_of.map(|it| [it; 16]),
            name: String::new(),
            memory: 0,
            pci_bus_id: String::new(),
            attributes: Vec::new(),
            stream_priorities: (0, 0),
            peers: Vec::new(),
        };
        let found = nvml::Memory { total: 64 * GIB, free: 9 * GIB, ..nvml::Memory::default() };
        let whole = [device(1, None), device(2, None)];
        let parts = [device(1, Some(3)), device(2, Some(3))];
        assert!(has_room(&whole, &[found, found], |_| 8 * GIB));
        assert!(!has_room(&whole, &[found, found], |_| 8 * GIB + 1));
        assert!(has_room(&parts, &[found, found], |_| 4 * GIB));
        assert!(!has_room(&parts, &[found, found], |_| 4 * GIB + 1));
        assert!(has_room(&whole, &[nvml::Memory { free: 0, ..found }, found], |it| it as u64));
    }
}
