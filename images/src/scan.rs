//! Computes the memory that a protobuf message will take, before it is decoded.
//!
//! An empty nested message is two bytes on disk and a structure of hundreds in memory, so a bound
//! on the file is no bound on the reader. This walks the encoded bytes without allocating, adds up
//! what decoding would allocate, and stops at [`MAX_DECODED`]. The sum is of the structures
//! themselves; vectors grow by doubling, so the peak is up to three times as much.

use std::mem::size_of;

use crate::limits::MAX_DECODED;
use crate::proto::image as proto;

/// Why a message must not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Not protobuf.
    Malformed,
    /// The decoded message would take at least this many bytes.
    TooLarge(u64),
}

/// A message, as far as it matters here: the field numbered `n` is `fields[n - 1]`.
pub(crate) struct Shape {
    cost: usize,
    fields: &'static [Field],
}

enum Field {
    /// A number or enumerator.
    Number,
    /// Many of them, packed or not.
    Numbers,
    /// A `fixed64`.
    Fixed,
    /// A string or bytes.
    Bytes,
    /// Many of them.
    EachBytes,
    /// A nested message, or many.
    Message(&'static Shape),
}

use Field::{Bytes, EachBytes, Fixed, Message, Number, Numbers};

const fn shape(cost: usize, fields: &'static [Field]) -> Shape {
    Shape { cost, fields }
}

pub(crate) static MANIFEST: Shape = shape(
    size_of::<proto::Manifest>(),
    &[
        Number,
        Bytes,
        Number,
        Bytes,
        Message(&HOST),
        Number,
        Bytes,
        Message(&PHASE),
        Message(&PARENT),
        Number,
        Bytes,
        Message(&CODE_IMAGE),
        Message(&CLIENT),
        Message(&BUILD),
        Message(&NATIVE),
    ],
);

static NATIVE: Shape =
    shape(size_of::<proto::Native>(), &[Number, Number, Bytes, Number, Number, Message(&NATIVE_GPU)]);

static NATIVE_GPU: Shape = shape(size_of::<proto::NativeGpu>(), &[Bytes, Bytes]);

static BUILD: Shape = shape(size_of::<proto::Build>(), &[Bytes, Bytes, Message(&LIBRARY)]);

static LIBRARY: Shape = shape(size_of::<proto::Library>(), &[Bytes, Bytes]);

static HOST: Shape = shape(size_of::<proto::Host>(), &[Bytes, Bytes, Message(&GPU), Bytes]);

static GPU: Shape = shape(size_of::<proto::Gpu>(), &[Bytes, Bytes, Number, Number, Number, Bytes, Number]);

static PHASE: Shape = shape(size_of::<proto::Phase>(), &[Number, Number, Number, Number]);

static PARENT: Shape = shape(size_of::<proto::Parent>(), &[Bytes, Bytes, Fixed, Fixed]);

static CODE_IMAGE: Shape = shape(size_of::<proto::CodeImage>(), &[Bytes, Number, Number]);

pub(crate) static CLIENT: Shape = shape(
    size_of::<proto::Client>(),
    &[
        Number,
        Number,
        Number,
        Bytes,
        Number,
        Bytes,
        Numbers,
        Message(&SETTING),
        Message(&CLIENT_GPU),
        Message(&RING),
        Bytes,
        Number,
        Bytes,
        Message(&WINDOW),
        Message(&OBJECT_KIND),
        Message(&OBJECT),
        Message(&ALLOCATION),
        Message(&GLOBAL),
        Message(&PINNED),
        Message(&BLOB),
        Message(&GRANT),
    ],
);

static SETTING: Shape = shape(size_of::<proto::Setting>(), &[Bytes, Bytes]);

static CLIENT_GPU: Shape = shape(size_of::<proto::ClientGpu>(), &[Number, Bytes]);

static RING: Shape = shape(size_of::<proto::Ring>(), &[Number, Number]);

static WINDOW: Shape = shape(size_of::<proto::Window>(), &[Number, Fixed, Number]);

static OBJECT_KIND: Shape = shape(size_of::<proto::ObjectKind>(), &[Number, Bytes]);

static OBJECT: Shape =
    shape(size_of::<proto::Object>(), &[Number, Number, Number, Number, Number, Number, Bytes, EachBytes]);

static ALLOCATION: Shape =
    shape(size_of::<proto::Allocation>(), &[Number, Fixed, Number, Number, Number, Number, Message(&PIECE)]);

static GLOBAL: Shape =
    shape(size_of::<proto::Global>(), &[Number, Number, Bytes, Fixed, Number, Message(&PIECE), Bytes]);

static PINNED: Shape = shape(size_of::<proto::Pinned>(), &[Fixed, Number, Number, Message(&PIECE)]);

static BLOB: Shape = shape(size_of::<proto::Blob>(), &[Number, Number, Number, Number, Message(&PIECE)]);

static GRANT: Shape = shape(size_of::<proto::Grant>(), &[Bytes, Number, Number, Number, Number, Bytes, Number]);

static PIECE: Shape =
    shape(size_of::<proto::Piece>(), &[Number, Number, Fixed, Fixed, Number, Number, Number, Number, Number, Number]);

pub(crate) static COMMIT: Shape =
    shape(size_of::<proto::Commit>(), &[Bytes, Fixed, Fixed, Number, Message(&FILE), Bytes, Bytes, Number]);

static FILE: Shape = shape(size_of::<proto::File>(), &[Bytes, Number]);

/// A field that the decoder does not know is kept in a map of vectors.
const UNKNOWN: usize = 128;

/// The number of the field of a manifest that has its clients.
pub(crate) const CLIENT_IN_MANIFEST: u64 = 13;

/// The nested messages that a message has in the field with this number, in their order, encoded. None after bytes that are no
/// protobuf.
pub(crate) fn parts(mut bytes: &[u8], number: u64) -> impl Iterator<Item = &[u8]> {
    let next = move || {
        if bytes.is_empty() {
            return None;
        }
        let tag = varint(&mut bytes).ok()?;
        let content = match tag & 7 {
            0 => varint(&mut bytes).map(|_| None),
            1 => take(&mut bytes, 8).map(|_| None),
            2 => varint(&mut bytes).and_then(|length| take(&mut bytes, length)).map(Some),
            5 => take(&mut bytes, 4).map(|_| None),
            _ => Err(Refused::Malformed),
        };
        Some(content.ok()?.filter(|_| tag >> 3 == number))
    };
    std::iter::from_fn(next).flatten()
}

/// The memory that decoding `bytes` as a message of this shape takes, in bytes.
pub(crate) fn scan(bytes: &[u8], shape: &Shape) -> Result<u64, Refused> {
    let mut total = 0;
    walk(bytes, shape, &mut total)?;
    Ok(total)
}

/// Recursion is as deep as the shapes nest: four levels.
fn walk(mut bytes: &[u8], shape: &Shape, total: &mut u64) -> Result<(), Refused> {
    add(total, shape.cost)?;
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let field = (tag >> 3).checked_sub(1).and_then(|index| shape.fields.get(usize::try_from(index).ok()?));
        match (tag & 7, field) {
            (0, Some(Number)) => drop(varint(&mut bytes)?),
            (0, Some(Numbers)) => {
                varint(&mut bytes)?;
                add(total, size_of::<u32>())?;
            }
            (1, Some(Fixed)) => drop(take(&mut bytes, 8)?),
            (2, Some(Numbers)) => {
                let length = varint(&mut bytes)?;
                add(total, take(&mut bytes, length)?.len() * size_of::<u32>())?;
            }
            (2, Some(Bytes)) => {
                let length = varint(&mut bytes)?;
                add(total, take(&mut bytes, length)?.len())?;
            }
            (2, Some(EachBytes)) => {
                let length = varint(&mut bytes)?;
                let length = take(&mut bytes, length)?.len();
                // The allocator gives at least this for any length but none.
                add(total, size_of::<Vec<u8>>() + length.max(32))?;
            }
            (2, Some(Message(inner))) => {
                let length = varint(&mut bytes)?;
                walk(take(&mut bytes, length)?, inner, total)?;
            }
            (wire, _) => {
                add(total, UNKNOWN)?;
                match wire {
                    0 => drop(varint(&mut bytes)?),
                    1 => drop(take(&mut bytes, 8)?),
                    2 => {
                        let length = varint(&mut bytes)?;
                        add(total, take(&mut bytes, length)?.len())?;
                    }
                    5 => drop(take(&mut bytes, 4)?),
                    // Groups nest without bound, and nothing of ours uses them.
                    _ => return Err(Refused::Malformed),
                }
            }
        }
    }
    Ok(())
}

fn add(total: &mut u64, cost: usize) -> Result<(), Refused> {
    *total = total.saturating_add(cost as u64);
    if *total > MAX_DECODED {
        return Err(Refused::TooLarge(*total));
    }
    Ok(())
}

fn varint(bytes: &mut &[u8]) -> Result<u64, Refused> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(Refused::Malformed)?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Refused::Malformed)
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8], Refused> {
    let length = usize::try_from(length).map_err(|_| Refused::Malformed)?;
    let (head, rest) = bytes.split_at_checked(length).ok_or(Refused::Malformed)?;
    *bytes = rest;
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The field types of each message in `image.proto`, in the order of their numbers.
    fn declared() -> Vec<(String, Vec<(bool, String)>)> {
        let mut messages = Vec::<(String, Vec<_>)>::new();
        let mut inside = false;
        for line in include_str!("../proto/image.proto").lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            match words[..] {
                ["message", name, "{"] => {
                    messages.push((name.to_owned(), Vec::new()));
                    inside = true;
                }
                ["}"] => inside = false,
                [.., "=", number] if inside && !line.contains("//") => {
                    let repeated = words[0] == "repeated";
                    let kind = words[usize::from(repeated)].to_owned();
                    let fields = &mut messages.last_mut().unwrap().1;
                    fields.push((repeated, kind));
                    assert_eq!(number, format!("{};", fields.len()), "{line}");
                }
                _ => {}
            }
        }
        messages
    }

    #[test]
    fn the_shapes_are_those_of_the_declared_messages() {
        let shapes = [
            ("Manifest", &MANIFEST),
            ("Host", &HOST),
            ("Gpu", &GPU),
            ("Phase", &PHASE),
            ("Parent", &PARENT),
            ("CodeImage", &CODE_IMAGE),
            ("Build", &BUILD),
            ("Library", &LIBRARY),
            ("Native", &NATIVE),
            ("NativeGpu", &NATIVE_GPU),
            ("Client", &CLIENT),
            ("Setting", &SETTING),
            ("ClientGpu", &CLIENT_GPU),
            ("Ring", &RING),
            ("Window", &WINDOW),
            ("ObjectKind", &OBJECT_KIND),
            ("Object", &OBJECT),
            ("Allocation", &ALLOCATION),
            ("Global", &GLOBAL),
            ("Pinned", &PINNED),
            ("Blob", &BLOB),
            ("Grant", &GRANT),
            ("Piece", &PIECE),
            ("Commit", &COMMIT),
            ("File", &FILE),
        ];
        let of = |name: &str| shapes.iter().find(|it| it.0 == name).map(|it| it.1);
        let declared = declared();
        assert_eq!(declared.len(), shapes.len());
        for (message, fields) in declared {
            let shape = of(&message).unwrap_or_else(|| panic!("{message} has no shape"));
            assert_eq!(shape.fields.len(), fields.len(), "{message}");
            for (number, (field, (repeated, kind))) in (1..).zip(shape.fields.iter().zip(fields)) {
                let right = match (field, kind.as_str(), repeated) {
                    (Numbers, "uint32", true) | (EachBytes, "bytes", true) => true,
                    (Fixed, "fixed64", false) | (Bytes, "bytes" | "string", false) => true,
                    (Message(inner), name, _) => of(name).is_some_and(|it| std::ptr::eq(it, *inner)),
                    // Numbers and enumerators.
                    (Number, name, false) => of(name).is_none() && !["bytes", "string", "fixed64"].contains(&name),
                    _ => false,
                };
                assert!(right, "field {number} of {message}: {kind}");
            }
        }
    }

    #[test]
    fn a_message_cut_anywhere_in_a_field_is_malformed() {
        // Field 2, bytes, length 4; field 1 of a phase.
        let message = [0x12, 4, 1, 2, 3, 4, 0x42, 2, 0x08, 1];
        assert!(scan(&message, &MANIFEST).is_ok());
        for length in [1, 2, 5, 7, 8, 9] {
            let result = scan(&message[..length], &MANIFEST);
            assert_eq!(result, Err(Refused::Malformed), "{length}");
        }
    }

    #[test]
    fn parts_are_those_of_their_field_in_their_order_and_end_where_bytes_are_no_message() {
        let field = &MANIFEST.fields[CLIENT_IN_MANIFEST as usize - 1];
        assert!(matches!(field, Message(inner) if std::ptr::eq(*inner, &CLIENT)));
        // Three of field 13, and before, between and behind them fields of every kind.
        let message = [
            &[0x08, 1, 0x6a, 2, 7, 8, 0x11, 0, 0, 0, 0, 0, 0, 0, 0][..],
            &[0x12, 3, 0x6a, 1, 9, 0x6a, 0, 0x1d, 1, 2, 3, 4, 0x6a, 1, 5],
        ]
        .concat();
        let of = |bytes: &[u8]| parts(bytes, CLIENT_IN_MANIFEST).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let all = [vec![7, 8], vec![], vec![5]];
        assert_eq!(of(&message), all);
        for length in 0..message.len() {
            let found = of(&message[..length]);
            assert!(all.starts_with(&found), "{length}: {found:?}");
        }
        assert!(of(&[0x6b, 0x6a, 1, 5]).is_empty(), "a group");
    }

    #[test]
    fn an_endless_number_is_malformed() {
        let mut message = vec![0x08];
        message.extend_from_slice(&[0xff; 20]);
        assert_eq!(scan(&message, &MANIFEST), Err(Refused::Malformed));
    }
}
