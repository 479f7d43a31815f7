//! Kernel launches.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{Kind, Launch, LaunchOnDevices};
use rekindle_wire::window;

use crate::resources::launch_attributes::attributes;
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};

impl Executor {
    pub(crate) fn launch(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let launch = Launch::read(args)?;
        let object = *self.call.session.objects.get(launch.function).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let function = self.handle_function(launch.function)?;
        if object.kind == Kind::Kernel {
            self.instantiate(object.parent)?;
        }
        let stream = self.handle_stream(launch.stream)?;
        let refusal = match object.allocates {
            true => self.prepare_heap(self.call.header.context, stream)?,
            false => None,
        };
        // The driver takes gathered parameters through `extra`: CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE.
        let mut size = launch.parameters.len();
        let mut extra = [
            std::ptr::without_provenance_mut(1),
            launch.parameters.as_ptr().cast_mut().cast(),
            std::ptr::without_provenance_mut(2),
            (&raw mut size).cast(),
            std::ptr::null_mut(),
        ];
        let [gx, gy, gz] = launch.grid;
        let [bx, by, bz] = launch.block;
        let driver = self.driver();
        let result = if launch.flags == 0 && launch.attributes.is_empty() {
            // SAFETY: handles are the driver's own; `extra` and what it points to live through the call.
            unsafe {
                (driver.cuLaunchKernel)(
                    function,
                    gx,
                    gy,
                    gz,
                    bx,
                    by,
                    bz,
                    launch.shared_bytes,
                    stream,
                    std::ptr::null_mut(),
                    extra.as_mut_ptr(),
                )
            }
        } else {
            let attributes = attributes(&self.call.session, &launch)?;
            let config = CUlaunchConfig {
                grid: launch.grid,
                block: launch.block,
                shared_bytes: launch.shared_bytes,
                stream,
                attrs: attributes.as_ptr(),
                num_attrs: attributes.len() as u32,
            };
            // SAFETY: as above, and the configuration lives through the call.
            unsafe { (driver.cuLaunchKernelEx)(&raw const config, function, std::ptr::null_mut(), extra.as_mut_ptr()) }
        };
        self.code.prints.notice(&self.call.session);
        if result == CUDA_SUCCESS {
            self.call.session.waiting.launched(self.stream_key(launch.stream)?, launch.function);
            // The launch was also one of the events' records.
            for event in launch.events() {
                if self.call.session.objects.get(event).is_some() {
                    self.scheduler.times.event_recorded(event);
                }
            }
        }
        let outcome = Outcome::Done(result);
        self.launched_allocating(&outcome, refusal);
        Ok(outcome)
    }

    /// Cooperative launches on several devices: one command, since they wait for each other.
    pub(crate) fn launch_on_devices(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let LaunchOnDevices { flags, launches } = LaunchOnDevices::read(args)?;
        if launches.len() > window::MAX_DEVICES {
            return Err(Malformed("more launches than there are devices").into());
        }
        // Each launch's parameters, and the place of each of its parameters.
        let mut parameters: Vec<(Vec<u64>, Vec<*mut c_void>)> = Vec::new();
        let (mut list, mut keys, mut refusal) = (Vec::new(), Vec::new(), None);
        for launch in launches {
            let launch = Launch::read(&mut Reader::new(launch))?;
            let object =
                *self.call.session.objects.get(launch.function).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
            let context = self.stream_key(launch.stream)?.context;
            self.enter_context(context)?;
            let before = std::mem::replace(&mut self.call.header.context, context);
            let function = self.handle_function(launch.function);
            let instantiated = if object.kind == Kind::Kernel { self.instantiate(object.parent) } else { Ok(()) };
            self.call.header.context = before;
            let function = instantiated.and(function)?;
            let stream = self.handle_stream(launch.stream)?;
            if object.allocates {
                refusal = refusal.or(self.prepare_heap(context, stream)?);
            }
            let mut bytes = vec![0_u64; launch.parameters.len().div_ceil(8)];
            for (word, chunk) in bytes.iter_mut().zip(launch.parameters.chunks(8)) {
                let mut eight = [0; 8];
                eight[..chunk.len()].copy_from_slice(chunk);
                *word = u64::from_ne_bytes(eight);
            }
            let places = self.parameter_places(function, &mut bytes)?;
            let key = self.stream_key(launch.stream)?;
            list.push(CudaLaunchParams {
                function,
                grid: launch.grid,
                block: launch.block,
                shared_bytes: launch.shared_bytes,
                stream,
                params: std::ptr::null_mut(),
            });
            parameters.push((bytes, places));
            keys.push((key, launch.function));
        }
        self.enter_context(self.call.header.context)?;
        for (launch, (_, places)) in list.iter_mut().zip(&mut parameters) {
            launch.params = places.as_mut_ptr();
        }
        // SAFETY: handles are the driver's own; the parameters and the pointers to them live through the call.
        let result = unsafe {
            (self.driver().cuLaunchCooperativeKernelMultiDevice)(list.as_mut_ptr().cast(), list.len() as u32, flags)
        };
        if result == CUDA_SUCCESS {
            keys.into_iter().for_each(|(key, function)| self.call.session.waiting.launched(key, function));
        }
        let outcome = Outcome::Done(result);
        self.launched_allocating(&outcome, refusal);
        Ok(outcome)
    }

    /// Pointers to a function's parameters in a buffer that holds all of them.
    fn parameter_places(&self, function: u64, bytes: &mut [u64]) -> Result<Vec<*mut c_void>, Refused> {
        let mut places = Vec::new();
        loop {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: out parameters are locals.
            match unsafe { (self.driver().cuFuncGetParamInfo)(function, places.len(), &raw mut offset, &raw mut size) }
            {
                CUDA_SUCCESS if offset.checked_add(size).is_some_and(|end| end <= bytes.len() * 8) => {
                    places.push(bytes.as_mut_ptr().cast::<u8>().wrapping_add(offset).cast());
                }
                CUDA_SUCCESS => return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE)),
                CUDA_ERROR_INVALID_VALUE => return Ok(places),
                error => return Err(Refused::Code(error)),
            }
        }
    }
}
