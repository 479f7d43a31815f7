//! The requests of a restore, in their order: `Load`, `Connect`, `Open`, and `LoadProgress` from `Load` on. After a `Load` in
//! advance, `BringBack` begins the restore.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{Client, DataReader, HashKey};
use rekindle_wire::Dialect;
use rekindle_wire::attach::{Attach, Pinned};
use rekindle_wire::control::{Learned, TemplatePiece, WorkerReply};
use rekindle_wire::frame::MAX_FDS;
use rekindle_wire::ring::Consumer;
use rekindle_wire::standstill;
use tracing::{debug, error, info};

use crate::checkpoint::borrowing::Borrowing;
use crate::checkpoint::content::LoadProgress;
use crate::checkpoint::suspend::{Kept, enter_any, is_out_of_memory};
use crate::checkpoint::template::{self, Template};
use crate::resources::memory::borrowed::TemplateError;
use crate::serve::channel::{self, Event};
use crate::serve::executor::Executor;
use crate::serve::keeper;
use crate::serve::refusal::Refusal;
use crate::serve::request_loop::{Answered, Server, done, or_failed};
use crate::serve::state::{Connected, Lent, Loaded, Predecessor, Spare, State, Warm};
use crate::serve::title;

/// The number of a template's pieces, and some of them with their descriptors.
type Exported = (usize, Vec<(TemplatePiece, OwnedFd)>);

impl Lent {
    /// Keeps pieces of the template until the client is loaded.
    pub(super) fn take(&mut self, pieces: Vec<TemplatePiece>, files: Vec<OwnedFd>) -> Result<(), Refusal> {
        if pieces.len() != files.len() {
            return Err(TemplateError::NoDescriptors.into());
        }
        self.template.extend(pieces.into_iter().zip(files));
        Ok(())
    }
}

impl Server {
    /// Loads a client: with `early` the content of its memory comes later, and with `steps` the daemon hears when a step begins.
    pub(super) fn load(
        &mut self,
        spare: Spare,
        key: HashKey,
        blob: &[u8],
        early: bool,
        steps: bool,
    ) -> Result<Loaded, Refusal> {
        let began = Instant::now();
        let reader = DataReader::new(key, spare.data);
        let client = Client::from_bytes(blob)?;
        debug!(us = began.elapsed().as_micros() as u64, "the client is decoded");
        let code = spare.code.into_iter().map(|(hash, file)| (hash, channel::file(file))).collect();
        let channel = Arc::clone(&self.channel);
        let over = move || {
            channel.tell(Event::LoadOver);
        };
        let begins = self.says_steps(steps);
        self.executor.load_client(&client, (reader, spare.template), (code, early), begins, over)?;
        if !early {
            self.executor.end_load()?;
        }
        Ok(Loaded { client: Box::new(client), pinned: Vec::new() })
    }

    /// Imports pieces of a template from which a client is copied that is not loaded yet. They are mapped when its log is replayed: before
    /// that, mappings would change where things lie.
    pub(super) fn import(
        &mut self,
        spare: &mut Spare,
        pieces: Vec<TemplatePiece>,
        files: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        let lacks = Refusal::Lacks("a template came, and no word on what it is for");
        let imported = spare.template.as_mut().ok_or(lacks)?;
        let Executor { call, memory, .. } = &mut self.executor;
        enter_any(call, memory);
        let taken = imported.take(call.driver(), &memory.devices, pieces, files);
        call.gpu.leave();
        Ok(taken?)
    }

    /// What is called at the beginning of each step of a load: the daemon hears of it, if it has asked.
    fn says_steps(&self, asked: bool) -> impl Fn(&'static str) + Clone + Send + use<> {
        let channel = Arc::clone(&self.channel);
        move |step| {
            if asked {
                channel.say_step(step);
            }
        }
    }

    /// Loads a client in advance, without its GPU memory.
    pub(super) fn warm(&mut self, spare: Spare, key: HashKey, blob: &[u8], steps: bool) -> Result<Warm, Refusal> {
        let reader = DataReader::new(key, spare.data);
        let client = Box::new(Client::from_bytes(blob)?);
        let code = spare.code.into_iter().map(|(hash, file)| (hash, channel::file(file))).collect();
        let begins = self.says_steps(steps);
        let (kept, bytes) = self.executor.warm_client(client, reader, code, spare.lent, begins)?;
        Ok(Warm { kept, bytes })
    }

    /// A restore of a client that was loaded in advance begins: makes its memory, and begins to load its content. If the GPU has
    /// no room, nothing changes.
    pub(super) fn restore_warm(&mut self, mut warm: Box<Warm>) -> (State, Answered) {
        let channel = Arc::clone(&self.channel);
        let over = move || {
            channel.tell(Event::LoadOver);
        };
        let (mut layers, checkpoint) = self.executor.layers();
        match checkpoint.bring_back(&mut layers, &mut warm.kept, over) {
            Ok(()) => (State::Loaded(Loaded { client: warm.kept.client, pinned: Vec::new() }), done(Ok(()))),
            Err(why) if is_out_of_memory(&why) => {
                let what = format!("the GPU has no room for the {} bytes of its memory now ({why})", warm.bytes);
                (State::Warm(warm), Ok((WorkerReply::Busy { what }, Vec::new())))
            }
            Err(why) => or_failed(Err(why.into())),
        }
    }

    /// Descriptors of the memory that has a loaded client's content. The content must be there.
    pub(super) fn export_template(&mut self, first: usize) -> Result<Exported, Refusal> {
        self.executor.end_load()?;
        let Executor { call, memory, .. } = &mut self.executor;
        enter_any(call, memory);
        let exported = template::export(call.driver(), memory, first, MAX_FDS);
        call.gpu.leave();
        Ok(exported?)
    }

    /// A client that is not loaded yet is to borrow memory. These are the lessons of others of its image.
    pub(super) fn borrow(&self, mut spare: Spare, learned: &[u8]) -> (State, Answered) {
        let borrowing = self.borrowing(learned);
        let lent = borrowing.map(|borrowing| spare.lent = Some(Box::new(Lent { template: Vec::new(), borrowing })));
        (State::Spare(spare), done(lent))
    }

    /// More was learned since a client was loaded in advance: what others have written is not borrowed.
    pub(super) fn borrow_less(&mut self, mut warm: Box<Warm>, learned: &[u8]) -> (State, Answered) {
        let less = self.borrowing(learned).and_then(|it| self.give_back_written(&mut warm.kept, it));
        match less {
            Ok(()) => (State::Warm(warm), done(Ok(()))),
            Err(refusal) => or_failed(Err(refusal)),
        }
    }

    fn borrowing(&self, learned: &[u8]) -> Result<Borrowing, Refusal> {
        let learned = Learned::from_bytes(learned).map_err(|_| Refusal::Lacks("what was learned is not readable"))?;
        let (channel, asker) = (Arc::clone(&self.channel), self.channel.asker());
        let tell = move |learned: &Learned, fault| channel.say_learned(asker.as_ref(), learned, fault);
        Ok(Borrowing::new(learned, Box::new(tell)))
    }

    /// Gives back what a client borrows and others have written; its content is copied from the template.
    fn give_back_written(&mut self, kept: &mut Kept, borrowing: Borrowing) -> Result<(), Refusal> {
        let Executor { call, memory, .. } = &mut self.executor;
        enter_any(call, memory);
        let driver = call.driver();
        let given_back = memory.devices.iter_mut().enumerate().try_for_each(|(ordinal, device)| {
            borrowing.written().iter().try_for_each(|base| {
                let mut pieces = device.memory.give_back_borrowed(driver, *base)?.into_iter();
                pieces.try_for_each(|piece| kept.template.add(driver, (device.device, ordinal), piece))
            })
        });
        call.gpu.leave();
        given_back.map_err(|why: TemplateError| Refusal::from(why))?;
        kept.borrowing = Some(borrowing);
        Ok(())
    }

    /// Takes content that is on the devices already.
    pub(super) fn take_template(
        &mut self,
        template: &mut Template,
        pieces: Vec<TemplatePiece>,
        files: Vec<OwnedFd>,
    ) -> Result<(), Refusal> {
        let Executor { call, memory, .. } = &mut self.executor;
        enter_any(call, memory);
        let taken = template.take(call.driver(), &memory.devices, pieces, files);
        call.gpu.leave();
        Ok(taken?)
    }

    /// Connects the restored process: its shared memory takes the place of the memory saved with it.
    pub(super) fn connect(
        &mut self,
        loaded: Loaded,
        pinned: Vec<Pinned>,
        takes_over: Option<Attach>,
        mut fds: std::vec::IntoIter<OwnedFd>,
    ) -> Result<Connected, Refusal> {
        let Loaded { client, pinned: mut files } = loaded;
        let connection = UnixStream::from(fds.next().ok_or(Refusal::Lacks("no connection came with the process"))?);
        let keeper = match takes_over {
            Some(_) => Some(fds.next().ok_or(Refusal::Lacks("no socket of its keeper came with the process"))?),
            None => None,
        };
        let dialect = Dialect::from_parts(client.wire_version, &client.shared_state);
        let began = Instant::now();
        let us = || began.elapsed().as_micros() as u64;
        self.share(&mut fds, &dialect)?;
        let shared_us = us();
        files.extend(pinned.into_iter().zip(fds));
        for (what, file) in files {
            self.executor.memory.pinned.arrived.put(what, file);
        }
        let driver = self.executor.driver();
        for (address, allocation) in std::mem::take(&mut self.executor.memory.expected_pins) {
            self.executor.enter_context(allocation.context).map_err(|error| Refusal::Pinned { address, error })?;
            let result = self.executor.memory.pinned.map(driver, address, None, allocation);
            crate::gpu::driver::checked("mapping pinned memory", result)
                .map_err(|source| Refusal::PinnedMap { address, source })?;
        }
        // Graphs name memory, and managed memory opens it to other devices.
        if self.executor.memory.managed.expects_any() || !self.executor.code.graphs.is_empty() {
            let Executor { checkpoint, memory, .. } = &mut self.executor;
            checkpoint.wait_until_mapped(&mut memory.devices)?;
        }
        self.executor.adopt_managed()?;
        if let Some(userfault) = self.executor.memory.managed.faults.clone() {
            self.channel.watch(userfault);
        }
        let pinned_us = us();
        let (call, mut loading, code) = self.executor.code_parts();
        code.make_graphs(call, &mut loading);
        debug!(
            shared_us,
            pinned_us,
            graphs_us = us(),
            "connected: us until its shared memory is mapped, its pinned memory is registered and its graphs are made"
        );
        let consumer = self.begin(client.ring.head, takes_over.is_some())?;
        if let (Some(attach), Some(socket)) = (takes_over, keeper) {
            self.know_client(&connection, attach)?;
            let keeper = Some(Predecessor { socket: socket.into(), connection });
            return Ok(Connected { consumer, keeper });
        }
        let attach = Attach {
            dialect,
            pid: client.namespace_pid as i32,
            command: client.command.clone(),
            socket: client.socket_path.display().to_string(),
            cookie: 0,
            settings: client.settings.into_iter().map(|s| (s.name, s.value)).collect(),
        };
        if self.channel.has_client() {
            // The process has come already (`ahead.rs`).
            title::show(&attach.command);
        } else {
            self.serve_client(connection, attach)?;
        }
        Ok(Connected { consumer, keeper: None })
    }

    /// All processes of the restore are there, or a client's keeper is to give it to this worker. The ring opens when the content
    /// of the client's memory is there too.
    pub(super) fn open_connected(&mut self, connected: Connected) -> (State, Answered) {
        let Connected { consumer, keeper } = connected;
        // The process was quiesced when it was saved.
        standstill::allow(consumer.shared());
        let opened = match self.executor.checkpoint.load_progress() {
            LoadProgress::UnderWay { .. } => Ok(State::Filling as fn(Consumer) -> State),
            LoadProgress::Over => self.executor.end_load().map(|_| State::Open as fn(Consumer) -> State),
        };
        // A client whose content cannot be loaded stays its keeper's.
        let opened = opened.map_err(Refusal::from).and_then(|state| match keeper {
            Some(keeper) => self.take_over(keeper).map(|()| state),
            None => Ok(state),
        });
        match opened.map(|state| state(consumer)) {
            Ok(State::Open(consumer)) => (self.open(consumer), done(Ok(()))),
            opened => or_failed(opened),
        }
    }

    /// Makes the client this worker's own. Its keeper ends.
    fn take_over(&mut self, keeper: Predecessor) -> Result<(), Refusal> {
        let Predecessor { socket, connection } = keeper;
        keeper::take_over(&socket).map_err(Refusal::NotGiven)?;
        info!("this worker has taken the client over");
        self.read_client(connection)
    }

    /// Tells how far the load of the content is.
    pub(super) fn load_progress(&mut self, state: State) -> (State, Answered) {
        match self.executor.checkpoint.load_progress() {
            LoadProgress::UnderWay { loaded, bytes } => {
                (state, Ok((WorkerReply::Loading { loaded, bytes }, Vec::new())))
            }
            LoadProgress::Over => self.load_over(state),
        }
    }

    /// The load of the content is over. A ring that waited for it opens.
    pub(super) fn load_over(&mut self, state: State) -> (State, Answered) {
        let state = match state {
            state @ (State::Loaded(_) | State::Connected(_) | State::Filling(_)) => state,
            // The end of this load is known already.
            state => return (state, done(Ok(()))),
        };
        match (self.executor.end_load(), state) {
            (Ok(times), State::Filling(consumer)) => {
                (self.open(consumer), Ok((WorkerReply::Loaded { times }, Vec::new())))
            }
            (Ok(times), state) => (state, Ok((WorkerReply::Loaded { times }, Vec::new()))),
            (Err(error), _) => {
                error!("the content of the client's memory cannot be loaded: {error}");
                or_failed(Err(error.into()))
            }
        }
    }

    /// Quiesces a client whose content is still being loaded: waits for the content first.
    pub(super) fn quiesce_filling(&mut self, consumer: Consumer, timeout: Duration) -> (State, Answered) {
        let began = Instant::now();
        if !self.executor.checkpoint.wait_for_load(timeout) {
            let what = "the content of its memory is still being loaded".to_owned();
            return (State::Filling(consumer), Ok((WorkerReply::Busy { what }, Vec::new())));
        }
        if let Err(error) = self.executor.end_load() {
            return or_failed(Err(error.into()));
        }
        // What waits in software since before the dump begins to run.
        self.executor.scheduler.deferred.open();
        let closed = self.close(consumer);
        self.quiesce(closed, timeout.saturating_sub(began.elapsed()))
    }
}
