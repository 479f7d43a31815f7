//! Imports of memory from worker to worker that are under way.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex};

use super::grants::Allowed;
use super::{lock, wait_timeout};
use crate::limit::{Deadline, Limit};

/// An import takes too long.
#[derive(Debug, thiserror::Error)]
#[error(
    "process {pid} is importing memory from another process, and has not finished after {limit}: dump again when it has"
)]
pub(super) struct Unfinished {
    pid: i32,
    limit: Limit,
}

/// Imports of memory from worker to worker. A dump that holds a tree waits for imports that began before, among processes that
/// may share memory with its clients; an import that begins later finds the hold.
#[derive(Default)]
pub(super) struct Imports {
    /// The importing process of each, and its grant.
    imports: Mutex<HashMap<u64, (Allowed, i32)>>,
    over: Condvar,
}

/// An import that is under way.
pub(super) struct Import<'a> {
    all: &'a Imports,
    number: u64,
}

impl Imports {
    /// An import begins; it is over when the result is dropped.
    pub(super) fn begin(&self, number: u64, of: Allowed, pid: i32) -> Import<'_> {
        lock(&self.imports).insert(number, (of, pid));
        Import { all: self, number }
    }

    /// Waits for imports that have begun and that concern the caller; an error names one that takes too long.
    pub(super) fn wait_for(&self, concerns: impl Fn(&Allowed) -> bool, deadline: Deadline) -> Result<(), Unfinished> {
        let mut imports = lock(&self.imports);
        let before: Vec<u64> = imports.iter().filter(|(_, (of, _))| concerns(of)).map(|(number, _)| *number).collect();
        while let Some((_, pid)) = before.iter().find_map(|number| imports.get(number)) {
            if deadline.is_over() {
                return Err(Unfinished { pid: *pid, limit: deadline.limit });
            }
            imports = wait_timeout(&self.over, imports, deadline.left());
        }
        Ok(())
    }
}

impl Drop for Import<'_> {
    fn drop(&mut self) {
        lock(&self.all.imports).remove(&self.number);
        self.all.over.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_dump_waits_for_what_concerns_it_and_not_for_ever() {
        let all = Imports::default();
        let import = all.begin(1, Allowed::default(), 77);
        let long = Limit::fixed(Duration::from_secs(60)).begins();
        all.wait_for(|_| false, long).unwrap();
        let short = Limit::fixed(Duration::from_millis(20)).begins();
        let error = all.wait_for(|_| true, short).unwrap_err().to_string();
        assert!(error.contains("process 77") && error.contains("20 ms"), "{error}");
        // Imports that begin later are not waited for.
        std::thread::scope(|scope| {
            let (say, said) = std::sync::mpsc::channel();
            let waiting = scope.spawn(|| all.wait_for(move |_| say.send(()).is_ok(), long));
            said.recv().unwrap();
            let later = all.begin(2, Allowed::default(), 78);
            drop(import);
            waiting.join().unwrap().unwrap();
            drop(later);
        });
    }
}
