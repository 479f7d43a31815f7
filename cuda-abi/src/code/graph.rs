//! The only question asked of a call graph: which nodes reach a given node?

/// A graph of references between nodes. The user of the graph chooses the nodes' numbers.
#[derive(Debug, Default)]
pub(super) struct Graph {
    /// Pairs of referred and referring node.
    edges: Vec<(u32, u32)>,
}

impl Graph {
    /// Notes that `from` refers to `to`.
    pub(super) fn add(&mut self, from: u32, to: u32) {
        if from != to {
            self.edges.push((to, from));
        }
    }

    /// Which of the nodes below `count` are a target or lead to one.
    pub(super) fn reaching(mut self, count: usize, targets: impl Iterator<Item = u32>) -> Vec<bool> {
        self.edges.sort_unstable();
        self.edges.dedup();
        let mut marked = vec![false; count];
        let mut open: Vec<u32> = targets.collect();
        while let Some(node) = open.pop() {
            match marked.get_mut(node as usize) {
                Some(mark @ false) => *mark = true,
                _ => continue,
            }
            let first = self.edges.partition_point(|edge| edge.0 < node);
            let edges = self.edges.get(first..).unwrap_or_default();
            open.extend(edges.iter().take_while(|e| e.0 == node).map(|e| e.1));
        }
        marked
    }
}
