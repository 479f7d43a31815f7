//! CRIU's own `cuda_plugin`, which takes processes that use a GPU.
//!
//! CRIU asks its plugins in the order in which it has loaded them, which is that of the folder, and the first that does not decline
//! wins. `cuda_plugin` declines nothing while it is active, also no process that uses no GPU. So where it comes first, this plugin
//! is never asked; where it comes second, it is asked about processes that are not Rekindle's only, of which none uses a GPU.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::{host, log};

/// The file of CRIU's own plugin.
const OTHER: &str = "cuda_plugin.so";

static IS_FIRST: AtomicBool = AtomicBool::new(false);

/// Looks, at init, whether the other plugin comes first.
pub fn look() {
    if let Some(path) = host::loaded_before(OTHER) {
        IS_FIRST.store(true, Ordering::Relaxed);
        log::warn(&reason(&path));
    }
}

/// Why this plugin was not asked; none if the other one does not come first.
pub fn explanation() -> Option<String> {
    IS_FIRST.load(Ordering::Relaxed).then(|| reason(OTHER))
}

fn reason(path: &str) -> String {
    format!(
        "CRIU has loaded {path} before rekindle.so and asks it first: unless it is inactive, Rekindle dumps no process. Remove it from that folder, \
         or give CRIU another one (libdir /usr/lib/rekindle/criu)"
    )
}
