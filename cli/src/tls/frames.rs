//! What a connection carries, as frames.
//!
//! ```text
//!   u8 kind | u32 length, little endian | content of that length, at most 64 KiB
//!
//!   connects ── Ask ─────► listens      what is to be run: words, separated by a byte 0
//!            ◄─ Started ──              it runs                    or Refused: why not, for people
//!            ◄─ Data, End ►             its input, and its output, and the end of either
//!            ◄─ Errors ────             what it says on its standard error
//!            ◄─ Room ─────►             so many more bytes may be sent (u32): the receiver has passed them on
//!            ◄─ Status ────             it has ended with this (u8), and everything it has said was sent
//! ```
//!
//! Each side sends [`WINDOW`] bytes of `Data` and `Errors` at most that the other has not passed on. So both always read the socket, however
//! slow the programs behind them are, and a host that reads nothing for a while is lost.

use thiserror::Error;

/// The longest content of a frame.
pub(super) const LONGEST: usize = 64 << 10;
/// The bytes before the content.
const HEAD: usize = 5;
/// The most bytes that may be under way in one direction.
pub(super) const WINDOW: usize = 8 << 20;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Ask,
    Started,
    Refused,
    Data,
    End,
    Errors,
    Room,
    Status,
}

/// All kinds. A kind's number is its place, from 1.
const KINDS: [Kind; 8] =
    [Kind::Ask, Kind::Started, Kind::Refused, Kind::Data, Kind::End, Kind::Errors, Kind::Room, Kind::Status];

/// Why bytes are no frames.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum FrameError {
    #[error("a frame of the unknown kind {0}: install one version of Rekindle on both hosts")]
    Kind(u8),
    #[error("a frame of {0} bytes, more than any has")]
    TooLong(usize),
    #[error("a frame ({0:?}) that is out of turn")]
    OutOfTurn(Kind),
    #[error("more bytes than were asked for")]
    TooMuch,
}

/// The bytes before the content of a frame.
pub(super) fn head(kind: Kind, length: usize) -> [u8; HEAD] {
    let number = KINDS.iter().position(|it| *it == kind).map_or(0, |at| at as u8 + 1);
    let [a, b, c, d] = (length as u32).to_le_bytes();
    [number, a, b, c, d]
}

/// Finds frames in bytes that come in pieces of any size.
#[derive(Debug, Default)]
pub(super) struct Parser {
    bytes: Vec<u8>,
    /// The bytes of frames that were taken.
    taken: usize,
}

impl Parser {
    /// More bytes have come.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.taken);
        self.taken = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next frame, if all of it is here.
    pub(super) fn next(&mut self) -> Result<Option<(Kind, &[u8])>, FrameError> {
        let Some((&[number, a, b, c, d], rest)) = self.bytes.get(self.taken..).and_then(|it| it.split_first_chunk())
        else {
            return Ok(None);
        };
        let kind = usize::from(number).checked_sub(1).and_then(|at| KINDS.get(at)).copied();
        let kind = kind.ok_or(FrameError::Kind(number))?;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > LONGEST {
            return Err(FrameError::TooLong(length));
        }
        let Some(content) = rest.get(..length) else { return Ok(None) };
        self.taken += HEAD + length;
        Ok(Some((kind, content)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(frames: &[(Kind, Vec<u8>)]) -> Vec<u8> {
        frames.iter().flat_map(|(kind, content)| [&head(*kind, content.len())[..], content].concat()).collect()
    }

    fn frame() -> impl Strategy<Value = (Kind, Vec<u8>)> {
        (0..KINDS.len(), prop::collection::vec(any::<u8>(), 0..300)).prop_map(|(at, content)| (KINDS[at], content))
    }

    fn all(parser: &mut Parser) -> Result<Vec<(Kind, Vec<u8>)>, FrameError> {
        let mut found = Vec::new();
        while let Some((kind, content)) = parser.next()? {
            found.push((kind, content.to_vec()));
        }
        Ok(found)
    }

    proptest! {
        #[test]
        fn frames_are_found_however_their_bytes_are_cut(
            frames in prop::collection::vec(frame(), 0..8),
            cuts in prop::collection::vec(1..200_usize, 1..50),
        ) {
            let (mut parser, mut found) = (Parser::default(), Vec::new());
            let bytes = bytes(&frames);
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (piece, others) = rest.split_at(rest.len().min(*cuts.next().unwrap_or(&1)));
                parser.push(piece);
                found.extend(all(&mut parser)?);
                rest = others;
            }
            prop_assert_eq!(found, frames);
            prop_assert!(parser.bytes.len() == parser.taken, "nothing is left");
        }

        #[test]
        fn whatever_comes_is_frames_or_refused_and_never_kept_for_long(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..2000), 0..8)) {
            let mut parser = Parser::default();
            for piece in &pieces {
                parser.push(piece);
                match all(&mut parser) {
                    Ok(found) => prop_assert!(found.iter().all(|(_, content)| content.len() <= LONGEST)),
                    Err(error) => {
                        prop_assert!(matches!(error, FrameError::Kind(_) | FrameError::TooLong(_)), "{}", error);
                        break;
                    }
                }
                prop_assert!(parser.bytes.len() - parser.taken < HEAD + LONGEST);
            }
        }
    }

    #[test]
    fn a_frame_of_another_kind_or_size_is_none() {
        let next = |bytes: &[u8]| {
            let mut parser = Parser::default();
            parser.push(bytes);
            all(&mut parser)
        };
        assert_eq!(next(&[0; 5]), Err(FrameError::Kind(0)));
        assert_eq!(next(b"GET / HTTP/1.1"), Err(FrameError::Kind(b'G')));
        assert_eq!(next(&[9, 0, 0, 0, 0]), Err(FrameError::Kind(9)));
        assert_eq!(next(&head(Kind::Data, LONGEST + 1)), Err(FrameError::TooLong(LONGEST + 1)));
        assert_eq!(next(&head(Kind::Data, LONGEST)), Ok(vec![]));
    }
}
