//! Operations of streams on words of memory.

use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{MAX_MEM_OPS, MemOp, MemOps};

use crate::resources::Memory;
use crate::resources::globals::Globals;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};

/// `CUstreamBatchMemOpParams`, whose members all begin alike: operation, address, value, flags.
type Params = [u64; 6];

impl Memory {
    /// Executes `MEM_OPS`.
    pub(crate) fn mem_ops(
        &mut self,
        call: &mut Call,
        globals: &Globals,
        args: &mut Reader<'_>,
    ) -> Result<Outcome, Refused> {
        let MemOps { stream: handle, operations } = MemOps::read(args)?;
        let stream = call.stream(handle)?;
        let mut words = Reader::new(operations);
        let mut params: Vec<Params> = Vec::new();
        while words.end().is_err() {
            let op = MemOp::read(&mut words)?;
            if op.width() > 0 {
                self.reachable(globals, op.address, op.width())?;
                self.allow_peer(call, op.address)?;
            }
            params.push(match op.width() {
                // An operation without an address has its flags where the others have their address.
                0 => [u64::from(op.operation) | u64::from(op.flags) << 32, 0, 0, 0, 0, 0],
                _ => [u64::from(op.operation), op.address, op.value, u64::from(op.flags), 0, 0],
            });
        }
        if params.len() > MAX_MEM_OPS {
            return Err(Malformed("more operations than a stream takes at once").into());
        }
        let key = call.stream_key(handle)?;
        call.session.waiting.add_to(key, params.len() as u64);
        // SAFETY: as many structures of the driver's layout as are said, which it has read when it returns; the words
        // lie in the client's memory, checked above.
        let result = unsafe {
            (call.driver().cuStreamBatchMemOp_v2)(stream, params.len() as u32, params.as_mut_ptr().cast(), 0)
        };
        Ok(Outcome::Done(result))
    }
}
