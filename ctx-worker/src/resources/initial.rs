//! The places of functions, as far as they can be inferred from memory.
//!
//! The driver tells where a variable lies, but not where a function lies. However, it fills variables whose initial value
//! names functions (tables of pointers, tables of virtual functions) with the addresses that it has chosen. So the
//! worker reads the content of such variables when they are placed, before a kernel can write them, and again at the same
//! place of a restore's replay. Where the content differs, functions lie elsewhere, and pointers to them may be anywhere in
//! the client's memory.
//!
//! Both times the worker reads the same variables: those in primary contexts that have not been reset. For these the engine
//! has had what it needs since the worker's start. For other contexts it would have to be made now, which would move code.

use std::collections::HashSet;
use std::ffi::CStr;
use std::time::Duration;

use rekindle_images::{self as images, InitialHash, PIECE_LENGTH};

use crate::gpu::driver::Driver;
use crate::resources::code_store::Global;
use crate::resources::globals::Placed;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::{Code, Memory};
use crate::session::Session;
use crate::session::call::Call;

/// The longest time of a read. Commands that run on the device delay the read only where they are in the same hardware
/// queue.
const LIMIT: Duration = Duration::from_secs(1);
/// The most bytes that are read at once.
pub(crate) const MOST: u64 = PIECE_LENGTH;
/// The most copies enqueued at once. So few find room even in a hardware queue that has all the commands that the client
/// may have there (`waiting.rs`), so that enqueuing them does not block.
const AT_ONCE: usize = 32;

/// Reads device memory beside whatever the client's streams do.
pub(crate) trait ReadDevice {
    /// Reads regions of a device's memory, given by address and length, of [`MOST`] bytes together. Waits up to `limit` for
    /// the reads. `None` where the regions cannot be read now.
    ///
    /// # Safety
    /// The regions are mapped, and the device may read them.
    unsafe fn read_now(
        &mut self,
        driver: &Driver,
        device: usize,
        regions: &[(u64, u64)],
        limit: Duration,
    ) -> Option<Vec<Vec<u8>>>;
}

/// The needs of a command that may make the driver load code: the client's memory, and a reader of device memory.
pub(crate) struct Loading<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) reader: &'a mut dyn ReadDevice,
}

impl Loading<'_> {
    /// Reads the content of variables that have just been placed in the command's context, which is the current one.
    pub(super) fn read_initial(&mut self, call: &Call, globals: &[Global], placed: &mut [Placed]) {
        let with_addresses = globals.iter().filter(|global| !global.points_to.is_empty());
        let names: HashSet<&CStr> = with_addresses.map(|global| global.name.as_c_str()).collect();
        if names.is_empty() {
            return;
        }
        let Some(device) = self.memory.readable(&call.session, call.owner()) else { return };
        let mut room = MOST;
        let mut wanted: Vec<&mut Placed> = placed.iter_mut().filter(|p| names.contains(p.name.as_c_str())).collect();
        wanted.retain(|p| match room.checked_sub(p.size) {
            Some(left) if p.size > 0 => {
                room = left;
                true
            }
            _ => false,
        });
        let driver = call.driver();
        for some in wanted.chunks_mut(AT_ONCE) {
            let regions: Vec<_> = some.iter().map(|p| (p.address, p.size)).collect();
            // Variables that are not read will not be compared.
            // SAFETY: the driver has just said that the variables lie there.
            let Some(contents) = (unsafe { self.reader.read_now(driver, device, &regions, LIMIT) }) else { return };
            for (placed, content) in some.iter_mut().zip(contents) {
                placed.initial = Some(InitialHash::of(&content));
            }
        }
    }
}

impl Memory {
    /// The device of a context, if the worker reads variables in that context.
    fn readable(&self, session: &Session, context: u64) -> Option<usize> {
        let real = session.objects.get(context)?.real;
        let ordinal = session.device_of_context(context).ok()?;
        // The engine's buffers belong to the first device.
        let reset = [0, ordinal].iter().any(|number| self.devices.get(*number).is_none_or(|device| device.reset));
        (!reset && self.devices.get(ordinal)?.primary == real).then_some(ordinal)
    }
}

impl Code {
    /// Compares the content of a variable when its code was loaded here with its content when the code was first loaded.
    pub(crate) fn compare_initial(
        &self,
        session: &Session,
        memory: &Memory,
        (parent, context): (u64, u64),
        placed: &Placed,
        saved: &images::Global,
    ) -> Result<(), NotLoaded> {
        let Some(before) = saved.initial.filter(|_| memory.readable(session, context).is_some()) else { return Ok(()) };
        match placed.initial {
            Some(here) if here == before => Ok(()),
            Some(_) => {
                let image = self.loaded.get(&parent);
                let global = image.and_then(|i| i.globals.as_ref().ok()?.iter().find(|g| g.name == placed.name));
                let names = global.map(|global| global.points_to.clone()).unwrap_or_default();
                Err(NotLoaded::CodeMoved { variable: saved.name.clone(), names })
            }
            None => Err(NotLoaded::NotCompared(saved.name.clone())),
        }
    }
}
