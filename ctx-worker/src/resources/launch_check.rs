//! The driver's immediate answer to a launch, determined by the worker for a launch that is deferred.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{Kind, Launch};

use crate::resources::Code;
use crate::resources::initial::Loading;
use crate::resources::launch_attributes::attributes;
use crate::session::call::Call;
use crate::session::outcome::{Refused, check};

impl Code {
    /// Determines the driver's immediate answer to a launch.
    pub(crate) fn check_launch(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        parameters: &[u8],
    ) -> Result<(), Refused> {
        const MAX_THREADS: u32 = 0;
        const MAX_DYNAMIC_SHARED: u32 = 8;
        let launch = Launch::read(&mut Reader::new(parameters))?;
        let object = *call.session.objects.get(launch.function).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let mut function = self.function(call, loading, launch.function)?;
        if object.kind == Kind::Kernel {
            self.instantiate(call, loading, object.parent)?;
            // A kernel can be launched as it is, but only its function in this context has attributes.
            let kernel = function;
            // SAFETY: the out parameter is a local, the handle the driver's own.
            match unsafe { (call.driver().cuKernelGetFunction)(&raw mut function, kernel) } {
                CUDA_SUCCESS => {}
                error => return Err(Refused::Code(error)),
            }
        }
        let device = call.device()?;
        let limits = call.session.attached.devices.get(device);
        let limit = |n: usize| limits.and_then(|d| d.attributes.get(n)).map_or(0, |a| a.1 as u32);
        let within = |sizes: [u32; 3], first: usize| (0..3).all(|i| (1..=limit(first + i)).contains(&sizes[i]));
        let threads = launch.block.iter().map(|n| u64::from(*n)).product::<u64>();
        let attribute = |which: u32| {
            let mut value = 0;
            // SAFETY: the out parameter is a local, the handle the driver's own.
            match unsafe { (call.driver().cuFuncGetAttribute)(&raw mut value, which, function) } {
                CUDA_SUCCESS => Ok(value.max(0) as u64),
                error => Err(Refused::Code(error)),
            }
        };
        const BLOCK: usize = 2;
        const GRID: usize = 5;
        if !within(launch.block, BLOCK) || !within(launch.grid, GRID) || threads > u64::from(limit(1)) {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        if threads > attribute(MAX_THREADS)? {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        if u64::from(launch.shared_bytes) > attribute(MAX_DYNAMIC_SHARED)? {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        check_together(call, loading, &launch, function, threads)
    }
}

/// Checks that the blocks that must be on the device together fit there: all of a cooperative launch, or those of a
/// cluster.
fn check_together(
    call: &Call,
    loading: &Loading<'_>,
    launch: &Launch<'_>,
    function: u64,
    threads: u64,
) -> Result<(), Refused> {
    const COOPERATIVE: u32 = 2;
    const CLUSTER: u32 = 4;
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
    const MULTIPROCESSORS: u32 = 16;
    let attributes = attributes(&call.session, launch)?;
    let driver = call.driver();
    if attributes.iter().any(|it| it.id == COOPERATIVE && it.value[0] as u32 != 0) {
        let (mut fitting, mut processors) = (0, 0);
        let device = loading.memory.devices[call.device()?].device;
        // SAFETY: out parameters are locals, the handle the driver's own.
        let results = unsafe {
            [
                (driver.cuDeviceGetAttribute)(&raw mut processors, MULTIPROCESSORS, device),
                (driver.cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                    &raw mut fitting,
                    function,
                    threads as i32,
                    launch.shared_bytes as usize,
                ),
            ]
        };
        results.into_iter().try_for_each(check)?;
        let blocks: u64 = launch.grid.iter().map(|n| u64::from(*n)).product();
        if blocks > fitting.max(0) as u64 * processors.max(0) as u64 {
            return Err(Refused::Code(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE));
        }
    }
    if attributes.iter().any(|it| it.id == CLUSTER) {
        let config = CUlaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            stream: 0,
            attrs: attributes.as_ptr(),
            num_attrs: attributes.len() as u32,
        };
        let mut clusters = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own, the configuration lives through the call.
        check(unsafe { (driver.cuOccupancyMaxActiveClusters)(&raw mut clusters, function, &raw const config) })?;
        if clusters <= 0 {
            return Err(Refused::Code(CUDA_ERROR_INVALID_CLUSTER_SIZE));
        }
    }
    Ok(())
}
