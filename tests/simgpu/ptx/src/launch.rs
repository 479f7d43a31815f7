//! The inputs of a launch: its shape, and its surroundings.

use std::sync::atomic::AtomicBool;

use crate::texture::Textures;

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub struct LaunchConfig<'a> {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub dynamic_shared: u32,
    /// The parameters, laid out as [`Kernel::params`](crate::Kernel::params) says. May be longer
    /// than the kernel's parameters are, not shorter.
    pub params: &'a [u8],
    /// Whether all blocks must be resident together, as a grid barrier needs.
    pub cooperative: bool,
    /// Blocks of a cluster in x, y and z; all one if there are none.
    pub cluster: [u32; 3],
}

impl<'a> LaunchConfig<'a> {
    /// A plain launch, without dynamic shared memory.
    #[must_use]
    pub fn new(grid: [u32; 3], block: [u32; 3], params: &'a [u8]) -> Self {
        Self { grid, block, dynamic_shared: 0, params, cooperative: false, cluster: [1; 3] }
    }
}

/// The device's heap, from which kernels take memory with `malloc`.
pub trait Heap: Sync {
    /// A new allocation's address, or none. [`Memory`](crate::Memory) must have it from then on.
    fn malloc(&self, bytes: u64) -> Option<u64>;
    /// Frees an allocation.
    fn free(&self, addr: u64);
}

/// The device's part in launches that kernels make.
pub trait Children: Sync {
    /// The address of memory for the parameters of a kernel, which is named by its address, with this grid, block and dynamic
    /// shared memory; none where it cannot be launched so.
    fn parameters(&self, kernel: u64, grid: [u32; 3], block: [u32; 3], shared: u32) -> Option<u64>;
    /// Launches the kernel that such memory was made for, in a stream of the device's: 0, or an error of the runtime.
    fn launch(&self, parameters: u64, stream: u64) -> u32;
    /// The last error, which is forgotten if `take`.
    fn last_error(&self, take: bool) -> u32;
    /// A new stream.
    fn create_stream(&self) -> u64;
}

/// The values that a graph's conditional nodes look at.
pub trait Conditions: Sync {
    /// Sets a value; `false` if the graph has no such one.
    fn set(&self, handle: u64, value: u32) -> bool;
}

/// The surroundings of a launch.
#[derive(Clone, Copy)]
pub struct Env<'a> {
    /// Set to end the launch soon, with a fault of kind [`Cancelled`](crate::FaultKind::Cancelled).
    pub cancel: &'a AtomicBool,
    /// Nanoseconds since some moment, for `%globaltimer` and `%clock`.
    pub clock: &'a (dyn Fn() -> u64 + Sync),
    /// Receives the text that the kernel prints, one call of `printf` at a time.
    pub print: &'a (dyn Fn(&[u8]) + Sync),
    /// Receives the message of a failed assertion.
    pub complain: &'a (dyn Fn(&[u8]) + Sync),
    /// The heap for `malloc`. Without one, a kernel that executes `malloc` fails.
    pub heap: Option<&'a dyn Heap>,
    /// The textures and surfaces. Without them, a kernel that uses one fails.
    pub textures: Option<&'a dyn Textures>,
    /// Executes the launches that the kernel makes. Without it, a kernel that makes one fails.
    pub children: Option<&'a dyn Children>,
    /// The values of the graph whose node the kernel is. Without them, setting one is an access to no memory.
    pub conditions: Option<&'a dyn Conditions>,
    /// The bytes of a thread's stack.
    pub stack_bytes: u32,
    /// `%nsmid`: the number of the device's multiprocessors.
    pub multiprocessors: u32,
    /// `%gridid`: the number of this launch.
    pub grid_id: u64,
}

impl<'a> Env<'a> {
    /// An environment that discards printed text, has no heap, and reads the process's clock.
    #[must_use]
    pub fn new(cancel: &'a AtomicBool) -> Self {
        Self {
            cancel,
            clock: &monotonic_nanos,
            print: &|_| (),
            complain: &|_| (),
            heap: None,
            textures: None,
            children: None,
            conditions: None,
            stack_bytes: 256 << 10,
            multiprocessors: 16,
            grid_id: 1,
        }
    }
}

fn monotonic_nanos() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
}
