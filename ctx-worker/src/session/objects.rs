//! The objects behind the client's handles, and the log from which a restore makes them again.
//!
//! A record is the command that created or changed an object, as the command came through the ring. A restore executes the
//! records in their order. When an object is destroyed, its records, and those of objects that depended on it, leave the
//! log. Code and contexts are the exception: see [`crate::session::lives`].

use std::collections::{HashMap, HashSet};

use rekindle_images::CodeHash;
use rekindle_wire::command::Kind;

use crate::session::lives::{Lives, places_code};
use crate::session::record::Record;

/// The object behind a handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    pub(crate) kind: Kind,
    /// The driver's handle.
    pub(crate) real: u64,
    /// The context that the object belongs to; 0 for libraries and kernels, which belong to none. A context belongs to itself,
    /// unless it is a green one: that belongs to the primary context of its device.
    pub(crate) context: u64,
    /// The module, library or kernel that the object came from, or 0.
    pub(crate) parent: u64,
    /// For a function or kernel: whether its code reaches the device's `malloc`.
    pub(crate) allocates: bool,
}

/// All objects of a client.
#[derive(Default)]
pub(crate) struct Objects {
    by_handle: HashMap<u64, Object>,
    log: Vec<Record>,
    next_sequence: u64,
    /// Unloaded code and destroyed contexts.
    lives: Lives,
    /// Functions whose code is loaded, and kernels, each with a context in which its code is loaded.
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

    /// The contexts that own what is in them: all but green ones.
    pub(crate) fn contexts(&self) -> Vec<u64> {
        let own =
            |(handle, it): (&u64, &Object)| (it.kind == Kind::Context && it.context == *handle).then_some(*handle);
        self.by_handle.iter().filter_map(own).collect()
    }

    /// The green contexts that belong to a primary context.
    pub(crate) fn green_contexts(&self, primary: u64) -> Vec<u64> {
        let green = |(handle, it): (&u64, &Object)| {
            (it.kind == Kind::Context && it.context == primary && *handle != primary).then_some(*handle)
        };
        self.by_handle.iter().filter_map(green).collect()
    }

    pub(crate) fn log(&self) -> &[Record] {
        &self.log
    }

    /// Adds an object; `false` where the handle is taken or names another kind, which is the client's mistake.
    pub(crate) fn insert(&mut self, handle: u64, object: Object) -> bool {
        if !object.kind.owns(handle) || self.by_handle.contains_key(&handle) {
            return false;
        }
        self.by_handle.insert(handle, object);
        true
    }

    /// Replaces the object behind a handle.
    pub(crate) fn replace(&mut self, handle: u64, object: Object) {
        self.by_handle.insert(handle, object);
    }

    /// Whether a function has been used; for a kernel, whether it has been used in this context.
    pub(crate) fn is_used(&self, handle: u64, context: u64) -> bool {
        self.used.contains(&self.use_of(handle, context))
    }

    /// Notes a use of a function, or of a kernel in this context; returns whether it is the first.
    pub(crate) fn first_use(&mut self, handle: u64, context: u64) -> bool {
        self.used.insert(self.use_of(handle, context))
    }

    /// The key of a use. A function belongs to one context, whatever the current one is.
    fn use_of(&self, handle: u64, context: u64) -> (u64, u64) {
        (handle, if Kind::Kernel.owns(handle) { context } else { 0 })
    }

    /// Adds a record.
    pub(crate) fn record(&mut self, call: u16, owner: u64, context: u64, args: &[u8], code: Option<CodeHash>) {
        self.next_sequence += 1;
        let sequence = self.next_sequence;
        self.log.push(Record { sequence, call, owner, context, args: args.to_vec(), code });
    }

    /// Adds a record of a change. An earlier record of the same change, which may differ only in the word of the new value,
    /// is removed, so that a program which changes values for ever does not make the log grow.
    pub(crate) fn record_change(&mut self, call: u16, owner: u64, context: u64, args: &[u8], value: Option<usize>) {
        let is_value = |at: usize| value.is_some_and(|word| at / 8 == word);
        let same = |other: &[u8]| {
            let pairs = other.iter().zip(args).enumerate();
            other.len() == args.len() && pairs.into_iter().all(|(at, (a, b))| a == b || is_value(at))
        };
        self.log.retain(|r| !(r.owner == owner && r.call == call && r.context == context && same(&r.args)));
        self.record(call, owner, context, args, None);
    }

    /// Removes the record of a change that no longer holds.
    pub(crate) fn unrecord(&mut self, call: u16, owner: u64, args: &[u8]) {
        self.log.retain(|r| !(r.owner == owner && r.call == call && r.args == args));
    }

    /// Removes the records of a call whose first word names an object that is going away.
    pub(crate) fn unrecord_naming(&mut self, call: u16, handle: u64) {
        self.log.retain(|r| !(r.call == call && r.args.starts_with(&handle.to_le_bytes())));
    }

    /// Removes an unloaded module or library. Its records stay as long as they count ([`crate::session::lives`]), and a
    /// record of the unloading is added.
    pub(crate) fn unload(&mut self, handle: u64, call: u16, context: u64, args: &[u8]) {
        let gone = self.take(handle);
        self.record(call, handle, context, args, None);
        self.lives.end(handle, self.next_sequence, gone.iter().map(|(child, _)| *child));
        self.lives.forget(&mut self.log);
    }

    /// Removes all records that do not count any more, or are of no use behind a cut; not every call does the work.
    pub(crate) fn settle(&mut self) {
        self.lives.forget_now(&mut self.log);
        self.lives.forget_behind_cut(&mut self.log);
    }

    /// The record from which on the log lacks unloaded code that decided where loaded code is; `None` if the log lacks
    /// none. A worker drops such code where there is too much of it.
    pub(crate) fn cut_from(&self) -> Option<u64> {
        self.lives.cut_from(&self.log)
    }

    /// Drops half of the unloaded code, since it takes too much memory; `false` where there is none. See
    /// [`Self::cut_from`].
    pub(crate) fn cut(&mut self) -> bool {
        self.lives.cut(&mut self.log)
    }

    /// Notes that the replayed log lacks unloaded code from this record on.
    pub(crate) fn was_cut(&mut self, from: u64) {
        self.lives.was_cut(from, self.next_sequence);
    }

    /// The number of records that the log has ever had.
    pub(crate) fn recorded(&self) -> u64 {
        self.next_sequence
    }

    /// The objects that are still there and whose code was placed behind a record.
    pub(crate) fn placed_behind(&self, from: u64) -> HashSet<u64> {
        self.lives.placed_behind(&self.log, from)
    }

    /// The code images of code that is loaded, and of all code in the log.
    pub(crate) fn code(&self) -> (HashSet<CodeHash>, HashSet<CodeHash>) {
        let loaded = self.log.iter().filter(|r| self.by_handle.contains_key(&r.owner));
        (loaded.filter_map(|r| r.code).collect(), self.log.iter().filter_map(|r| r.code).collect())
    }

    /// Removes an object, everything made from it, and their records. Returns the removed objects, the object itself last.
    pub(crate) fn remove(&mut self, handle: u64) -> Vec<(u64, Object)> {
        let gone = self.take(handle);
        let owners: HashSet<u64> = gone.iter().map(|(handle, _)| *handle).chain([handle]).collect();
        self.log.retain(|r| !owners.contains(&r.owner));
        gone
    }

    /// Removes an object and everything made from it, and leaves their records.
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

    /// Removes everything that belongs to a context (not the context itself), and every record made in it. Libraries and
    /// kernels belong to no context: the records of their loading stay, and need no context.
    pub(crate) fn remove_context(&mut self, context: u64) -> Vec<(u64, Object)> {
        let gone = self.take_context(context);
        let owners: HashSet<u64> = gone.iter().map(|(handle, _)| *handle).collect();
        self.log.retain(|r| !owners.contains(&r.owner));
        self.lives.drop_context(&mut self.log, context);
        self.lives.forget(&mut self.log);
        gone
    }

    /// Removes a destroyed context and everything that belongs to it, the context itself last. Records that loaded code
    /// there stay as long as they count, and a record of the destruction is added.
    pub(crate) fn destroy_context(&mut self, context: u64, call: u16, args: &[u8]) -> Vec<(u64, Object)> {
        let mut gone = self.take_context(context);
        gone.extend(self.by_handle.remove(&context).map(|object| (context, object)));
        let owners: HashSet<u64> = gone.iter().map(|(handle, _)| *handle).filter(|h| !places_code(*h)).collect();
        self.log.retain(|r| r.owner == context || !owners.contains(&r.owner));
        self.record(call, context, 0, args, None);
        let code = gone.iter().map(|(handle, _)| *handle).filter(|h| places_code(*h) && *h != context);
        self.lives.end_context(&self.log, context, self.next_sequence, code);
        self.lives.forget(&mut self.log);
        gone
    }

    /// Removes the objects of a context, and leaves their records.
    fn take_context(&mut self, context: u64) -> Vec<(u64, Object)> {
        let of_context = self.by_handle.iter().filter(|(h, o)| o.context == context && **h != context);
        let roots: Vec<u64> = of_context.map(|(h, _)| *h).collect();
        let gone = roots.into_iter().flat_map(|h| self.take(h)).collect();
        self.used.retain(|(_, used_in)| *used_in != context);
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_wire::command;

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
    fn a_green_context_belongs_to_its_primary_one_and_owns_its_streams_alone() {
        let mut objects = Objects::default();
        let (primary, green) = (Kind::Context.handle(1), Kind::Context.handle(2));
        let (stream, event) = (Kind::Stream.handle(3), Kind::Event.handle(4));
        for handle in [primary, green] {
            assert!(objects.insert(handle, Object { context: primary, ..object(Kind::Context, 0) }));
        }
        assert!(objects.insert(stream, Object { context: green, ..object(Kind::Stream, 0) }));
        assert!(objects.insert(event, Object { context: primary, ..object(Kind::Event, 0) }));
        assert_eq!((objects.contexts(), objects.green_contexts(primary)), (vec![primary], vec![green]));
        let gone: Vec<_> = objects.remove_context(green).into_iter().map(|(handle, _)| handle).collect();
        assert_eq!(gone, [stream]);
        objects.remove(green);
        assert!(objects.green_contexts(primary).is_empty() && objects.get(event).is_some());
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
    }

    #[test]
    fn code_that_overlaps_what_is_loaded_stays_in_the_log_however_much_it_is() {
        let mut objects = Objects::default();
        let load = |objects: &mut Objects, number: u64| {
            assert!(objects.insert(Kind::Module.handle(number), object(Kind::Module, 0)));
            objects.record(1, Kind::Module.handle(number), 0, &[], Some(CodeHash::of(b"code")));
        };
        load(&mut objects, 1);
        for number in 1..300 {
            load(&mut objects, number + 1);
            objects.unload(Kind::Module.handle(number), 9, 0, &[]);
            assert_eq!(objects.log().len(), 2 * number as usize + 1);
        }
        // The last module of the chain is unloaded: no part of the chain counts for code that comes later.
        objects.unload(Kind::Module.handle(300), 9, 0, &[]);
        objects.settle();
        assert!(objects.log().is_empty() && objects.cut_from().is_none());
    }

    #[test]
    fn a_use_of_older_code_during_the_life_of_a_module_keeps_that_modules_records() {
        let mut objects = Objects::default();
        let (older, newer) = (Kind::Module.handle(1), Kind::Module.handle(2));
        let function = Kind::Function.handle(3);
        for handle in [older, newer] {
            assert!(objects.insert(handle, object(Kind::Module, 0)));
            objects.record(1, handle, 0, &[], Some(CodeHash::of(b"code")));
        }
        assert!(objects.insert(function, object(Kind::Function, older)));
        assert!(objects.first_use(function, 0) && !objects.first_use(function, 0));
        objects.record(5, function, 0, &[], None);
        objects.unload(newer, 9, 0, &[]);
        assert_eq!(objects.log().iter().map(|r| r.call).collect::<Vec<_>>(), [1, 1, 5, 9]);
        objects.unload(older, 9, 0, &[]);
        assert!(objects.log().is_empty() && objects.first_use(function, 0));
    }

    #[test]
    fn destroying_one_context_leaves_the_unloaded_code_of_others_in_the_log() {
        let mut objects = Objects::default();
        let code = Some(CodeHash::of(b"code"));
        let (here, there) = (Kind::Context.handle(1), Kind::Context.handle(2));
        for context in [here, there] {
            assert!(objects.insert(context, Object { context, ..object(Kind::Context, 0) }));
            objects.record(command::CONTEXT_CREATE, context, 0, &[], None);
        }
        for (number, context) in [(3, here), (4, here), (5, there)] {
            let module = Kind::Module.handle(number);
            assert!(objects.insert(module, Object { context, ..object(Kind::Module, 0) }));
            objects.record(1, module, context, &[], code);
        }
        objects.unload(Kind::Module.handle(3), 9, here, &[]);
        assert_eq!(objects.destroy_context(there, 10, &[]).len(), 2);
        let log: Vec<_> = objects.log().iter().map(|r| (r.call, r.owner & 0xff)).collect();
        // The other context was there when the loaded code was placed.
        assert_eq!(
            log,
            [(command::CONTEXT_CREATE, 1), (command::CONTEXT_CREATE, 2), (1, 3), (1, 4), (1, 5), (9, 3), (10, 2)]
        );
        objects.unload(Kind::Module.handle(4), 9, here, &[]);
        assert_eq!(objects.log().iter().map(|r| r.call).collect::<Vec<_>>(), [command::CONTEXT_CREATE]);
    }

    #[test]
    fn contexts_that_come_and_go_with_code_leave_nothing_in_the_log() {
        let mut objects = Objects::default();
        for number in 1..100 {
            let (context, module) = (Kind::Context.handle(number), Kind::Module.handle(number));
            let stream = Kind::Stream.handle(number);
            assert!(objects.insert(context, Object { context, ..object(Kind::Context, 0) }));
            objects.record(command::CONTEXT_CREATE, context, 0, &[], None);
            for (handle, kind, code) in
                [(module, Kind::Module, Some(CodeHash::of(b"code"))), (stream, Kind::Stream, None)]
            {
                assert!(objects.insert(handle, Object { context, ..object(kind, 0) }));
                objects.record(1, handle, context, &[], code);
            }
            assert_eq!(objects.destroy_context(context, 10, &[]).len(), 3);
            assert!(objects.log().is_empty(), "{:?}", objects.log());
        }
    }

    #[test]
    fn code_that_was_dropped_for_its_mass_is_missed_until_all_that_it_could_have_moved_is_gone() {
        let mut objects = Objects::default();
        let load = |objects: &mut Objects, number: u64| {
            assert!(objects.insert(Kind::Module.handle(number), object(Kind::Module, 0)));
            objects.record(1, Kind::Module.handle(number), 0, &[], Some(CodeHash::of(b"code")));
        };
        load(&mut objects, 1);
        for number in 1..20 {
            load(&mut objects, number + 1);
            objects.unload(Kind::Module.handle(number), 9, 0, &[]);
        }
        assert!(objects.cut());
        assert!(objects.cut_from().is_some() && objects.log().len() < 25);
        objects.unload(Kind::Module.handle(20), 9, 0, &[]);
        objects.settle();
        load(&mut objects, 21);
        assert!(objects.cut_from().is_none());
    }

    #[test]
    fn a_cut_leaves_the_log_of_before_whole_and_nothing_that_is_gone_behind_it() {
        let mut objects = Objects::default();
        let load = |objects: &mut Objects, number: u64| {
            assert!(objects.insert(Kind::Module.handle(number), object(Kind::Module, 0)));
            objects.record(1, Kind::Module.handle(number), 0, &[], Some(CodeHash::of(b"code")));
        };
        let chain = |objects: &mut Objects, numbers: std::ops::Range<u64>| {
            for number in numbers {
                load(objects, number + 1);
                objects.unload(Kind::Module.handle(number), 9, 0, &[]);
            }
        };
        load(&mut objects, 1);
        chain(&mut objects, 1..20);
        let before: Vec<u64> = objects.log().iter().map(|r| r.sequence).collect();
        assert!(objects.cut());
        let from = objects.cut_from().unwrap();
        let left: Vec<u64> = objects.log().iter().map(|r| r.sequence).collect();
        let exact = |log: &[u64]| log.iter().copied().filter(|sequence| *sequence <= from).collect::<Vec<_>>();
        assert!(exact(&left).len() > 10 && exact(&left) == exact(&before));
        // Later cuts do not reach farther back, as long as code of the first cut is left.
        chain(&mut objects, 20..40);
        objects.settle();
        assert_eq!(objects.cut_from(), Some(from));
        let behind =
            |objects: &Objects| objects.log().iter().filter(|r| r.sequence > from).map(|r| r.owner).collect::<Vec<_>>();
        assert!(behind(&objects).contains(&Kind::Module.handle(40)));
        assert_eq!(objects.placed_behind(from), [Kind::Module.handle(40)].into());
        // A life that ended behind the cut and began before it is in the log with its end.
        assert!(behind(&objects).len() <= 3, "{:?}", behind(&objects));
        objects.was_cut(from);
        assert_eq!(objects.cut_from(), Some(from));
        objects.unload(Kind::Module.handle(40), 9, 0, &[]);
        objects.settle();
        assert_eq!((objects.cut_from(), objects.log().len()), (None, 0));
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
