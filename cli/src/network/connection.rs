//! A TCP connection.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// A TCP connection of a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Connection {
    pub(crate) own: SocketAddr,
    pub(crate) other: SocketAddr,
}

impl Connection {
    /// As the other end sees it.
    pub(crate) fn turned(self) -> Self {
        Self { own: self.other, other: self.own }
    }
}
