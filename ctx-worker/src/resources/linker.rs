//! Commands of the linker. A linker that is alive is saved: its inputs are code images, and a restore links them again.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind, LinkAdd, LinkCreate, LinkOutput, OfLinker};
use rekindle_wire::layout::REPLY_BYTES;

use crate::gpu::driver::Driver;
use crate::resources::code_store::Image;
use crate::resources::jit::{CodeLogs, JitOptions};
use crate::session::call::Call;
use crate::session::objects::Object;
use crate::session::outcome::Refused;

/// A linker.
struct Link {
    real: u64,
    /// The options of the linker's creation; the driver writes their logs in every later call.
    options: JitOptions,
    output: Vec<u8>,
}

/// The client's linkers.
#[derive(Default)]
pub(crate) struct Links {
    by_handle: HashMap<u64, Link>,
}

impl Links {
    /// Destroys a linker, and its object.
    pub(crate) fn destroy(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<CUresult, Refused> {
        let OfLinker { linker } = OfLinker::read(args)?;
        self.link(linker)?;
        self.forget(call.driver(), linker);
        call.session.objects.remove(linker);
        Ok(CUDA_SUCCESS)
    }

    fn link(&mut self, handle: u64) -> Result<&mut Link, Refused> {
        self.by_handle.get_mut(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))
    }

    /// Makes a linker.
    pub(crate) fn create(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<CUresult, Refused> {
        let LinkCreate { linker: handle, options } = LinkCreate::read(args)?;
        let mut options = JitOptions::read(options)?;
        let (count, numbers, values) = options.arrays();
        let mut real = 0_u64;
        // SAFETY: the arrays hold `count` options, whose buffers stay where they are as long as the linker does.
        let result = unsafe { (call.driver().cuLinkCreate_v2)(count, numbers, values, (&raw mut real).cast()) };
        if result != CUDA_SUCCESS {
            return Ok(result);
        }
        let context = call.owner();
        let object = Object { kind: Kind::Linker, real, context, parent: 0, allocates: false };
        if !call.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        call.session.objects.record(command::LINK_CREATE, handle, context, args.all(), None);
        self.by_handle.insert(handle, Link { real, options, output: Vec::new() });
        Ok(CUDA_SUCCESS)
    }

    /// Adds an input. A restore uses this too, with a record that has the same parameters.
    pub(crate) fn add(
        &mut self,
        call: &mut Call,
        logs: &mut CodeLogs,
        add: &LinkAdd<'_>,
        parameters: &[u8],
        image: &Arc<Image>,
        reply: &mut Writer,
    ) -> Result<CUresult, Refused> {
        let LinkAdd { linker: handle, kind, name, .. } = *add;
        let options = JitOptions::read(add.options)?;
        let data = image.single().ok_or(Malformed("an input of a linker in several parts"))?;
        let driver = call.driver();
        let real = self.link(handle)?.real;
        let result = link_data(driver, (real, kind), data, name, options);
        self.answer(call, logs, handle, reply)?;
        if result == CUDA_SUCCESS {
            call.session.objects.record(command::LINK_ADD, handle, call.owner(), parameters, Some(image.hash));
        }
        Ok(result)
    }

    fn answer(&mut self, call: &Call, logs: &mut CodeLogs, handle: u64, reply: &mut Writer) -> Result<(), Refused> {
        let options = std::mem::take(&mut self.link(handle)?.options);
        logs.answer(call.header.thread, &options, reply);
        self.link(handle)?.options = options;
        Ok(())
    }

    /// Links what was added.
    pub(crate) fn complete(
        &mut self,
        call: &mut Call,
        logs: &mut CodeLogs,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<CUresult, Refused> {
        let OfLinker { linker: handle } = OfLinker::read(args)?;
        let driver = call.driver();
        let link = self.link(handle)?;
        let (mut output, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: out parameters are locals, the handle the driver's own.
        let result = unsafe { (driver.cuLinkComplete)(link.real, &raw mut output, &raw mut size) };
        if result == CUDA_SUCCESS && !output.is_null() {
            // SAFETY: the driver's output has as many bytes as it says, and stays until the linker is destroyed.
            link.output = unsafe { std::slice::from_raw_parts(output.cast::<u8>(), size) }.to_vec();
        }
        reply.word(link.output.len() as u64);
        self.answer(call, logs, handle, reply)?;
        if result == CUDA_SUCCESS {
            call.session.objects.record(command::LINK_COMPLETE, handle, call.owner(), args.all(), None);
        }
        Ok(result)
    }

    /// Gives the client a part of the linked code.
    pub(crate) fn output(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<CUresult, Refused> {
        let LinkOutput { linker, offset } = LinkOutput::read(args)?;
        let output = &self.link(linker)?.output;
        let rest = output.get(offset as usize..).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        reply.blob(&rest[..rest.len().min(REPLY_BYTES - 16)]);
        Ok(CUDA_SUCCESS)
    }

    /// Destroys the driver's side of a linker, if the handle is a linker's.
    pub(crate) fn forget(&mut self, driver: &Driver, handle: u64) {
        if let Some(link) = self.by_handle.remove(&handle) {
            // SAFETY: the handle is the driver's own, and not used again.
            unsafe { (driver.cuLinkDestroy)(link.real) };
        }
    }
}

fn link_data(driver: &Driver, (real, kind): (u64, u32), data: &[u8], name: &CStr, mut options: JitOptions) -> CUresult {
    let (count, numbers, values) = options.arrays();
    // SAFETY: the driver reads the data, which has that length, and has taken it when it returns; the arrays hold
    // `count` options; the name is a C string.
    unsafe {
        let start = data.as_ptr().cast_mut().cast();
        (driver.cuLinkAddData_v2)(real, kind, start, data.len(), name.as_ptr(), count, numbers, values)
    }
}
