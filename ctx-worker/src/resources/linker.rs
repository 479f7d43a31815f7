//! Commands of the linker. A linker that is alive is part of what is saved: its inputs are code images, and a restore
//! links them again.

use std::ffi::CStr;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind, LinkAdd};
use rekindle_wire::layout::REPLY_BYTES;

use crate::resources::code_store::Image;
use crate::resources::jit::JitOptions;
use crate::serve::executor::Executor;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused};

/// A linker of the client's.
pub(crate) struct Link {
    real: u64,
    /// The driver writes their logs in every later call.
    options: JitOptions,
    output: Vec<u8>,
}

impl Executor {
    pub(crate) fn link_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let result = match call {
            command::LINK_CREATE => self.link_create(args)?,
            command::LINK_ADD => {
                let number = LinkAdd::read(&mut args.clone())?.image;
                let arrived = self.code.store.complete(number, self.capability());
                let image = arrived.map_err(|_| Refused::Code(CUDA_ERROR_INVALID_IMAGE))?;
                self.link_add(args, &image, reply)?
            }
            command::LINK_COMPLETE => self.link_complete(args, reply)?,
            command::LINK_OUTPUT => self.link_output(args, reply)?,
            command::LINK_DESTROY => {
                let handle = args.word()?;
                args.end()?;
                self.link(handle)?;
                self.drop_link(handle);
                self.session.objects.remove(handle);
                CUDA_SUCCESS
            }
            _ => return Err(Refused::UnknownCall(call)),
        };
        Ok(Outcome::Done(result))
    }

    fn link(&mut self, handle: u64) -> Result<&mut Link, Refused> {
        self.code.links.get_mut(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))
    }

    fn link_create(&mut self, args: &mut Reader<'_>) -> Result<CUresult, Refused> {
        let handle = args.word()?;
        let mut options = JitOptions::read(args.blob()?)?;
        args.end()?;
        let (count, numbers, values) = options.arrays();
        let mut real = 0_u64;
        // SAFETY: the arrays hold `count` options, whose buffers stay where they are as long as the linker does.
        let result = unsafe { (self.driver().cuLinkCreate_v2)(count, numbers, values, (&raw mut real).cast()) };
        if result != CUDA_SUCCESS {
            return Ok(result);
        }
        let context = self.header.context;
        let object = Object { kind: Kind::Linker, real, context, parent: 0, allocates: false };
        if !self.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.session.objects.record(command::LINK_CREATE, handle, context, args.all(), None);
        self.code.links.insert(handle, Link { real, options, output: Vec::new() });
        Ok(CUDA_SUCCESS)
    }

    /// Adds an input; also for a restore, whose record has the same parameters.
    pub(crate) fn link_add(
        &mut self,
        args: &mut Reader<'_>,
        image: &Arc<Image>,
        reply: &mut Writer,
    ) -> Result<CUresult, Refused> {
        let (handle, kind, _, name) = (args.word()?, args.word32()?, args.word()?, args.text()?);
        let options = JitOptions::read(args.blob()?)?;
        args.end()?;
        let data = image.single().ok_or(Malformed("an input of a linker in several parts"))?;
        let driver = self.driver();
        let real = self.link(handle)?.real;
        let result = link_data(driver, (real, kind), data, name, options);
        self.answer_link(handle, reply)?;
        if result == CUDA_SUCCESS {
            self.session.objects.record(command::LINK_ADD, handle, self.header.context, args.all(), Some(image.hash));
        }
        Ok(result)
    }

    fn answer_link(&mut self, handle: u64, reply: &mut Writer) -> Result<(), Refused> {
        let options = std::mem::take(&mut self.link(handle)?.options);
        self.answer_jit(&options, reply);
        self.link(handle)?.options = options;
        Ok(())
    }

    fn link_complete(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<CUresult, Refused> {
        let handle = args.word()?;
        args.end()?;
        let driver = self.driver();
        let link = self.link(handle)?;
        let (mut output, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: out parameters are locals, the handle the driver's own.
        let result = unsafe { (driver.cuLinkComplete)(link.real, &raw mut output, &raw mut size) };
        if result == CUDA_SUCCESS && !output.is_null() {
            // SAFETY: the driver's output has as many bytes as it says, and stays until the linker is destroyed.
            link.output = unsafe { std::slice::from_raw_parts(output.cast::<u8>(), size) }.to_vec();
        }
        reply.word(link.output.len() as u64);
        self.answer_link(handle, reply)?;
        if result == CUDA_SUCCESS {
            self.session.objects.record(command::LINK_COMPLETE, handle, self.header.context, args.all(), None);
        }
        Ok(result)
    }

    fn link_output(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<CUresult, Refused> {
        let (handle, offset) = (args.word()?, args.word()? as usize);
        args.end()?;
        let output = &self.link(handle)?.output;
        let rest = output.get(offset..).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        reply.blob(&rest[..rest.len().min(REPLY_BYTES - 16)]);
        Ok(CUDA_SUCCESS)
    }

    /// Destroys the driver's side of a linker, if the handle is one's.
    pub(crate) fn drop_link(&mut self, handle: u64) {
        if let Some(link) = self.code.links.remove(&handle) {
            // SAFETY: the handle is the driver's own, and not used again.
            unsafe { (self.driver().cuLinkDestroy)(link.real) };
        }
    }
}

fn link_data(
    driver: &crate::gpu::driver::Driver,
    (real, kind): (u64, u32),
    data: &[u8],
    name: &CStr,
    mut options: JitOptions,
) -> CUresult {
    let (count, numbers, values) = options.arrays();
    // SAFETY: the driver reads the data, which has that length, and has taken it when it returns; the arrays hold
    // `count` options; the name is a C string.
    unsafe {
        let start = data.as_ptr().cast_mut().cast();
        (driver.cuLinkAddData_v2)(real, kind, start, data.len(), name.as_ptr(), count, numbers, values)
    }
}
