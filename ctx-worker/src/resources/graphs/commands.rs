//! Commands about executable graphs, which make, change and launch the driver's graphs.

use std::collections::BTreeMap;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{self, GraphCreate, GraphDestroy, GraphInStream, GraphSet, Kind, Launch};
use rekindle_wire::graph::{Program, Step, Task};
use tracing::info;

use super::bodies::Bodies;
use super::{Graph, Made, conditions, destroy_graph, function, functions};
use crate::gpu::driver::Driver;
use crate::resources::Code;
use crate::resources::boxes::between;
use crate::resources::initial::Loading;
use crate::resources::launch_attributes::attributes;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::Then;

/// The flags and attributes of a kernel's step, which cannot be changed in an executable graph of the driver's.
fn attributes_of(task: &Task) -> Option<(u32, Vec<u8>)> {
    match task {
        Task::Kernel(launch) => Launch::read(&mut Reader::new(launch)).ok().map(|l| (l.flags, l.attributes.to_vec())),
        _ => None,
    }
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

/// Edges of a graph of the driver's.
#[derive(Default)]
struct Edges {
    from: Vec<CUgraphNode>,
    to: Vec<CUgraphNode>,
    data: Vec<CUgraphEdgeData>,
}

impl Code {
    /// Executes a command about executable graphs.
    pub(crate) fn graph_command(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        number: u16,
        args: &mut Reader<'_>,
    ) -> Result<Outcome, Refused> {
        match number {
            command::GRAPH_CREATE => self.graph_create(call, loading, args)?,
            command::GRAPH_SET => self.graph_set(call, loading, args)?,
            command::GRAPH_LAUNCH => return self.graph_launch(call, loading, args),
            command::GRAPH_UPLOAD => return self.graph_upload(call, loading, args),
            command::GRAPH_DESTROY => {
                let GraphDestroy { exec } = GraphDestroy::read(args)?;
                let graph = self.graphs.remove(&exec).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
                end_made(call, graph.made)?;
            }
            _ => return Err(Refused::UnknownCall(number)),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn graph_create(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
    ) -> Result<(), Refused> {
        let GraphCreate { exec: handle, image, flags } = GraphCreate::read(args)?;
        let bytes = self.store.take(image).map_err(|_| Malformed("a graph whose program has not come"))?;
        if !Kind::GraphExec.owns(handle) || self.graphs.contains_key(&handle) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let mut graph = Graph::new(call.owner(), flags, Program::from_bytes(&bytes)?);
        graph.made = Some(self.make_graph(call, loading, &graph.program, flags)?);
        self.graphs.insert(handle, graph);
        Ok(())
    }

    /// Makes the driver's graph of a program.
    fn make_graph(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        program: &Program,
        flags: u64,
    ) -> Result<Made, Refused> {
        let driver = call.driver();
        let mut graph = 0;
        // SAFETY: the out parameter is a local.
        check(unsafe { (driver.cuGraphCreate)(&raw mut graph, 0) })?;
        let made = self.fill_graph(call, loading, graph, program).and_then(|nodes| {
            call.enter_own()?;
            let mut exec = 0;
            // SAFETY: as above; the graph is the driver's own.
            check(unsafe { (driver.cuGraphInstantiateWithFlags)(&raw mut exec, graph, flags) })?;
            Ok(Made { exec, graph, nodes })
        });
        let made = made.and_then(|made| {
            for (i, step) in program.steps.iter().enumerate().filter(|(_, step)| !step.enabled) {
                if !matches!(step.task, Task::Nothing | Task::Conditional(_)) {
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
        call.enter_own()?;
        made
    }

    fn fill_graph(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        graph: CUgraph,
        program: &Program,
    ) -> Result<Vec<CUgraphNode>, Refused> {
        conditions::create(call, graph, program)?;
        let mut nodes = Vec::with_capacity(program.steps.len());
        let mut bodies = Bodies::new(graph);
        for (place, step) in program.steps.iter().enumerate() {
            let graph = bodies.of(step)?;
            nodes.push(match &step.task {
                Task::Conditional(it) => bodies.add(call, graph, (place, step.context), it)?,
                _ => self.add_step(call, loading, graph, step)?,
            });
        }
        let mut edges: BTreeMap<CUgraph, Edges> = BTreeMap::new();
        for (node, step) in nodes.iter().zip(&program.steps) {
            let edges = edges.entry(bodies.of(step)?).or_default();
            for (before, edge) in &step.after {
                edges.from.push(*nodes.get(*before as usize).ok_or(Malformed("a step that comes after none"))?);
                edges.to.push(*node);
                let [from_port, to_port, kind, reserved @ ..] = *edge;
                edges.data.push(CUgraphEdgeData { from_port, to_port, kind, reserved });
            }
        }
        for (graph, Edges { from, to, data }) in edges {
            if from.is_empty() {
                continue;
            }
            // SAFETY: the arrays are of that length.
            check(unsafe {
                let (from, to) = (from.as_ptr(), to.as_ptr());
                (call.driver().cuGraphAddDependencies_v2)(graph, from, to, data.as_ptr(), data.len())
            })?;
        }
        Ok(nodes)
    }

    /// The parameters of a step, checked: the worker's own memory must not be read or written for a client.
    fn step_params(&mut self, call: &mut Call, loading: &mut Loading<'_>, step: &Step) -> Result<Params, Refused> {
        if step.task == Task::Nothing {
            // The step runs in no particular context.
            return Ok(Params::Nothing);
        }
        let before = std::mem::replace(&mut call.header.context, step.context);
        let params = call.enter(step.context).and_then(|()| self.params_in_context(call, loading, &step.task));
        call.header.context = before;
        params
    }

    fn params_in_context(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        task: &Task,
    ) -> Result<Params, Refused> {
        let context = call.session.objects.get(call.header.context).map_or(0, |o| o.real);
        Ok(match task {
            Task::Nothing => Params::Nothing,
            // Made with its bodies, and never changed: a graph with another one is made anew.
            Task::Conditional(_) => return Err(Refused::Code(CUDA_ERROR_NOT_SUPPORTED)),
            Task::Kernel(launch) => {
                let launch = Launch::read(&mut Reader::new(launch))?;
                let object =
                    *call.session.objects.get(launch.function).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
                let real = self.function(call, loading, launch.function)?;
                let is_kernel = object.kind == Kind::Kernel;
                if is_kernel {
                    self.instantiate(call, loading, object.parent)?;
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
                let attributes = attributes(&call.session, &launch)?;
                let params = CudaKernelNodeParams { v1, kern, context };
                Params::Kernel { params, bytes: launch.parameters.to_vec(), attributes }
            }
            Task::Copy { target, source, size } => {
                let target = loading.memory.check_end(call, &self.globals, *target, *size)?;
                let source = loading.memory.check_end(call, &self.globals, *source, *size)?;
                let mut copy = between(target.side, source.side, *size);
                (copy.dst.context, copy.src.context) = (0, 0);
                Params::Copy(copy, context)
            }
            Task::Fill { address, pitch, value, element, width, height } => {
                const INVALID: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);
                let row = width.checked_mul(u64::from(*element)).ok_or(INVALID)?;
                let rows = height.saturating_sub(1).checked_mul(*pitch).ok_or(INVALID)?;
                loading.memory.reachable(&self.globals, *address, rows.checked_add(row).ok_or(INVALID)?)?;
                loading.memory.allow_peer(call, *address)?;
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

    fn add_step(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        graph: CUgraph,
        step: &Step,
    ) -> Result<CUgraphNode, Refused> {
        let params = self.step_params(call, loading, step)?;
        let driver = call.driver();
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

    fn graph_set(&mut self, call: &mut Call, loading: &mut Loading<'_>, args: &mut Reader<'_>) -> Result<(), Refused> {
        let GraphSet { exec: handle, place, step } = GraphSet::read(args)?;
        let (place, mut words) = (place as usize, Reader::new(step));
        let step = Step::read(&mut words, place)?;
        words.end()?;
        self.check_change(handle, place, &step)?;
        let graph = self.graphs.get_mut(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let made = graph.made.as_ref().map(|made| (made.exec, made.nodes.get(place).copied().unwrap_or(0)));
        let old = graph.program.steps.get_mut(place).ok_or(Malformed("a step that a graph does not have"))?;
        let change = old.clone();
        *old = step.clone();
        if function(&change) != function(&step) {
            graph.functions = functions(&graph.program);
        }
        let Some((exec, node)) = made else { return Ok(()) };
        if self.set_step(call, loading, exec, node, &change, &step).is_err() {
            // The driver cannot change a node in every way in which a new node could differ.
            let graph = self.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
            let (program, flags) = (graph.program.clone(), graph.flags);
            let remade = self.make_graph(call, loading, &program, flags);
            // Where that fails there is no executable graph: better no launch than a launch of the program before its
            // change.
            let (made, failed) = match remade {
                Ok(made) => (Some(made), None),
                Err(refused) => (None, Some(refused)),
            };
            let former = self.graphs.get_mut(&handle).and_then(|graph| std::mem::replace(&mut graph.made, made));
            end_made(call, former)?;
            if let Some(refused) = failed {
                return Err(refused);
            }
        }
        call.enter_own()
    }

    /// Whether a step may become another one: bodies stay what they are.
    fn check_change(&self, handle: u64, place: usize, step: &Step) -> Result<(), Refused> {
        let graph = self.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let old = graph.program.steps.get(place).ok_or(Malformed("a step that a graph does not have"))?;
        let fixed = |step: &Step| match step.task {
            Task::Conditional(it) => Some((it.handle, it.kind, it.bodies)),
            _ => None,
        };
        if old.within != step.within || old.after != step.after || fixed(old) != fixed(step) {
            return Err(Malformed("a step of a graph that becomes one of another place or kind").into());
        }
        Ok(())
    }

    fn set_step(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        exec: CUgraphExec,
        node: CUgraphNode,
        old: &Step,
        step: &Step,
    ) -> Result<(), Refused> {
        let driver = call.driver();
        if old.task != step.task {
            let params = self.step_params(call, loading, step)?;
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
                    // Attributes belong to a node of a graph, not to a node of an executable graph.
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

    /// The driver's executable graph; makes it if a restore has not.
    fn exec_of(&mut self, call: &mut Call, loading: &mut Loading<'_>, handle: u64) -> Result<CUgraphExec, Refused> {
        let graph = self.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        if let Some(made) = &graph.made {
            return Ok(made.exec);
        }
        let (program, flags) = (graph.program.clone(), graph.flags);
        let made = self.make_graph(call, loading, &program, flags)?;
        let exec = made.exec;
        if let Some(graph) = self.graphs.get_mut(&handle) {
            graph.made = Some(made);
        }
        Ok(exec)
    }

    fn graph_launch(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
    ) -> Result<Outcome, Refused> {
        let GraphInStream { exec: handle, stream } = GraphInStream::read(args)?;
        let exec = self.exec_of(call, loading, handle)?;
        let real = call.stream(stream)?;
        // SAFETY: both handles are the driver's own.
        let result = unsafe { (call.driver().cuGraphLaunch)(exec, real) };
        self.prints.notice(&call.session);
        if result == CUDA_SUCCESS {
            let key = call.stream_key(stream)?;
            let graph = self.graphs.get(&handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
            for function in &graph.functions {
                call.session.waiting.launched(key, *function);
            }
        }
        Ok(Outcome::Done(result))
    }

    fn graph_upload(
        &mut self,
        call: &mut Call,
        loading: &mut Loading<'_>,
        args: &mut Reader<'_>,
    ) -> Result<Outcome, Refused> {
        let GraphInStream { exec: handle, stream } = GraphInStream::read(args)?;
        let exec = self.exec_of(call, loading, handle)?;
        let real = call.stream(stream)?;
        // SAFETY: both handles are the driver's own.
        Ok(Outcome::Done(unsafe { (call.driver().cuGraphUpload)(exec, real) }))
    }

    /// Drops the graphs of a context that goes away, in which nothing runs any more.
    pub(crate) fn clear_graphs(&mut self, driver: &Driver, context: u64) {
        let uses = |g: &Graph| g.context == context || g.program.steps.iter().any(|s| s.context == context);
        let gone: Vec<u64> = self.graphs.iter().filter(|(_, g)| uses(g)).map(|(handle, _)| *handle).collect();
        for handle in gone {
            if let Some(Made { exec, graph, .. }) = self.graphs.remove(&handle).and_then(|g| g.made) {
                destroy_graph(driver, exec, graph);
            }
        }
    }

    /// Makes graphs after a restore, once all of the client's memory is there, so that no launch waits for that.
    pub(crate) fn make_graphs(&mut self, call: &mut Call, loading: &mut Loading<'_>) {
        let handles: Vec<u64> = self.graphs.keys().copied().collect();
        for handle in handles {
            let context = self.graphs.get(&handle).map_or(0, |g| g.context);
            call.header.context = context;
            let made = call.enter(context).and_then(|()| self.exec_of(call, loading, handle));
            if let Err(refused) = made {
                // A program may have freed what a graph uses, and never launch it. A launch tries again, and answers then.
                info!("graph {handle:#x} is not made before its first launch: {refused}");
            }
        }
    }
}

/// Makes the driver destroy a graph when all commands that run now have ended: a launch of the graph may be under way.
fn end_made(call: &mut Call, made: Option<Made>) -> Result<(), Refused> {
    let Some(Made { exec, graph, .. }) = made else { return Ok(()) };
    let busy = call.session.waiting.busy(0);
    call.when_done(busy, Then::DestroyGraph { exec, graph })
}
