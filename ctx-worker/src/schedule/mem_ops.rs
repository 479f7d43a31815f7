//! Operations of streams on words of memory.

use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{MAX_MEM_OPS, MemOp, MemOps};

use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};

/// `CUstreamBatchMemOpParams`, of which every member begins alike: operation, address, value, flags.
type Params = [u64; 6];

impl Executor {
    pub(crate) fn mem_ops(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let MemOps { stream: handle, operations } = MemOps::read(args)?;
        let stream = self.handle_stream(handle)?;
        let mut words = Reader::new(operations);
        let mut params: Vec<Params> = Vec::new();
        while words.end().is_err() {
            let op = MemOp::read(&mut words)?;
            if op.width() > 0 {
                self.reachable(op.address, op.width())?;
                self.allow_peer(op.address)?;
            }
            params.push(match op.width() {
                // Its flags lie where the others have their address.
                0 => [u64::from(op.operation) | u64::from(op.flags) << 32, 0, 0, 0, 0, 0],
                _ => [u64::from(op.operation), op.address, op.value, u64::from(op.flags), 0, 0],
            });
        }
        if params.len() > MAX_MEM_OPS {
            return Err(Malformed("more operations than a stream takes at once").into());
        }
        self.session.waiting.add_to(self.stream_key(handle)?, params.len() as u64);
        // SAFETY: as many structures of the driver's layout as are said, which it has read when it returns; the words
        // lie in the client's memory, checked above.
        let result = unsafe {
            (self.driver().cuStreamBatchMemOp_v2)(stream, params.len() as u32, params.as_mut_ptr().cast(), 0)
        };
        Ok(Outcome::Done(result))
    }
}
