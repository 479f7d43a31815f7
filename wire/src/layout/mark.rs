//! The mark of a client's shared memory: magic and version.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::Shared;
use super::content::MAGIC;

impl Shared {
    /// Marks freshly made shared memory as such.
    pub fn initialise(&self) {
        self.header().version.store(crate::version::client_version(), Release);
        self.header().magic.store(MAGIC, Release);
    }

    /// [`crate::CLIENT_VERSION`] of the client that made this; `None` if no client did.
    pub fn version(&self) -> Option<u32> {
        (self.header().magic.load(Acquire) == MAGIC).then(|| self.header().version.load(Acquire))
    }
}
