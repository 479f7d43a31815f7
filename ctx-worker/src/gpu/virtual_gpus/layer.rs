//! The virtual GPUs of a worker, and what the driver's calls do on them.
//!
//! Two virtual GPUs of one GPU are two contexts of one device to the driver, which would not call them peers. So the layer
//! answers itself what concerns two of them. Everything else goes to the driver, with the driver's device in place of the
//! virtual one.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::atomics;
use rekindle_cuda_abi::types::*;
use rekindle_wire::gpus;
use rekindle_wire::window::MAX_DEVICES;

use super::contexts::Contexts;
use super::error::VirtualError;
use super::identity;
use super::rights::{Change, Rights};
use super::settings::{Uuid, VirtualGpus};
use crate::gpu::driver::{Driver, checked};

/// `CU_DEVICE_ATTRIBUTE_*`.
const PCI_DOMAIN_ID: u32 = 50;
const COOPERATIVE_MULTI_DEVICE_LAUNCH: u32 = 96;
/// `CU_DEVICE_P2P_ATTRIBUTE_*`.
const PERFORMANCE_RANK: u32 = 1;
const ACCESS_SUPPORTED: u32 = 2;
const NATIVE_ATOMIC_SUPPORTED: u32 = 3;
const ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED: u32 = 5;

/// A virtual GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VirtualGpu {
    /// The driver's device.
    pub(super) real: CUdevice,
    pub(super) part_of: Uuid,
    /// Its number among the parts of its GPU, from 0.
    pub(super) part: u32,
    pub(super) uuid: Uuid,
    pub(super) pci_bus_id: String,
    /// Its memory, in bytes.
    pub(super) memory: usize,
    /// Whether it has the primary context of its GPU.
    pub(super) leads: bool,
}

/// The layer between a worker and the driver.
pub(super) struct Layer {
    real: Driver,
    gpus: Vec<VirtualGpu>,
    contexts: Mutex<Contexts>,
    rights: Mutex<Rights>,
}

/// The driver's result of a call, as an error if it is one.
fn done(result: CUresult) -> Result<(), CUresult> {
    if result == CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

/// Calls a function of the driver's.
macro_rules! call {
    ($layer:ident.$function:ident($($argument:expr),*)) => {
        // SAFETY: pointers are to locals, or are the caller's, who passes what the driver expects; handles are the driver's.
        done(unsafe { ($layer.real.$function)($($argument),*) })
    };
}

impl Layer {
    /// Initialises the driver, and cuts its GPUs into parts.
    pub(super) fn new(real: Driver, settings: &VirtualGpus) -> Result<Self, VirtualError> {
        let mut count = 0;
        // SAFETY: the out parameter is a local.
        unsafe {
            checked("cuInit", (real.cuInit)(0))?;
            checked("cuDeviceGetCount", (real.cuDeviceGetCount)(&raw mut count))?;
        }
        let wholes = (0..count).map(|ordinal| Whole::find(&real, ordinal)).collect::<Result<Vec<_>, _>>()?;
        // In the order of their PCI addresses, by which NVML numbers them, if the GPUs are in theirs. So a program that uses the
        // first few devices also uses as many GPUs as there are.
        let parts = (0..settings.per_gpu).flat_map(|part| wholes.iter().map(move |whole| (whole, part)));
        let mut gpus: Vec<_> = parts.map(|(whole, part)| whole.part(part, settings.per_gpu)).collect();
        if let Some(visible) = &settings.visible {
            let find = |uuid: &Uuid| {
                let found = gpus.iter().find(|gpu| gpu.uuid == *uuid).cloned();
                found.ok_or_else(|| VirtualError::Unknown(gpus::name(uuid)))
            };
            gpus = visible.iter().map(find).collect::<Result<_, _>>()?;
        }
        if gpus.len() > MAX_DEVICES {
            return Err(VirtualError::TooMany { gpus: count as usize, per_gpu: settings.per_gpu });
        }
        let mut led = Vec::new();
        for gpu in &mut gpus {
            gpu.leads = !led.contains(&gpu.real);
            led.push(gpu.real);
        }
        Ok(Self { real, gpus, contexts: Mutex::default(), rights: Mutex::default() })
    }

    pub(super) fn gpus(&self) -> &[VirtualGpu] {
        &self.gpus
    }

    /// The virtual GPU with a device's number.
    pub(super) fn gpu(&self, device: CUdevice) -> Result<&VirtualGpu, CUresult> {
        usize::try_from(device).ok().and_then(|at| self.gpus.get(at)).ok_or(CUDA_ERROR_INVALID_DEVICE)
    }

    /// The driver's device behind a virtual GPU.
    pub(super) fn real(&self, device: CUdevice) -> Result<CUdevice, CUresult> {
        self.gpu(device).map(|gpu| gpu.real)
    }

    /// The driver, for what goes to it unchanged.
    pub(super) fn driver(&self) -> &Driver {
        &self.real
    }

    /// The contexts. Each change leaves them whole, so a panic elsewhere does not matter.
    fn contexts(&self) -> MutexGuard<'_, Contexts> {
        self.contexts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn rights(&self) -> MutexGuard<'_, Rights> {
        self.rights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An attribute of a virtual GPU: the GPU's, but for the PCI domain, which is its own, and for launches that the driver
    /// refuses on two contexts of one device.
    pub(super) fn attribute(&self, attribute: u32, device: CUdevice) -> Result<i32, CUresult> {
        let gpu = self.gpu(device)?;
        let mut value = 0;
        call!(self.cuDeviceGetAttribute(&raw mut value, attribute, gpu.real))?;
        Ok(match attribute {
            PCI_DOMAIN_ID => identity::pci_domain(value.cast_unsigned(), gpu.part).cast_signed(),
            COOPERATIVE_MULTI_DEVICE_LAUNCH => 0,
            _ => value,
        })
    }

    /// Whether two devices are different parts of one GPU.
    fn are_siblings(&self, one: CUdevice, other: CUdevice) -> Result<bool, CUresult> {
        Ok(self.real(one)? == self.real(other)? && one != other)
    }

    pub(super) fn can_access_peer(&self, device: CUdevice, peer: CUdevice) -> Result<i32, CUresult> {
        if self.are_siblings(device, peer)? {
            return Ok(1);
        }
        let mut can = 0;
        call!(self.cuDeviceCanAccessPeer(&raw mut can, self.real(device)?, self.real(peer)?))?;
        Ok(can)
    }

    /// Parts of one GPU reach each other's memory, with atomic operations. Access to arrays is not promised: of two devices that
    /// need it, not every pair has it.
    pub(super) fn p2p_attribute(&self, attribute: u32, from: CUdevice, to: CUdevice) -> Result<i32, CUresult> {
        let mut value = 0;
        if !self.are_siblings(from, to)? {
            call!(self.cuDeviceGetP2PAttribute(&raw mut value, attribute, self.real(from)?, self.real(to)?))?;
            return Ok(value);
        }
        match attribute {
            ACCESS_SUPPORTED | NATIVE_ATOMIC_SUPPORTED => Ok(1),
            PERFORMANCE_RANK..=ONLY_PARTIAL_NATIVE_ATOMIC_SUPPORTED => Ok(0),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// What the link between two devices does by an atomic operation: between parts of one GPU, what the GPU does in its memory.
    pub(super) fn p2p_atomic_capability(&self, operation: u32, from: CUdevice, to: CUdevice) -> Result<u32, CUresult> {
        if self.are_siblings(from, to)? {
            return Ok(atomics::in_own_memory(operation));
        }
        let (from, to, mut capability) = (self.real(from)?, self.real(to)?, 0);
        call!(self.cuDeviceGetP2PAtomicCapabilities(&raw mut capability, &raw const operation, 1, from, to))?;
        Ok(capability)
    }

    /// The primary context of a virtual GPU: that of its GPU, or one that stands for it.
    pub(super) fn retain(&self, device: CUdevice) -> Result<CUcontext, CUresult> {
        let gpu = self.gpu(device)?;
        let mut contexts = self.contexts();
        let mut context = 0;
        if gpu.leads {
            call!(self.cuDevicePrimaryCtxRetain(&raw mut context, gpu.real))?;
        } else if let Some(standing) = contexts.primary(device) {
            context = standing;
        } else {
            call!(self.cuCtxCreate_v2(&raw mut context, contexts.flags(device), gpu.real))?;
            // A retained context is not current, but a created one is.
            let mut popped = 0;
            call!(self.cuCtxPopCurrent_v2(&raw mut popped))?;
        }
        contexts.set_primary(device, context);
        Ok(context)
    }

    /// Ends the primary context of a virtual GPU.
    pub(super) fn reset(&self, device: CUdevice) -> Result<(), CUresult> {
        let gpu = self.gpu(device)?;
        let mut contexts = self.contexts();
        let ended = contexts.take_primary(device);
        match ended {
            _ if gpu.leads => call!(self.cuDevicePrimaryCtxReset_v2(gpu.real)),
            Some(context) => call!(self.cuCtxDestroy_v2(context)),
            None => Ok(()),
        }
    }

    /// Sets the flags of the primary context of a virtual GPU, and of the next one.
    pub(super) fn set_flags(&self, device: CUdevice, flags: u32) -> Result<(), CUresult> {
        let gpu = self.gpu(device)?;
        if gpu.leads {
            return call!(self.cuDevicePrimaryCtxSetFlags_v2(gpu.real, flags));
        }
        let mut contexts = self.contexts();
        if let Some(context) = contexts.primary(device) {
            let mut before = 0;
            call!(self.cuCtxGetCurrent(&raw mut before))?;
            call!(self.cuCtxSetCurrent(context))?;
            let set = call!(self.cuCtxSetFlags(flags));
            call!(self.cuCtxSetCurrent(before))?;
            set?;
        }
        contexts.set_flags(device, flags);
        Ok(())
    }

    pub(super) fn create_context(&self, flags: u32, device: CUdevice) -> Result<CUcontext, CUresult> {
        let mut context = 0;
        call!(self.cuCtxCreate_v2(&raw mut context, flags, self.real(device)?))?;
        self.contexts().add(context, device);
        Ok(context)
    }

    pub(super) fn destroy_context(&self, context: CUcontext) -> Result<(), CUresult> {
        call!(self.cuCtxDestroy_v2(context))?;
        self.contexts().remove(context);
        Ok(())
    }

    /// The current context.
    fn current(&self) -> Result<CUcontext, CUresult> {
        let mut context = 0;
        call!(self.cuCtxGetCurrent(&raw mut context))?;
        Ok(context)
    }

    /// Lets the current context use another one's memory. What the client allocates is mapped, and is opened by
    /// [`Self::set_access`]; what the driver itself allocates in a context is open to all contexts of its device.
    pub(super) fn enable_peer(&self, peer: CUcontext, flags: u32) -> Result<(), CUresult> {
        let current = self.current()?;
        let mut contexts = self.contexts();
        let ask = || call!(self.cuCtxEnablePeerAccess(peer, flags));
        let (Some(here), Some(owner)) = (contexts.gpu(current), contexts.gpu(peer)) else { return ask() };
        if here == owner {
            return ask();
        }
        if contexts.are_peers(current, peer) {
            return Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        if self.are_siblings(here, owner)? {
            if flags != 0 {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
        } else {
            // The driver may have opened the GPU for another context of it.
            match ask() {
                Ok(()) | Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) => {}
                Err(code) => return Err(code),
            }
        }
        contexts.add_peers(current, peer);
        Ok(())
    }

    pub(super) fn disable_peer(&self, peer: CUcontext) -> Result<(), CUresult> {
        let current = self.current()?;
        let mut contexts = self.contexts();
        let ask = || call!(self.cuCtxDisablePeerAccess(peer));
        let (Some(here), Some(owner)) = (contexts.gpu(current), contexts.gpu(peer)) else { return ask() };
        if !contexts.are_peers(current, peer) {
            return Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
        }
        let real = self.real(owner)?;
        let still = contexts.remove_peers(current, peer, |gpu| self.real(gpu) == Ok(real));
        if still || self.are_siblings(here, owner)? {
            return Ok(());
        }
        match ask() {
            Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED) => Ok(()),
            result => result,
        }
    }

    /// The free and the total memory of the current context's virtual GPU. Of what the GPU has free, it has no more than
    /// its part.
    pub(super) fn memory(&self) -> Result<(usize, usize), CUresult> {
        let (mut free, mut total) = (0, 0);
        call!(self.cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        let gpu = self.contexts().gpu(self.current()?);
        let most = gpu.and_then(|gpu| self.gpu(gpu).ok()).map_or(total, |gpu| gpu.memory);
        Ok((free.min(most), total.min(most)))
    }

    /// Properties of physical memory, with the driver's device.
    pub(super) fn properties(&self, of: &CUmemAllocationProp) -> Result<CUmemAllocationProp, CUresult> {
        let mut properties = *of;
        if of.location_type == CU_MEM_LOCATION_TYPE_DEVICE {
            properties.location_id = self.real(of.location_id)?;
        }
        Ok(properties)
    }

    pub(super) fn map(&self, at: u64, size: usize, offset: usize, handle: u64, flags: u64) -> Result<(), CUresult> {
        let mut rights = self.rights();
        call!(self.cuMemMap(at, size, offset, handle, flags))?;
        rights.map(at, size as u64);
        Ok(())
    }

    pub(super) fn unmap(&self, at: u64, size: usize) -> Result<(), CUresult> {
        let mut rights = self.rights();
        call!(self.cuMemUnmap(at, size))?;
        rights.unmap(at..at.saturating_add(size as u64));
        Ok(())
    }

    /// Sets access to mappings, so that each GPU has what any of its parts has.
    pub(super) fn set_access(&self, at: u64, size: usize, given: &[CUmemAccessDesc]) -> Result<(), CUresult> {
        let (mut of_gpus, mut others) = (Vec::new(), Vec::new());
        for access in given {
            if access.location_type == CU_MEM_LOCATION_TYPE_DEVICE {
                self.gpu(access.location_id)?;
                of_gpus.push((access.location_id, access.flags));
            } else {
                others.push(*access);
            }
        }
        let range = at..at.saturating_add(size as u64);
        let mut rights = self.rights();
        let mut changes = rights.changes(range.clone(), &of_gpus, |gpu| self.real(gpu).ok());
        // Where nothing is mapped, the driver says so.
        if changes.is_empty() {
            let mut of_real = BTreeMap::<CUdevice, u32>::new();
            for (gpu, flags) in &of_gpus {
                let most = of_real.entry(self.real(*gpu)?).or_default();
                *most = (*most).max(*flags);
            }
            changes.push(Change { range, of_gpus: of_real.into_iter().collect() });
        }
        for change in changes {
            let of_gpu = |&(location_id, flags): &(CUdevice, u32)| CUmemAccessDesc {
                location_type: CU_MEM_LOCATION_TYPE_DEVICE,
                location_id,
                flags,
            };
            let all: Vec<_> = change.of_gpus.iter().map(of_gpu).chain(others.iter().copied()).collect();
            let bytes = (change.range.end - change.range.start) as usize;
            call!(self.cuMemSetAccess(change.range.start, bytes, all.as_ptr(), all.len()))?;
            rights.set(change.range, &of_gpus);
        }
        Ok(())
    }
}

/// A GPU of the driver's.
struct Whole {
    device: CUdevice,
    uuid: Uuid,
    pci_bus_id: String,
    memory: usize,
}

impl Whole {
    fn find(real: &Driver, ordinal: i32) -> Result<Self, VirtualError> {
        let (mut device, mut uuid, mut memory, mut pci) = (0, [0; 16], 0, [0; 32]);
        // SAFETY: out parameters are locals of the sizes that are given.
        unsafe {
            checked("cuDeviceGet", (real.cuDeviceGet)(&raw mut device, ordinal))?;
            checked("cuDeviceGetUuid", (real.cuDeviceGetUuid_v2)(&raw mut uuid, device))?;
            checked("cuDeviceTotalMem", (real.cuDeviceTotalMem_v2)(&raw mut memory, device))?;
            checked("cuDeviceGetPCIBusId", (real.cuDeviceGetPCIBusId)(pci.as_mut_ptr(), pci.len() as i32, device))?;
        }
        let pci: Vec<u8> = pci.iter().map(|byte| byte.cast_unsigned()).collect();
        let pci_bus_id = CStr::from_bytes_until_nul(&pci).map(|it| it.to_string_lossy().into_owned());
        Ok(Self { device, uuid, pci_bus_id: pci_bus_id.unwrap_or_default(), memory })
    }

    /// One of so many parts.
    fn part(&self, part: u32, of: u32) -> VirtualGpu {
        VirtualGpu {
            real: self.device,
            part_of: self.uuid,
            part,
            uuid: identity::uuid(self.uuid, part),
            pci_bus_id: identity::pci_bus_id(&self.pci_bus_id, part).unwrap_or_else(|| self.pci_bus_id.clone()),
            memory: self.memory / of as usize,
            leads: false,
        }
    }
}

#[cfg(test)]
mod tests;
