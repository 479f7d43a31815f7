//! Commands about how many blocks or clusters of a function fit on a device.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{OccupancyBlockSize, OccupancyClusters};

use crate::resources::Code;
use crate::resources::initial::Loading;
use crate::resources::launch_attributes::attributes;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};

impl Code {
    pub(crate) fn occupancy_block_size(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let OccupancyBlockSize { function, shared_bytes, limit, flags } = OccupancyBlockSize::read(args)?;
        let function = self.function(call, loading, function)?;
        let (mut grid, mut block) = (0, 0);
        // SAFETY: out parameters are locals, the handle the driver's own; no function gives the shared memory.
        let result = unsafe {
            (call.driver().cuOccupancyMaxPotentialBlockSizeWithFlags)(
                &raw mut grid,
                &raw mut block,
                function,
                std::ptr::null_mut(),
                shared_bytes as usize,
                limit,
                flags,
            )
        };
        reply.word(grid as u64);
        reply.word(block as u64);
        Ok(Outcome::Done(result))
    }

    pub(crate) fn occupancy_clusters(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let OccupancyClusters { sizes, launch } = OccupancyClusters::read(args)?;
        let function = self.function(call, loading, launch.function)?;
        let attributes = attributes(&call.session, &launch)?;
        let config = CUlaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            stream: match launch.stream {
                0 => 0,
                stream => call.stream(stream)?,
            },
            attrs: attributes.as_ptr(),
            num_attrs: attributes.len() as u32,
        };
        let driver = call.driver();
        let ask =
            if sizes != 0 { driver.cuOccupancyMaxPotentialClusterSize } else { driver.cuOccupancyMaxActiveClusters };
        let mut number = 0;
        // SAFETY: the out parameter is a local, the handle the driver's own, the configuration lives through the call.
        let result = unsafe { ask(&raw mut number, function, &raw const config) };
        reply.word(number as u64);
        Ok(Outcome::Done(result))
    }
}
