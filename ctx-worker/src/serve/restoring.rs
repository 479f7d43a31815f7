//! The requests of a restore, in their order: `Load`, `Connect`, `Open`, and `LoadProgress` from `Load` on.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{Client, DataReader, HashKey};
use rekindle_wire::Dialect;
use rekindle_wire::attach::{Attach, Pinned};
use rekindle_wire::control::WorkerReply;
use rekindle_wire::ring::Consumer;
use tracing::{error, info};

use crate::checkpoint::content::LoadProgress;
use crate::serve::channel::{self, Event};
use crate::serve::keeper;
use crate::serve::refusal::Refusal;
use crate::serve::request_loop::{Answered, Server, done, or_failed};
use crate::serve::state::{Connected, Loaded, Predecessor, Spare, State};

impl Server {
    /// Loads a client: with `early` the content of its memory comes later.
    pub(super) fn load(&mut self, spare: Spare, key: HashKey, blob: &[u8], early: bool) -> Result<Loaded, Refusal> {
        let reader = DataReader::new(key, spare.data);
        let client = Client::from_bytes(blob)?;
        let code = spare.code.into_iter().map(|(hash, file)| (hash, channel::file(file))).collect();
        let channel = Arc::clone(&self.channel);
        let over = move || {
            channel.tell(Event::LoadOver);
        };
        self.executor.load_client(&client, reader, code, over)?;
        if !early {
            self.executor.end_load()?;
        }
        Ok(Loaded { client: Box::new(client), pinned: Vec::new() })
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
        self.share(&mut fds, &dialect)?;
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
        let (call, mut loading, code) = self.executor.code_parts();
        code.make_graphs(call, &mut loading);
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
        self.serve_client(connection, attach)?;
        Ok(Connected { consumer, keeper: None })
    }

    /// All processes of the restore are there, or a client's keeper is to give it to this worker. The ring opens when the content
    /// of the client's memory is there too.
    pub(super) fn open_connected(&mut self, connected: Connected) -> (State, Answered) {
        let Connected { consumer, keeper } = connected;
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
