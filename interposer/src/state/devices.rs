//! The devices, as the worker described them when the process attached.

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::{Attached, Device};
use rekindle_wire::gpus;

/// The worker's devices, and which of them the application sees.
pub(crate) struct Devices {
    attached: Attached,
    /// Numbers of the worker's devices, in the application's order (`CUDA_VISIBLE_DEVICES`).
    visible: Vec<usize>,
}

impl Devices {
    /// Takes what the worker said when the process attached.
    pub(crate) fn new(attached: Attached) -> Self {
        Self { visible: visible_devices(&attached.devices), attached }
    }

    /// `cuDriverGetVersion`.
    pub(crate) fn driver_version(&self) -> i32 {
        self.attached.driver_version
    }

    /// `cuCtxGetApiVersion` of a primary context.
    pub(crate) fn api_version(&self) -> u32 {
        self.attached.api_version
    }

    /// The number of the worker's devices.
    pub(crate) fn count(&self) -> usize {
        self.attached.devices.len()
    }

    /// One of the worker's devices by its number.
    pub(crate) fn get(&self, number: usize) -> Option<&Device> {
        self.attached.devices.get(number)
    }

    /// The devices that the application sees, in its order.
    pub(crate) fn visible(&self) -> impl ExactSizeIterator<Item = &Device> {
        self.visible.iter().map(|&number| &self.attached.devices[number])
    }

    /// The worker's number of an application's device ordinal.
    pub(crate) fn number(&self, ordinal: CUdevice) -> Result<usize, CUresult> {
        usize::try_from(ordinal).ok().and_then(|o| self.visible.get(o).copied()).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    /// The device of an application's ordinal.
    pub(crate) fn of_ordinal(&self, ordinal: CUdevice) -> Result<&Device, CUresult> {
        self.get(self.number(ordinal)?).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    /// The application's ordinal of a worker's device.
    pub(crate) fn ordinal(&self, number: usize) -> CUdevice {
        self.visible.iter().position(|&d| d == number).map_or(-1, |o| o as CUdevice)
    }
}

/// The devices that `CUDA_VISIBLE_DEVICES` leaves, in its order: ordinals or UUID prefixes, up to the first that names
/// none, as the driver reads it.
fn visible_devices(devices: &[Device]) -> Vec<usize> {
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
                peers: Vec::new(),
                part_of: None,
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
