//! The client's GPU resources: memory of every kind, and code.

pub(crate) mod array_commands;
pub(crate) mod arrays;
pub(crate) mod box_commands;
pub(crate) mod boxes;
pub(crate) mod broken_image;
pub(crate) mod code;
pub(crate) mod code_reserve;
pub(crate) mod code_store;
pub(crate) mod device;
pub(crate) mod globals;
pub(crate) mod graphs;
pub(crate) mod initial;
pub(crate) mod ipc;
pub(crate) mod jit;
pub(crate) mod job;
pub(crate) mod kernel_heap;
pub(crate) mod kernel_heap_error;
pub(crate) mod launch_attributes;
pub(crate) mod launch_check;
pub(crate) mod libraries_ahead;
pub(crate) mod limits;
pub(crate) mod linker;
pub(crate) mod managed;
pub(crate) mod mem_ops;
pub(crate) mod memory;
pub(crate) mod not_loaded;
pub(crate) mod occupancy;
pub(crate) mod peers;
pub(crate) mod pinned;
pub(crate) mod pool_commands;
pub(crate) mod pools;
pub(crate) mod prints;
pub(crate) mod reach;
pub(crate) mod saved;
pub(crate) mod shortage;
pub(crate) mod surplus;
pub(crate) mod tensor_maps;
pub(crate) mod textures;
pub(crate) mod transit;
pub(crate) mod units;
pub(crate) mod vmm;

use std::collections::HashMap;
use std::sync::Arc;

use rekindle_cuda_abi::table::Function;
use rekindle_wire::command;
use rekindle_wire::control::Limits;

use self::arrays::Arrays;
use self::code_store::{CodeStore, Image};
use self::device::Device;
use self::globals::Globals;
use self::graphs::Graphs;
use self::ipc::Arrived;
use self::ipc::events::IpcEvents;
use self::jit::CodeLogs;
use self::kernel_heap::KernelHeaps;
use self::libraries_ahead::Ahead;
use self::linker::Links;
use self::managed::ManagedMemory;
use self::pinned::PinnedMemory;
use self::pools::Pools;
use self::prints::Prints;
use self::textures::Textures;
use self::vmm::Vmm;

/// The devices, and the client's memory of every kind.
pub(crate) struct Memory {
    pub(crate) devices: Vec<Device>,
    pub(crate) pools: Pools,
    pub(crate) vmm: Vmm,
    pub(crate) pinned: PinnedMemory,
    pub(crate) managed: ManagedMemory,
    pub(crate) kernel_heaps: KernelHeaps,
    /// Pinned memory of a restored client whose memfds have not come yet.
    pub(crate) expected_pins: Vec<(u64, pinned::Allocation)>,
    pub(crate) arrays: Arrays,
    pub(crate) textures: Textures,
    /// Memory of other processes that has come and has not been imported yet.
    pub(crate) arrived: Arrived,
    pub(crate) ipc_events: IpcEvents,
    pub(crate) limits: Limits,
}

impl Memory {
    /// The memory of a worker that has no client yet.
    pub(crate) fn new(devices: Vec<Device>, table: &[Function]) -> Self {
        Self {
            pools: Pools::new(devices.len()),
            devices,
            vmm: Vmm::default(),
            pinned: PinnedMemory::default(),
            managed: ManagedMemory::default(),
            kernel_heaps: KernelHeaps::default(),
            expected_pins: Vec::new(),
            arrays: Arrays::default(),
            textures: Textures::default(),
            arrived: Arrived::default(),
            ipc_events: IpcEvents::new(table),
            limits: Limits::default(),
        }
    }
}

/// The client's code: modules and libraries, linkers, graphs, and the output of kernels that print.
pub(crate) struct Code {
    /// Images of code, by their hashes.
    pub(crate) store: CodeStore,
    /// The image that each module or library was loaded from.
    pub(crate) loaded: HashMap<u64, Arc<Image>>,
    /// Libraries whose records a restore has not replayed yet.
    pub(crate) ahead: Ahead,
    /// The places of their variables.
    pub(crate) globals: Globals,
    pub(crate) links: Links,
    pub(crate) graphs: Graphs,
    pub(crate) logs: CodeLogs,
    pub(crate) prints: Prints,
    /// The number of the call `cuFuncLoad`.
    pub(crate) function_load: u16,
}

impl Code {
    /// The code of a worker that has no client yet.
    pub(crate) fn new(table: &[Function]) -> Self {
        Self {
            store: CodeStore::default(),
            loaded: HashMap::new(),
            ahead: Ahead::default(),
            globals: Globals::default(),
            links: Links::default(),
            graphs: Graphs::new(),
            logs: CodeLogs::default(),
            prints: Prints::default(),
            function_load: command::number(table, "cuFuncLoad").unwrap_or(u16::MAX),
        }
    }
}
