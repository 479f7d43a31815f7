//! A dump whose clients are quiesced, and whose tree CRIU is about to freeze.

use std::sync::Arc;
use std::time::Instant;

use rekindle_images::{ImageDir, ImageWriter};

use super::super::ipc;
use super::super::memory_pressure::ClonesGuard;
use super::super::process;
use super::super::quiesce::{self, ClosedRing};
use super::error::DumpError;
use super::freeze::FreezeWatch;
use super::precopy::Planned;
use super::save::{How, SaveJob};
use super::saving::Saving;
use super::tree::Tree;

/// A dump whose clients are quiesced.
pub(super) struct Quiesced {
    pub(super) begun: Begun,
    pub(super) freeze: FreezeWatch,
}

/// An image that has begun. The rings are the first field, so that clients go on first when this is dropped.
pub(super) struct Begun {
    pub(super) rings: Vec<ClosedRing>,
    pub(super) planned: Vec<Planned>,
    pub(super) writer: ImageWriter,
    /// Exists from when memory is set aside until the copy is over.
    pub(super) clones: ClonesGuard,
    /// The directory of a second image, which `stop` makes at the same quiesce.
    pub(super) beside: Option<ImageDir>,
    /// When the clients were asked to quiesce, after any pre-copies.
    pub(super) quiesce_began: Instant,
    pub(super) idle_at: Instant,
}

impl Quiesced {
    /// The tree is frozen.
    pub(super) fn save(self, tree: &Tree<'_>) -> Result<Saving, DumpError> {
        let frozen_at = self.freeze.stopped_at();
        self.begun.save(tree, frozen_at)
    }

    /// Nobody freezes the tree.
    pub(super) fn save_running(self, tree: &Tree<'_>) -> Result<Saving, DumpError> {
        self.begun.save(tree, Instant::now())
    }
}

impl Begun {
    /// The tree is frozen, so it is in the state that CRIU dumps: changes of the tree since the quiesce are taken in.
    pub(super) fn save(self, tree: &Tree<'_>, frozen_at: Instant) -> Result<Saving, DumpError> {
        // Dropped in the reverse of this order where this fails: rings open first.
        let Self { clones, beside, quiesce_began, mut idle_at, writer, mut planned, mut rings } = self;
        let config = &tree.daemon.config;
        for ring in &rings {
            if ring.client().worker.is_dead() && ring.client().process.is_alive() {
                return Err(DumpError::LostWorker(ring.client().to_string()));
            }
        }
        rings.retain(|it| !it.client().worker.is_dead());
        let (mut clients, _) = tree.find(process::frozen_tree)?;
        clients.retain(|it| !rings.iter().any(|ring| Arc::ptr_eq(ring.client(), it)));
        if !clients.is_empty() {
            rings.extend(quiesce::quiesce(&clients, config.timeouts.quiesce)?);
            idle_at = Instant::now();
        }
        let is_there = |it: &Planned| rings.iter().any(|ring| Arc::ptr_eq(ring.client(), &it.client));
        if let Some(gone) = planned.iter().find(|it| it.files.is_some() && !is_there(it)) {
            return Err(DumpError::EndedMeanwhile(gone.client.to_string()));
        }
        planned.retain(is_there);
        let next = planned.iter().map(|it| it.index + 1).max().unwrap_or(0);
        let memory = tree.memory_of(&clients)?;
        planned.extend(tree.plan(&clients, &memory, next));
        writer.disown()?;
        let clients: Vec<_> = planned.iter().map(|it| Arc::clone(&it.client)).collect();
        if let Some(dir) = beside {
            tree.save_beside(dir, &planned, quiesce_began)?;
        }
        let how = How {
            began: tree.began,
            quiesce_began,
            idle_at,
            frozen_at,
            root: tree.root,
            leave_running: tree.leave_running,
            builds: tree.daemon.builds.clone(),
            quiesce: config.timeouts.quiesce,
            stall: config.timeouts.stall,
            sharing: ipc::within(tree.daemon, &clients)?,
            pool: Arc::clone(&tree.daemon.pool),
            natives: tree.native_records()?,
            rehearse: config.checkpoint.rehearse,
            progress: Arc::clone(&tree.progress),
        };
        let job = SaveJob::start(writer, rings, planned, how).map_err(DumpError::Thread)?;
        Ok(Saving::new(job, clones))
    }
}
