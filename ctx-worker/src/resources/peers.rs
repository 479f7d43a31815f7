//! Memory of one device used by another: peer access, and copies between devices that have none.
//!
//! The driver opens what it has allocated itself; mapped pieces are opened here, those that are there and those to come.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command;
use rekindle_wire::window;

use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};

impl Executor {
    pub(crate) fn peer_enable(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let (peer, flags) = (args.word()?, args.word32()?);
        args.end()?;
        let (here, owner) = (self.device_of_context(self.header.context)?, self.device_of_context(peer)?);
        let real = self.session.objects.get(peer).map_or(0, |o| o.real);
        // SAFETY: the context is the driver's own.
        let result = unsafe { (self.driver().cuCtxEnablePeerAccess)(real, flags) };
        if result == CUDA_SUCCESS {
            let (driver, device) = (self.driver(), self.memory.devices[here].device);
            let opened = self.memory.devices[owner].memory.open_to(driver, device);
            let context = self.header.context;
            self.session.objects.record_change(command::PEER_ENABLE, context, context, args.all(), None);
            opened.map_err(|failed| Refused::Code(failed.code))?;
        }
        Ok(Outcome::Done(result))
    }

    pub(crate) fn peer_disable(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let peer = args.word()?;
        args.end()?;
        let (here, owner) = (self.device_of_context(self.header.context)?, self.device_of_context(peer)?);
        let real = self.session.objects.get(peer).map_or(0, |o| o.real);
        // SAFETY: the context is the driver's own.
        let result = unsafe { (self.driver().cuCtxDisablePeerAccess)(real) };
        if result == CUDA_SUCCESS {
            let mut enabled = Writer::new();
            enabled.word(peer);
            enabled.word(0);
            self.session.objects.unrecord(command::PEER_ENABLE, self.header.context, enabled.bytes());
            let (driver, device) = (self.driver(), self.memory.devices[here].device);
            let closed = self.memory.devices[owner].memory.close_to(driver, device);
            closed.map_err(|failed| Refused::Code(failed.code))?;
        }
        Ok(Outcome::Done(result))
    }

    /// A copy that involves another device's memory, which this context's device cannot be let in to: the driver takes
    /// it through the host if it is told whose memory each end is. `None` where nothing of the kind is needed.
    pub(crate) fn copy_staged(
        &mut self,
        target: u64,
        source: u64,
        bytes: u64,
        stream: CUstream,
    ) -> Result<Option<CUresult>, Refused> {
        let here = self.device_of_context(self.header.context)?;
        let (to, from) = (window::device_of(target), window::device_of(source));
        let apart = |owner: Option<usize>| owner.is_some_and(|o| o != here && !self.may_access(here, o));
        if !apart(to) && !apart(from) {
            return Ok(None);
        }
        let context = |owner: Option<usize>| self.memory.devices.get(owner.unwrap_or(here)).map_or(0, |d| d.primary);
        // SAFETY: both ranges are memory of this client, which the caller has checked; the contexts are the driver's own.
        Ok(Some(unsafe {
            let (to, from) = (context(to), context(from));
            (self.driver().cuMemcpyPeerAsync)(target, to, source, from, bytes as usize, stream)
        }))
    }

    /// Whether a device can be let in to another's memory.
    pub(crate) fn may_access(&self, device: usize, owner: usize) -> bool {
        let (Some(device), Some(owner)) = (self.memory.devices.get(device), self.memory.devices.get(owner)) else {
            return false;
        };
        let mut can = 0;
        // SAFETY: the out parameter is a local.
        let result = unsafe { (self.driver().cuDeviceCanAccessPeer)(&raw mut can, device.device, owner.device) };
        result == CUDA_SUCCESS && can != 0
    }
}
