//! Use of one device's memory by another: peer access, and copies between devices without peer access.
//!
//! The driver opens memory that it has allocated itself. The worker opens mapped pieces, both existing and later ones.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, PeerDisable, PeerEnable};
use rekindle_wire::window;

use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};

impl Memory {
    pub(crate) fn peer_enable(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let PeerEnable { peer, flags } = PeerEnable::read(args)?;
        let (here, owner) = (call.device()?, call.session.device_of_context(peer)?);
        let real = call.session.objects.get(peer).map_or(0, |o| o.real);
        // SAFETY: the context is the driver's own.
        let result = unsafe { (call.driver().cuCtxEnablePeerAccess)(real, flags) };
        if result == CUDA_SUCCESS {
            let (driver, device) = (call.driver(), self.devices[here].device);
            let opened = self.devices[owner].memory.open_to(driver, device);
            let context = call.owner();
            call.session.objects.record_change(command::PEER_ENABLE, context, context, args.all(), None);
            opened.map_err(|failed| Refused::Code(failed.code))?;
        }
        Ok(Outcome::Done(result))
    }

    pub(crate) fn peer_disable(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let PeerDisable { peer } = PeerDisable::read(args)?;
        let (here, owner) = (call.device()?, call.session.device_of_context(peer)?);
        let real = call.session.objects.get(peer).map_or(0, |o| o.real);
        // SAFETY: the context is the driver's own.
        let result = unsafe { (call.driver().cuCtxDisablePeerAccess)(real) };
        if result == CUDA_SUCCESS {
            let mut enabled = Writer::new();
            PeerEnable { peer, flags: 0 }.write(&mut enabled);
            call.session.objects.unrecord(command::PEER_ENABLE, call.owner(), enabled.bytes());
            let (driver, device) = (call.driver(), self.devices[here].device);
            let closed = self.devices[owner].memory.close_to(driver, device);
            closed.map_err(|failed| Refused::Code(failed.code))?;
            self.open_managed(driver).map_err(Refused::Code)?;
        }
        Ok(Outcome::Done(result))
    }

    /// Lets every device use managed memory, which belongs to one. `CUDA_ERROR_NOT_SUPPORTED` where a device cannot.
    pub(crate) fn open_managed(&mut self, driver: &Driver) -> Result<(), CUresult> {
        for base in self.managed.bases() {
            let Some(owner) = window::device_of(base).filter(|it| *it < self.devices.len()) else { continue };
            for other in (0..self.devices.len()).filter(|it| *it != owner) {
                if !self.may_access(driver, other, owner) {
                    return Err(CUDA_ERROR_NOT_SUPPORTED);
                }
                let device = self.devices[other].device;
                self.devices[owner].memory.allow(driver, base, device).map_err(|failed| failed.code)?;
            }
        }
        Ok(())
    }

    /// Executes a copy that involves another device's memory, where that memory cannot be opened to this context's device:
    /// the driver copies through the host if it is told the device of each end. `None` where the copy needs no such help.
    pub(crate) fn copy_staged(
        &self,
        call: &Call,
        target: u64,
        source: u64,
        bytes: u64,
        stream: CUstream,
    ) -> Result<Option<CUresult>, Refused> {
        let here = call.device()?;
        let (to, from) = (window::device_of(target), window::device_of(source));
        let apart = |owner: Option<usize>| owner.is_some_and(|o| o != here && !self.may_access(call.driver(), here, o));
        if !apart(to) && !apart(from) {
            return Ok(None);
        }
        let context = |owner: Option<usize>| self.devices.get(owner.unwrap_or(here)).map_or(0, |d| d.primary);
        // SAFETY: both ranges are memory of this client, which the caller has checked; the contexts are the driver's own.
        Ok(Some(unsafe {
            let (to, from) = (context(to), context(from));
            (call.driver().cuMemcpyPeerAsync)(target, to, source, from, bytes as usize, stream)
        }))
    }

    /// Whether a device can access another device's memory.
    pub(crate) fn may_access(&self, driver: &Driver, device: usize, owner: usize) -> bool {
        let (Some(device), Some(owner)) = (self.devices.get(device), self.devices.get(owner)) else {
            return false;
        };
        let mut can = 0;
        // SAFETY: the out parameter is a local.
        let result = unsafe { (driver.cuDeviceCanAccessPeer)(&raw mut can, device.device, owner.device) };
        result == CUDA_SUCCESS && can != 0
    }
}
