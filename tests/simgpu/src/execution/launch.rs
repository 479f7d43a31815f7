//! Launching a kernel: checks in the caller's thread, execution in the stream's.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_ASSERT, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, CUDA_ERROR_ILLEGAL_ADDRESS,
    CUDA_ERROR_INVALID_CLUSTER_SIZE, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_PC, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_MISALIGNED_ADDRESS, CUresult, MEMORY_GRANULARITY,
};
use rekindle_graphs::Values;
use rekindle_ptx::{Conditions, Env, FaultKind, Heap, Kernel, LaunchConfig, LaunchFault, Program};

use super::children::Launches;
pub(crate) use super::shape::Shape;

use crate::attributes::{
    BLOCKS_OF_MULTIPROCESSOR, MAX_BLOCK, MAX_BLOCK_THREADS, MAX_GRID, SHARED_OF_MULTIPROCESSOR, SHARED_OPT_IN,
    SHARED_RESERVED, THREADS_OF_MULTIPROCESSOR,
};
use crate::config::config;
use crate::context::{Context, MALLOC_HEAP_SIZE};
use crate::current;
use crate::fault;
use crate::library::function_in;
use crate::memory::space::{Kind, View};
use crate::module::{Function, REGISTERS, attribute_of};
use crate::status::{Result, ensure};
use crate::stream::Stream;

/// The blocks of a cluster that every device supports, and those that this one supports.
const PORTABLE_CLUSTER: u64 = 8;
const MAX_CLUSTER: u64 = 16;
/// `CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`.
const NON_PORTABLE_ALLOWED: u32 = 14;

/// Launches a kernel in a stream.
///
/// # Safety
///
/// `params` and `extra` must be null or what `cuLaunchKernel` describes.
pub(crate) unsafe fn launch(
    function: u64,
    shape: Shape,
    stream: u64,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<()> {
    let context = current::healthy()?;
    context.flush_prints();
    let stream = current::stream(stream)?;
    // Copies may go to streams of other contexts, but launches may not.
    ensure(stream.context()?.id == context.id, CUDA_ERROR_INVALID_HANDLE)?;
    // SAFETY: the caller's promise.
    unsafe { launch_in(&context, &stream, function, shape, (params, extra), None) }
}

/// Launches a kernel in a stream of a context; a node of a graph, with the values of the graph's conditions.
///
/// # Safety
///
/// As for [`launch`].
pub(crate) unsafe fn launch_in(
    context: &Arc<Context>,
    stream: &Arc<Stream>,
    function: u64,
    shape: Shape,
    (params, extra): (*mut *mut c_void, *mut *mut c_void),
    values: Option<Values>,
) -> Result<()> {
    ensure(params.is_null() || extra.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    let function = function_in(context, function)?;
    ensure(function.context.upgrade().is_some_and(|c| c.id == context.id), CUDA_ERROR_INVALID_HANDLE)?;
    let mut shape = shape;
    // A kernel that declares its clusters' size is launched in such clusters.
    if let (Some(required), [1, 1, 1]) = (function.kernel.required_cluster, shape.cluster) {
        shape.cluster = required;
    }
    check(&function, &shape)?;
    // SAFETY: the caller's promise.
    let params = unsafe { gather(&function, params, extra) }?;
    if function.code.prints() {
        context.make_print_buffer();
    }
    stream.submit(move |context| run(context, &function, &shape, &params, values.as_ref()))?;
    Ok(())
}

/// Checks the conditions that the driver checks at once, without harm to the context.
pub(crate) fn check(function: &Function, shape: &Shape) -> Result<()> {
    let within = |size: [u32; 3], most: [u32; 3]| size.iter().zip(most).all(|(n, m)| (1..=m).contains(n));
    ensure(within(shape.grid, MAX_GRID) && within(shape.block, MAX_BLOCK), CUDA_ERROR_INVALID_VALUE)?;
    let threads = shape.block.iter().product::<u32>();
    ensure(threads <= MAX_BLOCK_THREADS, CUDA_ERROR_INVALID_VALUE)?;
    let blocks = shape.cluster.iter().map(|n| u64::from(*n)).product::<u64>();
    let required = function.kernel.required_cluster;
    let not_portable = attribute_of(&function.kernel, 0, &function.settings, NON_PORTABLE_ALLOWED)? != 0;
    let most = if not_portable { MAX_CLUSTER } else { PORTABLE_CLUSTER };
    ensure(blocks <= most, CUDA_ERROR_INVALID_CLUSTER_SIZE)?;
    ensure(required.is_none_or(|it| it == shape.cluster), CUDA_ERROR_INVALID_CLUSTER_SIZE)?;
    shape.check_clusters()?;
    if let Some(required) = function.kernel.required_threads {
        ensure(shape.block == required, CUDA_ERROR_INVALID_VALUE)?;
    }
    ensure(threads <= function.max_threads(), CUDA_ERROR_INVALID_VALUE)?;
    ensure(shape.shared <= function.max_dynamic_shared(), CUDA_ERROR_INVALID_VALUE)?;
    ensure(function.kernel.shared_bytes + shape.shared <= SHARED_OPT_IN, CUDA_ERROR_INVALID_VALUE)?;
    if shape.cooperative {
        let blocks = shape.grid.iter().map(|n| u64::from(*n)).product::<u64>();
        let most = blocks_of_multiprocessor(function, threads, u64::from(shape.shared)) * config().multiprocessors;
        ensure(blocks <= u64::from(most), CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE)?;
    }
    function.ensure_supported()
}

/// How many blocks a multiprocessor holds at once.
pub(crate) fn blocks_of_multiprocessor(function: &Function, threads: u32, shared: u64) -> u32 {
    // The kernel's own bounds do not count here, as with the driver.
    if threads == 0 || threads > MAX_BLOCK_THREADS {
        return 0;
    }
    let threads = threads.next_multiple_of(32);
    let shared = u64::from(function.kernel.shared_bytes) + shared + u64::from(SHARED_RESERVED);
    let by_shared = u64::from(SHARED_OF_MULTIPROCESSOR) / shared;
    let by_registers = 65_536 / (threads * REGISTERS);
    BLOCKS_OF_MULTIPROCESSOR.min(THREADS_OF_MULTIPROCESSOR / threads).min(by_registers).min(by_shared as u32)
}

/// Puts the parameters together, from pointers to each or from one buffer of them all.
///
/// # Safety
///
/// As for [`launch`].
pub(crate) unsafe fn gather(function: &Function, params: *mut *mut c_void, extra: *mut *mut c_void) -> Result<Vec<u8>> {
    let kernel = &function.kernel;
    let (layout, size) = (kernel.params.iter().map(|p| (p.offset, p.size)), kernel.param_bytes as usize);
    let mut bytes = Vec::new();
    // SAFETY: the caller's promise.
    unsafe { rekindle_cuda_abi::launch::gather(layout, size, params, extra, &mut bytes) }?;
    // A buffer may be too short: the parameters that it lacks are 0.
    bytes.resize(size, 0);
    Ok(bytes)
}

/// Runs a kernel to its end, and what it launches. A failure here is the context's error.
fn run(context: &Context, function: &Function, shape: &Shape, params: &[u8], values: Option<&Values>) -> Result<()> {
    fault::point("kernel")?;
    let program = function.code.program()?;
    let graph = values.map(GraphValues);
    run_grid(&Surroundings { context, program: &program, graph }, &function.kernel, (shape, params), 0)
}

/// What a kernel shares with those that it launches.
struct Surroundings<'c> {
    context: &'c Context,
    program: &'c Program,
    /// The values of the graph of which the kernel is a node.
    graph: Option<GraphValues<'c>>,
}

/// The values of a graph's conditions in the form that kernels use.
struct GraphValues<'g>(&'g Values);

impl Conditions for GraphValues<'_> {
    fn set(&self, handle: u64, value: u32) -> bool {
        self.0.set(handle, value)
    }
}

/// How deep launches of kernels by kernels may be nested; a device's limit.
const NESTED: u32 = 24;

fn run_grid(on: &Surroundings<'_>, kernel: &Kernel, (shape, params): (&Shape, &[u8]), depth: u32) -> Result<()> {
    let Surroundings { context, program, .. } = *on;
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    // Ends behind the view, for which memory stays.
    let children = Launches::new(context, program);
    let view = View::open(context.device.ordinal);
    let env = Env {
        print: &|text| context.print(text),
        complain: &|text| context.complain(text),
        heap: Some(&KernelHeap(context)),
        textures: Some(&context.bindings),
        children: (depth < NESTED).then_some(&children),
        conditions: on.graph.as_ref().map(|it| it as &dyn Conditions),
        multiprocessors: config().multiprocessors,
        grid_id: NUMBER.fetch_add(1, Ordering::Relaxed),
        ..Env::new(context.cancelled())
    };
    let config = LaunchConfig {
        grid: shape.grid,
        block: shape.block,
        dynamic_shared: shape.shared,
        params,
        cooperative: shape.cooperative,
        cluster: shape.cluster,
    };
    rekindle_ptx::launch(program, &kernel.name, &config, &view, &env).map_err(|fault| code(context, &fault))?;
    drop(view);
    let launched = children.take();
    launched.iter().try_for_each(|child| run_grid(on, &child.kernel, (&child.shape, &child.parameters), depth + 1))
}

/// The least that is mapped.
const PAGE: u64 = 4096;

/// The heap of a context in the form that kernels use.
struct KernelHeap<'c>(&'c Context);

impl Heap for KernelHeap<'_> {
    fn malloc(&self, bytes: u64) -> Option<u64> {
        let context = self.0;
        context.malloc.take(bytes, || {
            let len = (context.limit(MALLOC_HEAP_SIZE).ok()? as u64).next_multiple_of(PAGE);
            // It begins with a page of the size that a GPU's have.
            let base = context.device.allocate(context.handle, Kind::Internal, len + MEMORY_GRANULARITY).ok()?;
            Some((base.next_multiple_of(MEMORY_GRANULARITY), len))
        })
    }

    fn free(&self, addr: u64) {
        self.0.malloc.give_back(addr);
    }
}

fn code(context: &Context, fault: &LaunchFault) -> CUresult {
    let code = match &fault.fault.kind {
        FaultKind::Unmapped | FaultKind::ReadOnly => CUDA_ERROR_ILLEGAL_ADDRESS,
        FaultKind::Misaligned => CUDA_ERROR_MISALIGNED_ADDRESS,
        FaultKind::Assert => CUDA_ERROR_ASSERT,
        FaultKind::BadCall => CUDA_ERROR_INVALID_PC,
        FaultKind::InvalidLaunch(_) => CUDA_ERROR_INVALID_VALUE,
        // The context has failed elsewhere, or is being ended.
        FaultKind::Cancelled => return context.check().err().unwrap_or(CUDA_ERROR_LAUNCH_FAILED),
        FaultKind::Trap | FaultKind::StackOverflow => CUDA_ERROR_LAUNCH_FAILED,
        FaultKind::Deadlock(_) | FaultKind::Unsupported(_) => {
            // A GPU would hang, or would have run the kernel: this line is written whatever the log's setting.
            eprintln!("simgpu: {fault}");
            CUDA_ERROR_LAUNCH_FAILED
        }
    };
    crate::config::log!("{fault}");
    code
}
