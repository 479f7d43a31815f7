//! CRIU's image files: two words of magic, then entries of Protocol Buffers, each behind its length (criu/include/image.h,
//! `pb_write_one`). This parser only separates the fields, since few are of interest; missing fields are 0.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use protobuf::CodedInputStream;
use protobuf::rt::WireType;

/// The bytes before the first entry.
pub(super) const MAGIC: usize = 8;
/// The largest file of entries: memory maps with millions of mappings.
const LARGEST: u64 = 256 << 20;

/// An entry's fields, in their order.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Entry(Vec<(u32, Value)>);

#[derive(Debug, PartialEq, Eq)]
enum Value {
    Number(u64),
    Bytes(Vec<u8>),
}

impl Entry {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut stream = CodedInputStream::from_bytes(bytes);
        let mut fields = Vec::new();
        while let Some(tag) = stream.read_raw_tag_or_eof().ok()? {
            let value = match WireType::new(tag & 7)? {
                WireType::Varint => Value::Number(stream.read_raw_varint64().ok()?),
                WireType::Fixed64 => Value::Number(stream.read_fixed64().ok()?),
                WireType::Fixed32 => Value::Number(stream.read_fixed32().ok()?.into()),
                WireType::LengthDelimited => Value::Bytes(stream.read_bytes().ok()?),
                WireType::StartGroup | WireType::EndGroup => return None,
            };
            fields.push((tag >> 3, value));
        }
        Some(Self(fields))
    }

    /// The number in a field.
    pub(super) fn number(&self, field: u32) -> u64 {
        let found = self.0.iter().rev().find_map(|it| match it {
            (number, Value::Number(value)) if *number == field => Some(*value),
            _ => None,
        });
        found.unwrap_or(0)
    }

    /// Bytes or a text, for each occurrence of the field.
    pub(super) fn bytes(&self, field: u32) -> impl Iterator<Item = &[u8]> {
        self.0.iter().filter_map(move |it| match it {
            (number, Value::Bytes(value)) if *number == field => Some(value.as_slice()),
            _ => None,
        })
    }

    /// The text in a field, once.
    pub(super) fn text(&self, field: u32) -> String {
        self.bytes(field).next().map(|it| String::from_utf8_lossy(it).into_owned()).unwrap_or_default()
    }

    /// The entries in a field.
    pub(super) fn entries(&self, field: u32) -> impl Iterator<Item = Entry> {
        self.bytes(field).filter_map(Entry::parse)
    }
}

/// All entries of a file; `None` where the file is missing or of another kind.
pub(super) fn read(path: &Path) -> Option<Vec<Entry>> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(LARGEST).read_to_end(&mut bytes).ok()?;
    parse(bytes.get(MAGIC..)?)
}

fn parse(mut bytes: &[u8]) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk()?;
        let (entry, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        entries.push(Entry::parse(entry)?);
        bytes = rest;
    }
    Some(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_what_criu_writes_and_nothing_else() {
        // An entry of a memfd.img: name, size, id.
        let entry = b"\x0a\x04ring\x20\x80\x40\x28\x07";
        let file = [&[entry.len() as u8, 0, 0, 0][..], entry].concat();
        let entries = parse(&file).unwrap();
        assert_eq!((entries[0].text(1).as_str(), entries[0].number(4), entries[0].number(5)), ("ring", 8192, 7));
        assert_eq!((entries[0].number(9), entries[0].bytes(9).count()), (0, 0));
        assert_eq!(parse(&file[..file.len() - 1]), None);
        assert_eq!(parse(&[255, 255, 255, 255, 1]), None);
        assert_eq!(Entry::parse(&[0x0b]), None);
        assert_eq!(parse(&[]), Some(Vec::new()));
    }
}
