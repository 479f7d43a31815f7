//! What the clients of an image have taught about their writes: a client that borrows memory needs memory of its own only for
//! what it writes. Worker and daemon exchange it, and the daemon keeps it in a file.

use serde::{Deserialize, Serialize};

/// The most kernels that count.
const MOST_KERNELS: usize = 1 << 12;
/// The most parameters of a kernel, and allocations, that count.
const MOST: usize = 1 << 16;
/// The most bytes of the names of a kernel and its code, and of all of them.
const MOST_NAME: usize = 1 << 14;
const MOST_NAMES: usize = 8 << 20;

/// What was learned of a client, or a part of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Learned {
    /// Kernels, in the order in which they were met.
    pub kernels: Vec<LearnedKernel>,
    /// Addresses of allocations that were written.
    pub written: Vec<u64>,
}

/// What was learned of a kernel. Its parameters are told by their offsets among the parameters, in bytes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct LearnedKernel {
    /// The hash of the code that the kernel belongs to.
    pub code: String,
    /// Its name.
    pub name: String,
    /// Parameters whose memory had the same content after launches as before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reads: Vec<u32>,
    /// Parameters whose memory was written, or may have been.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub writes: Vec<u32>,
    /// How often a client of this image has died while this kernel was among those that may have written memory which their
    /// parameters do not name. After the second time the kernel is taken to write everything.
    #[serde(default)]
    pub suspected: u32,
}

impl LearnedKernel {
    /// Whether the kernel is taken to write everything.
    pub fn writes_everything(&self) -> bool {
        self.suspected > 1
    }

    /// Adds what is known of the same kernel. A write counts more than any number of launches without one.
    fn add(&mut self, more: &Self) {
        self.writes.extend(&more.writes);
        self.reads.extend(&more.reads);
        for list in [&mut self.writes, &mut self.reads] {
            list.sort_unstable();
            list.dedup();
            list.truncate(MOST);
        }
        self.reads.retain(|it| self.writes.binary_search(it).is_err());
        self.suspected = self.suspected.saturating_add(more.suspected);
    }
}

impl Learned {
    /// Adds what was learned since. What comes beyond a size that no program has is dropped.
    pub fn add(&mut self, more: &Self) {
        for kernel in &more.kernels {
            let known = self.kernels.iter().position(|it| it.code == kernel.code && it.name == kernel.name);
            let place = known.unwrap_or(self.kernels.len());
            let bytes = |it: &LearnedKernel| it.code.len() + it.name.len();
            let is_new = known.is_none();
            let all = || self.kernels.iter().map(bytes).sum::<usize>() + bytes(kernel);
            if place >= MOST_KERNELS || is_new && (bytes(kernel) > MOST_NAME || all() > MOST_NAMES) {
                continue;
            }
            if is_new {
                let LearnedKernel { code, name, .. } = kernel.clone();
                self.kernels.push(LearnedKernel { code, name, ..LearnedKernel::default() });
            }
            self.kernels[place].add(kernel);
        }
        self.written.extend(&more.written);
        self.written.sort_unstable();
        self.written.dedup();
        self.written.truncate(MOST);
    }

    /// Whether nothing was learned.
    pub fn is_empty(&self) -> bool {
        self.kernels.is_empty() && self.written.is_empty()
    }

    /// The bytes of [`Learned::from_bytes`].
    ///
    /// # Errors
    /// None that an encoder of JSON has for such a structure.
    pub fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }

    /// Reads bytes that come from a worker or a file.
    ///
    /// # Errors
    /// The bytes are something else.
    pub fn from_bytes(bytes: &[u8]) -> serde_json::Result<Self> {
        let mut learned = Self::default();
        learned.add(&serde_json::from_slice(bytes)?);
        Ok(learned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kernel(name: &str, reads: &[u32], writes: &[u32], suspected: u32) -> LearnedKernel {
        let name = name.to_owned();
        LearnedKernel { code: "c".to_owned(), name, reads: reads.to_vec(), writes: writes.to_vec(), suspected }
    }

    #[test]
    fn a_write_counts_whenever_it_was_seen() {
        let mut all = Learned { kernels: vec![kernel("a", &[0, 8], &[], 0)], written: vec![5] };
        all.add(&Learned {
            kernels: vec![kernel("a", &[16], &[8], 1), kernel("b", &[0], &[], 0)],
            written: vec![3, 5],
        });
        assert_eq!(all.kernels, [kernel("a", &[0, 16], &[8], 1), kernel("b", &[0], &[], 0)]);
        assert_eq!(all.written, [3, 5]);
        all.add(&Learned { kernels: vec![kernel("a", &[8], &[], 1)], written: Vec::new() });
        assert_eq!(all.kernels[0], kernel("a", &[0, 16], &[8], 2));
        assert!(all.kernels[0].writes_everything() && !all.kernels[1].writes_everything());
    }

    #[test]
    fn names_that_no_kernel_has_do_not_fill_memory() {
        let named = |bytes: usize, number: usize| Learned {
            kernels: vec![kernel(&format!("{number:0bytes$}"), &[0], &[], 0)],
            written: Vec::new(),
        };
        let mut all = Learned::default();
        all.add(&named(MOST_NAME, 0));
        assert!(all.is_empty());
        (0..2 * MOST_NAMES / (MOST_NAME - 1)).for_each(|number| all.add(&named(MOST_NAME - 1, number)));
        assert_eq!(all.kernels.len(), MOST_NAMES / MOST_NAME);
    }

    proptest! {
        #[test]
        fn what_was_learned_is_read_as_it_was_written(
            reads in proptest::collection::btree_set(0_u32..64, 0..9),
            writes in proptest::collection::btree_set(64_u32..128, 0..9),
            written in proptest::collection::btree_set(any::<u64>(), 0..9),
        ) {
            let (reads, writes): (Vec<_>, Vec<_>) = (reads.into_iter().collect(), writes.into_iter().collect());
            let learned = Learned { kernels: vec![kernel("k", &reads, &writes, 0)], written: written.into_iter().collect() };
            prop_assert_eq!(Learned::from_bytes(&learned.to_bytes().unwrap()).unwrap(), learned);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Learned::from_bytes(&bytes);
        }
    }
}
