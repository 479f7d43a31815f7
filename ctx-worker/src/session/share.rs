//! The memory that the workers of one container use together, in a table that they share: a file with a row for each
//! worker.
//!
//! ```text
//!   row:  owner's pid │ owner's start │ pinned bytes │ bytes on GPU 0 │ 1 │ ... │ 15
//! ```
//!
//! A worker writes the amount that it is about to use into its own row, then adds up all rows. If the sum is too large the
//! worker restores its old amount. Two workers that do this at the same moment may both be refused, but never both be
//! allowed too much. The daemon assigns rows, and empties those of dead workers. Nobody maps the file, so a worker that
//! truncates it harms only its own container.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rekindle_wire::control::ContainerLimits;
use rekindle_wire::window::MAX_DEVICES;
use tracing::warn;

/// The most workers of one container, where it has limits.
pub const ROWS: usize = 256;
const COLUMNS: usize = 3 + MAX_DEVICES;
const WORD: usize = size_of::<u64>();
const OWNER: usize = 0;
const START: usize = 1;
const PINNED: usize = 2;
const DEVICES: usize = 3;

/// All rows.
fn rows(file: &File) -> io::Result<Vec<[u64; COLUMNS]>> {
    let mut bytes = vec![0; ROWS * COLUMNS * WORD];
    let mut have = 0;
    while let Some(rest) = bytes.get_mut(have..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, have as u64)? {
            0 => break, // the rest was never written
            more => have += more,
        }
    }
    let words = bytes.chunks_exact(WORD).map(|it| u64::from_le_bytes(it.try_into().unwrap_or_default()));
    let words: Vec<u64> = words.collect();
    Ok(words.chunks_exact(COLUMNS).filter_map(|it| it.try_into().ok()).collect())
}

fn write(file: &File, row: usize, column: usize, words: &[u64]) -> io::Result<()> {
    let bytes: Vec<u8> = words.iter().flat_map(|it| it.to_le_bytes()).collect();
    file.write_all_at(&bytes, ((row * COLUMNS + column) * WORD) as u64)
}

/// Assigns a row to a worker. `lives` tells whether a row's owner is alive; rows of dead owners are emptied. `None` if all
/// are taken.
pub fn claim(file: &File, pid: i32, start: u64, lives: impl Fn(i32, u64) -> bool) -> io::Result<Option<usize>> {
    let mut free = None;
    for (at, row) in rows(file)?.iter().enumerate() {
        if row[OWNER] != 0 && !i32::try_from(row[OWNER]).is_ok_and(|pid| lives(pid, row[START])) {
            write(file, at, 0, &[0; COLUMNS])?;
            free = free.or(Some(at));
        } else if row[OWNER] == 0 {
            free = free.or(Some(at));
        }
    }
    if let Some(row) = free {
        write(file, row, 0, &[pid.unsigned_abs().into(), start])?;
    }
    Ok(free)
}

/// Empties the row of a worker that has died.
pub fn release(file: &File, pid: i32) -> io::Result<()> {
    for (at, row) in rows(file)?.iter().enumerate() {
        if row[OWNER] == u64::from(pid.unsigned_abs()) {
            write(file, at, 0, &[0; COLUMNS])?;
        }
    }
    Ok(())
}

/// A worker's row of the table.
#[derive(Debug)]
pub struct Share {
    file: File,
    row: usize,
    /// The most that the container may use in all.
    pub limits: ContainerLimits,
    /// The column of each of the worker's devices.
    columns: Vec<Option<usize>>,
}

/// An amount that a worker has withdrawn from its container's table: another worker counts it, or is to.
#[derive(Debug)]
pub(crate) struct Withdrawn {
    share: Arc<Share>,
    what: What,
    own: u64,
}

impl Withdrawn {
    /// Counts it here again.
    pub(crate) fn put_back(&self) {
        self.share.set(self.what, self.own);
    }
}

/// The resource that an amount is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Bytes of pinned host memory.
    Pinned,
    /// Bytes of memory of a device, by the worker's number of it.
    Device(usize),
}

impl Share {
    /// The row of a worker that sees the devices `sees`, in the table of a container that has the devices `has`.
    pub fn new(
        file: File,
        row: usize,
        limits: ContainerLimits,
        has: &[[u8; 16]],
        sees: impl Iterator<Item = [u8; 16]>,
    ) -> Option<Arc<Self>> {
        let column = |uuid| has.iter().position(|it| *it == uuid).filter(|at| *at < MAX_DEVICES).map(|at| DEVICES + at);
        (row < ROWS).then(|| Arc::new(Self { file, row, limits, columns: sees.map(column).collect() }))
    }

    fn column(&self, what: What) -> Option<(usize, u64)> {
        match what {
            What::Pinned => Some((PINNED, self.limits.pinned_memory?)),
            What::Device(at) => Some(((*self.columns.get(at)?)?, self.limits.device_memory?)),
        }
    }

    /// How much more this worker may use, when it uses `own`.
    pub fn room(&self, what: What, own: u64) -> u64 {
        let Some((column, limit)) = self.column(what) else { return u64::MAX };
        match self.others(column) {
            Ok(others) => limit.saturating_sub(others).saturating_sub(own),
            Err(error) => {
                warn!("cannot read what the container uses: {error}");
                0
            }
        }
    }

    /// Raises this worker's amount to `own`. Returns `false` where that is too much, and leaves the amount at `had`.
    pub fn take(&self, what: What, had: u64, own: u64) -> bool {
        let Some((column, limit)) = self.column(what) else { return true };
        let fits = self.put(column, own).and_then(|()| Ok(self.others(column)?.saturating_add(own) <= limit));
        match fits {
            Ok(true) => true,
            failed => {
                if let Err(error) = failed.and(self.put(column, had)) {
                    warn!("cannot account for what the container uses: {error}");
                }
                false
            }
        }
    }

    /// Sets this worker's amount to `own`.
    pub fn set(&self, what: What, own: u64) {
        if let Some((column, _)) = self.column(what)
            && let Err(error) = self.put(column, own)
        {
            warn!("cannot account for what the container uses: {error}");
        }
    }

    /// Withdraws this worker's amount.
    pub(crate) fn withdraw(self: &Arc<Self>, what: What) -> Option<Withdrawn> {
        let (column, _) = self.column(what)?;
        let own = rows(&self.file).map(|rows| rows.get(self.row).and_then(|row| row.get(column).copied()));
        let own = own.inspect_err(|error| warn!("cannot read what the container uses: {error}")).ok()??;
        self.set(what, 0);
        Some(Withdrawn { share: Arc::clone(self), what, own })
    }

    fn put(&self, column: usize, own: u64) -> io::Result<()> {
        write(&self.file, self.row, column, &[own])
    }

    fn others(&self, column: usize) -> io::Result<u64> {
        let rows = rows(&self.file)?;
        let others = rows.iter().enumerate().filter(|(at, _)| *at != self.row);
        Ok(others.filter_map(|(_, row)| row.get(column)).fold(0, |sum, bytes| sum.saturating_add(*bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ContainerLimits =
        ContainerLimits { device_memory: Some(100), pinned_memory: Some(10), workers: None };

    #[test]
    fn workers_of_a_container_have_no_more_than_it_together() {
        let file = tempfile::tempfile().unwrap();
        let alive = |_, _| true;
        let rows = [7, 8].map(|pid| claim(&file, pid, 1, alive).unwrap().unwrap());
        assert_eq!(rows, [0, 1]);
        let has = [[1; 16], [2; 16]];
        let share = |row, sees: Vec<[u8; 16]>| {
            Share::new(file.try_clone().unwrap(), row, LIMITS, &has, sees.into_iter()).unwrap()
        };
        // The two workers number the same GPU differently.
        let (first, second) = (share(0, vec![[1; 16], [2; 16]]), share(1, vec![[2; 16]]));
        assert!(first.take(What::Device(1), 0, 60));
        assert_eq!(second.room(What::Device(0), 0), 40);
        assert!(!second.take(What::Device(0), 0, 41));
        assert!(second.take(What::Device(0), 0, 40) && first.take(What::Device(0), 0, 100));
        assert!(!first.take(What::Device(1), 60, 61), "what it had stays");
        assert_eq!(second.room(What::Device(0), 40), 0);
        assert!(first.take(What::Pinned, 0, 10) && !second.take(What::Pinned, 0, 1));
        first.set(What::Device(1), 10);
        assert_eq!(second.room(What::Device(0), 40), 50);
        let withdrawn = first.withdraw(What::Device(1)).unwrap();
        assert_eq!(second.room(What::Device(0), 40), 60);
        withdrawn.put_back();
        assert_eq!(second.room(What::Device(0), 40), 50);
        release(&file, 7).unwrap();
        assert!(second.take(What::Pinned, 0, 10));
        // Other workers take its row, and that of a worker that died unnoticed.
        assert_eq!(claim(&file, 9, 1, alive).unwrap(), Some(0));
        assert_eq!(claim(&file, 10, 1, |pid, _| pid != 8).unwrap(), Some(1));
        assert_eq!(share(0, vec![[2; 16]]).room(What::Device(0), 0), 100);
        // Memory without a limit is not counted, nor is memory of a device that the container does not have.
        assert_eq!(share(0, vec![[3; 16]]).room(What::Device(0), 0), u64::MAX);
    }
}
