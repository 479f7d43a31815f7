//! Pieces that were copied while the client ran: the copy made at the quiesce takes over those that are unchanged.

use std::collections::HashMap;
use std::sync::Arc;

use rekindle_images::{DataWriter, Piece, PieceHash};

use super::Place;

/// The outcome of pre-copies into one data file.
pub(crate) struct Precopied {
    pub(crate) writer: Arc<DataWriter>,
    pieces: HashMap<(Place, u64), Piece>,
}

impl Precopied {
    /// Makes an empty set of pieces, to be copied into this file.
    pub(crate) fn new(writer: Arc<DataWriter>) -> Self {
        Self { writer, pieces: HashMap::new() }
    }

    /// Adds pieces that were copied, in place of earlier ones.
    pub(crate) fn add(&mut self, pieces: Vec<(Place, u64, Piece)>) {
        self.pieces.extend(pieces.into_iter().map(|(place, offset, piece)| ((place, offset), piece)));
    }

    /// The piece of a job, if the memory still has this hash.
    pub(crate) fn still(&self, place: Place, offset: u64, length: u64, hash: PieceHash) -> Option<Piece> {
        self.before(place, offset, length).filter(|piece| piece.hash == hash)
    }

    /// The piece of a job, changed or not.
    pub(crate) fn before(&self, place: Place, offset: u64, length: u64) -> Option<Piece> {
        let piece = self.pieces.get(&(place, offset))?;
        // Variables and arrays cannot be told apart by their place.
        (place != Place::Other && piece.length == length).then_some(*piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::Storage;

    #[test]
    fn what_has_changed_is_not_taken_over() {
        let writer =
            DataWriter::new(tempfile::tempfile().unwrap(), 0, rekindle_images::content::ContentKey::random().unwrap());
        let mut copied = Precopied::new(Arc::new(writer.unwrap()));
        let hash = |byte| PieceHash::from_bytes([byte; 16]);
        let piece = Piece { offset: 0, length: 10, hash: hash(1), storage: Storage::Zero };
        let place = Place::Allocation(4096);
        copied.add(vec![(place, 0, piece), (Place::Other, 0, piece)]);
        assert_eq!(copied.still(place, 0, 10, hash(1)), Some(piece));
        assert_eq!(copied.still(place, 0, 10, hash(2)), None);
        assert_eq!(copied.still(place, 0, 9, hash(1)), None);
        assert_eq!(copied.still(Place::Piece(4096), 0, 10, hash(1)), None);
        assert_eq!(copied.still(Place::Other, 0, 10, hash(1)), None);
        copied.add(vec![(place, 0, Piece { hash: hash(3), ..piece })]);
        assert_eq!(copied.still(place, 0, 10, hash(1)), None);
    }
}
