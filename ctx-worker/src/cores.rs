//! The cores that a worker may use.

use std::sync::OnceLock;

/// The number of cores that this process may use. The process asks once, before the sandbox, since the answer depends on
/// cgroups.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |cores| cores.get()))
}
