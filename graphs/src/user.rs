//! User objects: counted references, a destructor that is called when the last goes.

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::store::Store;

/// A user object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserObject {
    pub(crate) data: u64,
    pub(crate) destructor: u64,
    pub(crate) references: u64,
}

impl Store {
    /// Adds references to a user object.
    pub(crate) fn retain_user(&mut self, user: CUuserObject, count: u32) -> Result<()> {
        let object = self.users.get_mut(&user).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        object.references += u64::from(count);
        Ok(())
    }

    /// Takes references away; with the last, the destructor is called.
    pub(crate) fn release_user(&mut self, user: CUuserObject, count: u32) -> Result<()> {
        let object = self.users.get_mut(&user).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        object.references = object.references.checked_sub(u64::from(count)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if object.references == 0 {
            let gone = *object;
            self.users.remove(&user);
            self.after.destructors.push((gone.destructor, gone.data));
        }
        Ok(())
    }

    /// Gives a graph references of its own.
    pub(crate) fn retain_for_graph(&mut self, graph: CUgraph, user: CUuserObject, count: u32) -> Result<()> {
        self.retain_user(user, count)?;
        let users = &mut self.graph_mut(graph)?.users;
        match users.iter_mut().find(|(u, _)| *u == user) {
            Some((_, n)) => *n += count,
            None => users.push((user, count)),
        }
        Ok(())
    }

    /// Takes references away from a graph, as many as it has at most.
    pub(crate) fn release_from_graph(&mut self, graph: CUgraph, user: CUuserObject, count: u32) -> Result<()> {
        let users = &mut self.graph_mut(graph)?.users;
        let Some(at) = users.iter().position(|(u, _)| *u == user) else { return Ok(()) };
        let count = count.min(users[at].1);
        users[at].1 -= count;
        if users[at].1 == 0 {
            users.remove(at);
        }
        self.release_user(user, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::Owner;

    #[test]
    fn the_last_reference_calls_the_destructor() {
        let mut store = Store::default();
        let user = store.fresh_user();
        store.users.insert(user, UserObject { data: 7, destructor: 8, references: 1 });
        let graph = store.create_graph(Owner::Program);
        store.retain_for_graph(graph, user, 2).unwrap();
        store.release_from_graph(graph, user, 3).unwrap();
        store.release_from_graph(graph, user, 1).unwrap();
        store.retain_for_graph(graph, user, 2).unwrap();
        store.release_user(user, 1).unwrap();
        let clone = store.copy_graph(graph, Owner::Program).unwrap();
        store.drop_graph(graph);
        assert!(store.after.destructors.is_empty());
        store.drop_graph(clone);
        assert_eq!(store.after.destructors, [(8, 7)]);
    }
}
