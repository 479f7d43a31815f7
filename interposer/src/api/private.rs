//! The private tables of `cuGetExportTable`, answered from what the process knows.

use rekindle_cuda_abi::private::{DeviceIdentity, Host};
use rekindle_cuda_abi::types::*;

use super::{context, kernels, stream};
use crate::start;
use crate::state::client;
use crate::state::contexts::{self, Contexts};

/// This library as the tables see it.
pub(crate) struct Interposer;

/// The one there is.
pub(crate) static HOST: Interposer = Interposer;

impl Host for Interposer {
    fn driver_version(&self) -> i32 {
        start::ensure_attached().map_or(0, |c| c.devices.driver_version())
    }

    fn devices(&self) -> Vec<DeviceIdentity> {
        let Ok(client) = start::ensure_attached() else { return Vec::new() };
        client
            .devices
            .visible()
            .map(|device| {
                let attribute = |n: usize| device.attributes.get(n).map_or(0, |a| a.1);
                DeviceIdentity { uuid: device.uuid, pci: [attribute(50), attribute(33), attribute(34)] }
            })
            .collect()
    }

    fn primary_context(&self, device: CUdevice) -> Result<CUcontext, CUresult> {
        Ok(Contexts::primary_handle(client::get()?.devices.number(device)?))
    }

    fn current_context(&self) -> Result<CUcontext, CUresult> {
        Ok(contexts::current())
    }

    fn context_id(&self, context: CUcontext) -> Result<u64, CUresult> {
        context::context_id(context)
    }

    fn stream_id(&self, context: CUcontext, stream: CUstream, per_thread: bool) -> Result<u64, CUresult> {
        stream::stream_id(context, if stream == 0 && per_thread { CU_STREAM_PER_THREAD } else { stream })
    }

    fn module_functions(&self, _context: CUcontext, module: CUmodule) -> Result<Vec<CUfunction>, CUresult> {
        kernels::module_functions(module)
    }
}
