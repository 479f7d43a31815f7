//! A block: its warps, its shared memory, its barriers.

use std::rc::Rc;

use super::machine::{Cluster, Core, LANES, Launch, SharedMemory};
use super::warp::{Barriers, Stop, Warp};
use crate::fault::FaultKind;
use crate::program::Program;

/// The number of instructions that a warp runs before the next gets its turn.
const WARP_QUANTUM: i64 = 50_000;

/// The end of a block's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    Ended,
    /// Its time is up.
    Preempted,
    Fault,
}

/// A resident block.
pub(crate) struct Block<'l> {
    pub(crate) at: [u32; 3],
    warps: Vec<Warp<'l>>,
    shared: Vec<u128>,
    barriers: Barriers,
    /// The cluster that it is in, once it is started.
    pub(crate) cluster: Option<Rc<Cluster>>,
    /// The warp that runs next.
    next: usize,
    /// The thread that failed, and the line.
    pub(crate) failed: ([u32; 3], u32),
}

impl<'l> Block<'l> {
    pub(crate) fn new(program: &'l Program, launch: &Launch<'_>) -> Self {
        let threads: u32 = launch.block.iter().product();
        let warps = (0..threads.div_ceil(LANES as u32)).map(|n| Warp::new(program, launch, n)).collect();
        Block {
            at: [0; 3],
            warps,
            shared: vec![0; (launch.shared_bytes as usize).div_ceil(16)],
            barriers: Barriers::default(),
            cluster: None,
            next: 0,
            failed: ([0; 3], 0),
        }
    }

    /// Puts the block at the beginning of a kernel.
    pub(crate) fn start(&mut self, launch: &Launch<'_>, kernel: usize, at: [u32; 3]) {
        self.at = at;
        self.shared.fill(0);
        self.barriers = Barriers::default();
        self.next = 0;
        for warp in &mut self.warps {
            warp.start(launch, kernel, at);
        }
        if launch.cluster == [1; 3] {
            // A cluster by itself.
            let cluster = self.cluster.take().unwrap_or_default();
            cluster.restart();
            self.join(&cluster, launch);
        }
    }

    /// Becomes the next block of a cluster, before it runs.
    pub(crate) fn join(&mut self, cluster: &Rc<Cluster>, launch: &Launch<'_>) {
        let bytes = u64::from(launch.shared_bytes);
        cluster.add(self.shared.as_mut_ptr().cast(), bytes, launch.block.iter().product());
        self.cluster = Some(Rc::clone(cluster));
    }

    /// Runs about `budget` instructions of its warps.
    pub(crate) fn run(&mut self, w: &mut Core<'_>, mut budget: i64) -> Turn {
        let bytes = u64::from(w.launch.shared_bytes);
        w.shared = SharedMemory::new(self.shared.as_mut_ptr().cast(), bytes, self.cluster.clone());
        let count = self.warps.len();
        // Warps in a row that could not run.
        let mut blocked = 0;
        while budget > 0 {
            let index = self.next;
            self.next = (self.next + 1) % count;
            let quantum = budget.min(WARP_QUANTUM);
            w.budget = quantum;
            let warp = &mut self.warps[index];
            let stop = if warp.live == 0 { Stop::Ended } else { warp.run(w, &mut self.barriers) };
            budget -= (quantum - w.budget).max(0);
            match stop {
                Stop::Fault => {
                    self.blame(w, index);
                    return Turn::Fault;
                }
                Stop::Preempted => blocked = 0,
                Stop::Blocked | Stop::Ended => {
                    blocked = if w.budget < quantum { 0 } else { blocked + 1 };
                }
            }
            if self.barriers.any() && self.open_barriers(w) {
                blocked = 0;
            }
            if blocked >= count {
                if self.warps.iter().all(|warp| warp.live == 0) {
                    return Turn::Ended;
                }
                let index = self.warps.iter().position(|warp| warp.live != 0).unwrap_or(0);
                let what = "threads of the block wait for each other".to_owned();
                let lane = self.warps[index].some_lane();
                w.fail(FaultKind::Deadlock(what), 0, lane);
                self.blame(w, index);
                return Turn::Fault;
            }
        }
        Turn::Preempted
    }

    fn blame(&mut self, w: &Core<'_>, warp: usize) {
        let lane = w.fault.as_ref().map_or(0, |(_, lane)| *lane);
        let thread = (warp * LANES + lane) as u32;
        let [x, y, _] = w.launch.block;
        self.failed = ([thread % x, thread / x % y, thread / x / y], self.warps[warp].line);
    }

    /// Opens the barriers at which all threads have arrived; returns whether there was one.
    fn open_barriers(&mut self, w: &mut Core<'_>) -> bool {
        let live: u32 = self.warps.iter().map(|warp| warp.live.count_ones()).sum();
        let mut opened = false;
        while let Some((id, barrier)) = self.barriers.open(live) {
            opened = true;
            for warp in &mut self.warps {
                warp.release(w, id, |inst| barrier.result(inst));
            }
        }
        opened
    }
}
