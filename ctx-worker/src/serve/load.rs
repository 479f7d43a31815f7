//! Becoming a saved client: device memory at its addresses, code and objects made again in their order, content loaded.
//! Its shared memory comes later, with the restored process.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;

use rekindle_images::{Client, CodeHash, DataReader, Object};
use rekindle_wire::Dialect;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, Kind, LinkAdd};
use rekindle_wire::ring::CommandHeader;

use crate::checkpoint::load::{check_pieces, compare_globals, read_mapped, restore_allocations, restore_content};
use crate::resources::not_loaded::{NotLoaded, Why};
use crate::resources::pinned;
use crate::resources::textures::{needs_memory, recorded_memory, recorded_value};
use crate::resources::vmm::aliases::unmap_aliases;
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};
use crate::session::state::{self, Mapped, State};

impl Executor {
    /// Restores everything but what the client shares. After an error the worker is of no use any more.
    pub(crate) fn load_client(
        &mut self,
        client: &Client,
        reader: &DataReader,
        code: Vec<(String, File)>,
    ) -> Result<(), NotLoaded> {
        state::check(client.worker_version)?;
        let dialect = Dialect::from_parts(client.wire_version, &client.shared_state);
        dialect.is_served()?;
        for (hash, file) in code {
            self.load_code(&hash, file)?;
        }
        let kinds: HashMap<u32, u16> = client
            .object_kinds
            .iter()
            .map(|k| {
                let number = command::number(&self.call.session.table, &k.name);
                number.map(|n| (k.kind, n)).ok_or_else(|| NotLoaded::UnknownCall(k.name.clone()))
            })
            .collect::<Result<_, _>>()?;
        let state = state::parse(&client.worker_state).map_err(NotLoaded::worker_state)?;
        let mapped = read_mapped(client, &state, reader)?;
        self.restore_state(client, &state, &mapped)?;
        // Textures may be of memory, which must be there then.
        let call = |object: &Object| kinds.get(&object.kind).copied().unwrap_or_default();
        let (mut later, first): (Vec<_>, Vec<_>) = client.objects.iter().partition(|o| needs_memory(call(o)));
        for object in first {
            self.replay(object, &kinds)?;
        }
        restore_allocations(&mut self.memory, self.call.gpu.driver, client)?;
        self.memory.restore_vmm(self.call.gpu.driver)?;
        later.sort_by_key(|object| recorded_value(&object.args));
        for object in later {
            let memory = recorded_memory(call(object), &object.args);
            if memory.is_none_or(|(address, bytes)| self.reachable(address, bytes).is_ok()) {
                self.replay(object, &kinds)?;
            }
        }
        self.memory.textures.destroy_fillers(&mut self.call);
        compare_globals(&self.layers().0, client)?;
        let (mut layers, checkpoint) = self.layers();
        let aliases = layers.map_aliases()?;
        check_pieces(client, &aliases)?;
        restore_content(checkpoint.engine.as_mut(), &mut layers, client, reader)?;
        unmap_aliases(layers.call.driver(), &aliases);
        layers.memory.all_shared_is_mapped(layers.call, &state)?;
        layers.scheduler.times.record_events(layers.call)
    }

    fn load_code(&mut self, hash: &str, mut file: File) -> Result<(), NotLoaded> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|source| NotLoaded::ReadCode { hash: hash.to_owned(), source })?;
        if CodeHash::of(&bytes).to_string() != hash {
            return Err(NotLoaded::CodeContent(hash.to_owned()));
        }
        let capability = self.memory.capability();
        let kept = self.code.store.keep(bytes, capability);
        kept.map(drop).map_err(|why| NotLoaded::BrokenCode { hash: hash.to_owned(), why })
    }

    /// Executes a record of the object log.
    fn replay(&mut self, object: &Object, kinds: &HashMap<u32, u16>) -> Result<(), NotLoaded> {
        let call = *kinds.get(&object.kind).ok_or(NotLoaded::Image("the image's log has a record of no kind"))?;
        let name = command::name(&self.call.session.table, call).unwrap_or("?").to_owned();
        let failed = |why| NotLoaded::Replay { call: name.clone(), handle: object.handle, why };
        self.call.header = CommandHeader { call, context: object.context, ..Default::default() };
        self.enter_context(object.context).map_err(|e| failed(e.into()))?;
        let mut args = Reader::new(&object.args);
        let mut reply = Writer::new();
        let outcome = match call {
            command::MODULE_LOAD | command::LIBRARY_LOAD => {
                let hash = object.code.first().ok_or_else(|| failed(Why::NoCode))?;
                let image = self.code.store.get(hash).ok_or_else(|| failed(Why::CodeMissing))?;
                let kind = if call == command::MODULE_LOAD { Kind::Module } else { Kind::Library };
                let (call, mut loading, code) = self.code_parts();
                let loaded = code.load_again(call, &mut loading, (kind, object.handle), &image, &mut args);
                loaded.map(|()| Outcome::Done(0))
            }
            command::LINK_ADD => {
                let hash = object.code.first().ok_or_else(|| failed(Why::NoCode))?;
                let image = self.code.store.get(hash).ok_or_else(|| failed(Why::CodeMissing))?;
                let Self { call, code, .. } = self;
                let add = LinkAdd::read(&mut args).map_err(Refused::from);
                let added =
                    add.and_then(|add| code.links.add(call, &mut code.logs, &add, &object.args, &image, &mut reply));
                added.map(Outcome::Done)
            }
            // Done by the loading itself or asked for here, in the recorded order either way.
            command::INSTANTIATE => self.instantiate(object.handle).map(|()| Outcome::Done(0)),
            call if call == self.code.function_load => {
                let (call, mut loading, code) = self.code_parts();
                code.load_function(call, &mut loading, object.handle).map(|()| Outcome::Done(0))
            }
            call if call < command::FIRST => self.dispatch(call, &mut args, &mut reply).map(Outcome::Done),
            call => self.command(call, &mut args, &mut reply),
        };
        match outcome {
            Ok(Outcome::Done(0)) => Ok(()),
            Ok(Outcome::Done(code)) => Err(failed(Refused::Code(code).into())),
            Ok(Outcome::Later) => Err(failed(Why::NoRecord)),
            Err(refused) => Err(failed(refused.into())),
        }
    }

    fn restore_state(&mut self, client: &Client, state: &State, mapped: &Mapped) -> Result<(), NotLoaded> {
        let malformed = NotLoaded::worker_state;
        for (when, event) in (0..).zip(&state.recorded) {
            self.scheduler.times.recorded.insert(event.handle, when);
            if event.timed && event.age.is_finite() {
                self.scheduler.times.ages.insert(event.handle, event.age);
            }
        }
        let contexts: HashMap<u64, u64> = state.pinned.iter().map(|it| (it.address, it.context)).collect();
        for (i, saved) in state.devices.iter().enumerate() {
            let device = self.memory.devices.get_mut(i).ok_or(NotLoaded::NoDevice)?;
            device.memory.client_reserves(saved.reserved_to);
            device.memory.read_names(saved).map_err(malformed)?;
            if saved.reset {
                self.reset_primary(i).map_err(|why| NotLoaded::Reset { device: i, why })?;
            }
        }
        self.memory.pools.read(state, self.memory.devices.len()).map_err(malformed)?;
        self.memory.vmm.read(mapped, self.memory.devices.len()).map_err(malformed)?;
        self.memory.expected_pins = client
            .pinned
            .iter()
            .map(|p| {
                let context =
                    contexts.get(&p.address).copied().ok_or(NotLoaded::Image("pinned memory without a context"))?;
                Ok((p.address, pinned::Allocation { size: p.size, flags: p.flags as u32, context }))
            })
            .collect::<Result<_, NotLoaded>>()?;
        Ok(())
    }
}
