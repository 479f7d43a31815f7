//! Host callbacks, and other commands about the application's threads.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{CallbackNext, HeldRoom, HostFunc, ThreadEnd};

use crate::schedule::deferred::Progress;
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::Then;

impl Executor {
    /// The application's callback thread has run one, and asks for the next.
    pub(crate) fn callback_next(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let CallbackNext { done } = CallbackNext::read(args)?;
        if (done != 0 && !self.scheduler.deferred.callback_returned(done))
            || self.scheduler.deferred.callback_thread != 0
        {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let slot = self.header.reply;
        self.look_at_held();
        match self.next_callback() {
            Some(callback) => {
                reply.raw(callback.bytes());
                Ok(Outcome::Done(CUDA_SUCCESS))
            }
            None => {
                self.scheduler.deferred.callback_thread = slot;
                Ok(Outcome::Later)
            }
        }
    }

    /// Has the waiting callback thread run what is ready.
    pub(crate) fn run_callback(&mut self) {
        if self.scheduler.deferred.callback_thread == 0 {
            return;
        }
        if let Some(callback) = self.next_callback() {
            let slot = std::mem::take(&mut self.scheduler.deferred.callback_thread);
            self.answer(slot, CUDA_SUCCESS, callback.bytes());
        }
    }

    fn next_callback(&mut self) -> Option<Writer> {
        while let Some(id) = self.scheduler.deferred.ready.pop_front() {
            let Some(entry) = self.scheduler.deferred.entry(id) else { continue };
            let Progress::Callback(status) = entry.progress else { continue };
            let Ok(HostFunc { function, data, kind, named, .. }) = HostFunc::read(&mut Reader::new(&entry.parameters))
            else {
                continue;
            };
            let mut callback = Writer::new();
            [id, kind, function, data, named, status as u64].into_iter().for_each(|word| callback.word(word));
            self.scheduler.deferred.running.insert(id);
            return Some(callback);
        }
        None
    }

    /// A thread of the application's asks to go on when little of what it sent is held.
    pub(crate) fn held_room(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        HeldRoom::read(args)?;
        self.scheduler.deferred.waiting_for_room.push((self.header.thread, self.header.reply));
        self.show_pressure();
        Ok(Outcome::Later)
    }

    /// A thread of the application's has ended: its default streams are destroyed once they are idle.
    pub(crate) fn thread_end(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        ThreadEnd::read(args)?;
        for key in self.session.waiting.streams_of_thread(self.header.thread) {
            self.enter_context(key.context)?;
            let Some(real) = self.session.waiting.real(key) else { continue };
            match self.session.waiting.retire(key) {
                Some(dying) => self.when_done(vec![dying], Then::Destroy(dying))?,
                // SAFETY: the stream is the driver's own, idle, and its thread is gone.
                None => drop(unsafe { (self.driver().cuStreamDestroy_v2)(real) }),
            }
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }
}
