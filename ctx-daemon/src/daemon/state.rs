//! The state that connections share. This module imports none of those that serve connections.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rekindle_builds::Store;

use super::charge::Charges;
use super::checkpoints::Checkpoints;
use super::clients::{Client, Registry};
use super::connections::Connections;
use super::grants::{Grants, ShareError};
use super::groups::Groups;
use super::imports::Imports;
use super::links::Links;
use super::lost::LostWorkers;
use super::memory_pressure::MemoryPressure;
use super::metrics::Metrics;
use super::migrate::Migrations;
use super::moves::Moves;
use super::native::Native;
use super::nvml::Nvml;
use super::oversubscribe::Oversubscription;
use super::pool::Pool;
use super::restore::{Preloads, Promises, Restores, WarmImages, Watches};
use super::sandbox::Sandbox;
use super::spans::Spans;
use super::spawn::Spawner;
use super::stage::Stage;
use super::worker_records::WorkerRecords;
use crate::config::Config;

/// Everything that connections share.
pub(super) struct Daemon {
    pub(super) config: Config,
    pub(super) pool: Arc<Pool>,
    pub(super) clients: Clients,
    pub(super) restores: Restores,
    pub(super) preloads: Preloads,
    /// The memory that restores are about to make.
    pub(super) promises: Arc<Promises>,
    pub(super) warm: WarmImages,
    pub(super) watches: Watches,
    pub(super) checkpoints: Checkpoints,
    /// Dumps that are made at one moment.
    pub(super) groups: Groups,
    /// Trees that go on on other hosts.
    pub(super) migrations: Migrations,
    pub(super) moves: Arc<Moves>,
    pub(super) copying: CopyResources,
    pub(super) oversubscription: Arc<Oversubscription>,
    pub(super) sandbox: Sandbox,
    pub(super) grants: Arc<Grants>,
    pub(super) charges: Arc<Charges>,
    /// Processes that the driver itself checkpoints.
    pub(super) native: Arc<Native>,
    pub(super) nvml: Nvml,
    pub(super) connections: Arc<Connections>,
    pub(super) imports: Imports,
    /// The builds of the libraries that applications map.
    pub(super) builds: Store,
    pub(super) metrics: Arc<Metrics>,
    pub(super) spans: Arc<Spans>,
    pub(super) stopping: AtomicBool,
}

/// The clients, those that have lost their worker, and the records of both for the next daemon.
pub(super) struct Clients {
    pub(super) registry: Arc<Registry>,
    pub(super) lost: Arc<LostWorkers>,
    pub(super) records: Arc<WorkerRecords>,
}

/// What dumps that go on at the same time share: GPU memory for clones, host memory for copies, and the GPUs' links.
pub(super) struct CopyResources {
    pub(super) memory_pressure: Arc<MemoryPressure>,
    pub(super) stage: Arc<Stage>,
    pub(super) links: Arc<Links>,
}

/// Half of the host's memory, in bytes.
fn half_of_memory() -> io::Result<u64> {
    Ok(super::sys::memory()? / 2)
}

impl Daemon {
    /// Begins to fill the pool and the stage; there are no connections yet.
    ///
    /// # Errors
    /// There is no thread, or no memory, for them.
    pub(super) fn start(config: Config, sandbox: Sandbox) -> io::Result<Self> {
        let metrics = Arc::<Metrics>::default();
        let spans = Arc::new(Spans::start(&config.tracing, &metrics)?);
        let daemon = Self {
            pool: Pool::new(Spawner::new(&config, &sandbox), config.workers.spares, Arc::clone(&metrics)),
            clients: Clients {
                registry: Arc::default(),
                lost: Arc::default(),
                records: Arc::new(WorkerRecords::open(&config.state_dir)),
            },
            restores: Restores::default(),
            preloads: Preloads::default(),
            promises: Arc::default(),
            warm: WarmImages::new(config.restore.warm_memory.map_or_else(half_of_memory, Ok)?),
            watches: Watches::new(Arc::clone(&metrics), Arc::clone(&spans)),
            checkpoints: Checkpoints::new(Arc::clone(&metrics), Arc::clone(&spans)),
            groups: Groups::default(),
            migrations: Migrations::open(&config.state_dir),
            moves: Arc::default(),
            copying: CopyResources {
                memory_pressure: Arc::default(),
                stage: Stage::start(config.checkpoint.staging)?,
                links: Links::new(&config.checkpoint),
            },
            oversubscription: Arc::default(),
            sandbox,
            grants: Arc::new(Grants::load(&config.state_dir, config.clients.grants_required)),
            charges: Arc::new(Charges::open(config.clients.charge, &config.state_dir)),
            native: Arc::new(Native::new(&config)),
            nvml: Nvml::new(&config),
            connections: Arc::new(Connections::new(config.socket.connections, Arc::clone(&metrics))),
            imports: Imports::default(),
            builds: Store::new(&config.library_dir),
            metrics,
            spans,
            stopping: AtomicBool::new(false),
            config,
        };
        daemon.pool.keep_filled()?;
        Ok(daemon)
    }

    /// Has a client's worker count its memory together with that of the other clients of the container, and charges it to what
    /// limits the container.
    pub(super) fn share(&self, client: &Client) -> Result<(), ShareError> {
        self.charges.put(&client.allowed, client.process, client.worker.process());
        let devices = match client.allowed.container {
            Some(_) => self.pool.devices()?,
            None => return Ok(()),
        };
        self.grants.share(&client.allowed, &client.worker, &devices, self.config.timeouts.quiesce)
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}
