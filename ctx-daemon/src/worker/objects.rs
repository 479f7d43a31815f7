//! What the client's handles stand for, and the log from which a restore makes them again.
//!
//! A record is the command that created or changed something, as it came through the ring. A restore executes the
//! records in their order. What is destroyed takes its records, and those of what depended on it, out of the log.

use std::collections::{HashMap, HashSet};

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

/// How many unloaded modules and libraries the log keeps at most.
const MAX_UNLOADED: usize = 64;

/// Whether a handle is one that code is loaded as.
fn is_code(handle: u64) -> bool {
    Kind::Module.owns(handle) || Kind::Library.owns(handle)
}

/// All objects of a client.
#[derive(Default)]
pub(crate) struct Objects {
    by_handle: HashMap<u64, Object>,
    log: Vec<Record>,
    next_sequence: u64,
    /// Of unloaded code whose records are kept: what was made from it, and the code.
    former: HashMap<u64, u64>,
    /// Functions whose code is loaded, and kernels with the contexts that theirs is loaded in.
    used: HashSet<(u64, u64)>,
}

impl Objects {
    pub(crate) fn get(&self, handle: u64) -> Option<&Object> {
        self.by_handle.get(&handle)
    }

    /// The handles of one kind.
    pub(crate) fn of_kind(&self, kind: Kind) -> Vec<u64> {
        self.by_handle.iter().filter(|(_, o)| o.kind == kind).map(|(handle, _)| *handle).collect()
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

    /// Whether a function has been used, a kernel in this context.
    pub(crate) fn is_used(&self, handle: u64, context: u64) -> bool {
        self.used.contains(&self.use_of(handle, context))
    }

    /// Notes a use of a function, or of a kernel in this context; whether it is the first.
    pub(crate) fn first_use(&mut self, handle: u64, context: u64) -> bool {
        self.used.insert(self.use_of(handle, context))
    }

    /// A function belongs to one context, whatever the current one is.
    fn use_of(&self, handle: u64, context: u64) -> (u64, u64) {
        (handle, if Kind::Kernel.owns(handle) { context } else { 0 })
    }

    /// Adds a record.
    pub(crate) fn record(&mut self, call: u16, owner: u64, context: u64, args: &[u8], code: Option<CodeHash>) {
        self.next_sequence += 1;
        let sequence = self.next_sequence;
        self.log.push(Record { sequence, call, owner, context, args: args.to_vec(), code });
    }

    /// Adds a record of a change. One that said the same before, but for the word that is the new value, is taken out,
    /// so that a program which changes values for ever does not make the log grow.
    pub(crate) fn record_change(&mut self, call: u16, owner: u64, context: u64, args: &[u8], value: Option<usize>) {
        let is_value = |at: usize| value.is_some_and(|word| at / 8 == word);
        let same = |other: &[u8]| {
            let pairs = other.iter().zip(args).enumerate();
            other.len() == args.len() && pairs.into_iter().all(|(at, (a, b))| a == b || is_value(at))
        };
        self.log.retain(|r| !(r.owner == owner && r.call == call && r.context == context && same(&r.args)));
        self.record(call, owner, context, args, None);
    }

    /// Takes a record of a change out that no longer holds.
    pub(crate) fn unrecord(&mut self, call: u16, owner: u64, args: &[u8]) {
        self.log.retain(|r| !(r.owner == owner && r.call == call && r.args == args));
    }

    /// Takes records of a call out whose first word is an object that goes.
    pub(crate) fn unrecord_naming(&mut self, call: u16, handle: u64) {
        self.log.retain(|r| !(r.call == call && r.args.starts_with(&handle.to_le_bytes())));
    }

    /// Takes a module or library out that was unloaded. Where other code was loaded after it and is still there, its
    /// records stay, and one of the unloading is added: the driver places later code by what was there, and a restore
    /// must do as it did.
    pub(crate) fn unload(&mut self, handle: u64, call: u16, context: u64, args: &[u8]) {
        let gone = self.take(handle);
        self.former.extend(gone.iter().map(|(child, _)| (*child, handle)));
        self.record(call, handle, context, args, None);
        self.forget_unloaded();
    }

    /// Drops the records of unloaded code during whose life nothing was loaded that still counts. A program that loads
    /// and unloads for ever, always the next before the last, would keep a chain of all of them: it is cut at
    /// [`MAX_UNLOADED`], and the restore, which compares every address that can be asked for, then refuses if the
    /// driver has placed anything otherwise.
    fn forget_unloaded(&mut self) {
        // The life of each code: from its loading to its unloading, which is the last of its records.
        let mut ends: HashMap<u64, usize> = HashMap::new();
        for (at, record) in self.log.iter().enumerate().filter(|(_, r)| is_code(r.owner)) {
            let alive = self.by_handle.contains_key(&record.owner);
            ends.insert(record.owner, if alive { usize::MAX } else { at });
        }
        let loads = self.log.iter().enumerate().rev().filter(|(_, r)| r.code.is_some() && is_code(r.owner));
        // Where the next code was loaded that counts: later ones decide about earlier ones.
        let mut next = usize::MAX;
        let (mut gone, mut kept) = (Vec::new(), Vec::new());
        for (begin, record) in loads {
            match ends.get(&record.owner).copied().unwrap_or(usize::MAX) {
                usize::MAX => {}
                end if next < end => kept.push(record.owner),
                _ => {
                    gone.push(record.owner);
                    continue;
                }
            }
            next = begin;
        }
        gone.extend(kept.into_iter().skip(MAX_UNLOADED));
        if gone.is_empty() {
            return;
        }
        let gone: HashSet<u64> = gone.into_iter().collect();
        let former = &self.former;
        self.log.retain(|r| !gone.contains(former.get(&r.owner).unwrap_or(&r.owner)));
        self.former.retain(|_, code| !gone.contains(code));
    }

    /// Takes an object out, with everything made from it, and their records. Returns what was taken out, the object
    /// itself last.
    pub(crate) fn remove(&mut self, handle: u64) -> Vec<(u64, Object)> {
        let gone = self.take(handle);
        let owners: HashSet<u64> = gone.iter().map(|(handle, _)| *handle).chain([handle]).collect();
        self.log.retain(|r| !owners.contains(&r.owner));
        gone
    }

    /// Takes an object out, with everything made from it, and leaves their records.
    fn take(&mut self, handle: u64) -> Vec<(u64, Object)> {
        let mut gone = vec![handle];
        let mut at = 0;
        while at < gone.len() {
            let parent = gone[at];
            let children = self.by_handle.iter().filter(|(h, o)| o.parent == parent && !gone.contains(h));
            let children: Vec<u64> = children.map(|(h, _)| *h).collect();
            gone.extend(children);
            at += 1;
        }
        if gone.iter().any(|h| Kind::Function.owns(*h) || Kind::Kernel.owns(*h)) {
            self.used.retain(|(h, _)| !gone.contains(h));
        }
        gone.iter().rev().filter_map(|h| Some((*h, self.by_handle.remove(h)?))).collect()
    }

    /// Takes out everything that belongs to a context (not the context itself), and every record made in it.
    pub(crate) fn remove_context(&mut self, context: u64) -> Vec<(u64, Object)> {
        let roots: Vec<u64> =
            self.by_handle.iter().filter(|(h, o)| o.context == context && **h != context).map(|(h, _)| *h).collect();
        let gone = roots.into_iter().flat_map(|h| self.remove(h)).collect();
        self.used.retain(|(_, used_in)| *used_in != context);
        // What is left of the context's records is about libraries and kernels: their placing in it goes, their
        // loading stays, and needs no context.
        let stays = |r: &Record| {
            Kind::Library.owns(r.owner) && r.code.is_some() || r.call == rekindle_wire::command::LIBRARY_KERNEL
        };
        self.log.retain(|r| r.context != context || stays(r));
        for record in self.log.iter_mut().filter(|r| r.context == context) {
            record.context = 0;
        }
        // A context that comes anew is placed anew: what was unloaded no longer matters.
        self.log.retain(|r| self.by_handle.contains_key(&r.owner));
        self.former.clear();
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
        assert!(objects.log().is_empty());
    }

    #[test]
    fn loading_and_unloading_for_ever_does_not_grow_the_log() {
        let mut objects = Objects::default();
        let code = Some(CodeHash::of(b"code"));
        let load = |objects: &mut Objects, number: u64| {
            assert!(objects.insert(Kind::Module.handle(number), object(Kind::Module, 0)));
            objects.record(1, Kind::Module.handle(number), 0, &[], code);
        };
        load(&mut objects, 1);
        for pair in 1..200 {
            load(&mut objects, 2 * pair);
            load(&mut objects, 2 * pair + 1);
            objects.unload(Kind::Module.handle(2 * pair), 9, 0, &[]);
            objects.unload(Kind::Module.handle(2 * pair + 1), 9, 0, &[]);
            assert_eq!(objects.log().len(), 1);
        }
        load(&mut objects, 1000);
        for number in 1000..1200 {
            load(&mut objects, number + 1);
            objects.unload(Kind::Module.handle(number), 9, 0, &[]);
        }
        assert!(objects.log().len() <= 2 * MAX_UNLOADED + 2);
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
        let words = |what: u64, value: u64| [what.to_le_bytes(), value.to_le_bytes()].concat();
        for i in 0..100 {
            objects.record_change(7, 1, 0, &words(i % 2, i), Some(1));
        }
        let log: Vec<_> = objects.log().iter().map(|r| r.args.clone()).collect();
        assert_eq!(log, [words(0, 98), words(1, 99)]);
        objects.record_change(7, 1, 0, &words(0, 98), None);
        assert_eq!(objects.log().len(), 2);
    }
}
