//! How a kind of resource is kept in an image, and comes out of it again.

use rekindle_images::BlobKind;

use crate::resources::not_loaded::NotLoaded;
use crate::session::state::StateError;

/// A part of a client, as an image keeps it.
pub(crate) struct Part {
    /// Which one it is of its kind. What that means is the kind's affair.
    pub(crate) handle: u64,
    pub(crate) bytes: Vec<u8>,
}

/// A kind of resource that an image keeps in parts of its own. `checkpoint/parts.rs` lists all kinds.
pub(crate) trait Saved {
    /// The kind of its blobs, which no other kind of resource gets.
    const KIND: BlobKind;

    /// What a restore needs besides, to take a part up.
    type With<'a>;

    /// All parts of it. The client is quiesced.
    ///
    /// # Errors
    ///
    /// The parts cannot be encoded.
    fn save(&self) -> Result<Vec<Part>, StateError>;

    /// Takes up a part that [`Saved::save`] gave, maybe of an earlier release. All objects are there.
    ///
    /// # Errors
    ///
    /// It is no such part.
    fn load(&mut self, part: Part, with: Self::With<'_>) -> Result<(), NotLoaded>;
}
