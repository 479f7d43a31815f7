//! Executes commands or defers them in software. `schedule/deferred.rs` decides between the two.
//!
//! ```text
//!   ring ──> execute ──nothing blocks it──> perform ──> driver
//!               │ blocked                        ^
//!               └──> defer ──> the list ── look_at_deferred
//! ```

use std::sync::atomic::Ordering::Release;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, CallbackNext, HeldRoom, HostFunc};
use rekindle_wire::ring::CommandHeader;

use crate::resources::ipc::events::SharedRecord;
use crate::schedule::deferred::{Entry, Next, Progress};
use crate::schedule::deferred_settings::{set_as_made, set_back};
use crate::schedule::dependencies::{Dependencies, Turn};
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::Then;

impl Executor {
    /// Executes a command, or defers it. An error means that the client violates the protocol; the worker gives it up.
    pub(crate) fn execute(&mut self, header: CommandHeader, parameters: &[u8]) -> Result<(), Refused> {
        self.scheduler.times.commands += 1;
        let dependencies = self.scheduler.dependencies(&self.call.session, &self.memory, &header, parameters);
        let waits = matches!(dependencies.turn, Turn::Callback | Turn::AtRest(_));
        if waits || self.scheduler.deferred.blocks(&dependencies) || !self.has_room(&dependencies) {
            return self.defer(header, parameters, dependencies);
        }
        self.scheduler.deferred.count_step(&dependencies);
        self.perform(header, parameters)?;
        self.tick(&dependencies);
        Ok(())
    }

    /// Whether work is waiting that the executor must check repeatedly.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.call.session.waiting.is_empty() || !self.scheduler.deferred.is_at_rest()
    }

    /// Whether a client that is at rest has commands that go on by themselves when the quiesce is over. Its threads may wait for
    /// them, and send no other.
    pub(crate) fn has_commands_held_back(&self) -> bool {
        self.is_waiting() || self.scheduler.deferred.lacks_room()
    }

    /// Whether the command's stream has room for it now.
    fn has_room(&mut self, dependencies: &Dependencies) -> bool {
        self.scheduler.deferred.has_room(self.call.gpu.driver, &mut self.call.session.waiting, dependencies)
    }

    /// Records a private event after many commands were enqueued, to learn later how many of them are done.
    fn tick(&mut self, dependencies: &Dependencies) {
        let Some(lane) = dependencies.lane.filter(|lane| self.call.session.waiting.wants_tick(lane.key)) else {
            return;
        };
        if self.enter_context(lane.key.context).is_ok() {
            self.call.session.waiting.tick(self.call.gpu.driver, lane.key);
        }
    }

    /// Defers a command behind the commands that it must follow, and does at once the part that its caller would have from the
    /// driver at once.
    fn defer(&mut self, header: CommandHeader, parameters: &[u8], dependencies: Dependencies) -> Result<(), Refused> {
        self.call.header = header;
        if dependencies.turn == Turn::Ask {
            self.answer(header.reply, CUDA_ERROR_NOT_READY, &[]);
            return Ok(());
        }
        let record = self.memory.ipc_events.defer(header.call, parameters);
        let (driver, waiting) = (self.call.gpu.driver, &mut self.call.session.waiting);
        self.scheduler.deferred.note_lack(driver, waiting, &dependencies);
        // The event's stream continues: deferred commands mean the event as it was before.
        if self.scheduler.deferred.only_an_event_blocks(driver, waiting, &dependencies) {
            for (event, _) in &dependencies.events {
                let aside = self.scheduler.set_event_aside(&mut self.call, &self.memory, *event)?;
                self.memory.ipc_events.set_aside(*event, aside);
            }
            self.scheduler.deferred.count_step(&dependencies);
            self.perform_deferred(header, parameters, record)?;
            self.tick(&dependencies);
            return Ok(());
        }
        match header.call {
            command::LAUNCH if header.reply != 0 => {
                // The driver would say at once whether the launch is allowed, and its caller may have to continue before the
                // launch can run.
                let allowed = self.enter_context(header.context).and_then(|()| {
                    let (call, mut loading, code) = self.code_parts();
                    code.check_launch(call, &mut loading, parameters)
                });
                match allowed {
                    Ok(()) => self.answer(header.reply, CUDA_SUCCESS, &[]),
                    Err(Refused::Code(code)) => {
                        self.answer(header.reply, code, &[]);
                        return Ok(());
                    }
                    Err(refused) => return Err(refused),
                }
                let header = CommandHeader { reply: 0, ..header };
                self.scheduler.deferred.add(header, parameters.to_vec(), dependencies, Progress::Queued, None);
            }
            command::COPY_FROM_CHUNK => {
                if !self.scheduler.deferred.defer_chunk(&self.call.session, header, parameters, &dependencies)? {
                    self.perform(header, parameters)?;
                }
            }
            command::COPY_BOX_FROM_CHUNK => {
                if !self.scheduler.deferred.defer_box_chunk(&self.call.session, header, parameters, &dependencies)? {
                    self.perform(header, parameters)?;
                }
            }
            _ => self.scheduler.deferred.add(header, parameters.to_vec(), dependencies, Progress::Queued, record),
        }
        if self.scheduler.deferred.is_too_much() {
            self.give_up(&"it sends more and more behind what it holds up itself");
        }
        self.show_pressure();
        self.look_at_deferred();
        Ok(())
    }

    /// Executes commands that need not be deferred any more, in their order.
    pub(crate) fn look_at_deferred(&mut self) {
        if self.scheduler.deferred.looking {
            return;
        }
        self.scheduler.deferred.find_room(self.call.gpu.driver, &mut self.call.session.waiting);
        while std::mem::take(&mut self.scheduler.deferred.changed) {
            self.scheduler.deferred.looking = true;
            if let Err(refused) = self.look_once() {
                self.give_up(&refused);
            }
            self.scheduler.deferred.looking = false;
            self.show_pressure();
            self.run_callback();
        }
    }

    fn look_once(&mut self) -> Result<(), Refused> {
        for mut entry in self.scheduler.deferred.take_all() {
            if self.scheduler.deferred.blocks(&entry.dependencies) || !self.goes(&mut entry)? {
                self.scheduler.deferred.keep(entry);
            }
        }
        Ok(())
    }

    /// Called when no earlier command blocks a deferred command. Returns whether the command goes to the driver, or waits for
    /// another reason.
    fn goes(&mut self, entry: &mut Entry) -> Result<bool, Refused> {
        match self.scheduler.deferred.next(self.call.gpu.driver, &mut self.call.session.waiting, entry)? {
            Next::Stays => Ok(false),
            Next::WaitsOnDevice => {
                if let Err(code) = self.wait_on_device(entry) {
                    self.scheduler.deferred.arrived(entry.id, code);
                }
                Ok(false)
            }
            Next::Goes => {
                if entry.settings.is_empty() {
                    self.perform_deferred(entry.header, &entry.parameters, entry.shared_record)?;
                } else {
                    self.perform_as_set(entry)?;
                }
                self.tick(&entry.dependencies);
                Ok(true)
            }
            Next::Ends => Ok(true),
        }
    }

    /// Executes a command that was deferred. If it is about a shared event, it is about this record of it.
    fn perform_deferred(
        &mut self,
        header: CommandHeader,
        parameters: &[u8],
        record: Option<SharedRecord>,
    ) -> Result<(), Refused> {
        self.memory.ipc_events.under_way = record;
        let performed = self.perform(header, parameters);
        self.memory.ipc_events.under_way = None;
        performed
    }

    fn wait_on_device(&mut self, entry: &Entry) -> Result<(), CUresult> {
        self.call.header = entry.header;
        let code = |refused| match refused {
            Refused::Code(code) => code,
            _ => CUDA_ERROR_INVALID_VALUE,
        };
        let streams = match entry.dependencies.turn {
            Turn::Callback => {
                let callback = HostFunc::read(&mut Reader::new(&entry.parameters));
                let HostFunc { stream, .. } = callback.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
                self.enter_context(entry.header.context).map_err(code)?;
                self.handle_stream(stream).map_err(code)?;
                vec![self.stream_key(stream).map_err(code)?]
            }
            _ => self.call.session.waiting.busy(0),
        };
        self.when_done(streams, Then::Deferred(entry.id)).map_err(code)
    }

    /// Executes a deferred launch with the attributes that applied when it was made.
    fn perform_as_set(&mut self, entry: &Entry) -> Result<(), Refused> {
        let mut changed = Vec::new();
        let (call, mut loading, code) = self.code_parts();
        let performed = match set_as_made(call, &mut loading, code, entry, &mut changed) {
            Ok(()) => self.perform(entry.header, &entry.parameters),
            Err(Refused::Code(code)) => {
                self.call.header = entry.header;
                self.answer(entry.header.reply, code, &[]);
                Ok(())
            }
            Err(refused) => Err(refused),
        };
        let (call, mut loading, code) = self.code_parts();
        set_back(call, &mut loading, code, entry, changed);
        performed
    }

    /// Publishes whether some thread is far ahead, and lets threads continue that are not any more.
    fn show_pressure(&mut self) {
        let Some(shared) = self.call.session.shared else { return };
        shared.header().pressure.store(u32::from(self.scheduler.deferred.has_many()), Release);
        for slot in self.scheduler.deferred.relieved() {
            self.answer(slot, CUDA_SUCCESS, &[]);
        }
    }

    /// A thread of the application asks to continue when few of its commands are deferred.
    pub(crate) fn held_room(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        HeldRoom::read(args)?;
        self.scheduler.deferred.waiting_for_room.push((self.call.header.thread, self.call.header.reply));
        self.show_pressure();
        Ok(Outcome::Later)
    }

    /// The application's callback thread has run a callback, and asks for the next.
    pub(crate) fn callback_next(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let CallbackNext { done } = CallbackNext::read(args)?;
        if (done != 0 && !self.scheduler.deferred.callback_returned(done))
            || self.scheduler.deferred.callbacks.thread != 0
        {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let slot = self.call.header.reply;
        self.look_at_deferred();
        match self.scheduler.deferred.next_callback() {
            Some(callback) => {
                reply.raw(callback.bytes());
                Ok(Outcome::Done(CUDA_SUCCESS))
            }
            None => {
                self.scheduler.deferred.callbacks.thread = slot;
                Ok(Outcome::Later)
            }
        }
    }

    /// Has the waiting callback thread run a callback that is ready.
    fn run_callback(&mut self) {
        if self.scheduler.deferred.callbacks.thread == 0 {
            return;
        }
        if let Some(callback) = self.scheduler.deferred.next_callback() {
            let slot = std::mem::take(&mut self.scheduler.deferred.callbacks.thread);
            self.answer(slot, CUDA_SUCCESS, callback.bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use rekindle_cuda_abi::types::CU_STREAM_LEGACY;
    use rekindle_wire::codec::Writer;
    use rekindle_wire::command::{self, Kind, Launch};
    use rekindle_wire::ring::CommandHeader;

    use crate::serve::fixture;

    /// A suspended client whose threads all wait for such a command would wait for ever.
    #[test]
    fn a_command_that_a_quiesce_holds_back_is_more_to_do_and_not_what_the_quiesce_waits_for() {
        let mut worker = fixture::executor();
        let context = fixture::context(&mut worker);
        assert!(!worker.is_waiting() && !worker.has_commands_held_back());
        let launch = Launch {
            function: Kind::Function.handle(9),
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            flags: 0,
            stream: CU_STREAM_LEGACY,
            attributes: &[],
            parameters: &[],
        };
        let mut bytes = Writer::new();
        launch.write(&mut bytes);
        worker.scheduler.deferred.close(0);
        let header = CommandHeader { call: command::LAUNCH, context, ..Default::default() };
        worker.execute(header, bytes.bytes()).unwrap();
        assert!(!worker.is_waiting() && worker.has_commands_held_back());
        worker.scheduler.deferred.open();
        assert!(worker.is_waiting());
    }
}
