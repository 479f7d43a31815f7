//! What is known in the process: devices, contexts, allocations, functions, streams.

pub(crate) mod arrays;
pub(crate) mod contexts;
pub(crate) mod events;
pub(crate) mod functions;
pub(crate) mod ipc;
pub(crate) mod memory;
pub(crate) mod stream_attributes;
pub(crate) mod streams;
pub(crate) mod vmm;

use rekindle_wire::attach::Device;
use rekindle_wire::gpus;

/// The devices that `CUDA_VISIBLE_DEVICES` leaves, in its order: ordinals or UUID prefixes, up to the first that names
/// none, as the driver reads it.
pub(crate) fn visible_devices(devices: &[Device]) -> Vec<usize> {
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => visible(&list, devices),
        Err(_) => (0..devices.len()).collect(),
    }
}

fn visible(list: &str, devices: &[Device]) -> Vec<usize> {
    let mut visible = Vec::new();
    for word in list.split(',').map(str::trim) {
        match gpus::find(word, devices) {
            Some(device) if !visible.contains(&device) => visible.push(device),
            // The driver takes a repetition as a reason to show nothing.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<Device> {
        (0..3_u8)
            .map(|i| Device {
                name: String::new(),
                uuid: [i + 0xa0; 16],
                memory: 0,
                pci_bus_id: String::new(),
                attributes: Vec::new(),
                stream_priorities: (0, 0),
            })
            .collect()
    }

    #[test]
    fn visible_devices_are_read_as_the_driver_reads_them() {
        let d = devices();
        assert_eq!(visible("2,0", &d), [2, 0]);
        assert_eq!(visible("1,7,0", &d), [1]);
        assert!(visible("", &d).is_empty());
        assert!(visible("-1", &d).is_empty());
        assert!(visible("0,0", &d).is_empty());
        assert_eq!(visible("GPU-a1a1a1a1,GPU-a0", &d), [1, 0]);
        assert!(visible("GPU-a", &d).is_empty());
    }
}
