//! A launch, and the order in which its blocks run.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::block::{Block, Turn};
use super::machine::{Cluster, Core, GRID_BYTES, Launch, POLL_COST};
use crate::declaration::Kernel;
use crate::fault::{Fault, FaultKind, LaunchFault};
use crate::launch::{Env, LaunchConfig};
use crate::memory::Memory;
use crate::program::Program;

/// The number of warp instructions that a block runs before the next gets its turn.
const BLOCK_QUANTUM: i64 = 200_000;
/// The number of blocks that are resident at a time, unless all must be.
const RESIDENT: usize = 32;
/// CUDA's limit for the threads of a block.
const BLOCK_THREADS: u64 = 1024;
const SHARED_LIMIT: u64 = 228 << 10;
const CLUSTER_BLOCKS: u64 = 16;
/// The time to sleep when every block seems to wait for an event outside.
const IDLE: Duration = Duration::from_micros(50);

fn refuse(kernel: &str, kind: FaultKind) -> LaunchFault {
    let fault = Fault { kind, addr: 0 };
    LaunchFault { kernel: kernel.to_owned(), fault, line: 0, block: [0; 3], thread: [0; 3] }
}

fn invalid(kernel: &str, what: impl Into<String>) -> LaunchFault {
    refuse(kernel, FaultKind::InvalidLaunch(what.into()))
}

fn check(kernel: &Kernel, config: &LaunchConfig<'_>) -> Result<(), LaunchFault> {
    let name = &kernel.name;
    let threads: u64 = config.block.iter().map(|&n| u64::from(n)).product();
    if threads == 0 || threads > BLOCK_THREADS {
        return Err(invalid(name, format!("block of {:?} threads", config.block)));
    }
    if config.grid.contains(&0) {
        return Err(invalid(name, format!("grid of {:?} blocks", config.grid)));
    }
    let cluster = config.cluster;
    if cluster.contains(&0) || (0..3).any(|axis| !config.grid[axis].is_multiple_of(cluster[axis])) {
        return Err(invalid(name, format!("clusters of {cluster:?} blocks")));
    }
    let blocks = cluster.iter().map(|n| u64::from(*n)).product::<u64>();
    if blocks > CLUSTER_BLOCKS || kernel.required_cluster.is_some_and(|wanted| wanted != cluster) {
        return Err(invalid(name, format!("clusters of {cluster:?} blocks")));
    }
    if config.params.len() < kernel.param_bytes as usize {
        let (got, needed) = (config.params.len(), kernel.param_bytes);
        return Err(invalid(name, format!("{got} bytes of parameters instead of {needed}")));
    }
    if u64::from(kernel.shared_bytes) + u64::from(config.dynamic_shared) > SHARED_LIMIT {
        return Err(invalid(name, "too much shared memory"));
    }
    let too_large = |most: [u32; 3]| most.iter().map(|&n| u64::from(n)).product::<u64>() < threads;
    if kernel.required_threads.is_some_and(|wanted| wanted != config.block) || kernel.max_threads.is_some_and(too_large)
    {
        return Err(invalid(name, format!("not compiled for {:?} threads", config.block)));
    }
    Ok(())
}

/// Runs a kernel to its end, on the calling thread.
///
/// Blocks run in order, a few at a time where one does not end soon, all of them where the launch
/// is cooperative.
///
/// # Errors
///
/// The kernel is unknown or not supported, the configuration is impossible, a thread failed, or
/// the launch was cancelled. Writes made before are in memory.
pub fn launch(
    program: &Program,
    name: &str,
    config: &LaunchConfig<'_>,
    memory: &dyn Memory,
    env: &Env<'_>,
) -> Result<(), LaunchFault> {
    let Some(kernel) = program.kernel(name) else {
        return Err(invalid(name, "no such kernel"));
    };
    check(kernel, config)?;
    if let Err(unsupported) = program.supported(name) {
        return Err(refuse(name, FaultKind::Unsupported(unsupported.clone())));
    }
    let function = program.function_of(name).ok_or_else(|| invalid(name, "no such kernel"))?;
    // Parameters are read in place by generic addresses, so they must be aligned.
    let mut params = vec![0u128; config.params.len().div_ceil(16)];
    // SAFETY: the vector has at least as many bytes, and any bytes are valid numbers.
    let params = unsafe {
        let start = params.as_mut_ptr().cast::<u8>();
        std::ptr::copy_nonoverlapping(config.params.as_ptr(), start, config.params.len());
        std::slice::from_raw_parts(start, config.params.len())
    };
    let mut grid_words = [0u64; GRID_BYTES as usize / 8];
    let launch = Launch {
        constants: &program.constants,
        lists: &program.lists,
        memory,
        env,
        params,
        grid: config.grid,
        block: config.block,
        cluster: config.cluster,
        dynamic_shared: config.dynamic_shared,
        shared_bytes: kernel.shared_bytes.next_multiple_of(16) + config.dynamic_shared,
        grid_words: if config.cooperative { grid_words.as_mut_ptr() } else { std::ptr::null_mut() },
    };
    Grid { program, launch: &launch, name, function, cooperative: config.cooperative }.run()
}

struct Grid<'l> {
    program: &'l Program,
    launch: &'l Launch<'l>,
    name: &'l str,
    function: usize,
    cooperative: bool,
}

impl<'l> Grid<'l> {
    fn run(&self) -> Result<(), LaunchFault> {
        let launch = self.launch;
        let [gx, gy, gz] = launch.grid.map(u64::from);
        let count = gx * gy * gz;
        let mut next = 0u64;
        let mut resident: VecDeque<Block<'l>> = VecDeque::new();
        let mut spare: Vec<Block<'l>> = Vec::new();
        let mut ended: Vec<Block<'l>> = Vec::new();
        let mut w = Core::new(launch);
        let mut idle = 0;
        loop {
            // In a cooperative launch all blocks start at once; otherwise another one starts whenever the resident ones do not
            // end.
            let wanted = if self.cooperative { usize::MAX } else { RESIDENT };
            while next < count && resident.len() < wanted {
                if launch.cluster != [1; 3] {
                    // All blocks of a cluster are resident together.
                    resident.extend(self.cluster(next));
                    next += launch.cluster.iter().map(|n| u64::from(*n)).product::<u64>();
                } else {
                    let at = [next % gx, next / gx % gy, next / gx / gy].map(|n| n as u32);
                    let mut block = spare.pop().unwrap_or_else(|| Block::new(self.program, launch));
                    block.start(launch, self.function, at);
                    next += 1;
                    resident.push_front(block);
                }
                if !self.cooperative {
                    break;
                }
            }
            let Some(mut block) = resident.pop_front() else { return Ok(()) };
            if launch.env.cancel.load(Ordering::Relaxed) {
                let fault = Fault { kind: FaultKind::Cancelled, addr: 0 };
                return Err(self.failed(&block, fault));
            }
            w.safe_point();
            let polls = w.polls;
            match block.run(&mut w, BLOCK_QUANTUM) {
                Turn::Ended => {
                    match block.cluster.clone() {
                        // Other blocks of the cluster may access its memory until they have ended.
                        Some(cluster) if launch.cluster != [1; 3] => {
                            cluster.blocks.set(cluster.blocks.get() - 1);
                            ended.push(block);
                            ended.retain(|it| it.cluster.as_ref().is_some_and(|c| c.blocks.get() > 0));
                        }
                        _ => spare.push(block),
                    }
                    idle = 0;
                }
                Turn::Preempted => {
                    // A block that mostly polled probably waits for another thread.
                    let waits = (w.polls - polls) as i64 * POLL_COST > BLOCK_QUANTUM / 2;
                    idle = if waits { idle + 1 } else { 0 };
                    resident.push_back(block);
                    if idle > resident.len() && (next == count || resident.len() >= RESIDENT) {
                        std::thread::sleep(IDLE);
                        idle = 0;
                    }
                }
                Turn::Fault => {
                    let unknown = Fault { kind: FaultKind::Trap, addr: 0 };
                    let fault = w.fault.take().map_or(unknown, |(fault, _)| fault);
                    return Err(self.failed(&block, fault));
                }
            }
        }
    }

    /// The blocks of the cluster that follows `blocks` blocks in whole clusters, by their ranks.
    fn cluster(&self, blocks: u64) -> Vec<Block<'l>> {
        let launch = self.launch;
        let size = launch.cluster.map(u64::from);
        let number = blocks / size.iter().product::<u64>();
        let [cx, cy, _] = [0, 1, 2].map(|axis| u64::from(launch.grid[axis]) / size[axis]);
        let place = [number % cx, number / cx % cy, number / cx / cy];
        let cluster = Rc::new(Cluster::default());
        let mut members = Vec::new();
        for rank in 0..size.iter().product::<u64>() {
            let within = [rank % size[0], rank / size[0] % size[1], rank / size[0] / size[1]];
            let at = [0, 1, 2].map(|axis| (place[axis] * size[axis] + within[axis]) as u32);
            let mut block = Block::new(self.program, launch);
            block.start(launch, self.function, at);
            block.join(&cluster, launch);
            members.push(block);
        }
        members
    }

    fn failed(&self, block: &Block<'_>, fault: Fault) -> LaunchFault {
        let (thread, line) = block.failed;
        LaunchFault { kernel: self.name.to_owned(), fault, line, block: block.at, thread }
    }
}
