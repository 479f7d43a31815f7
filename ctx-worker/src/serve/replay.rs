//! Executes the object log again: exactly as it was, or, behind a cut, with place holders (`checkpoint/cut.rs`).

use std::collections::HashMap;

use rekindle_images::{Client, Object};
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, KernelFunction, Kind, LibraryModule, LinkAdd};
use rekindle_wire::ring::CommandHeader;

use crate::checkpoint::holders::{self, Holders, Placer, Taken};
use crate::gpu::driver::{CallFailed, checked};
use crate::resources::code_reserve;
use crate::resources::not_loaded::{NotLoaded, Why};
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};
use crate::session::state::State;

/// Calls that have to do with no memory of the client's, which may not be mapped yet. All others wait for that.
const WITHOUT_MEMORY: [&str; 18] = [
    "CONTEXT_RETAIN",
    "INSTANTIATE",
    "KERNEL_FUNCTION",
    "LIBRARY_KERNEL",
    "LIBRARY_LOAD",
    "LIBRARY_MODULE",
    "MODULE_FUNCTION",
    "MODULE_LOAD",
    "cuCtxSetCacheConfig",
    "cuCtxSetLimit",
    "cuEventCreate",
    "cuFuncLoad",
    "cuFuncSetAttribute",
    "cuFuncSetCacheConfig",
    "cuFuncSetSharedMemConfig",
    "cuKernelSetAttribute",
    "cuKernelSetCacheConfig",
    "cuStreamCreateWithPriority",
];

/// What a replay does between two records.
#[derive(Clone, Copy, Debug)]
enum Between {
    OwnCode(usize),
    KernelHeap(usize),
}

/// The devices on which kernels of a saved client may have called `malloc`, each with the record after which the driver made the heap.
fn heaps(state: &State) -> impl Iterator<Item = (u64, usize)> {
    let devices = state.devices.iter().enumerate();
    let mut heaps: Vec<_> =
        devices.filter_map(|(ordinal, device)| Some((device.kernel_heap.as_ref()?, ordinal))).collect();
    heaps.sort_by_key(|(heap, _)| heap.number);
    heaps.into_iter().map(|(heap, ordinal)| (heap.made_after, ordinal))
}

impl Executor {
    /// Executes records of the log in their order. The returned value holds places until the whole log has been replayed.
    pub(crate) fn replay_log(
        &mut self,
        client: &Client,
        state: &State,
        objects: Vec<&Object>,
        kinds: &HashMap<u32, u16>,
    ) -> Result<Holders, NotLoaded> {
        let Some(cut) = state.cut.as_ref() else {
            self.replay_exactly(state, objects, kinds, u64::MAX)?;
            return Ok(Holders::default());
        };
        let call = |object: &Object| kinds.get(&object.kind).copied().unwrap_or_default();
        let (exact, behind): (Vec<_>, Vec<_>) = objects.into_iter().partition(|object| object.sequence <= cut.from);
        self.replay_exactly(state, exact, kinds, cut.from)?;
        // What the limit says of those that were made later may come later.
        let later: Vec<_> = heaps(state).filter(|(after, _)| *after > cut.from).map(|(_, ordinal)| ordinal).collect();
        let from = self.call.session.objects.recorded();
        // Contexts take room from each other, so all contexts must exist before any place is held.
        let makes_context =
            |object: &&Object| matches!(call(object), command::CONTEXT_CREATE | command::CONTEXT_RETAIN);
        let (contexts, behind): (Vec<_>, Vec<_>) = behind.into_iter().partition(makes_context);
        contexts.into_iter().try_for_each(|object| self.replay(object, kinds))?;
        if cut.contexts.len() != client.globals.len() {
            return Err(NotLoaded::Image("the image does not say in which contexts its variables lie"));
        }
        let variables = client.globals.iter().zip(&cut.contexts);
        let variables = variables.map(|(global, context)| ((global.module, *context), (global.address, global.size)));
        let variables: Vec<_> = variables.filter(|(code, _)| !self.code.globals.contains_key(code)).collect();
        let mut holders = match variables.first() {
            Some(((_, context), _)) => Holders::new(holders::measure(self, *context)?, variables)?,
            None => Holders::default(),
        };
        holders.fill(self)?;
        for object in behind {
            if let Some(code) = self.brings(call(object), object) {
                holders.make_room(self, code, object.context)?;
            }
            if call(object) == command::CONTEXT_DESTROY {
                holders.leave(self, object.handle)?;
            }
            self.replay(object, kinds)?;
            if matches!(call(object), command::MODULE_UNLOAD | command::LIBRARY_UNLOAD | command::CONTEXT_DESTROY) {
                holders.fill(self)?;
            }
        }
        later.into_iter().try_for_each(|ordinal| self.make_heap_again(state, ordinal))?;
        self.call.session.objects.was_cut(from);
        Ok(holders)
    }

    /// Executes records in their order, which are all up to `last`. The worker's own kernels get their places, and the driver makes heaps
    /// for the client's, where they did among the records.
    fn replay_exactly(
        &mut self,
        state: &State,
        objects: Vec<&Object>,
        kinds: &HashMap<u32, u16>,
        last: u64,
    ) -> Result<(), NotLoaded> {
        let after = |ordinal: usize| state.devices.get(ordinal).and_then(|it| it.placed_after).unwrap_or(u64::MAX);
        let code = (0..self.memory.devices.len()).map(|ordinal| (after(ordinal), Between::OwnCode(ordinal)));
        let heaps = heaps(state).filter(|(after, _)| *after <= last);
        let mut between: Vec<_> =
            code.chain(heaps.map(|(after, ordinal)| (after, Between::KernelHeap(ordinal)))).collect();
        // The last one is the next.
        between.sort_by_key(|it| it.0);
        between.reverse();
        for object in objects {
            while let Some((_, what)) = between.pop_if(|(after, _)| *after < object.sequence) {
                self.do_between(state, what)?;
            }
            self.replay(object, kinds)?;
        }
        between.into_iter().rev().try_for_each(|(_, what)| self.do_between(state, what))
    }

    fn do_between(&mut self, state: &State, what: Between) -> Result<(), NotLoaded> {
        match what {
            Between::OwnCode(ordinal) => Ok(self.place_own_code(ordinal)?),
            Between::KernelHeap(ordinal) => self.make_heap_again(state, ordinal),
        }
    }

    /// Has the driver make the heap of a device that the client's kernels have had.
    fn make_heap_again(&mut self, state: &State, ordinal: usize) -> Result<(), NotLoaded> {
        let saved = state.devices.get(ordinal).and_then(|it| it.kernel_heap.as_ref());
        let (Some(saved), Some(device)) = (saved, self.memory.devices.get(ordinal)) else {
            return Err(NotLoaded::NoDevice);
        };
        let (primary, records) = (device.primary, self.call.session.objects.recorded());
        let made = self.memory.kernel_heaps.make_again(self.call.gpu.driver, (ordinal, primary), records, saved);
        self.context_changed();
        made
    }

    /// Has the driver place the code of the worker's own kernels now, among the client's code.
    pub(crate) fn place_own_code(&mut self, ordinal: usize) -> Result<(), CallFailed> {
        let placed = self.checkpoint.hasher.place(self.call.gpu.driver, ordinal);
        self.context_changed();
        if let Some(device) = self.memory.devices.get_mut(ordinal) {
            device.placed_after = self.call.session.objects.recorded();
        }
        placed
    }

    /// The module or library whose variables a record may be the first to place in its context.
    fn brings(&self, call: u16, object: &Object) -> Option<u64> {
        let handle = object.handle;
        let library_of = |kernel: u64| self.call.session.objects.get(kernel).map(|kernel| kernel.parent);
        let mut args = Reader::new(&object.args);
        match call {
            _ if object.context == 0 => None,
            command::KERNEL_FUNCTION => library_of(KernelFunction::read(&mut args).ok()?.kernel),
            command::LIBRARY_MODULE => Some(LibraryModule::read(&mut args).ok()?.library),
            _ if Kind::Kernel.owns(handle) => library_of(handle),
            _ if Kind::Module.owns(handle) || Kind::Library.owns(handle) => Some(handle),
            _ => None,
        }
    }

    /// Executes a record of the object log.
    pub(crate) fn replay(&mut self, object: &Object, kinds: &HashMap<u32, u16>) -> Result<(), NotLoaded> {
        let call = *kinds.get(&object.kind).ok_or(NotLoaded::Image("the image's log has a record of no kind"))?;
        let name = command::name(&self.call.session.table, call).unwrap_or("?").to_owned();
        if !WITHOUT_MEMORY.contains(&name.as_str()) {
            self.checkpoint.wait_until_mapped(&mut self.memory.devices)?;
        }
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
            // The variables are placed by the loading itself or by this request, in the recorded order either way.
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
}

impl Placer for Executor {
    fn place(&mut self, context: u64, size: u64) -> Result<Taken, NotLoaded> {
        self.enter_context(context)?;
        let text = code_reserve::variable_text(size);
        let (code, address) = code_reserve::load_variable(self.driver(), text.as_bytes_with_nul())?;
        Ok(Taken { code, address })
    }

    fn contexts(&self) -> Vec<(u64, u64)> {
        let objects = &self.call.session.objects;
        let contexts = objects.contexts().into_iter();
        contexts.filter_map(|handle| Some((handle, objects.get(handle)?.parent))).collect()
    }

    fn remove(&mut self, context: u64, code: u64) -> Result<(), NotLoaded> {
        self.enter_context(context)?;
        // SAFETY: the module is one that `place` has loaded, and nothing uses it.
        Ok(checked("cuModuleUnload", unsafe { (self.driver().cuModuleUnload)(code) })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::fixture;

    #[test]
    fn calls_without_memory_exist() {
        let worker = fixture::executor();
        for name in WITHOUT_MEMORY {
            assert!(command::number(&worker.call.session.table, name).is_some(), "{name}");
        }
    }
}
