//! Graphs as text for Graphviz.

use std::fmt::Write;

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::driver::driver;
use crate::graphs::Graphs;
use crate::task::Task;

/// `CU_GRAPH_DEBUG_DOT_FLAGS_*`: everything, kernels' parameters, copies', memsets', functions', events', handles,
/// memory's, conditional nodes'.
const VERBOSE: u32 = 1;
const KERNEL: u32 = 1 << 2;
const COPY: u32 = 1 << 3;
const FILL: u32 = 1 << 4;
const HOST: u32 = 1 << 5;
const EVENT: u32 = 1 << 6;
const HANDLES: u32 = 1 << 10;
const ALLOCATE: u32 = 1 << 11;
const FREE: u32 = 1 << 12;
const CONDITIONAL: u32 = 1 << 15;

impl Graphs {
    /// The text of a graph and its children.
    pub(crate) fn dot(&self, graph: CUgraph, flags: u32) -> Result<String> {
        let mut text = String::from("digraph dot {\n");
        let mut number = 0;
        self.subgraph(graph, flags, &mut number, &mut text)?;
        text.push_str("}\n");
        Ok(text)
    }

    fn subgraph(&self, graph: CUgraph, flags: u32, number: &mut usize, text: &mut String) -> Result<()> {
        let id = *number;
        *number += 1;
        let graph = self.graph(graph)?;
        let order: Vec<CUgraphNode> = graph.nodes.keys().copied().collect();
        let name = |node: CUgraphNode| {
            let place = order.binary_search(&node).unwrap_or(0);
            format!("\"graph_{id}_node_{place}\"")
        };
        let _ = writeln!(text, "subgraph cluster_{id} {{\nlabel=\"graph_{id}\" graph[style=\"dashed\"];");
        for (handle, node) in &graph.nodes {
            let mut label = describe(&node.task, flags);
            if flags & (VERBOSE | HANDLES) != 0 {
                let _ = write!(label, "\\nnode handle: {handle:#x}");
            }
            let place = order.binary_search(handle).unwrap_or(0);
            let shape = match node.task {
                Task::Kernel(_) => "style=\"bold\" shape=\"octagon\"",
                _ => "style=\"solid\" shape=\"rectangle\"",
            };
            let _ = writeln!(text, "{}[{shape} label=\"{place}\\n{label}\"];", name(*handle));
        }
        for (from, to, data) in graph.edges() {
            let port = if data.from_port == 0 { String::new() } else { format!("[label=\"port {}\"]", data.from_port) };
            let _ = writeln!(text, "{} -> {}{port};", name(from), name(to));
        }
        text.push_str("}\n");
        let children = graph.nodes.values().flat_map(|node| match &node.task {
            Task::Child(child) => vec![*child],
            Task::Conditional(it) => it.bodies.clone(),
            _ => Vec::new(),
        });
        for child in children.collect::<Vec<_>>() {
            self.subgraph(child, flags, number, text)?;
        }
        Ok(())
    }
}

fn describe(task: &Task, flags: u32) -> String {
    let wants = |flag| flags & (VERBOSE | flag) != 0;
    match task {
        Task::Kernel(k) => {
            let name = driver().and_then(|d| d.kernel(k.function)).map(|facts| facts.name).unwrap_or_default();
            let mut text = name.replace('"', "'");
            if wants(KERNEL) {
                let [gx, gy, gz] = k.grid;
                let [bx, by, bz] = k.block;
                let _ = write!(text, "\\n\\<\\<\\<({gx},{gy},{gz}),({bx},{by},{bz}),{}\\>\\>\\>", k.shared_bytes);
            }
            text
        }
        Task::Copy(c) if wants(COPY) => {
            let (from, to) = (c.copy.src, c.copy.dst);
            let at = |s: &CudaMemcpy3dSide| s.host | s.device | s.array;
            let (w, h, d) = (c.copy.width, c.copy.height, c.copy.depth);
            format!("MEMCPY\\n{:#x} to {:#x}\\n{w} x {h} x {d}", at(&from), at(&to))
        }
        Task::Copy(_) => "MEMCPY".into(),
        Task::Fill(f) if wants(FILL) => {
            let CudaMemsetNodeParams { dst, value, element, width, height, .. } = f.fill;
            format!("MEMSET\\n{dst:#x} = {value}\\n{width} x {height} of {element}")
        }
        Task::Fill(_) => "MEMSET".into(),
        Task::Host(h) if wants(HOST) => format!("HOST\\n{:#x}({:#x})", h.function, h.data),
        Task::Host(_) => "HOST".into(),
        Task::Child(_) => "GRAPH".into(),
        Task::Empty => "EMPTY".into(),
        Task::Wait(event) if wants(EVENT) => format!("EVENT_WAIT\\n{event:#x}"),
        Task::Wait(_) => "EVENT_WAIT".into(),
        Task::Record(event) if wants(EVENT) => format!("EVENT_RECORD\\n{event:#x}"),
        Task::Record(_) => "EVENT_RECORD".into(),
        Task::Allocate(m) if wants(ALLOCATE) => format!("MEM_ALLOC\\n{:#x}, {} bytes", m.address, m.bytes),
        Task::Allocate(_) => "MEM_ALLOC".into(),
        Task::Free(address) if wants(FREE) => format!("MEM_FREE\\n{address:#x}"),
        Task::Free(_) => "MEM_FREE".into(),
        Task::Words(_) => "MEM_OPS".into(),
        Task::Conditional(it) if wants(CONDITIONAL) => {
            let kind = ["IF", "WHILE", "SWITCH"].get(it.kind as usize).unwrap_or(&"?");
            format!("CONDITIONAL\\n{kind} of handle {}, {} bodies", it.handle, it.bodies.len())
        }
        Task::Conditional(_) => "CONDITIONAL".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Owner;

    #[test]
    fn nodes_edges_and_children_are_in_the_text() {
        let mut graphs = Graphs::default();
        let inner = graphs.create(Owner::Program);
        graphs.add_node(inner, &[], Task::Empty).unwrap();
        let graph = graphs.create(Owner::Program);
        let first = graphs.add_node(graph, &[], Task::Empty).unwrap();
        graphs.add_child(graph, &[(first, CUgraphEdgeData::default())], inner).unwrap();
        let text = graphs.dot(graph, 0).unwrap();
        assert!(text.starts_with("digraph dot {") && text.contains("\"graph_0_node_0\" -> \"graph_0_node_1\";"));
        assert!(text.contains("cluster_1") && text.contains("GRAPH"));
    }
}
