//! How an image keeps a kind of resource, and how a restore takes it up again.

use rekindle_images::BlobKind;

use crate::resources::not_loaded::NotLoaded;
use crate::session::state::StateError;

/// A part of a client's state in an image.
pub(crate) struct Part {
    /// The number of the part within its kind. Each kind gives the number a meaning of its own.
    pub(crate) handle: u64,
    pub(crate) bytes: Vec<u8>,
}

/// A kind of resource that an image keeps in parts of its own. `checkpoint/parts.rs` lists all kinds.
pub(crate) trait Saved {
    /// The kind of its blobs, which no other kind of resource has.
    const KIND: BlobKind;

    /// The additional parameters that a restore needs to take up a part.
    type With<'a>;

    /// All parts of the kind. The client is quiesced.
    ///
    /// # Errors
    ///
    /// The parts cannot be encoded.
    fn save(&self) -> Result<Vec<Part>, StateError>;

    /// Takes up a part that [`Saved::save`] returned, maybe in an earlier release. All objects exist by then.
    ///
    /// # Errors
    ///
    /// The part is malformed.
    fn load(&mut self, part: Part, with: Self::With<'_>) -> Result<(), NotLoaded>;
}
