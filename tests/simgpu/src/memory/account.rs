//! The account of a device's memory: the amount taken, and the devices that may access it.

use std::sync::atomic::{AtomicU64, Ordering};

use rekindle_cuda_abi::types::CUDA_ERROR_OUT_OF_MEMORY;

use super::machine::machine;
use crate::status::Result;

/// The account of a device's memory.
#[derive(Debug)]
pub(crate) struct Account {
    /// The device's number.
    pub(crate) device: usize,
    /// The machine's number of the device.
    number: usize,
    /// Bytes of memory.
    pub(crate) total: u64,
    used: AtomicU64,
    /// A bit for each other device whose contexts may access the memory.
    peers: AtomicU64,
}

impl Account {
    /// The account of a device that has `total` bytes.
    pub(crate) fn new(device: usize, number: usize, total: u64) -> Self {
        Self { device, number, total, used: AtomicU64::new(0), peers: AtomicU64::new(0) }
    }

    /// Takes memory, if there is enough.
    pub(crate) fn charge(&self, bytes: u64) -> Result<()> {
        match machine() {
            None => self.take(bytes, self.total),
            Some(machine) => machine.alone(|| {
                self.take(bytes, self.total.saturating_sub(machine.others(self.number)))?;
                machine.note(self.number, bytes as i64);
                Ok(())
            }),
        }
    }

    fn take(&self, bytes: u64, most: u64) -> Result<()> {
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= most);
        let taken = self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.map(|_| ()).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Gives memory back.
    pub(crate) fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if let Some(machine) = machine() {
            machine.note(self.number, -(bytes as i64));
        }
    }

    /// How many bytes are free.
    pub(crate) fn free(&self) -> u64 {
        let others = machine().map_or(0, |machine| machine.others(self.number));
        self.total.saturating_sub(self.used.load(Ordering::SeqCst)).saturating_sub(others)
    }

    /// A bit for each device whose contexts may access the memory, the device itself among them.
    pub(crate) fn devices(&self) -> u64 {
        1 << self.device | self.peers.load(Ordering::SeqCst)
    }

    /// Lets the contexts of another device access the memory, or ends that.
    pub(crate) fn set_peer(&self, other: usize, on: bool) {
        if on {
            self.peers.fetch_or(1 << other, Ordering::SeqCst);
        } else {
            self.peers.fetch_and(!(1 << other), Ordering::SeqCst);
        }
    }
}
