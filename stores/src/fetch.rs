//! Pieces from a store, neighbours in one request.

use crate::StoreError;
use crate::pack::{FULL, Place};
use crate::transport::{ObjectName, Transport};

/// What one request reads.
pub(crate) struct Task<T> {
    object: ObjectName,
    begin: u64,
    end: u64,
    pub(crate) pieces: Vec<Wanted<T>>,
}

/// A piece, and what the caller knows of it.
pub(crate) struct Wanted<T> {
    offset: u64,
    stored: u64,
    pub(crate) what: T,
}

/// More unneeded bytes than this between two pieces are not read along.
const GAP: u64 = 256 << 10;

/// The requests that read these pieces, in the order in which objects are named first.
pub(crate) fn tasks<T>(pieces: impl IntoIterator<Item = (Place, T)>) -> Vec<Task<T>> {
    let mut order = std::collections::HashMap::new();
    let mut objects: Vec<(ObjectName, Vec<Wanted<T>>)> = Vec::new();
    for (Place { object, offset, stored }, what) in pieces {
        let at = *order.entry(object.clone()).or_insert_with(|| {
            objects.push((object, Vec::new()));
            objects.len() - 1
        });
        objects[at].1.push(Wanted { offset, stored, what });
    }
    let mut tasks: Vec<Task<T>> = Vec::new();
    for (object, mut pieces) in objects {
        pieces.sort_by_key(|it| it.offset);
        let mut open: Option<Task<T>> = None;
        for piece in pieces {
            let end = piece.offset.saturating_add(piece.stored);
            match &mut open {
                Some(task) if piece.offset <= task.end.saturating_add(GAP) && end - task.begin <= FULL as u64 => {
                    task.end = task.end.max(end);
                    task.pieces.push(piece);
                }
                _ => {
                    let new = Task { object: object.clone(), begin: piece.offset, end, pieces: vec![piece] };
                    tasks.extend(open.replace(new));
                }
            }
        }
        tasks.extend(open);
    }
    tasks
}

impl<T> Task<T> {
    pub(crate) fn object(&self) -> &ObjectName {
        &self.object
    }

    /// Reads it, and gives each piece as it is stored; one that is not all there is shorter. Returns the bytes that
    /// were read.
    pub(crate) fn run(
        self,
        transport: &dyn Transport,
        mut take: impl FnMut(&ObjectName, T, Vec<u8>) -> Result<(), StoreError>,
    ) -> Result<u64, StoreError> {
        let read = transport.get(&self.object, Some(self.begin..self.end))?;
        let read = read.ok_or_else(|| StoreError::Missing { object: self.object.to_string() })?;
        let length = read.len() as u64;
        let pieces = match <[Wanted<T>; 1]>::try_from(self.pieces) {
            // As it came, without a copy.
            Ok([only]) => return take(&self.object, only.what, read).map(|()| length),
            Err(pieces) => pieces,
        };
        for piece in pieces {
            let from = (piece.offset - self.begin).min(length);
            let to = from.saturating_add(piece.stored).min(length);
            take(&self.object, piece.what, read[from as usize..to as usize].to_vec())?;
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_read_together_and_others_are_not() {
        let place = |object: &str, offset, stored| Place { object: ObjectName::parse(object).unwrap(), offset, stored };
        let far = 2 << 20;
        let pieces = [place("b", 10, 10), place("a", 0, 5), place("b", 0, 10), place("b", far, 7), place("b", 30, 5)];
        let tasks = tasks(pieces.into_iter().zip(0..));
        let shape: Vec<_> = tasks
            .iter()
            .map(|it| (it.object.as_str(), it.begin, it.end, it.pieces.iter().map(|it| it.what).collect::<Vec<_>>()))
            .collect();
        assert_eq!(shape, [("b", 0, 35, vec![2, 0, 4]), ("b", far, far + 7, vec![3]), ("a", 0, 5, vec![1])]);
    }
}
