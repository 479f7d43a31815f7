//! Executable graphs. The client keeps graphs; the worker has a program of each executable one, and the driver's graph
//! that is made of it.
//!
//! ```text
//!   GRAPH_CREATE ──> program ──> driver's graph ──> driver's executable graph <── GRAPH_LAUNCH
//!   GRAPH_SET ────> a step of the program, and of the driver's executable graph
//!   a restore ────> program; the rest once the client's pinned memory is there
//! ```
//!
//! A stream takes about a thousand launches without blocking, however many steps each has (seen with a thousand), so a
//! launch counts as one command there.

use std::collections::{BTreeMap, BTreeSet};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{self, GraphCreate, GraphDestroy, GraphInStream, GraphSet, Kind, Launch};
use rekindle_wire::graph::{Program, Step, Task};
use tracing::warn;

use crate::resources::boxes::between;
use crate::resources::launch_attributes::attributes;
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::state::{self, StateError};
use crate::session::waiting::Then;

/// An executable graph of the client's.
pub(crate) struct Graph {
    /// The context that was current when it was made.
    context: u64,
    flags: u64,
    program: Program,
    /// The functions that it launches.
    functions: BTreeSet<u64>,
    made: Option<Made>,
}

/// What the driver has of one.
#[derive(Clone, Debug)]
struct Made {
    exec: CUgraphExec,
    graph: CUgraph,
    /// The node of each step.
    nodes: Vec<CUgraphNode>,
}

/// All of them, by the client's handle.
pub(crate) type Graphs = BTreeMap<u64, Graph>;

impl Graph {
    /// What it does.
    pub(crate) fn program(&self) -> &Program {
        &self.program
    }

    fn new(context: u64, flags: u64, program: Program) -> Self {
        let functions = functions(&program);
        Self { context, flags, program, functions, made: None }
    }
}

/// The function that a step launches.
fn function(step: &Step) -> Option<u64> {
    match &step.task {
        Task::Kernel(launch) => Launch::read(&mut Reader::new(launch)).ok().map(|l| l.function),
        _ => None,
    }
}

/// What a kernel's step has that an executable graph of the driver's cannot be given anew.
fn attributes_of(task: &Task) -> Option<(u32, Vec<u8>)> {
    match task {
        Task::Kernel(launch) => Launch::read(&mut Reader::new(launch)).ok().map(|l| (l.flags, l.attributes.to_vec())),
        _ => None,
    }
}

fn functions(program: &Program) -> BTreeSet<u64> {
    program.steps.iter().filter_map(function).collect()
}

/// A step's parameters as the driver takes them.
enum Params {
    Kernel { params: CudaKernelNodeParams, bytes: Vec<u8>, attributes: Vec<CUlaunchAttribute> },
    Copy(CudaMemcpy3d, CUcontext),
    Fill(CudaMemsetNodeParams, CUcontext),
    Nothing,
}

/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `_SIZE`, with the parameters of a kernel behind them.
fn extra(bytes: &mut [u8], size: &mut usize) -> [*mut std::ffi::c_void; 5] {
    *size = bytes.len();
    [
        std::ptr::without_provenance_mut(1),
        bytes.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut *size).cast(),
        std::ptr::null_mut(),
    ]
}

impl Executor {
    pub(crate) fn graph_command(&mut self, call: u16, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        match call {
            command::GRAPH_CREATE => self.graph_create(args)?,
            command::GRAPH_SET => self.graph_set(args)?,
            command::GRAPH_LAUNCH => return self.graph_launch(args),
            command::GRAPH_UPLOAD => return self.graph_upload(args),
            command::GRAPH_DESTROY => {
                let GraphDestroy { exec } = GraphDestroy::read(args)?;
                let graph = self.code.graphs.remove(&exec).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
                self.end_made(graph.made)?;
            }
            _ => return Err(Refused::UnknownCall(call)),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn graph_create(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let GraphCreate { exec: handle, image, flags } = GraphCreate::read(args)?;
        let bytes = self.code.store.take(image).map_err(|_| Malformed("a graph whose program has not come"))?;
        if !Kind::GraphExec.owns(handle) || self.code.graphs.contains_key(&handle) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let mut graph = Graph::new(self.header.context, flags, Program::from_bytes(&bytes)?);
        graph.made = Some(self.make_graph(&graph.program, flags)?);
        self.code.graphs.insert(handle, graph);
        Ok(())
    }

    /// Has the driver make a graph of a program.
    fn make_graph(&mut self, program: &Program, flags: u64) -> Result<Made, Refused> {
        let driver = self.driver();
        let mut graph = 0;
        // SAFETY: the out parameter is a local.
        check(unsafe { (driver.cuGraphCreate)(&raw mut graph, 0) })?;
        let made = self.fill_graph(graph, program).and_then(|nodes| {
            self.enter_context(self.header.context)?;
            let mut exec = 0;
            // SAFETY: as above; the graph is the driver's own.
            check(unsafe { (driver.cuGraphInstantiateWithFlags)(&raw mut exec, graph, flags) })?;
            Ok(Made { exec, graph, nodes })
        });
        let made = made.and_then(|made| {
            for (i, step) in program.steps.iter().enumerate().filter(|(_, step)| !step.enabled) {
                if !matches!(step.task, Task::Nothing) {
                    // SAFETY: both handles are the driver's own.
                    check(unsafe { (driver.cuGraphNodeSetEnabled)(made.exec, made.nodes[i], 0) })?;
                }
            }
            Ok(made)
        });
        if made.is_err() {
            // SAFETY: the graph is the driver's own, and not used again.
            unsafe { (driver.cuGraphDestroy)(graph) };
        }
        self.enter_context(self.header.context)?;
        made
    }

    fn fill_graph(&mut self, graph: CUgraph, program: &Program) -> Result<Vec<CUgraphNode>, Refused> {
        let mut nodes = Vec::with_capacity(program.steps.len());
        for step in &program.steps {
            nodes.push(self.add_step(graph, step)?);
        }
        let (mut from, mut to, mut data) = (Vec::new(), Vec::new(), Vec::new());
        for (node, step) in nodes.iter().zip(&program.steps) {
            for (before, edge) in &step.after {
                from.push(*nodes.get(*before as usize).ok_or(Malformed("a step that comes after none"))?);
                to.push(*node);
                let [from_port, to_port, kind, reserved @ ..] = *edge;
                data.push(CUgraphEdgeData { from_port, to_port, kind, reserved });
            }
        }
        if !from.is_empty() {
            // SAFETY: the arrays are of that length.
            check(unsafe {
                let (from, to) = (from.as_ptr(), to.as_ptr());
                (self.driver().cuGraphAddDependencies_v2)(graph, from, to, data.as_ptr(), data.len())
            })?;
        }
        Ok(nodes)
    }

    /// A step's parameters, checked: the worker's own memory must not be read or written for a client.
    fn step_params(&mut self, step: &Step) -> Result<Params, Refused> {
        if step.task == Task::Nothing {
            // It runs in no context in particular.
            return Ok(Params::Nothing);
        }
        let before = std::mem::replace(&mut self.header.context, step.context);
        let params = self.enter_context(step.context).and_then(|()| self.params_in_context(&step.task));
        self.header.context = before;
        params
    }

    fn params_in_context(&mut self, task: &Task) -> Result<Params, Refused> {
        let context = self.session.objects.get(self.header.context).map_or(0, |o| o.real);
        Ok(match task {
            Task::Nothing => Params::Nothing,
            Task::Kernel(launch) => {
                let launch = Launch::read(&mut Reader::new(launch))?;
                let object =
                    *self.session.objects.get(launch.function).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
                let real = self.handle_function(launch.function)?;
                let is_kernel = object.kind == Kind::Kernel;
                if is_kernel {
                    self.instantiate(object.parent)?;
                }
                let v1 = CudaKernelNodeParamsV1 {
                    func: if is_kernel { 0 } else { real },
                    grid: launch.grid,
                    block: launch.block,
                    shared_bytes: launch.shared_bytes,
                    params: std::ptr::null_mut(),
                    extra: std::ptr::null_mut(),
                };
                let kern = if is_kernel { real } else { 0 };
                let attributes = attributes(&self.session, &launch)?;
                let params = CudaKernelNodeParams { v1, kern, context };
                Params::Kernel { params, bytes: launch.parameters.to_vec(), attributes }
            }
            Task::Copy { target, source, size } => {
                let (mut call, memory, code) = self.parts();
                let target = memory.check_end(&mut call, &code.globals, *target, *size)?;
                let source = memory.check_end(&mut call, &code.globals, *source, *size)?;
                let mut copy = between(target.side, source.side, *size);
                (copy.dst.context, copy.src.context) = (0, 0);
                Params::Copy(copy, context)
            }
            Task::Fill { address, pitch, value, element, width, height } => {
                const INVALID: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);
                let row = width.checked_mul(u64::from(*element)).ok_or(INVALID)?;
                let rows = height.saturating_sub(1).checked_mul(*pitch).ok_or(INVALID)?;
                self.reachable(*address, rows.checked_add(row).ok_or(INVALID)?)?;
                self.allow_peer(*address)?;
                let fill = CudaMemsetNodeParams {
                    dst: *address,
                    pitch: *pitch as usize,
                    value: *value,
                    element: *element,
                    width: *width as usize,
                    height: *height as usize,
                };
                Params::Fill(fill, context)
            }
        })
    }

    fn add_step(&mut self, graph: CUgraph, step: &Step) -> Result<CUgraphNode, Refused> {
        let params = self.step_params(step)?;
        let driver = self.driver();
        let (mut node, none) = (0, std::ptr::null());
        let out = &raw mut node;
        // SAFETY: the out parameter is a local; structures and what they point to live through the calls.
        let result = unsafe {
            match params {
                Params::Nothing => (driver.cuGraphAddEmptyNode)(out, graph, none, 0),
                Params::Copy(copy, context) => {
                    (driver.cuGraphAddMemcpyNode)(out, graph, none, 0, &raw const copy, context)
                }
                Params::Fill(fill, context) => {
                    (driver.cuGraphAddMemsetNode)(out, graph, none, 0, &raw const fill, context)
                }
                Params::Kernel { mut params, mut bytes, attributes } => {
                    let mut size = 0;
                    let mut extra = extra(&mut bytes, &mut size);
                    params.v1.extra = extra.as_mut_ptr();
                    let mut result = (driver.cuGraphAddKernelNode_v2)(out, graph, none, 0, &raw const params);
                    for attribute in attributes {
                        let value = CUlaunchAttributeValue(attribute.value);
                        if result == CUDA_SUCCESS {
                            let set = driver.cuGraphKernelNodeSetAttribute;
                            result = set(node, attribute.id, &raw const value);
                        }
                    }
                    result
                }
            }
        };
        check(result).map(|()| node)
    }

    fn graph_set(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let GraphSet { exec: handle, place, step } = GraphSet::read(args)?;
        let (place, mut words) = (place as usize, Reader::new(step));
        let step = Step::read(&mut words, place)?;
        words.end()?;
        let graph = self.code.graphs.get_mut(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let made = graph.made.as_ref().map(|made| (made.exec, made.nodes.get(place).copied().unwrap_or(0)));
        let old = graph.program.steps.get_mut(place).ok_or(Malformed("a step that a graph does not have"))?;
        let change = old.clone();
        *old = step.clone();
        if function(&change) != function(&step) {
            graph.functions = functions(&graph.program);
        }
        let Some((exec, node)) = made else { return Ok(()) };
        if self.set_step(exec, node, &change, &step).is_err() {
            // The driver does not change a node into everything that another could have been.
            let graph = self.code.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
            let (program, flags) = (graph.program.clone(), graph.flags);
            let remade = self.make_graph(&program, flags);
            // Where that fails there is none: better no launch than one of what the program has changed.
            let (made, failed) = match remade {
                Ok(made) => (Some(made), None),
                Err(refused) => (None, Some(refused)),
            };
            let former = self.code.graphs.get_mut(&handle).and_then(|graph| std::mem::replace(&mut graph.made, made));
            self.end_made(former)?;
            if let Some(refused) = failed {
                return Err(refused);
            }
        }
        self.enter_context(self.header.context)
    }

    fn set_step(&mut self, exec: CUgraphExec, node: CUgraphNode, old: &Step, step: &Step) -> Result<(), Refused> {
        let driver = self.driver();
        if old.task != step.task {
            let params = self.step_params(step)?;
            // SAFETY: handles are the driver's own; structures and what they point to live through the calls.
            check(unsafe {
                match params {
                    Params::Nothing => CUDA_ERROR_INVALID_VALUE,
                    Params::Copy(copy, context) => {
                        (driver.cuGraphExecMemcpyNodeSetParams)(exec, node, &raw const copy, context)
                    }
                    Params::Fill(fill, context) => {
                        (driver.cuGraphExecMemsetNodeSetParams)(exec, node, &raw const fill, context)
                    }
                    // Attributes belong to the node of a graph, not of an executable one.
                    Params::Kernel { .. } if attributes_of(&old.task) != attributes_of(&step.task) => {
                        CUDA_ERROR_INVALID_VALUE
                    }
                    Params::Kernel { mut params, mut bytes, .. } => {
                        let mut size = 0;
                        let mut extra = extra(&mut bytes, &mut size);
                        params.v1.extra = extra.as_mut_ptr();
                        (driver.cuGraphExecKernelNodeSetParams_v2)(exec, node, &raw const params)
                    }
                }
            })?;
        }
        if old.enabled != step.enabled {
            // SAFETY: as above.
            check(unsafe { (driver.cuGraphNodeSetEnabled)(exec, node, u32::from(step.enabled)) })?;
        }
        Ok(())
    }

    /// The driver's executable graph, made now if a restore has not.
    fn exec_of(&mut self, handle: u64) -> Result<CUgraphExec, Refused> {
        let graph = self.code.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        if let Some(made) = &graph.made {
            return Ok(made.exec);
        }
        let (program, flags) = (graph.program.clone(), graph.flags);
        let made = self.make_graph(&program, flags)?;
        let exec = made.exec;
        if let Some(graph) = self.code.graphs.get_mut(&handle) {
            graph.made = Some(made);
        }
        Ok(exec)
    }

    fn graph_launch(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let GraphInStream { exec: handle, stream } = GraphInStream::read(args)?;
        let exec = self.exec_of(handle)?;
        let real = self.handle_stream(stream)?;
        // SAFETY: both handles are the driver's own.
        let result = unsafe { (self.driver().cuGraphLaunch)(exec, real) };
        self.code.prints.notice(&self.session);
        if result == CUDA_SUCCESS {
            let key = self.stream_key(stream)?;
            let graph = self.code.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
            let mut allocates = false;
            for function in &graph.functions {
                self.session.waiting.launched(key, *function);
                allocates |= self.session.objects.get(*function).is_some_and(|o| o.allocates);
            }
            self.launched(allocates);
        }
        Ok(Outcome::Done(result))
    }

    fn graph_upload(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let GraphInStream { exec: handle, stream } = GraphInStream::read(args)?;
        let exec = self.exec_of(handle)?;
        let real = self.handle_stream(stream)?;
        // SAFETY: both handles are the driver's own.
        Ok(Outcome::Done(unsafe { (self.driver().cuGraphUpload)(exec, real) }))
    }

    /// Has the driver end a graph when everything that runs now has ended: a launch of it may be under way.
    fn end_made(&mut self, made: Option<Made>) -> Result<(), Refused> {
        let Some(Made { exec, graph, .. }) = made else { return Ok(()) };
        let busy = self.session.waiting.busy(0);
        self.when_done(busy, Then::DestroyGraph { exec, graph })
    }

    /// Has the driver end a graph that does not run.
    pub(crate) fn destroy_graph(&mut self, exec: CUgraphExec, graph: CUgraph) {
        // SAFETY: both handles are the driver's own, and not used again.
        unsafe {
            (self.driver().cuGraphExecDestroy)(exec);
            (self.driver().cuGraphDestroy)(graph);
        }
    }

    /// A context goes, in which nothing runs any more, and what was made in it.
    pub(crate) fn clear_graphs(&mut self, context: u64) {
        let uses = |g: &Graph| g.context == context || g.program.steps.iter().any(|s| s.context == context);
        let gone: Vec<u64> = self.code.graphs.iter().filter(|(_, g)| uses(g)).map(|(handle, _)| *handle).collect();
        for handle in gone {
            if let Some(Made { exec, graph, .. }) = self.code.graphs.remove(&handle).and_then(|g| g.made) {
                self.destroy_graph(exec, graph);
            }
        }
    }

    /// All programs as bytes of the saved state; `None` where there are none.
    pub(crate) fn graph_bytes(&self) -> Result<Option<Vec<u8>>, StateError> {
        if self.code.graphs.is_empty() {
            return Ok(None);
        }
        let graph = |(&handle, graph): (&u64, &Graph)| state::Graph {
            handle,
            context: graph.context,
            flags: graph.flags,
            program: graph.program.to_bytes(),
            ..state::Graph::default()
        };
        let graphs = self.code.graphs.iter().map(graph).collect();
        state::bytes(&state::Graphs { graphs, ..state::Graphs::default() }).map(Some)
    }

    /// Takes up what [`Executor::graph_bytes`] gave.
    pub(crate) fn restore_graphs(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let saved: state::Graphs = state::parse(bytes)?;
        for it in saved.graphs {
            let graph = Graph::new(it.context, it.flags, Program::from_bytes(&it.program)?);
            self.code.graphs.insert(it.handle, graph);
        }
        Ok(())
    }

    /// The client's memory is all there after a restore: graphs are made, so that no launch waits for that.
    pub(crate) fn make_graphs(&mut self) {
        let handles: Vec<u64> = self.code.graphs.keys().copied().collect();
        for handle in handles {
            let context = self.code.graphs.get(&handle).map_or(0, |g| g.context);
            self.header.context = context;
            let made = self.enter_context(context).and_then(|()| self.exec_of(handle));
            if let Err(refused) = made {
                // It is tried again when it is launched, and answers then.
                warn!("graph {handle:#x} cannot be made yet: {refused}");
            }
        }
    }
}
