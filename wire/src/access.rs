//! A worker's counts of its client's accesses to memory. The worker counts where the daemon's configuration asks for it
//! (`[access] report`).

use serde::{Deserialize, Serialize};

/// Launches that named this many units or more share a place in [`AccessReport::named`].
pub const MOST_NAMED: usize = 16;

/// The counts since the client began, or was restored.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct AccessReport {
    /// Launches of kernels, those of graphs' steps among them.
    pub launches: Launches,
    /// Launches of graphs.
    pub graphs: u64,
    /// Copies, memsets and operations of streams on memory.
    pub exact: u64,
    /// Launches by how many units their parameters named; the last place is [`MOST_NAMED`] or more. Without those that
    /// name everything, and without graphs.
    pub named: Vec<u64>,
    /// Units that they named, together.
    pub named_total: u64,
    /// Commands around which all memory was hashed.
    pub watched: u64,
    /// Commands around which it was not: the device did not come to rest, or there was more memory than the limit.
    pub unwatched: u64,
    /// Writes to units that the command had not named.
    pub outside: Vec<Outside>,
    /// Why nothing is watched any more, if so.
    pub stopped: Option<String>,
    /// In which order memory was used, where reads are watched.
    pub first_uses: Option<FirstUses>,
}

/// When commands may first have used the memory that there was before the first command.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct FirstUses {
    /// Bytes of that memory.
    pub content: u64,
    /// Commands that use memory, so far.
    pub commands: u64,
    /// Bytes that they may have used, together.
    pub used: u64,
    /// Commands that were the first to use some memory: their number, and the bytes. After the first [`MOST_FIRST`] of them, the last
    /// entry takes the others' bytes in.
    pub order: Vec<(u64, u64)>,
    /// The command that used memory which it had not named; it was the last one.
    pub fault: Option<String>,
}

/// The most entries in [`FirstUses::order`].
pub const MOST_FIRST: usize = 4096;

impl FirstUses {
    /// A command uses so many bytes that no command has used before.
    pub fn used(&mut self, bytes: u64) {
        self.commands += 1;
        if bytes == 0 {
            return;
        }
        self.used += bytes;
        let is_full = self.order.len() >= MOST_FIRST;
        match self.order.last_mut() {
            Some((_, last)) if is_full => *last += bytes,
            _ => self.order.push((self.commands, bytes)),
        }
    }
}

/// Launches by how what they may use was found.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Launches {
    /// (a) By every value in their parameters.
    pub values: u64,
    /// (b) By the signature in the kernel's name.
    pub signature: u64,
    /// (c) Not at all: everything.
    pub everything: u64,
}

impl Launches {
    /// All of them.
    #[must_use]
    pub fn all(&self) -> u64 {
        self.values + self.signature + self.everything
    }
}

/// A unit that was written and had not been named.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Outside {
    /// The kernel; of a graph, all its kernels; of another command, what it is called.
    pub by: String,
    /// Where the unit begins.
    pub address: u64,
    /// Bytes of it.
    pub size: u64,
    /// How often.
    pub times: u64,
}

/// The most entries in [`AccessReport::outside`].
pub const MOST_OUTSIDE: usize = 256;

impl AccessReport {
    /// A launch named this many units.
    pub fn count_named(&mut self, units: usize) {
        self.named.resize(MOST_NAMED + 1, 0);
        self.named[units.min(MOST_NAMED)] += 1;
        self.named_total += units as u64;
    }

    /// A command has written a unit that it had not named.
    pub fn count_outside(&mut self, by: &str, address: u64, size: u64) {
        let known = self.outside.iter_mut().find(|it| it.by == by && it.address == address && it.size == size);
        if let Some(outside) = known {
            outside.times += 1;
        } else if self.outside.len() < MOST_OUTSIDE {
            self.outside.push(Outside { by: by.to_owned(), address, size, times: 1 });
        }
    }

    /// Units that a launch named, on average.
    #[must_use]
    pub fn mean_named(&self) -> f64 {
        let launches: u64 = self.named.iter().sum();
        if launches == 0 { 0.0 } else { self.named_total as f64 / launches as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_add_up() {
        let mut report = AccessReport::default();
        [0, 3, 3, 40].into_iter().for_each(|units| report.count_named(units));
        assert_eq!((report.named[0], report.named[3], report.named[MOST_NAMED]), (1, 2, 1));
        assert_eq!(report.mean_named(), 11.5);
        report.count_outside("kernel", 512, 4);
        report.count_outside("kernel", 512, 4);
        report.count_outside("other", 512, 4);
        let mut uses = FirstUses { content: 30, ..FirstUses::default() };
        [0, 10, 0, 5].into_iter().for_each(|bytes| uses.used(bytes));
        assert_eq!((uses.commands, uses.used, uses.order.as_slice()), (4, 15, [(2, 10), (4, 5)].as_slice()));
        report.first_uses = Some(uses);
        assert_eq!(report.outside.iter().map(|it| it.times).collect::<Vec<_>>(), [2, 1]);
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<AccessReport>(&text).unwrap(), report);
    }
}
