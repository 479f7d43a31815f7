//! The numbers that processes have in an image: those in the pid namespace of the tree's root.

use std::fs;

/// The pid namespace whose numbers an image has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Numbers {
    /// How many namespaces lie between this process's and that one.
    depth: Option<usize>,
}

impl Numbers {
    /// Those of an image of the tree with this root. There are none of a process that has ended.
    pub(super) fn of(root: i32) -> Self {
        Self { depth: numbers_of(root).len().checked_sub(1) }
    }

    /// The number of a process of the tree. None if it has ended, or has no number there.
    pub(super) fn in_image(self, pid: i32) -> Option<u32> {
        numbers_of(pid).get(self.depth?).copied()
    }

    /// Whether these are the numbers here.
    pub(super) fn are_ours(self) -> bool {
        self.depth == Some(0)
    }
}

/// A process's numbers, from that in this process's namespace on to that in its own.
fn numbers_of(pid: i32) -> Vec<u32> {
    parse(&fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default())
}

/// Reads `/proc/PID/status`. The names of processes are escaped there, so no other line begins so.
fn parse(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|it| it.strip_prefix("NSpid:")).unwrap_or_default();
    line.split_whitespace().map_while(|it| it.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_number_in_the_namespace_of_the_root() {
        let status = |numbers: &str| format!("Name:\ta NSpid: 7\nNStgid:\t1\nNSpid:\t{numbers}\nNSpgid:\t1\n");
        assert_eq!(parse(&status("812\t1")), [812, 1]);
        assert_eq!(parse(&status("900\t20\t3")), [900, 20, 3]);
        assert!(parse("Name:\tinit\n").is_empty() && parse(&status("x")).is_empty());
        let (own, depth) = (std::process::id(), |depth| Numbers { depth });
        let here = Numbers::of(own.cast_signed());
        assert!(here.are_ours() && here.in_image(own.cast_signed()) == Some(own));
        assert_eq!(depth(Some(1)).in_image(own.cast_signed()), None, "it is in no namespace below this one");
        assert!(Numbers::of(i32::MAX).in_image(own.cast_signed()).is_none() && !depth(None).are_ours());
    }
}
