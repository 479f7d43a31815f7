//! The bandwidth of copies on the links between GPUs and host: `checkpoint.bandwidth`, divided equally among all clients that
//! are being copied from the same GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use rekindle_wire::control::WorkerRequest;
use tracing::debug;

use super::clients::Client;
use super::lock;
use super::worker::WorkerError;
use crate::config::CheckpointConfig;
use crate::limit::Limit;

type Uuid = [u8; 16];

/// The links of all GPUs.
#[derive(Debug)]
pub(crate) struct Links {
    /// The bandwidth of each link, in bytes a second.
    bandwidth: Option<u64>,
    application_first: bool,
    /// The number of clients that are being copied from each GPU.
    copied: Mutex<HashMap<Uuid, u64>>,
}

/// A client that is being copied, until this is dropped.
pub(crate) struct Copied {
    links: Arc<Links>,
    /// The GPUs in the order of its worker's devices. The flag says whether the client counts there: it had memory there at
    /// first.
    gpus: Vec<(Uuid, bool)>,
    /// The share that its worker was told last.
    told: Mutex<Option<Vec<u64>>>,
}

impl Links {
    /// The links with the configured bandwidth.
    pub(crate) fn new(config: &CheckpointConfig) -> Arc<Self> {
        let &CheckpointConfig { bandwidth, application_first, .. } = config;
        Arc::new(Self { bandwidth, application_first, copied: Mutex::default() })
    }

    /// Adds a client, which has so much memory on each device.
    pub(crate) fn join(self: &Arc<Self>, client: &Client, memory: &[u64]) -> Arc<Copied> {
        let devices = client.worker.attached().devices.iter().enumerate();
        let uses = |at: usize| memory.get(at).is_some_and(|bytes| *bytes > 0);
        self.join_gpus(devices.map(|(at, device)| (device.uuid, uses(at))).collect())
    }

    fn join_gpus(self: &Arc<Self>, gpus: Vec<(Uuid, bool)>) -> Arc<Copied> {
        let mut copied = lock(&self.copied);
        for (gpu, _) in gpus.iter().filter(|(_, counted)| *counted) {
            *copied.entry(*gpu).or_default() += 1;
        }
        drop(copied);
        Arc::new(Copied { links: Arc::clone(self), gpus, told: Mutex::default() })
    }
}

impl Copied {
    /// The share of the client's worker now, in bytes per second on each device; 0: no limit.
    fn share(&self) -> Vec<u64> {
        let copied = lock(&self.links.copied);
        let share = |(gpu, counted): &(Uuid, bool)| {
            // A device without memory at first may have some by now: it gets no more than a client that is counted would.
            let clients = copied.get(gpu).copied().unwrap_or(0) + u64::from(!counted);
            self.links.bandwidth.map_or(0, |bandwidth| (bandwidth / clients.max(1)).max(1))
        };
        self.gpus.iter().map(share).collect()
    }

    /// Tells the worker its share, if the worker does not know it yet, and waits at most for the limit.
    pub(crate) fn tell(&self, client: &Client, limit: Limit) -> Result<(), WorkerError> {
        let mut told = lock(&self.told);
        let bandwidth = self.share();
        if told.as_ref() == Some(&bandwidth) {
            return Ok(());
        }
        debug!(%client, ?bandwidth, "may be copied so fast");
        let application_first = self.links.application_first;
        let request = WorkerRequest::Pace { bandwidth: bandwidth.clone(), application_first };
        client.worker.ask(&request, &[], limit)?;
        *told = Some(bandwidth);
        Ok(())
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let mut copied = lock(&self.links.copied);
        for (gpu, _) in self.gpus.iter().filter(|(_, counted)| *counted) {
            if let Some(left) = copied.get_mut(gpu) {
                *left -= 1;
                if *left == 0 {
                    copied.remove(gpu);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_of_one_gpu_share_its_link() {
        let links = Arc::new(Links { bandwidth: Some(900), application_first: true, copied: Mutex::default() });
        let (one, other) = (([1; 16], true), ([2; 16], true));
        let first = links.join_gpus(vec![one, other]);
        assert_eq!(first.share(), [900, 900]);
        let second = links.join_gpus(vec![([2; 16], false), one]);
        let third = links.join_gpus(vec![one]);
        assert_eq!((first.share(), second.share(), third.share()), (vec![300, 900], vec![450, 300], vec![300]));
        drop(second);
        assert_eq!(first.share(), [450, 900]);
        drop((first, third));
        assert!(lock(&links.copied).is_empty());
    }

    #[test]
    fn without_a_limit_there_is_none() {
        let links = Arc::new(Links { bandwidth: None, application_first: true, copied: Mutex::default() });
        assert_eq!(links.join_gpus(vec![([1; 16], true), ([2; 16], false)]).share(), [0, 0]);
    }
}
