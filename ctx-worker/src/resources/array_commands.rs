//! Commands about arrays, and about textures and surfaces.

use std::collections::BTreeSet;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, ArrayCreate, ArrayDestroy, Kind, MipmapCreate, TextureCreate};

use crate::resources::Memory;
use crate::resources::arrays::{bytes, descriptor, ensure_savable, is_array};
use crate::resources::globals::Globals;
use crate::resources::textures::{descriptors, destroy_textures, texture_destroy};
use crate::session::Session;
use crate::session::call::Call;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::Then;

impl Memory {
    /// Executes a command about arrays, textures and surfaces.
    pub(crate) fn array_command(
        &mut self,
        call: &mut Call,
        globals: &Globals,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::ARRAY_CREATE => self.array_create(call, args),
            command::ARRAY_DESTROY => self.array_destroy(call, args),
            command::MIPMAP_CREATE => self.mipmap_create(call, args),
            command::MIPMAP_DESTROY => self.array_destroy(call, args),
            command::TEXTURE_CREATE | command::SURFACE_CREATE => {
                let kind = if number == command::TEXTURE_CREATE { Kind::TexObject } else { Kind::SurfObject };
                let wanted = TextureCreate::read(args)?;
                let descriptors = descriptors(&call.session, &wanted)?;
                if let Some((address, bytes)) = descriptors.memory {
                    self.reachable(globals, address, bytes)?;
                }
                self.textures.create(call, &wanted, &descriptors, reply, kind)
            }
            command::TEXTURE_DESTROY => texture_destroy(call, args),
            _ => Err(Refused::UnknownCall(number)),
        }
    }

    fn array_create(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ArrayCreate { array: handle, size, format, channels, flags } = ArrayCreate::read(args)?;
        let desc = descriptor(size, format, channels, flags);
        ensure_savable(&desc)?;
        let (driver, context) = (call.driver(), call.owner());
        let real = self.make_counted(driver, call.session.device_of_context(context)?, bytes(&desc), || {
            let mut real = 0;
            // SAFETY: the out parameter is a local, the descriptor lives through the call.
            match unsafe { (driver.cuArray3DCreate_v2)(&raw mut real, &raw const desc) } {
                CUDA_SUCCESS => Ok(real),
                code => Err(code),
            }
        })?;
        self.keep_array(call, handle, real, 0, desc)?;
        self.count_arrays(&call.session);
        call.session.objects.record(command::ARRAY_CREATE, handle, context, args.all(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Adds an array's object and shape. The caller calls [`Memory::count_arrays`].
    pub(crate) fn keep_array(
        &mut self,
        call: &mut Call,
        handle: u64,
        real: CUarray,
        parent: u64,
        desc: CudaArray3dDescriptor,
    ) -> Result<(), Refused> {
        let object = Object { kind: Kind::Array, real, context: call.owner(), parent, allocates: false };
        if !call.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.arrays.shapes.insert(handle, desc);
        Ok(())
    }

    fn mipmap_create(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let MipmapCreate { mipmapped: handle, size, format, channels, flags, levels } = MipmapCreate::read(args)?;
        let (desc, count) = (descriptor(size, format, channels, flags), levels.len() as u32);
        if count > desc.most_levels() {
            return Err(Malformed("more levels than an array of this size has").into());
        }
        ensure_savable(&desc)?;
        let (driver, context) = (call.driver(), call.owner());
        let all = (0..count).map(|level| bytes(&desc.level(level))).fold(0, u64::saturating_add);
        let real = self.make_counted(driver, call.session.device_of_context(context)?, all, || {
            let mut real = 0;
            // SAFETY: the out parameter is a local, the descriptor lives through the call.
            match unsafe { (driver.cuMipmappedArrayCreate)(&raw mut real, &raw const desc, count) } {
                CUDA_SUCCESS => Ok(real),
                code => Err(code),
            }
        })?;
        let object = Object { kind: Kind::MipmappedArray, real, context, parent: 0, allocates: false };
        if !call.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        for (level, array) in (0..).zip(levels) {
            let mut real = 0;
            // SAFETY: the out parameter is a local, the mipmapped array was made just now.
            check(unsafe { (driver.cuMipmappedArrayGetLevel)(&raw mut real, object.real, level) })?;
            self.keep_array(call, array, real, handle, desc.level(level))?;
        }
        // All levels count at once: the mipmapped array was counted already.
        self.count_arrays(&call.session);
        call.session.objects.record(command::MIPMAP_CREATE, handle, context, args.all(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn array_destroy(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ArrayDestroy { array: handle } = ArrayDestroy::read(args)?;
        match call.session.objects.get(handle) {
            Some(o) if is_array(o) && o.parent == 0 => {}
            _ => return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
        }
        // As with freed memory, everything enqueued before may still use the array.
        let busy = call.session.waiting.busy(0);
        call.when_done(busy, Then::DestroyArray { array: handle, reply: call.header.reply })?;
        Ok(Outcome::Later)
    }

    /// Destroys an array that the device no longer uses.
    pub(crate) fn destroy_array(&mut self, call: &mut Call, handle: u64) -> CUresult {
        let Some(object) = call.session.objects.get(handle).copied().filter(is_array) else {
            return CUDA_ERROR_INVALID_HANDLE;
        };
        let gone = call.session.objects.remove(handle);
        for (handle, _) in &gone {
            self.arrays.shapes.remove(handle);
        }
        self.count_arrays(&call.session);
        if call.enter(object.context).is_err() {
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        destroy_textures(call.driver(), &gone);
        // SAFETY: the array is the driver's own, idle, and nobody has a handle of it any more.
        unsafe {
            match object.kind {
                Kind::MipmappedArray => (call.driver().cuMipmappedArrayDestroy)(object.real),
                _ => (call.driver().cuArrayDestroy)(object.real),
            }
        }
    }

    /// Destroys the objects of a context that take memory. Nothing runs in the context.
    pub(crate) fn clear_arrays(&mut self, call: &mut Call, context: u64) {
        // A level is destroyed with its mipmapped array.
        let whole = |handle: &u64| {
            let object = call.session.objects.get(*handle).filter(|o| o.context == context)?;
            Some(if object.parent == 0 { *handle } else { object.parent })
        };
        let gone: BTreeSet<u64> = self.arrays.shapes.keys().filter_map(whole).collect();
        for handle in gone {
            self.destroy_array(call, handle);
        }
    }

    /// Counts the client's arrays towards its limits.
    fn count_arrays(&mut self, session: &Session) {
        for device in 0..self.devices.len() {
            let bytes = self.arrays.bytes(session, device);
            if let Some(device) = self.devices.get_mut(device) {
                device.memory.set_beside(bytes);
            }
        }
    }

    /// The bytes that the client has on each device.
    pub(crate) fn device_bytes(&self, session: &Session) -> Vec<u64> {
        let devices = self.devices.iter().enumerate();
        devices.map(|(i, d)| d.memory.bytes() + self.arrays.bytes(session, i) + self.vmm.bytes(i)).collect()
    }
}
