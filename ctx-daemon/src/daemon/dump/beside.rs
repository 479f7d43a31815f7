//! A second image, which `stop` writes at the quiesce of another protocol's image: for tests, which compare the two.
//!
//! A peer that asks for a dump may send a second directory with `Pause`. CRIU's plugin never does. The second image is written
//! while the rings are closed, before the first image begins, so both have the same state.

use std::sync::Arc;
use std::time::Instant;

use rekindle_images::{ImageDir, Protocol};

use super::super::ipc;
use super::error::DumpError;
use super::precopy::Planned;
use super::protocol::Chosen;
use super::save::{How, SaveJob};
use super::tree::Tree;

impl Tree<'_> {
    /// Writes the state of quiesced clients, and waits until it is on disk. Memory set aside for these clients' first image
    /// stays.
    pub(super) fn save_beside(
        &self,
        dir: ImageDir,
        planned: &[Planned],
        quiesce_began: Instant,
    ) -> Result<(), DumpError> {
        let chosen = Chosen { protocol: Protocol::Stop, reason: "beside another image".to_owned() };
        let again = |it: &Planned| {
            Planned::new(Arc::clone(&it.client), (it.index, it.count), chosen.clone(), Arc::clone(&it.link))
        };
        let planned: Vec<_> = planned.iter().map(again).collect();
        let clients: Vec<_> = planned.iter().map(|it| Arc::clone(&it.client)).collect();
        let now = Instant::now();
        let how = How {
            began: self.began,
            quiesce_began,
            idle_at: now,
            frozen_at: now,
            root: self.root,
            leave_running: false,
            builds: self.daemon.builds.clone(),
            quiesce: self.daemon.config.timeouts.quiesce,
            stall: self.daemon.config.timeouts.stall,
            sharing: ipc::within(self.daemon, &clients)?,
            pool: Arc::clone(&self.daemon.pool),
            natives: Vec::new(),
            rehearse: false,
            progress: Arc::default(),
        };
        let writer = self.begin_image(dir)?;
        let job = SaveJob::start(writer, Vec::new(), planned, how).map_err(DumpError::Thread)?;
        job.finish(Vec::new());
        job.wait(self.stream)?;
        Ok(())
    }
}
