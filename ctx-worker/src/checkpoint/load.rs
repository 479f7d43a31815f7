//! Becoming a saved client: device memory at its addresses, code and objects made again in their order, content loaded.
//! Its shared memory comes later, with the restored process.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::AtomicBool;

use rekindle_images::{Allocation, Blob, BlobKind, Client, CodeHash, DataReader, Object, Piece};
use rekindle_wire::Dialect;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, Kind, LinkAdd};
use rekindle_wire::ring::CommandHeader;

use crate::resources::graphs;
use crate::resources::job::Job;
use crate::resources::memory;
use crate::resources::not_loaded::{NotLoaded, Why};
use crate::resources::pinned;
use crate::resources::textures::{needs_memory, recorded_memory, recorded_value};
use crate::resources::vmm::aliases::{Alias, unmap_aliases};
use crate::serve::executor::Executor;
use crate::session::call::Call;
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
                let number = command::number(&self.session.table, &k.name);
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
        self.restore_allocations(client)?;
        self.memory.restore_vmm(self.gpu.driver)?;
        later.sort_by_key(|object| recorded_value(&object.args));
        for object in later {
            let memory = recorded_memory(call(object), &object.args);
            if memory.is_none_or(|(address, bytes)| self.reachable(address, bytes).is_ok()) {
                self.replay(object, &kinds)?;
            }
        }
        let (mut under_way, memory, _) = self.parts();
        memory.textures.destroy_fillers(&mut under_way);
        self.compare_globals(client)?;
        let aliases = self.memory.vmm.map_aliases(self.gpu.driver, &self.memory.devices)?;
        self.check_pieces(client, &aliases)?;
        self.restore_content(client, reader)?;
        unmap_aliases(self.driver(), &aliases);
        let (mut under_way, memory, _) = self.parts();
        memory.all_shared_is_mapped(&mut under_way, &state)?;
        let mut call = Call { gpu: &mut self.gpu, session: &mut self.session, header: self.header };
        self.scheduler.times.record_events(&mut call)
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
        let name = command::name(&self.session.table, call).unwrap_or("?").to_owned();
        let failed = |why| NotLoaded::Replay { call: name.clone(), handle: object.handle, why };
        self.header = CommandHeader { call, context: object.context, ..Default::default() };
        self.enter_context(object.context).map_err(|e| failed(e.into()))?;
        let mut args = Reader::new(&object.args);
        let mut reply = Writer::new();
        let outcome = match call {
            command::MODULE_LOAD | command::LIBRARY_LOAD => {
                let hash = object.code.first().ok_or_else(|| failed(Why::NoCode))?;
                let image = self.code.store.get(hash).ok_or_else(|| failed(Why::CodeMissing))?;
                let kind = if call == command::MODULE_LOAD { Kind::Module } else { Kind::Library };
                let (mut call, mut loading, code) = self.code_parts();
                let loaded = code.load_again(&mut call, &mut loading, (kind, object.handle), &image, &mut args);
                loaded.map(|()| Outcome::Done(0))
            }
            command::LINK_ADD => {
                let hash = object.code.first().ok_or_else(|| failed(Why::NoCode))?;
                let image = self.code.store.get(hash).ok_or_else(|| failed(Why::CodeMissing))?;
                let (mut call, _, code) = self.parts();
                let add = LinkAdd::read(&mut args).map_err(Refused::from);
                let added = add
                    .and_then(|add| code.links.add(&mut call, &mut code.logs, &add, &object.args, &image, &mut reply));
                added.map(Outcome::Done)
            }
            // Done by the loading itself or asked for here, in the recorded order either way.
            command::INSTANTIATE => self.instantiate(object.handle).map(|()| Outcome::Done(0)),
            call if call == self.code.function_load => {
                let (mut call, mut loading, code) = self.code_parts();
                code.load_function(&mut call, &mut loading, object.handle).map(|()| Outcome::Done(0))
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

    fn restore_allocations(&mut self, client: &Client) -> Result<(), NotLoaded> {
        let driver = self.driver();
        self.memory.restore_pools(driver)?;
        self.memory.map_made(driver)?;
        for allocation in &client.allocations {
            if allocation.flags & Allocation::PHYSICAL != 0 {
                continue;
            }
            let pooled = allocation.flags & Allocation::POOLED != 0;
            let (context, pool) = if pooled { (0, allocation.handle) } else { (allocation.handle, 0) };
            let memory = memory::Allocation { size: allocation.size, context, pool };
            if pooled {
                self.memory.restore_pooled(allocation.device as usize, allocation.address, memory)?;
                continue;
            }
            let device = self.memory.devices.get_mut(allocation.device as usize).ok_or(NotLoaded::NoDevice)?;
            // The driver maps in the current context's process; any context of the device will do.
            device.memory.allocate_at(driver, allocation.address, memory).map_err(|source| NotLoaded::Memory {
                what: "device",
                address: allocation.address,
                source,
            })?;
        }
        Ok(())
    }

    /// The content of pieces goes to where they are mapped for it: each to its own.
    fn check_pieces(&self, client: &Client, aliases: &[Alias]) -> Result<(), NotLoaded> {
        let saved = client.allocations.iter().filter(|a| a.flags & Allocation::PHYSICAL != 0);
        let saved = saved.map(|a| (a.address, a.handle, a.size, a.device as usize));
        let here = aliases.iter().map(|a| (a.address, a.handle, a.piece.size, a.piece.device));
        if saved.eq(here) { Ok(()) } else { Err(NotLoaded::Image("the image's memory is not what its state says")) }
    }

    /// Addresses of variables and functions may be stored anywhere in the client's memory: each must be what it was, as
    /// far as that can be told.
    fn compare_globals(&self, client: &Client) -> Result<(), NotLoaded> {
        for global in &client.globals {
            let (key, placed) = self
                .code
                .globals
                .iter()
                .filter(|((module, context), _)| {
                    *module == global.module
                        && self.device_of_context(*context).is_ok_and(|d| d == global.device as usize)
                })
                .flat_map(|(key, placed)| placed.iter().map(move |p| (key, p)))
                .find(|(_, p)| p.address == global.address && p.size == global.size && *p.name == *c_name(&global.name))
                .ok_or_else(|| NotLoaded::Moved { name: global.name.clone(), address: global.address })?;
            self.code.compare_initial(&self.session, &self.memory, *key, placed, global)?;
        }
        Ok(())
    }

    fn restore_content(&mut self, client: &Client, reader: &DataReader) -> Result<(), NotLoaded> {
        let mut list: Vec<(Job, Piece)> = Vec::new();
        let mut add = |address: u64, device: usize, context, pieces: &[Piece]| {
            list.extend(pieces.iter().map(|p| {
                let job = Job {
                    address: address + p.offset,
                    offset: p.offset,
                    length: p.length,
                    device,
                    context,
                    array: None,
                };
                (job, *p)
            }));
        };
        for a in &client.allocations {
            let device = a.device as usize;
            add(a.address, device, self.memory.devices[device].primary, &a.pieces);
        }
        for g in &client.globals {
            let context =
                self.context_of_global(g.module, g.address).ok_or(NotLoaded::Image("a variable's context is gone"))?;
            add(g.address, g.device as usize, context, &g.pieces);
        }
        for blob in client.blobs.iter().filter(|blob| blob.is(BlobKind::ArrayContent)) {
            list.extend(self.memory.arrays.saved_jobs(&self.session, blob)?);
        }
        let primaries: Vec<_> = self.memory.devices.iter().map(|d| d.primary).collect();
        let driver = self.driver();
        let engine = self.checkpoint.engine.as_mut().ok_or(NotLoaded::Busy)?;
        engine.prepare(driver, &primaries)?;
        let loaded = engine.load(driver, &list, reader, &AtomicBool::new(false));
        self.context_changed();
        loaded?;
        self.restore_blobs(client, reader)
    }

    fn context_of_global(&self, module: u64, address: u64) -> Option<u64> {
        let holds = |placed: &Vec<crate::resources::globals::Placed>| placed.iter().any(|p| p.address == address);
        let key = self.code.globals.iter().find(|((m, _), placed)| *m == module && holds(placed))?.0;
        Some(self.session.objects.get(key.1)?.real)
    }

    fn restore_blobs(&mut self, client: &Client, reader: &DataReader) -> Result<(), NotLoaded> {
        for blob in &client.blobs {
            let bytes = || read_blob(blob, reader);
            match BlobKind::try_from(blob.kind).map_err(|unknown| NotLoaded::UnknownPart(unknown.0))? {
                // Content of arrays is loaded with that of memory, and what the client maps itself is there.
                BlobKind::ArrayContent | BlobKind::Mapped => {}
                BlobKind::ArrivingCode => self.code.store.resume_arriving(blob.handle, bytes()?),
                BlobKind::Printed => self.code.prints.resume(blob.handle, bytes()?)?,
                BlobKind::CodeLog => self.code.logs.resume(blob.handle, bytes()?),
                BlobKind::DeferredCommands => {
                    let restored = self.scheduler.restore_held(&self.session, &self.memory, &bytes()?);
                    restored.map_err(|why| NotLoaded::Part { part: "deferred commands", why })?;
                }
                BlobKind::Graphs => graphs::restore(&mut self.code.graphs, &bytes()?)
                    .map_err(|why| NotLoaded::Part { part: "graphs", why })?,
            }
        }
        Ok(())
    }
}

/// The content of a blob.
fn read_blob(blob: &Blob, reader: &DataReader) -> Result<Vec<u8>, NotLoaded> {
    let mut bytes = vec![0; blob.size as usize];
    for piece in &blob.pieces {
        let start = piece.offset as usize;
        let place = bytes
            .get_mut(start..start + piece.length as usize)
            .ok_or(NotLoaded::Image("a blob's piece lies outside it"))?;
        reader.read(piece, place)?;
    }
    Ok(bytes)
}

/// What the client maps itself.
pub(crate) fn read_mapped(client: &Client, state: &State, reader: &DataReader) -> Result<Mapped, NotLoaded> {
    let mut blobs = client.blobs.iter().filter(|blob| blob.is(BlobKind::Mapped));
    let blob = blobs.next().map(|blob| read_blob(blob, reader)).transpose()?;
    if blobs.next().is_some() {
        return Err(NotLoaded::Image("the image has two lists of what the client maps itself"));
    }
    state::mapped(state, blob.as_deref()).map_err(|why| NotLoaded::Part { part: "mappings", why })
}

fn c_name(name: &str) -> std::ffi::CString {
    std::ffi::CString::new(name).unwrap_or_default()
}
