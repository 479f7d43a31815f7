//! What the client's handles stand for, and the log from which a restore makes them again.
//!
//! A record is the command that created or changed something, as it came through the ring. A restore executes the
//! records in their order. What is destroyed takes its records, and those of what depended on it, out of the log.

use std::collections::HashMap;

use rekindle_images::CodeHash;
use rekindle_wire::command::Kind;

/// What a handle stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    pub(crate) kind: Kind,
    /// The driver's handle.
    pub(crate) real: u64,
    /// The context it belongs to; 0 for libraries and kernels, which belong to none.
    pub(crate) context: u64,
    /// The module, library or kernel it came from, or 0.
    pub(crate) parent: u64,
    /// Of a function or kernel: whether its code reaches the device's `malloc`.
    pub(crate) allocates: bool,
}

/// One record of the log.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) sequence: u64,
    pub(crate) call: u16,
    /// The object that it created or changed.
    pub(crate) owner: u64,
    /// The context that was current.
    pub(crate) context: u64,
    pub(crate) args: Vec<u8>,
    pub(crate) code: Option<CodeHash>,
}

/// All objects of a client.
#[derive(Default)]
pub(crate) struct Objects {
    by_handle: HashMap<u64, Object>,
    log: Vec<Record>,
    next_sequence: u64,
}

impl Objects {
    pub(crate) fn get(&self, handle: u64) -> Option<&Object> {
        self.by_handle.get(&handle)
    }

    pub(crate) fn log(&self) -> &[Record] {
        &self.log
    }

    /// Adds an object; `false` where the handle is taken or of another kind: the client's mistake.
    pub(crate) fn insert(&mut self, handle: u64, object: Object) -> bool {
        if !object.kind.owns(handle) || self.by_handle.contains_key(&handle) {
            return false;
        }
        self.by_handle.insert(handle, object);
        true
    }

    /// Changes what a handle stands for.
    pub(crate) fn replace(&mut self, handle: u64, object: Object) {
        self.by_handle.insert(handle, object);
    }

    /// Adds a record.
    pub(crate) fn record(&mut self, call: u16, owner: u64, context: u64, args: &[u8], code: Option<CodeHash>) {
        self.next_sequence += 1;
        let sequence = self.next_sequence;
        self.log.push(Record { sequence, call, owner, context, args: args.to_vec(), code });
    }

    /// Adds a record of a change. One that said the very same before is taken out, so that a program which changes
    /// between a few values for ever does not make the log grow.
    pub(crate) fn record_change(&mut self, call: u16, owner: u64, context: u64, args: &[u8]) {
        self.log.retain(|r| !(r.owner == owner && r.call == call && r.context == context && r.args == args));
        self.record(call, owner, context, args, None);
    }

    /// Takes a module or library out that was unloaded. Where other code was loaded after it, its records stay, and one
    /// of the unloading is added: the driver places later code by what was there, and a restore must do as it did.
    pub(crate) fn unload(&mut self, handle: u64, call: u16, context: u64, args: &[u8]) {
        let loaded = self.log.iter().position(|r| r.owner == handle && r.code.is_some());
        let others_after = |at: usize| self.log[at..].iter().any(|r| r.code.is_some() && r.owner != handle);
        if !loaded.is_some_and(others_after) {
            self.remove(handle);
            return;
        }
        let kept = self.log.clone();
        self.remove(handle);
        self.log = kept;
        self.record(call, handle, context, args, None);
    }

    /// Takes an object out, with everything made from it, and their records. Returns what was taken out, the object
    /// itself last.
    pub(crate) fn remove(&mut self, handle: u64) -> Vec<(u64, Object)> {
        let mut gone = vec![handle];
        let mut at = 0;
        while at < gone.len() {
            let parent = gone[at];
            let children = self.by_handle.iter().filter(|(h, o)| o.parent == parent && !gone.contains(h));
            let children: Vec<u64> = children.map(|(h, _)| *h).collect();
            gone.extend(children);
            at += 1;
        }
        self.log.retain(|r| !gone.contains(&r.owner));
        gone.iter().rev().filter_map(|h| Some((*h, self.by_handle.remove(h)?))).collect()
    }

    /// Takes out everything that belongs to a context (not the context itself), and every record made in it.
    pub(crate) fn remove_context(&mut self, context: u64) -> Vec<(u64, Object)> {
        let roots: Vec<u64> =
            self.by_handle.iter().filter(|(h, o)| o.context == context && **h != context).map(|(h, _)| *h).collect();
        let gone = roots.into_iter().flat_map(|h| self.remove(h)).collect();
        // What is left of the context's records is about libraries and kernels: their placing in it goes, their
        // loading stays, and needs no context.
        let stays = |r: &Record| Kind::Library.owns(r.owner) && r.code.is_some() || Kind::Kernel.owns(r.owner);
        self.log.retain(|r| r.context != context || stays(r));
        for record in self.log.iter_mut().filter(|r| r.context == context) {
            record.context = 0;
        }
        // A context that comes anew is placed anew: what was unloaded no longer matters.
        self.log.retain(|r| self.by_handle.contains_key(&r.owner));
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(kind: Kind, parent: u64) -> Object {
        Object { kind, real: 1, context: Kind::Context.handle(1), parent, allocates: false }
    }

    #[test]
    fn what_came_from_an_object_goes_with_it() {
        let mut objects = Objects::default();
        let (library, kernel, function) = (Kind::Library.handle(1), Kind::Kernel.handle(2), Kind::Function.handle(3));
        assert!(objects.insert(library, object(Kind::Library, 0)));
        assert!(objects.insert(kernel, object(Kind::Kernel, library)));
        assert!(objects.insert(function, object(Kind::Function, kernel)));
        for (call, owner) in [(1, library), (2, kernel), (3, function)] {
            objects.record(call, owner, 0, &[], None);
        }
        assert!(!objects.insert(kernel, object(Kind::Kernel, library)));
        assert!(!objects.insert(Kind::Event.handle(9), object(Kind::Stream, 0)));
        assert_eq!(objects.remove(library).len(), 3);
        assert!(objects.log().is_empty());
    }

    #[test]
    fn an_unloading_is_recorded_where_other_code_came_after() {
        let mut objects = Objects::default();
        let code = Some(CodeHash::of(b"code"));
        let (first, second) = (Kind::Module.handle(1), Kind::Module.handle(2));
        for handle in [first, second] {
            assert!(objects.insert(handle, object(Kind::Module, 0)));
            objects.record(1, handle, 0, &[], code);
        }
        objects.unload(first, 9, 0, &[]);
        assert!(objects.get(first).is_none());
        let log: Vec<_> = objects.log().iter().map(|r| (r.call, r.owner)).collect();
        assert_eq!(log, [(1, first), (1, second), (9, first)]);
        objects.unload(second, 9, 0, &[]);
        let log: Vec<_> = objects.log().iter().map(|r| (r.call, r.owner)).collect();
        assert_eq!(log, [(1, first), (9, first)]);
    }

    #[test]
    fn a_library_outlives_the_context_it_was_loaded_in() {
        let mut objects = Objects::default();
        let (context, library) = (Kind::Context.handle(1), Kind::Library.handle(2));
        assert!(objects.insert(library, Object { context: 0, ..object(Kind::Library, 0) }));
        objects.record(1, library, context, &[], Some(CodeHash::of(b"code")));
        objects.record(2, library, context, &[], None);
        objects.remove_context(context);
        let log: Vec<_> = objects.log().iter().map(|r| (r.call, r.context)).collect();
        assert_eq!(log, [(1, 0)]);
    }

    #[test]
    fn repeated_changes_do_not_grow_the_log() {
        let mut objects = Objects::default();
        for i in 0..100_u8 {
            objects.record_change(7, 1, 0, &[i % 2]);
        }
        assert_eq!(objects.log().len(), 2);
        assert_eq!(objects.log()[1].args, [1]);
    }
}
