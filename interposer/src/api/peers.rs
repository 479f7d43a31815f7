//! Access of one context to another's memory.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{PEER_DISABLE, PEER_ENABLE, PeerDisable, PeerEnable};

use super::{check, code};
use crate::call::Call;
use crate::state::client;

/// Begins a call about another context, which must be one.
fn about(number: u16, peer: CUcontext) -> Result<Call, CUresult> {
    let client = client::get()?;
    client.contexts.current()?;
    client.contexts.get(peer).ok_or(CUDA_ERROR_INVALID_CONTEXT)?;
    Call::in_context(number)
}

pub(crate) unsafe fn cuCtxEnablePeerAccess(peer: CUcontext, flags: u32) -> CUresult {
    if flags != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(about(PEER_ENABLE, peer).and_then(|mut call| {
        call.put(&PeerEnable { peer, flags });
        check(call.wait().0)
    }))
}

pub(crate) unsafe fn cuCtxDisablePeerAccess(peer: CUcontext) -> CUresult {
    code(about(PEER_DISABLE, peer).and_then(|mut call| {
        call.put(&PeerDisable { peer });
        check(call.wait().0)
    }))
}
