//! Questions to NVML: the GPUs that a process may see, their present state, and calls that the machine's own
//! `libnvidia-ml.so.1` answers. The messages go between our `libnvidia-ml.so.1` and the daemon, and between the daemon
//! and the helper process that has loaded the machine's library.
//!
//! A process's questions name GPUs by their place in [`Gpus::gpus`]; questions to the helper name them by UUID.

use rekindle_cuda_abi::nvml::{MAX_BUFFER, Shape, versioned_size};
use serde::{Deserialize, Serialize};

/// The GPUs that a process may see, and what does not change.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Gpus {
    /// `nvmlSystemGetDriverVersion`; none where the machine has no NVML.
    pub driver_version: Option<String>,
    /// `nvmlSystemGetNVMLVersion`; none where the machine has no NVML.
    pub nvml_version: Option<String>,
    /// `cuDriverGetVersion`, which NVML answers alike.
    pub cuda_driver_version: i32,
    /// The GPUs in the order of their PCI addresses, which is NVML's order.
    pub gpus: Vec<Gpu>,
}

/// A GPU that a process may see.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Gpu {
    /// The driver's name for the GPU.
    pub name: String,
    /// `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// Bytes of memory, as the driver counts them.
    pub memory: u64,
    /// `cuDeviceGetPCIBusId`: `0000:01:00.0`.
    pub pci_bus_id: String,
    /// The PCI device (upper half) and vendor.
    pub pci_device: Option<u32>,
    /// The PCI subsystem's device (upper half) and vendor.
    pub pci_subsystem: Option<u32>,
    /// N of `/dev/nvidiaN`; none where there is none.
    pub minor: Option<u32>,
    /// `cuDeviceGetAttribute` for 0, 1, 2, ...: the result and the value.
    pub attributes: Vec<(i32, i32)>,
}

/// Bytes of a GPU's memory.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Memory {
    /// All.
    pub total: u64,
    /// Bytes that nobody has allocated.
    pub free: u64,
    /// Bytes that the driver keeps for itself; 0 where that is not known and these bytes count as used.
    pub reserved: u64,
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Process {
    /// The process's pid, as the asker numbers it.
    pub pid: u32,
    /// Bytes of memory that it has on that GPU.
    pub memory: u64,
}

/// An argument of a call that the machine's NVML answers.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum Argument {
    /// A GPU.
    Device(u32),
    /// A number.
    Number(u64),
    /// The buffer that a pointer points to, of exactly the size that the call may write.
    Buffer(Vec<u8>),
}

/// A call for the machine's NVML.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Question {
    /// A function whose line in `nvml.table` says `ask`.
    pub function: String,
    /// The arguments, in the order of the call's parameters.
    pub arguments: Vec<Argument>,
}

/// The answer of the machine's NVML.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Answer {
    /// An `nvmlReturn_t`.
    pub result: u32,
    /// The buffers of the question in order, as they are now.
    pub buffers: Vec<Vec<u8>>,
}

/// The daemon to its helper.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HelperQuestion {
    /// The call. It may be one that is no process's to ask.
    pub question: Question,
    /// The UUIDs of the GPUs that its [`Argument::Device`]s number, as NVML writes them.
    pub gpus: Vec<String>,
}

/// The helper's first word.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum HelperReady {
    /// NVML is loaded and initialised.
    Ready,
    /// NVML cannot be loaded and initialised.
    Failed {
        /// Why, in one line.
        reason: String,
    },
}

/// Whether the arguments are of these shapes, each buffer of the size that the call will take it to have, and each
/// device one of `gpus`.
pub fn fits(shapes: &[Shape], arguments: &[Argument], gpus: usize) -> bool {
    let number = |at: usize| match arguments.get(at) {
        Some(Argument::Number(number)) => usize::try_from(*number).ok(),
        _ => None,
    };
    let fits = |(shape, argument): (&Shape, &Argument)| match (shape, argument) {
        (Shape::Device, Argument::Device(gpu)) => (*gpu as usize) < gpus,
        (Shape::Number, Argument::Number(_)) => true,
        (Shape::Bytes(size), Argument::Buffer(buffer)) => buffer.len() == *size,
        (Shape::Versioned, Argument::Buffer(buffer)) => {
            let version = buffer.first_chunk().map(|first| u32::from_le_bytes(*first));
            version.and_then(versioned_size) == Some(buffer.len())
        }
        (Shape::Many { count, each }, Argument::Buffer(buffer)) => {
            let size = number(*count).and_then(|count| count.checked_mul(*each));
            buffer.len() <= MAX_BUFFER && size == Some(buffer.len())
        }
        _ => false,
    };
    shapes.len() == arguments.len() && shapes.iter().zip(arguments).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_arguments_of_the_declared_shapes_and_sizes_fit() {
        let buffer = |size| Argument::Buffer(vec![0; size]);
        let plain = [Shape::Device, Shape::Bytes(4)];
        assert!(fits(&plain, &[Argument::Device(1), buffer(4)], 2));
        assert!(!fits(&plain, &[Argument::Device(2), buffer(4)], 2));
        assert!(!fits(&plain, &[Argument::Device(0), buffer(3)], 2));
        assert!(!fits(&plain, &[Argument::Device(0), Argument::Number(4)], 2));
        assert!(!fits(&plain, &[Argument::Device(0)], 2));
        let text = [Shape::Many { count: 1, each: 8 }, Shape::Number];
        assert!(fits(&text, &[buffer(16), Argument::Number(2)], 0));
        assert!(!fits(&text, &[buffer(16), Argument::Number(3)], 0));
        assert!(!fits(&text, &[buffer(0), Argument::Number(u64::MAX)], 0));
        let versioned = |version: u32, size: usize| {
            let mut bytes = vec![0; size];
            bytes[..4].copy_from_slice(&version.to_le_bytes());
            fits(&[Shape::Versioned], &[Argument::Buffer(bytes)], 0)
        };
        assert!(versioned(2 << 24 | 40, 40));
        assert!(!versioned(2 << 24 | 48, 40));
        assert!(!fits(&[Shape::Versioned], &[buffer(0)], 0));
    }
}
