//! Kernels that kernels launch: each runs when the kernel that has launched it has ended.
//!
//! A kernel cannot wait for one that it launches, so the order is one that a device may choose: first a kernel, then what it has
//! launched, one after the other, and last what it has launched for its own end (`cudaStreamTailLaunch`). Streams and events of the
//! device's side demand no other order.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_ptx::{Children, Kernel, Program};

use super::shape::Shape;
use crate::attributes::{MAX_BLOCK, MAX_BLOCK_THREADS, MAX_GRID, SHARED_DEFAULT};
use crate::context::Context;
use crate::memory::space::{self, Kind};

/// `cudaErrorInvalidValue`, `cudaErrorMemoryAllocation`, `cudaErrorInvalidConfiguration`.
const INVALID_VALUE: u32 = 1;
const NO_MEMORY: u32 = 2;
const INVALID_CONFIGURATION: u32 = 9;

/// The stream of launches that wait for the end of the kernel that makes them, and of all that it has launched.
const TAIL_LAUNCH: u64 = 3;
/// The first stream that is not named by a small number.
const FIRST_STREAM: u64 = 0x100;

/// A launch that a kernel has made.
#[derive(Debug)]
pub(super) struct Child {
    /// The kernel.
    pub(super) kernel: Kernel,
    /// Its blocks and threads.
    pub(super) shape: Shape,
    /// Its parameters.
    pub(super) parameters: Vec<u8>,
}

/// The launches that one kernel makes.
pub(super) struct Launches<'c> {
    context: &'c Context,
    program: &'c Program,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Kernels whose parameters are being written, by where these are.
    prepared: BTreeMap<u64, (Kernel, Shape)>,
    /// Memory of parameters that have been read: given back when the kernel has ended, since memory stays while one runs.
    spent: Vec<u64>,
    ordinary: Vec<Child>,
    at_end: Vec<Child>,
    streams: u64,
    error: u32,
}

impl<'c> Launches<'c> {
    /// Of a kernel of this program.
    pub(super) fn new(context: &'c Context, program: &'c Program) -> Self {
        Self { context, program, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The launches, in the order in which they run. The kernel that has made them has ended.
    pub(super) fn take(&self) -> Vec<Child> {
        self.give_back();
        let mut state = self.state();
        let mut all = std::mem::take(&mut state.ordinary);
        all.append(&mut state.at_end);
        all
    }

    fn give_back(&self) {
        let mut state = self.state();
        let mut addresses = std::mem::take(&mut state.spent);
        // Prepared, but never launched.
        addresses.extend(std::mem::take(&mut state.prepared).into_keys());
        drop(state);
        for address in addresses {
            if let Some(region) = space::remove(address, |it| it.kind == Kind::Internal) {
                self.context.device.reclaim(&region);
            }
        }
    }

    fn prepare(&self, kernel: u64, shape: Shape) -> Result<u64, u32> {
        let kernel = self.program.kernel_at(kernel).ok_or(INVALID_VALUE)?;
        let within = |size: [u32; 3], most: [u32; 3]| size.iter().zip(most).all(|(n, m)| (1..=m).contains(n));
        let threads = shape.block.iter().map(|n| u64::from(*n)).product::<u64>();
        let fits = within(shape.grid, MAX_GRID)
            && within(shape.block, MAX_BLOCK)
            && threads <= u64::from(MAX_BLOCK_THREADS)
            && u64::from(kernel.shared_bytes) + u64::from(shape.shared) <= u64::from(SHARED_DEFAULT);
        if !fits {
            return Err(INVALID_CONFIGURATION);
        }
        let bytes = u64::from(kernel.param_bytes).max(1);
        let address = self.context.device.allocate(self.context.handle, Kind::Internal, bytes);
        let address = address.map_err(|_| NO_MEMORY)?;
        self.state().prepared.insert(address, (kernel.clone(), shape));
        Ok(address)
    }
}

impl Children for Launches<'_> {
    fn parameters(&self, kernel: u64, grid: [u32; 3], block: [u32; 3], shared: u32) -> Option<u64> {
        let prepared = self.prepare(kernel, Shape::plain(grid, block, shared));
        prepared.map_err(|error| self.state().error = error).ok()
    }

    fn launch(&self, parameters: u64, stream: u64) -> u32 {
        let Some((kernel, shape)) = self.state().prepared.remove(&parameters) else {
            self.state().error = INVALID_VALUE;
            return INVALID_VALUE;
        };
        let mut bytes = vec![0; kernel.param_bytes as usize];
        // SAFETY: the memory was allocated for that many bytes, and is given back only below.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(parameters as *const u8, bytes.len()) };
        let child = Child { kernel, shape, parameters: bytes };
        let mut state = self.state();
        state.spent.push(parameters);
        match stream {
            TAIL_LAUNCH => state.at_end.push(child),
            _ => state.ordinary.push(child),
        }
        0
    }

    fn last_error(&self, take: bool) -> u32 {
        let mut state = self.state();
        let error = state.error;
        if take {
            state.error = 0;
        }
        error
    }

    fn create_stream(&self) -> u64 {
        let mut state = self.state();
        state.streams += 1;
        FIRST_STREAM + state.streams
    }
}

impl Drop for Launches<'_> {
    fn drop(&mut self) {
        self.give_back();
    }
}
