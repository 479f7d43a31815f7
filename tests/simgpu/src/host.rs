//! The services of the driver that the private tables of `cuGetExportTable` need.

use rekindle_cuda_abi::private::{DeviceIdentity, Host};
use rekindle_cuda_abi::types::{CUcontext, CUdevice, CUfunction, CUmodule, CUresult, CUstream};

use crate::config::config;
use crate::device::{create, device};
use crate::green::Converted;
use crate::module::Module;
use crate::{current, handles};

/// This driver.
pub(crate) struct SoftwareGpu;

impl Host for SoftwareGpu {
    fn driver_version(&self) -> i32 {
        config().version
    }

    fn devices(&self) -> Vec<DeviceIdentity> {
        create().iter().map(|device| DeviceIdentity { uuid: device.uuid(), pci: device.pci() }).collect()
    }

    fn primary_context(&self, ordinal: CUdevice) -> Result<CUcontext, CUresult> {
        Ok(device(ordinal)?.primary)
    }

    fn current_context(&self) -> Result<CUcontext, CUresult> {
        Ok(current::handle())
    }

    fn context_id(&self, context: CUcontext) -> Result<u64, CUresult> {
        let known = current::named(context)?;
        Ok(handles::get::<Converted>(context).map_or(known.id, |it| it.0.id))
    }

    fn stream_id(&self, context: CUcontext, stream: CUstream, per_thread: bool) -> Result<u64, CUresult> {
        let context = current::or_named(context)?;
        Ok(current::stream_of(&context, stream, per_thread)?.id)
    }

    fn module_functions(&self, _context: CUcontext, module: CUmodule) -> Result<Vec<CUfunction>, CUresult> {
        Ok(handles::get::<Module>(module)?.functions().iter().map(|function| function.handle).collect())
    }
}
