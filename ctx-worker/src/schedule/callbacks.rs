//! Host callbacks, and the end of the application's threads.

use std::collections::{HashSet, VecDeque};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::ThreadEnd;

use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::Then;

/// Callbacks that their streams have reached, by the numbers of their commands.
#[derive(Debug, Default)]
pub(crate) struct Callbacks {
    /// The callbacks that are to be run.
    pub(super) ready: VecDeque<u64>,
    /// The callbacks that the application is running.
    pub(super) running: HashSet<u64>,
    /// The callbacks whose commands are over.
    pub(super) returned: HashSet<u64>,
    /// The reply slot in which the client's callback thread waits, 0 for none.
    pub(crate) thread: u16,
}

/// A thread of the application has ended: its default streams are destroyed once they are idle.
pub(crate) fn thread_end(call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
    ThreadEnd::read(args)?;
    for key in call.session.waiting.streams_of_thread(call.header.thread) {
        call.enter(key.context)?;
        let Some(real) = call.session.waiting.real(key) else { continue };
        match call.session.waiting.retire(key) {
            Some(dying) => call.when_done(vec![dying], Then::Destroy(dying))?,
            // SAFETY: the stream is the driver's own, idle, and its thread is gone.
            None => drop(unsafe { (call.driver().cuStreamDestroy_v2)(real) }),
        }
    }
    Ok(Outcome::Done(CUDA_SUCCESS))
}
