//! Finds the allocation in which an address lies.

use rekindle_wire::command::Kind;
use rekindle_wire::window;

use super::client::ClientView;
use super::set::Access;
use crate::resources::units::Unit;

/// Lists that are collected before they can be searched: runs of mappings, and variables. Sorted, without overlaps.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    runs: Vec<Unit>,
    globals: Vec<Unit>,
    /// Pairs of runs that share memory.
    shared: Vec<(Unit, Unit)>,
    versions: (u64, u64),
}

impl Gathered {
    /// Collects the lists that have changed again.
    pub(crate) fn update(&mut self, client: &ClientView<'_>) {
        let versions = (client.memory.vmm.version(), client.code.globals.version());
        if self.versions.0 != versions.0 {
            self.runs = client.memory.vmm.runs();
            self.shared = client.memory.vmm.shared_runs();
        }
        if self.versions.1 != versions.1 {
            self.globals = client.code.globals.values().flatten().map(|g| Unit::new(g.address, g.size)).collect();
            self.globals.sort();
            self.globals.dedup_by_key(|unit| unit.start);
        }
        self.versions = versions;
    }

    /// The unit in which an address lies, or that a handle names. The caller has called [`Gathered::update`] since the last
    /// change.
    ///
    /// Costs one search in a sorted map of the allocations of one device; for a value that is no address of any window, one
    /// search in the list of variables.
    pub(crate) fn find(&self, client: &ClientView<'_>, address: u64) -> Option<Unit> {
        if let Some(device) = window::device_of(address) {
            let (start, allocation) =
                client.memory.devices.get(device)?.memory.allocations().range(..=address).next_back()?;
            let unit = Unit::new(*start, allocation.size);
            return (address < unit.end).then_some(unit);
        }
        if window::pinned().contains(&address) {
            let (start, allocation) = client.memory.pinned.allocations().range(..=address).next_back()?;
            let unit = Unit::new(*start, allocation.size);
            return (address < unit.end).then_some(unit);
        }
        if window::reserved().contains(&address) {
            return find_in(&self.runs, address);
        }
        if Kind::Array.owns(address) {
            return client.memory.arrays.extent(address).map(|_| Unit::array(address));
        }
        find_in(&self.globals, address)
    }

    /// Adds the units that are the same memory at other addresses.
    pub(crate) fn add_shared(&self, access: &mut Access) {
        for (one, other) in &self.shared {
            let (read, written) = (access.reads.contains(one), access.writes.contains(one));
            if read {
                access.add(*other, written);
            }
        }
    }

    /// Calls `found` with each unit that overlaps a range; a handle is a range of its own.
    pub(crate) fn overlapping(&self, client: &ClientView<'_>, address: u64, bytes: u64, mut found: impl FnMut(Unit)) {
        if bytes == 0 {
            return;
        }
        let first = self.find(client, address);
        first.into_iter().for_each(&mut found);
        let end = address.saturating_add(bytes);
        // Few ranges extend beyond their first unit.
        if first.is_some_and(|unit| end <= unit.end) || bytes == 1 {
            return;
        }
        if let Some(device) = window::device_of(address).and_then(|device| client.memory.devices.get(device)) {
            let after = device.memory.allocations().range(address.saturating_add(1)..end);
            after.for_each(|(start, allocation)| found(Unit::new(*start, allocation.size)));
        }
        for units in [&self.runs, &self.globals] {
            let from = units.partition_point(|unit| unit.start <= address);
            units[from..].iter().take_while(|unit| unit.start < end).for_each(|unit| found(*unit));
        }
    }

    /// All units of device memory that have addresses.
    pub(crate) fn all(&self, client: &ClientView<'_>) -> Vec<Unit> {
        let allocations = client.memory.devices.iter().flat_map(|d| d.memory.allocations());
        let allocations = allocations.map(|(start, allocation)| Unit::new(*start, allocation.size));
        allocations.chain(self.runs.iter().copied()).chain(self.globals.iter().copied()).collect()
    }
}

fn find_in(units: &[Unit], address: u64) -> Option<Unit> {
    let behind = units.partition_point(|unit| unit.start <= address);
    units[..behind].last().copied().filter(|unit| address < unit.end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resources::units::join;

    #[test]
    fn what_has_no_gap_is_one_run() {
        let runs = join([(10, 5), (15, 5), (21, 4)].into_iter());
        assert_eq!(runs, [Unit::new(10, 10), Unit::new(21, 4)]);
        let found = |address| find_in(&runs, address).map(|unit| unit.start);
        assert_eq!((found(9), found(10), found(19), found(20)), (None, Some(10), Some(10), None));
        assert_eq!((found(24), found(25), found(u64::MAX)), (Some(21), None, None));
    }

    /// Measures the speed of a search. Not a test: `cargo test --release -p rekindled lookup -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn lookup_speed() {
        let units: Vec<_> = (0..10_000_u64).map(|i| Unit::new(0x2000_0000_0000 + i * 4096, 4000)).collect();
        let map: std::collections::BTreeMap<_, _> = units.iter().map(|unit| (unit.start, unit.size())).collect();
        let addresses: Vec<u64> =
            (0..1_000_000_u64).map(|i| units[(i * 7919 % 10_000) as usize].start + i % 4000).collect();
        let timed = |what: &str, find: &dyn Fn(u64) -> bool| {
            let start = std::time::Instant::now();
            let found = addresses.iter().filter(|address| find(**address)).count();
            let each = start.elapsed().as_nanos() as f64 / addresses.len() as f64;
            println!("{what}: {each:.0} ns an address, {found} found");
        };
        timed("sorted list", &|address| find_in(&units, address).is_some());
        timed("sorted map", &|address| map.range(..=address).next_back().is_some_and(|(s, l)| address < s + l));
    }
}
