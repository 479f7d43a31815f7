//! What goes over the pipe between a store on another host and who uses it.
//!
//! ```text
//!   the server begins    magic, 16 bytes │ version, 4
//!   then each side       length of the head, 4 │ length of the body, 8 │ head, JSON │ body
//! ```
//!
//! Each request has one answer, in the same order. Numbers are little-endian.

use std::io::{self, BufReader, Read, Write};
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::transport::{Found, MAX_OBJECT, ObjectName};

const MAGIC: &[u8; 16] = b"rekindle-store\r\n";
/// The version of all this.
pub(crate) const VERSION: u32 = 1;
/// The longest head of a request. An answer's lists are in the body.
const MAX_HEAD: u32 = 64 << 10;

/// What is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// The body is the content.
    Put {
        name: ObjectName,
        if_absent: bool,
    },
    Get {
        name: ObjectName,
        range: Option<Range<u64>>,
    },
    Head {
        name: ObjectName,
    },
    List {
        folder: ObjectName,
    },
    Delete {
        name: ObjectName,
    },
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Answer {
    /// Whether it was written.
    Put(bool),
    /// Whether it is there; the body is the content.
    Get(bool),
    Head(Option<Found>),
    /// The body is the list, as JSON.
    List,
    Deleted,
    /// It failed, and why.
    Failed(String),
}

/// Says what this is.
pub(crate) fn greet(to: &mut impl Write) -> io::Result<()> {
    to.write_all(MAGIC)?;
    to.write_all(&VERSION.to_le_bytes())?;
    to.flush()
}

/// What the other side began with, where it is not what it should be.
#[derive(Debug)]
pub(crate) enum Greeting {
    Version(u32),
    Other(Vec<u8>),
}

/// Makes sure that the other side is a server of this version.
pub(crate) fn greeted(from: &mut BufReader<impl Read>) -> io::Result<Option<Greeting>> {
    let mut magic = Vec::new();
    from.by_ref().take(MAGIC.len() as u64).read_to_end(&mut magic)?;
    if magic.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if magic != MAGIC {
        // More of what it has said helps to see what it is.
        magic.extend(from.buffer().iter().take(200));
        return Ok(Some(Greeting::Other(magic)));
    }
    let mut version = [0; 4];
    from.read_exact(&mut version)?;
    let version = u32::from_le_bytes(version);
    Ok((version != VERSION).then_some(Greeting::Version(version)))
}

/// Writes a head and a body.
pub(crate) fn send(to: &mut impl Write, head: &impl Serialize, body: &[u8]) -> io::Result<()> {
    let head = serde_json::to_vec(head)?;
    to.write_all(&(head.len() as u32).to_le_bytes())?;
    to.write_all(&(body.len() as u64).to_le_bytes())?;
    to.write_all(&head)?;
    to.write_all(body)?;
    to.flush()
}

/// Reads a head and a body; `None` at the end, before the first byte.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<(T, Vec<u8>)>> {
    let mut lengths = [0; 12];
    let mut got = 0;
    while got < lengths.len() {
        match from.read(&mut lengths[got..]) {
            Ok(0) if got == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let number = |range: Range<usize>| lengths[range].iter().rev().fold(0_u64, |all, byte| all << 8 | u64::from(*byte));
    let (head, body) = (number(0..4), number(4..12));
    if head > u64::from(MAX_HEAD) || body > MAX_OBJECT {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is longer than any may be"));
    }
    let mut read = |length: u64| {
        // Memory grows with what arrives, not with what was promised.
        let mut bytes = Vec::new();
        from.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 == length { Ok(bytes) } else { Err(io::Error::from(io::ErrorKind::UnexpectedEof)) }
    };
    let head = serde_json::from_slice(&read(head)?)?;
    Ok(Some((head, read(body)?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name() -> ObjectName {
        ObjectName::parse("pieces/aa/b-1").unwrap()
    }

    #[test]
    fn what_was_sent_is_received() {
        let mut wire = Vec::new();
        let requests = [
            Request::Put { name: name(), if_absent: true },
            Request::Get { name: name(), range: Some(1..5) },
            Request::List { folder: ObjectName::parse("pieces").unwrap() },
        ];
        for request in &requests {
            send(&mut wire, request, b"body").unwrap();
        }
        let mut wire = &wire[..];
        for request in requests {
            assert_eq!(receive::<Request>(&mut wire).unwrap().unwrap(), (request, b"body".to_vec()));
        }
        assert!(receive::<Request>(&mut wire).unwrap().is_none());
    }

    #[test]
    fn another_greeting_is_told() {
        let mut wire = Vec::new();
        greet(&mut wire).unwrap();
        assert!(greeted(&mut BufReader::new(&wire[..])).unwrap().is_none());
        wire[16] = 9;
        assert!(matches!(greeted(&mut BufReader::new(&wire[..])).unwrap(), Some(Greeting::Version(9))));
        let other = b"Welcome to node 7! You have new mail.";
        assert!(
            matches!(greeted(&mut BufReader::new(&other[..])).unwrap(), Some(Greeting::Other(said)) if said == other)
        );
        assert!(greeted(&mut BufReader::new(&b""[..])).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = receive::<Request>(&mut &bytes[..]);
            let _ = greeted(&mut BufReader::new(&bytes[..]));
        }

        #[test]
        fn a_request_for_what_is_outside_is_none(text in "[a-z./]{0,12}") {
            let head = serde_json::json!({ "delete": { "name": text } });
            let mut wire = Vec::new();
            send(&mut wire, &head, b"").unwrap();
            if let Ok(Some((Request::Delete { name }, _))) = receive(&mut &wire[..]) {
                prop_assert!(name.as_str().split('/').all(|part| !part.is_empty() && !part.starts_with('.')));
            }
        }
    }
}
