//! Host callbacks, and the end of the application's threads.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{HostFunc, ThreadEnd};

use crate::schedule::deferred::{Held, Progress};
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::Then;

impl Held {
    /// The next callback that is to be run, as the application's callback thread takes it.
    pub(crate) fn next_callback(&mut self) -> Option<Writer> {
        while let Some(id) = self.ready.pop_front() {
            let Some(entry) = self.entry(id) else { continue };
            let Progress::Callback(status) = entry.progress else { continue };
            let Ok(HostFunc { function, data, kind, named, .. }) = HostFunc::read(&mut Reader::new(&entry.parameters))
            else {
                continue;
            };
            let mut callback = Writer::new();
            [id, kind, function, data, named, status as u64].into_iter().for_each(|word| callback.word(word));
            self.running.insert(id);
            return Some(callback);
        }
        None
    }
}

/// A thread of the application's has ended: its default streams are destroyed once they are idle.
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
