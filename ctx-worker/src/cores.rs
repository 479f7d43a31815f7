//! The cores that a worker has.

use std::sync::OnceLock;

/// How many cores this process may use. Asked for once, before the sandbox: cgroups have a part in it.
pub(crate) fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |cores| cores.get()))
}
