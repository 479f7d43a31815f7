//! Commands of the ring that are not lines of the driver table: what the hand-written calls of the interposer send.
//!
//! Each is declared once, in `list.rs`: its number, its name (which the object log keeps, since numbers may change), its
//! parameters, and what it has to do with streams, events and memory. From that come the structures that both sides
//! write and read, and what the worker knows of a command before it executes it ([`Declaration`]).

use rekindle_cuda_abi::table::Function;

/// The first number that is no line of the driver table.
pub const FIRST: u16 = 0x4000;

mod declare;
mod field;
mod list;

pub use declare::{Clause, Declaration, Parameters};
pub use field::{Field, Half, Rest};
pub use list::*;

/// The commands of copies of boxes, arrays, textures and surfaces.
pub const SHAPES: std::ops::Range<u16> = FIRST + 256..FIRST + 320;

/// The staging chunk whose word says when a command is done, where it is one through a chunk.
#[must_use]
pub fn chunk(call: u16, parameters: &[u8]) -> Option<u64> {
    let through = |clause: &Clause| if let Clause::Through(place) = clause { Some(*place) } else { None };
    let place = declaration(call)?.clauses.iter().find_map(through)?;
    crate::codec::Reader::new(parameters.get(place * 8..)?).word().ok()
}

/// An operation of [`MEM_OPS`]: four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemOp {
    /// `CUstreamBatchMemOpType`: waits for, or writes, 32 (1, 2) or 64 bits (4, 5); flushes (3); a barrier (6).
    pub operation: u32,
    /// Of the word.
    pub address: u64,
    /// To be written, or compared with.
    pub value: u64,
    /// `CU_STREAM_WAIT_VALUE_*` and the like.
    pub flags: u32,
}

/// Most operations that one [`MEM_OPS`] has, as in the driver.
pub const MAX_MEM_OPS: usize = 256;

impl MemOp {
    /// Bytes of the word that it is about, 0 for none.
    #[must_use]
    pub fn width(&self) -> u64 {
        match self.operation {
            1 | 2 => 4,
            4 | 5 => 8,
            _ => 0,
        }
    }

    /// Appends its words.
    pub fn write(&self, w: &mut crate::codec::Writer) {
        [u64::from(self.operation), self.address, self.value, u64::from(self.flags)]
            .into_iter()
            .for_each(|x| w.word(x));
    }

    /// Takes what [`MemOp::write`] appended.
    pub fn read(r: &mut crate::codec::Reader<'_>) -> Result<Self, crate::codec::Malformed> {
        Ok(Self { operation: r.word32()?, address: r.word()?, value: r.word()?, flags: r.word32()? })
    }
}

/// The most bytes of a copy to the device that travel inside its command. More go through staging chunks.
pub const MAX_INLINE_BYTES: usize = 32 << 10;

/// The kind of a callback of `cuLaunchHostFunc`: not called in a broken context.
pub const HOST_FUNCTION: u64 = 0;
/// The kind of a callback of `cuStreamAddCallback`: always called, and told of an error.
pub const STREAM_CALLBACK: u64 = 1;

/// The result of [`MEM_ALLOC`] that asks for more of the window; no driver error has this number.
pub const WINDOW_FULL: i32 = 1_000_001;

/// The result of [`PIECE_IMPORT`] for a ticket that the worker does not know; no driver error has this number.
pub const NO_TICKET: i32 = 1_000_002;

/// Launch attributes that travel as they are: ignore 0, access policy window 1 (a range of device memory), cooperative
/// 2, synchronisation policy 3, cluster dimension 4, cluster scheduling 5, programmatic stream serialisation 6, priority
/// 8, memory synchronisation domain map 9 and domain 10, preferred cluster 11, shared memory carve-out 14, NVLink-centric
/// scheduling 16. Device-updatable nodes (13) belong to graphs.
pub const PLAIN_ATTRIBUTES: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 14, 16];

/// Launch attributes whose first word is an event's handle: programmatic event 7, launch completion event 12.
pub const EVENT_ATTRIBUTES: &[u32] = &[7, 12];

/// In [`Launch::flags`]: a cooperative launch.
pub const COOPERATIVE: u32 = 1;

/// Bytes of an attribute: its id, and eight words.
pub const ATTRIBUTE_BYTES: usize = 72;

/// All that a launch has is copied.
impl Copy for Launch<'_> {}

impl Launch<'_> {
    /// The handles of the events that the launch records by its attributes.
    pub fn events(&self) -> impl Iterator<Item = u64> {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
        let attributes = self.attributes.chunks_exact(ATTRIBUTE_BYTES).map(move |a| (word(&a[..8]), word(&a[8..16])));
        attributes.filter(|(id, _)| EVENT_ATTRIBUTES.iter().any(|e| u64::from(*e) == *id)).map(|(_, event)| event)
    }
}

/// A command, by its number; `None` for lines of the driver table, and for numbers without a meaning.
#[must_use]
pub fn declaration(call: u16) -> Option<&'static Declaration> {
    DECLARED.iter().find(|it| it.number == call)
}

/// Reads the parameters of a command and writes them again, as they lie in the ring; `None` for a number that is not a
/// command's. Tests and fuzzing compare the two.
#[must_use]
pub fn again(call: u16, parameters: &[u8]) -> Option<Result<Vec<u8>, crate::codec::Malformed>> {
    declaration(call).map(|it| (it.again)(parameters))
}

/// The name of a call number: a command's, or the symbol in its line of the table.
pub fn name(table: &[Function], call: u16) -> Option<&str> {
    if call < FIRST {
        return table.get(call as usize).map(|f| f.symbol.as_str());
    }
    declaration(call).map(|it| it.name)
}

/// The number of a name that the object log kept.
pub fn number(table: &[Function], name: &str) -> Option<u16> {
    let command = DECLARED.iter().find(|it| it.name == name).map(|it| it.number);
    command.or_else(|| table.iter().position(|f| f.symbol == name).map(|i| i as u16))
}

/// `allocFlags` of `CUmemAllocationProp`, as a word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PieceFlags {
    /// `compressionType`.
    pub compression: u8,
    /// `gpuDirectRDMACapable`.
    pub rdma: u8,
    /// `usage`.
    pub usage: u16,
}

impl PieceFlags {
    /// The word.
    pub fn word(self) -> u64 {
        u64::from(self.compression) | u64::from(self.rdma) << 8 | u64::from(self.usage) << 16
    }

    /// The flags of a word that [`PieceFlags::word`] gave.
    pub fn of(word: u64) -> Self {
        Self { compression: word as u8, rdma: (word >> 8) as u8, usage: (word >> 16) as u16 }
    }
}

/// The kinds of objects that a handle can name. A handle is the kind in its upper 16 bits, and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u16)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Kind {
    Context = 0x11,
    Module = 0x12,
    Library = 0x13,
    Function = 0x14,
    Kernel = 0x15,
    Stream = 0x16,
    Event = 0x17,
    Array = 0x18,
    MipmappedArray = 0x19,
    TexObject = 0x1a,
    SurfObject = 0x1b,
    Linker = 0x1d,
    MemPool = 0x1c,
    GraphExec = 0x1e,
    Piece = 0x20,
    Resource = 0x21,
    ResourceDescriptor = 0x22,
    GreenContext = 0x23,
}

/// The handle of a device's default pool, which is there without being created.
pub fn default_pool(device: usize) -> u64 {
    Kind::MemPool.handle(0x1_0000_0000 + device as u64)
}

impl Kind {
    /// The handle with this number. Never a canonical address, so that a program which dereferences the handle ends.
    pub fn handle(self, number: u64) -> u64 {
        (self as u64) << 48 | (number & 0xffff_ffff_ffff)
    }

    /// Whether a handle is of this kind.
    pub fn owns(self, handle: u64) -> bool {
        handle >> 48 == self as u64
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod names {
    use super::*;

    #[test]
    fn names_and_numbers_belong_together() {
        let table = rekindle_cuda_abi::table::parse(rekindle_cuda_abi::table::TEXT).unwrap();
        assert_eq!(number(&table, name(&table, LAUNCH).unwrap()), Some(LAUNCH));
        assert_eq!(number(&table, name(&table, 17).unwrap()), Some(17));
        assert_eq!(name(&table, FIRST - 1), None);
        assert!(table.len() < FIRST as usize);
    }
}
