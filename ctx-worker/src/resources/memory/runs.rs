//! Runs of ranges of addresses: ranges that lie side by side count as one, so that the driver does in one call what it would do for each.

use rekindle_wire::window::STEP;

/// Ranges, of which those that are added in the order of their addresses become runs. A run of several does not cross the boundary between two
/// reservations of a window.
#[derive(Debug, Default)]
pub(super) struct Runs(Vec<(u64, u64)>);

impl Runs {
    pub(super) fn add(&mut self, base: u64, length: u64) {
        match self.0.last_mut() {
            Some((start, size)) if *start + *size == base && *start / STEP == (base + length - 1) / STEP => {
                *size += length
            }
            _ => self.0.push((base, length)),
        }
    }

    /// The start and the length of each.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_side_by_side_are_one_run_within_a_reservation() {
        let mut runs = Runs::default();
        let ranges = [(10, 2), (12, 5), (20, 1), (19, 1), (STEP - 4, 4), (STEP, 8), (STEP + 8, 1)];
        let across = [(2 * STEP - 9, 8), (2 * STEP - 1, 4), (2 * STEP + 3, 1)];
        ranges.into_iter().chain(across).for_each(|(base, length)| runs.add(base, length));
        let runs: Vec<_> = runs.iter().collect();
        let across = [(2 * STEP - 9, 8), (2 * STEP - 1, 4), (2 * STEP + 3, 1)];
        assert_eq!(runs, [&[(10, 7), (20, 1), (19, 1), (STEP - 4, 4), (STEP, 9)][..], &across].concat());
    }
}
