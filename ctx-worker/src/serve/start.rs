//! Starts a worker: loads the driver, makes contexts on all devices and registers staging, before there is a client.
//!
//! The driver takes addresses for code and variables where the kernel would place a mapping. These addresses must be the same
//! in a restore, so between start and restore the worker does nothing that takes such addresses in another order. The worker
//! runs without address randomisation, allocates only from the heap, starts its threads first, and maps a client's memory at
//! fixed addresses of its own.

use std::ffi::CStr;
use std::path::Path;

use rekindle_cuda_abi::types::*;
use rekindle_images::content::ContentKey;
use rekindle_wire::attach::{self, Attached};
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::window::MAX_DEVICES;
use thiserror::Error;
use tracing::warn;

use crate::checkpoint::access::hash::{BATCH_BYTES, Hasher};
use crate::checkpoint::access::mode::Reporting;
use crate::checkpoint::access::observe::{Observation, ObserveError};
use crate::checkpoint::access::reads::Reads;
use crate::checkpoint::engine::Engine;
use crate::gpu::driver::{self, CallFailed, Driver, LoadError, checked};
use crate::gpu::virtual_gpus::{self, Uuid, VirtualError, VirtualGpus};
use crate::resources::code_reserve::{self, CodeReserve};
use crate::resources::device::Device;
use crate::resources::memory::{DeviceMemory, size_of_pieces};
use crate::serve::confinement::Confinement;
use crate::serve::crash;
use crate::serve::executor::Executor;
use crate::serve::sandbox::{self, SandboxError};

/// Attributes up to this number are queried; later ones are unknown to this version.
const ATTRIBUTES: u32 = 160;
const CAPABILITY_MAJOR: usize = 75;
const CAPABILITY_MINOR: usize = 76;

/// Reasons why a worker does not start.
#[derive(Debug, Error)]
pub(crate) enum StartError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    Observe(#[from] ObserveError),
    #[error(transparent)]
    Virtual(#[from] VirtualError),
}

impl Failing for StartError {
    fn kind(&self) -> FailureKind {
        FailureKind::Internal
    }
}

/// Prepares everything for a client, or returns why that failed.
pub(crate) fn start(
    cuda_driver: &Path,
    virtual_gpus: Option<&VirtualGpus>,
    confined: Option<&Confinement>,
    report_access: Option<Reporting>,
) -> Result<Executor, StartError> {
    // SAFETY: only sets parameters of the allocator, before there are threads.
    unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
    let mut driver = driver::load(cuda_driver)?;
    crate::cores::cores();
    // Read before the sandbox may hide the library's place from this process.
    let build = driver::build(&driver::place(&driver));
    // The library may lie where only root can read it, and the administrator answers for its initialisers.
    if let Some(confinement) = confined {
        sandbox::enter(confinement, &driver::place(&driver))?;
    }
    let mut parts_of = Vec::new();
    if let Some(settings) = virtual_gpus {
        let shown = virtual_gpus::show(driver, settings)?;
        (driver, parts_of) = (shown.driver, shown.parts_of);
    }
    let mut executor = try_start(Box::leak(Box::new(driver)), build, &parts_of)?;
    match report_access {
        Some(Reporting::Writes { limit }) => {
            let observed = Observation::start(&mut executor.call.gpu, &executor.memory, limit)?;
            executor.checkpoint.observed = Some(Box::new(observed));
        }
        Some(Reporting::Reads) => executor.checkpoint.reads = Some(Box::new(Reads::start())),
        None => {}
    }
    // After all libraries are loaded, and before there is a client.
    crash::say().unwrap_or_else(|error| warn!("a crash would not be said: {error}"));
    if let Some(confinement) = confined {
        sandbox::close(confinement)?;
    }
    Ok(executor)
}

/// `parts_of` has the GPU that each device is a part of; it is empty where devices are GPUs.
fn try_start(driver: &'static Driver, driver_build: String, parts_of: &[Uuid]) -> Result<Executor, CallFailed> {
    let (mut version, mut count) = (0, 0);
    // SAFETY: out parameters are locals.
    unsafe {
        checked("cuInit", (driver.cuInit)(0))?;
        checked("cuDriverGetVersion", (driver.cuDriverGetVersion)(&raw mut version))?;
        checked("cuDeviceGetCount", (driver.cuDeviceGetCount)(&raw mut count))?;
    }
    let mut devices = Vec::new();
    let mut described = Vec::new();
    let mut api_version = 0;
    for ordinal in 0..(count as usize).min(MAX_DEVICES) {
        let mut device = 0;
        let mut primary = 0;
        // SAFETY: out parameters are locals.
        unsafe {
            checked("cuDeviceGet", (driver.cuDeviceGet)(&raw mut device, ordinal as i32))?;
            let retained = (driver.cuDevicePrimaryCtxRetain)(&raw mut primary, device);
            checked("cuDevicePrimaryCtxRetain", retained)?;
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
            checked("cuCtxGetApiVersion", (driver.cuCtxGetApiVersion)(primary, &raw mut api_version))?;
        }
        let part_of = parts_of.get(ordinal).copied();
        let description = attach::Device { part_of, ..describe(driver, device, (count as usize).min(MAX_DEVICES))? };
        let attribute = |n: usize| description.attributes.get(n).map_or(0, |a| a.1 as u32);
        let capability = (attribute(CAPABILITY_MAJOR), attribute(CAPABILITY_MINOR));
        devices.push(Device {
            device,
            primary,
            used: false,
            reset: false,
            placed_after: 0,
            code_reserve: CodeReserve::default(),
            capability,
            most: part_of.map_or(u64::MAX, |_| description.memory),
            memory: DeviceMemory::new(device, ordinal, size_of_pieces(description.memory)),
        });
        described.push(description);
    }
    if devices.windows(2).any(|d| d[0].capability != d[1].capability) {
        warn!("the devices are of different compute capabilities: code is looked at for the first one's");
    }
    let mut engine = Engine::new();
    let primaries: Vec<_> = devices.iter().map(|d| d.primary).collect();
    engine.prepare(driver, &primaries)?;
    engine.warm_up();
    // Prepared now, so that later code gets the same addresses.
    let key = ContentKey::from_bytes([0; 16]);
    let mut hasher = Hasher::new(&key, devices.len(), BATCH_BYTES);
    for (ordinal, device) in devices.iter().enumerate() {
        hasher.prepare(driver, (ordinal, device.device), device.primary)?;
    }
    for device in &mut devices {
        device.code_reserve = CodeReserve::make(driver, device.primary, code_reserve::BYTES)?;
    }
    let attached = Attached { driver_version: version, driver_build, api_version, devices: described };
    let mut executor = Executor::new(driver, devices, engine, hasher, attached);
    executor.checkpoint.peek.prepare(driver, &primaries)?;
    executor.context_changed();
    Ok(executor)
}

fn describe(driver: &Driver, device: CUdevice, count: usize) -> Result<attach::Device, CallFailed> {
    let mut name = [0; 256];
    let mut pci = [0; 32];
    let mut uuid = [0; 16];
    let mut memory = 0;
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: out parameters are locals of the sizes that are given; the device's context is current.
    unsafe {
        checked("cuDeviceGetName", (driver.cuDeviceGetName)(name.as_mut_ptr(), name.len() as i32, device))?;
        checked("cuDeviceGetPCIBusId", (driver.cuDeviceGetPCIBusId)(pci.as_mut_ptr(), pci.len() as i32, device))?;
        checked("cuDeviceGetUuid", (driver.cuDeviceGetUuid_v2)(&raw mut uuid, device))?;
        checked("cuDeviceTotalMem", (driver.cuDeviceTotalMem_v2)(&raw mut memory, device))?;
        let range = (driver.cuCtxGetStreamPriorityRange)(&raw mut least, &raw mut greatest);
        checked("cuCtxGetStreamPriorityRange", range)?;
    }
    let attributes = (0..ATTRIBUTES)
        .map(|attribute| {
            let mut value = 0;
            // SAFETY: the out parameter is a local; an unknown attribute is an error code.
            let result = unsafe { (driver.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
            (result, value)
        })
        .collect();
    let peers = (0..count as CUdevice).map(|other| {
        let mut can = 0;
        // SAFETY: the out parameter is a local.
        let result = unsafe { (driver.cuDeviceCanAccessPeer)(&raw mut can, device, other) };
        result == CUDA_SUCCESS && can != 0
    });
    let peers = peers.collect();
    let text = |bytes: &[std::ffi::c_char]| {
        let bytes: Vec<u8> = bytes.iter().map(|b| *b as u8).collect();
        CStr::from_bytes_until_nul(&bytes).map(|c| c.to_string_lossy().into_owned()).unwrap_or_default()
    };
    Ok(attach::Device {
        name: text(&name),
        uuid,
        memory: memory as u64,
        pci_bus_id: text(&pci),
        attributes,
        stream_priorities: (least, greatest),
        peers,
        part_of: None,
    })
}
