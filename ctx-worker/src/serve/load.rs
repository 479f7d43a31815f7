//! Restores a saved client: device memory at its addresses, code and objects in their order, and the content of memory. The
//! client's shared memory comes later, with the restored process.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;
use std::time::Instant;

use rekindle_images::{Client, DataReader, Object};
use rekindle_wire::Dialect;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, LoadCode};
use rekindle_wire::control::{ASSURED, LOAD_STEPS, LoadTimes, MEMORY_MADE, MEMORY_MAPPED};
use tracing::{debug, warn};

use crate::checkpoint::borrowing;
use crate::checkpoint::content::Source;
use crate::checkpoint::layers::Layers;
use crate::checkpoint::load::{
    check_pieces, compare_globals, content, content_besides_plain, content_of_plain, has_memory_besides_plain,
    plan_plain, read_mapped, restore_parts, restore_plain, restore_pools, stored_of_plain,
};
use crate::checkpoint::suspend::{Kept, Origin, enter_any};
use crate::checkpoint::template::{Imported, Template};
use crate::resources::code_reserve;
use crate::resources::code_store::Image;
use crate::resources::job::EngineError;
use crate::resources::memory::MemoryError;
use crate::resources::memory::to_map::ToMap;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::pinned::PinnedMemory;
use crate::resources::textures::{needs_memory, recorded_memory, recorded_value};
use crate::resources::vmm::aliases::{Alias, unmap_aliases};
use crate::serve::ahead::has_room;
use crate::serve::code_files;
use crate::serve::executor::Executor;
use crate::serve::state::Lent;
use crate::session::state::{self, Mapped, State};

impl Executor {
    /// Restores everything except the memory that the client shares, and begins to load the content of device memory. What a template
    /// has of it is copied. `begins` is called at the beginning of each of [`LOAD_STEPS`], with `may_run_ahead` also when the process may
    /// run ([`ASSURED`]), and `over` when the content is there, or could not be loaded. After an error the worker cannot be used any more.
    pub(crate) fn load_client(
        &mut self,
        client: &Client,
        (reader, imported): (DataReader, Option<Imported>),
        (code, may_run_ahead): (Vec<(String, File)>, bool),
        begins: impl Fn(&'static str) + Clone + Send + 'static,
        over: impl FnOnce() + Send + 'static,
    ) -> Result<(), NotLoaded> {
        let key = reader.key();
        let (mut over, reader) = (Some(over), Arc::new(reader));
        // Other memory is made when the log is replayed.
        let besides = has_memory_besides_plain(client);
        let says = begins.clone();
        let says = move |what| {
            if !besides {
                says(what);
            }
        };
        let early = |executor: &mut Self| match over.take_if(|_| imported.is_none()) {
            Some(over) => executor.load_plain(client, Arc::clone(&reader), says, over).map(|()| true),
            None => Ok(false),
        };
        let early = Early { bytes: stored_of_plain(client), may_run_ahead, begin: early };
        let (aliases, times) = self.prepare_client(client, &reader, code, early, |_| Ok(()), begins.clone())?;
        if over.is_some() || besides {
            begins(MEMORY_MADE);
            begins(MEMORY_MAPPED);
        }
        let template = self.map_template(imported);
        let (mut layers, checkpoint) = self.layers();
        let rest = match over {
            None => content_besides_plain(&layers, client, key)?,
            Some(over) => {
                let mut all = content(&layers, client, key)?;
                let Layers { call, memory, .. } = &mut layers;
                checkpoint.copy_what_is_same(call, &memory.devices, (&mut all, &template), key)?;
                call.gpu.leave();
                let source = Source { reader, is_last_use: false };
                checkpoint.begin_load(&mut call.gpu, &memory.devices, (source, template), over)?;
                all
            }
        };
        checkpoint.load_rest(rest, aliases, times);
        Ok(())
    }

    /// Maps a template. What cannot be mapped is loaded from the files.
    fn map_template(&mut self, imported: Option<Imported>) -> Template {
        let mut template = Template::default();
        let Some(imported) = imported else { return template };
        let Self { call, memory, .. } = self;
        enter_any(call, memory);
        if let Err(why) = template.map(call.driver(), &memory.devices, imported) {
            warn!("content that is on the devices already is loaded once more: {why}");
        }
        call.gpu.leave();
        template
    }

    /// Begins to make and map plain allocations, and to load their content. `says` hears when all are made, and mapped.
    fn load_plain(
        &mut self,
        client: &Client,
        reader: Arc<DataReader>,
        says: impl Fn(&'static str) + Send + 'static,
        over: impl FnOnce() + Send + 'static,
    ) -> Result<(), NotLoaded> {
        let primary = self.memory.first_primary();
        self.enter_real(primary)?;
        let driver = self.call.gpu.driver;
        let began = Instant::now();
        let us = || began.elapsed().as_micros() as u64;
        let fill = content_of_plain(&self.memory, client, reader.key())?;
        let mut to_map = plan_plain(&mut self.memory, driver, client)?;
        let listed_us = us();
        let (Layers { call, memory, .. }, checkpoint) = self.layers();
        let found = memory.memory_of_devices(&mut call.gpu)?;
        let bytes = |ordinal: usize| to_map.get(ordinal).map_or(0, ToMap::bytes);
        let beside = has_room(&call.session.attached.devices, &found, bytes);
        if !beside {
            // What cannot be made must end the restore, and not the process.
            let failed =
                |(address, source)| NotLoaded::Memory { what: "device", address, source: MemoryError::Driver(source) };
            to_map.iter_mut().try_for_each(|it| it.make(driver).map_err(failed))?;
        }
        let made_us = us();
        let source = Source { reader, is_last_use: false };
        checkpoint.begin_load(&mut call.gpu, &memory.devices, (source, Template::default()), over)?;
        checkpoint.load_when_mapped(driver, primary, (to_map, fill), says)?;
        if !beside {
            checkpoint.wait_until_mapped(&mut memory.devices)?;
        }
        debug!(
            beside,
            listed_us,
            made_us,
            begun_us = us(),
            "us until content is listed, memory made if no thread makes it, and the load begun"
        );
        Ok(())
    }

    /// Restores everything except the memory that the client shares and the content of device memory, and gives that memory back
    /// until a restore of the client begins. With `lent` it borrows memory, which stays. Returns the saved content, and the number of
    /// bytes that were given back. After an error the worker cannot be used any more.
    pub(crate) fn warm_client(
        &mut self,
        client: Box<Client>,
        reader: DataReader,
        code: Vec<(String, File)>,
        lent: Option<Box<Lent>>,
        begins: impl Fn(&'static str),
    ) -> Result<(Kept, u64), NotLoaded> {
        let (lent, borrowing) = lent.map(|it| *it).map(|it| (it.template, it.borrowing)).unzip();
        let written = borrowing.as_ref().map(|it| it.written().clone()).unwrap_or_default();
        let mut template = Template::default();
        let lend = |executor: &mut Self| {
            let Some(pieces) = lent else { return Ok(()) };
            let driver = executor.call.driver();
            template = borrowing::lend(driver, &mut executor.memory, &client.allocations, &written, pieces)?;
            Ok(())
        };
        let (aliases, _) = self.prepare_client(
            &client,
            &reader,
            code,
            Early { bytes: 0, may_run_ahead: false, begin: |_: &mut Self| Ok(false) },
            lend,
            begins,
        )?;
        unmap_aliases(self.call.driver(), &aliases);
        let (mut layers, checkpoint) = self.layers();
        let bytes = checkpoint.give_back(&mut layers, true)?;
        Ok((Kept { client, reader: Some(reader), template, origin: Origin::Image, borrowing }, bytes))
    }

    /// Restores everything except the memory that the client shares and the content of device memory. `early` is called before the
    /// log is replayed, if memory may be made then, and returns whether it has made the plain allocations.
    fn prepare_client(
        &mut self,
        client: &Client,
        reader: &DataReader,
        code: Vec<(String, File)>,
        early: Early<impl FnOnce(&mut Self) -> Result<bool, NotLoaded>>,
        lend: impl FnOnce(&mut Self) -> Result<(), NotLoaded>,
        begins: impl Fn(&'static str),
    ) -> Result<(Vec<Alias>, LoadTimes), NotLoaded> {
        let dialect = Dialect::from_parts(client.wire_version, &client.shared_state);
        dialect.is_served()?;
        let [code_step, replay_step, map_step, content_step] = LOAD_STEPS;
        let mut steps = Steps::begin(begins, code_step);
        let (kinds, state) = self.begin_loading(client, code)?;
        let code_ns = steps.next(replay_step);
        let mapped = read_mapped(client, &state, reader)?;
        self.restore_state(client, &state, &mapped)?;
        let call = |object: &Object| kinds.get(&object.kind).copied().unwrap_or_default();
        let any_order = lies_by_code_alone(&state) && !makes_contexts(client, call);
        if any_order {
            if early.may_run_ahead && !self.sets_limits(client, call) && self.has_room_for(client)? {
                steps.says(ASSURED);
            }
            let ahead = self.code.ahead.count();
            let mut libraries: Vec<_> = self.libraries(client, call).collect();
            libraries.retain(|(handle, image)| !self.code.ahead.has(*handle, image));
            debug!(ahead, more = libraries.len(), "libraries that are loaded, and those that are not");
            if early.waits_for(libraries.iter().map(|(_, image)| image.bytes().len() as u64).sum()) {
                self.code.ahead.load(self.call.gpu.driver, libraries);
            }
        } else {
            self.code.ahead.unload(self.call.gpu.driver);
        }
        let mapping = Instant::now();
        self.memory.map_made(self.call.gpu.driver)?;
        let plain_is_made = any_order && (early.begin)(self)?;
        let plain_ns = mapping.elapsed().as_nanos() as u64;
        // Textures may refer to memory, which must exist by then.
        let (mut later, first): (Vec<_>, Vec<_>) = client.objects.iter().partition(|o| needs_memory(call(o)));
        let mut holders = self.replay_log(client, &state, first, &kinds)?;
        self.code.ahead.unload(self.call.gpu.driver);
        let replay_ns = steps.next(map_step).saturating_sub(plain_ns);
        lend(self)?;
        let driver = self.call.gpu.driver;
        if !plain_is_made {
            restore_plain(&mut self.memory, driver, client)?;
        } else if !later.is_empty() || has_memory_besides_plain(client) {
            self.checkpoint.wait_until_mapped(&mut self.memory.devices)?;
        }
        restore_pools(&mut self.memory, driver, client)?;
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
        holders.end(self)?;
        let (mut layers, _) = self.layers();
        let aliases = layers.map_aliases()?;
        check_pieces(client, &aliases)?;
        restore_parts(&mut layers, client, reader)?;
        layers.memory.kernel_heaps.write(layers.call.driver())?;
        layers.call.gpu.leave();
        layers.memory.all_shared_is_mapped(layers.call, &state)?;
        layers.scheduler.times.record_events(layers.call)?;
        let map_ns = steps.next(content_step) + plain_ns;
        Ok((aliases, LoadTimes { code_ns, replay_ns, map_ns, ..LoadTimes::default() }))
    }

    /// The libraries that the log loads without options and keeps loaded, by their handles.
    fn libraries(
        &self,
        client: &Client,
        call: impl Fn(&Object) -> u16 + Copy,
    ) -> impl Iterator<Item = (u64, Arc<Image>)> {
        let of = |number: u16| client.objects.iter().filter(move |object| call(object) == number);
        let unloaded: HashSet<u64> = of(command::LIBRARY_UNLOAD).map(|object| object.handle).collect();
        let kept = of(command::LIBRARY_LOAD).filter(move |object| !unloaded.contains(&object.handle));
        kept.filter_map(|object| {
            let has_options = LoadCode::read(&mut Reader::new(&object.args)).map_or(true, |it| !it.options.is_empty());
            let image = self.code.store.get(object.code.first()?)?;
            (!has_options).then_some((object.handle, image))
        })
    }

    /// Whether the log changes limits of contexts, for which the driver may take any amount of memory.
    fn sets_limits(&self, client: &Client, call: impl Fn(&Object) -> u16) -> bool {
        let number = command::number(&self.call.session.table, "cuCtxSetLimit");
        client.objects.iter().any(|object| Some(call(object)) == number)
    }

    /// Waits for the end of the load of the content, and compares its hashes. Returns how long the load took.
    pub(crate) fn end_load(&mut self) -> Result<LoadTimes, EngineError> {
        self.checkpoint.end_load(&mut self.call, &mut self.memory.devices)
    }

    /// Loads the received code, and reads the data of the worker that saved the client: the calls that its log's kinds stand
    /// for, and its state.
    pub(crate) fn begin_loading(
        &mut self,
        client: &Client,
        code: Vec<(String, File)>,
    ) -> Result<(HashMap<u32, u16>, State), NotLoaded> {
        state::check(client.worker_version)?;
        self.read_code(code)?;
        let kinds = self.kinds(client)?;
        let state: State = state::parse(&client.worker_state).map_err(NotLoaded::worker_state)?;
        for (ordinal, saved) in state.devices.iter().enumerate() {
            if saved.code_reserve > code_reserve::MOST {
                return Err(NotLoaded::Image("the image wants more room reserved for code than any worker does"));
            }
            self.change_code_reserve(ordinal, saved.code_reserve)?;
            if let Some(device) = self.memory.devices.get_mut(ordinal) {
                device.memory.read_piece_size(saved).map_err(NotLoaded::worker_state)?;
            }
        }
        Ok((kinds, state))
    }

    /// Reads the code that the worker does not have.
    fn read_code(&mut self, mut code: Vec<(String, File)>) -> Result<(), NotLoaded> {
        let store = &self.code.store;
        code.retain(|(hash, _)| !hash.parse().is_ok_and(|hash| store.get(&hash).is_some()));
        for image in code_files::read(code, self.memory.capability())? {
            self.code.store.keep(image);
        }
        Ok(())
    }

    /// The calls that the kinds of the client's log stand for.
    fn kinds(&self, client: &Client) -> Result<HashMap<u32, u16>, NotLoaded> {
        let kinds = client.object_kinds.iter().map(|it| {
            let number = command::number(&self.call.session.table, &it.name);
            number.map(|number| (it.kind, number)).ok_or_else(|| NotLoaded::UnknownCall(it.name.clone()))
        });
        kinds.collect()
    }

    /// Reads code of a client that may come, and loads its libraries where that places nothing on a device. What cannot be loaded is left
    /// to the client's load.
    pub(crate) fn load_code_ahead(&mut self, client: &Client, code: Vec<(String, File)>) -> Result<(), NotLoaded> {
        self.read_code(code)?;
        let kinds = self.kinds(client)?;
        let call = |object: &Object| kinds.get(&object.kind).copied().unwrap_or_default();
        let state: State = state::parse(&client.worker_state).map_err(NotLoaded::worker_state)?;
        if lies_by_code_alone(&state) && !makes_contexts(client, call) {
            let libraries: Vec<_> = self.libraries(client, call).collect();
            self.code.ahead.load(self.call.gpu.driver, libraries);
            self.code.ahead.forget_errors();
        }
        debug!(libraries = self.code.ahead.count(), "code of a client that may come");
        Ok(())
    }

    fn restore_state(&mut self, client: &Client, state: &State, mapped: &Mapped) -> Result<(), NotLoaded> {
        let malformed = NotLoaded::worker_state;
        self.scheduler.times.read(state);
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
        self.memory.managed.read(state);
        self.memory.expected_pins = PinnedMemory::read(state, &client.pinned)?;
        Ok(())
    }
}

/// Content that may be loaded while the log is replayed.
struct Early<F> {
    /// How much of it files have.
    bytes: u64,
    /// Whether the process may run before the log is replayed, if nothing is left that can fail.
    may_run_ahead: bool,
    /// Begins to load it, and returns whether its memory was made, and is being mapped.
    begin: F,
}

impl<F> Early<F> {
    /// As many bytes of content for each byte of libraries come over the link in the time in which one thread loads these: some 40 GB/s
    /// beside 0.24 GB/s (PyTorch's on an H100), and a little more.
    const BYTES_OF_CODE: u64 = 200;

    /// Whether libraries of so many bytes are loaded first, by several threads. In the driver these and the content hinder each other,
    /// so one of both has to wait: the content where it takes less time than the libraries. First steps on an H100, medians: 9 GB
    /// beside 66 MB of libraries 589 ms if the content waits for them, 614 if it waits for the whole replay, 706 if the libraries wait;
    /// 26 GB beside 93 MB 1,169, 1,277 and 1,012 ms (`docs/results/2026-11-27-H100-restore-early.json`).
    fn waits_for(&self, libraries: u64) -> bool {
        debug!(content = self.bytes, libraries, "what can be loaded early");
        self.bytes < libraries.saturating_mul(Self::BYTES_OF_CODE)
    }
}

/// Whether nothing decides where the client's code lies but the order in which it is placed, so that memory may be mapped before: no
/// code lies beyond the reserve, no place holder looks for room, and no context is reset while its memory is being loaded.
fn lies_by_code_alone(state: &State) -> bool {
    let of_device = |device: &state::Device| device.code_reserve > 0 && !device.reset;
    state.cut.is_none() && !state.beyond_reserve && state.devices.iter().all(of_device)
}

/// Whether the log makes contexts of the client's own, which have code of their own.
fn makes_contexts(client: &Client, call: impl Fn(&Object) -> u16) -> bool {
    client.objects.iter().any(|object| call(object) == command::CONTEXT_CREATE)
}

/// Measures steps that follow each other, and tells when they begin.
struct Steps<F> {
    began: Instant,
    begins: F,
}

impl<F: Fn(&'static str)> Steps<F> {
    fn begin(begins: F, first: &'static str) -> Self {
        begins(first);
        Self { began: Instant::now(), begins }
    }

    /// Says this meanwhile.
    fn says(&self, what: &'static str) {
        (self.begins)(what);
    }

    /// How long the step that ends now took, in nanoseconds.
    fn next(&mut self, next: &'static str) -> u64 {
        let began = std::mem::replace(&mut self.began, Instant::now());
        (self.begins)(next);
        began.elapsed().as_nanos() as u64
    }
}
