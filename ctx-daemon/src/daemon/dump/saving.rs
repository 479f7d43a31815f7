//! A dump whose image is written in the background, while CRIU dumps the frozen tree.

use std::sync::Arc;

use rekindle_images::Committed;
use rekindle_wire::control::Reply;
use tracing::info;

use super::super::clients::Client;
use super::super::memory_pressure::ClonesGuard;
use super::super::migrate::HandedOver;
use super::error::{DumpError, SaveError};
use super::manifest::Whose;
use super::save::SaveJob;
use super::tree::Tree;

/// A dump that is being saved. Dropping it gives the image up, and lets the clients go on.
pub(super) struct Saving {
    job: SaveJob,
    /// The sockets that CRIU has dumped.
    sockets: Vec<(Whose, u32)>,
    clones: ClonesGuard,
}

/// A dump whose image is on disk. The job is held until the connection closes: only then do clients that CRIU kills go on.
pub(super) struct Durable {
    /// Dropped first: nothing of a tree that was handed over is alive when its rings open.
    _handed_over: Option<HandedOver>,
    _job: SaveJob,
}

impl Saving {
    pub(super) fn new(job: SaveJob, clones: ClonesGuard) -> Self {
        Self { job, sockets: Vec::new(), clones }
    }

    /// An error if the image has failed by now.
    pub(super) fn check(&self) -> Result<(), SaveError> {
        self.job.check()
    }

    pub(super) fn clients(&self) -> &[Arc<Client>] {
        self.job.clients()
    }

    /// Notes the owner of the socket. CRIU asks twice about a socket that has something to be read.
    pub(super) fn note(&mut self, id: u32, whose: Whose, again: bool) -> Reply {
        self.sockets.retain(|(_, before)| *before != id);
        self.sockets.push((whose, id));
        Reply::Socket { ours: true, again }
    }

    /// CRIU has dumped the tree, and the plugin has resumed the tasks, if they are to go on. Waits until the image is on
    /// disk.
    pub(super) fn finish(self, tree: &Tree<'_>) -> Result<Durable, DumpError> {
        // Dropped in the reverse of this order where this fails: the job's copy ends first.
        let Self { clones, sockets, job } = self;
        for client in job.clients() {
            let dumped =
                |(whose, _): &(Whose, u32)| matches!(whose, Whose::Client(process) if *process == client.process);
            if !sockets.iter().any(dumped) {
                return Err(DumpError::NoSocket(client.to_string()));
            }
        }
        job.finish(sockets);
        let committed = job.wait(tree.stream)?;
        tree.all_are_durable()?;
        let handed_over = tree.wait_until_handed_over()?;
        drop(clones);
        tree.is_durable();
        tree.progress.durable(&committed, tree.began.elapsed());
        info!(
            root = tree.root,
            id = %committed.id,
            bytes = committed.bytes,
            files = committed.files,
            ms = tree.began.elapsed().as_millis() as u64,
            "durable"
        );
        Ok(Durable { _handed_over: handed_over, _job: job })
    }

    /// Lets the clients run, and waits until their memory is on disk. There is no CRIU that dumps their processes.
    pub(super) fn finish_pre_copy(self, tree: &Tree<'_>) -> Result<Committed, DumpError> {
        self.job.finish(Vec::new());
        self.job.wait(tree.stream)
    }
}
