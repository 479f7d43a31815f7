//! The kinds of blobs, by their numbers in an image.

use crate::manifest::Blob;

/// The kind of content that a [`Blob`] holds. A worker writes and reads blobs; each number keeps its meaning in every later
/// version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum BlobKind {
    /// A code image whose parts had not all arrived; its handle is the code image's number.
    ArrivingCode = 1,
    /// The content of the array that its handle names.
    ArrayContent = 2,
    /// The deferred commands.
    DeferredCommands = 3,
    /// The heap from which kernels take memory with `malloc`; its handle is the device's number.
    KernelHeap = 4,
    /// Text that kernels have printed and the application has not fetched; its handle is 0 for stdout, 1 for stderr.
    Printed = 0x1c0,
    /// A compiler's log that its caller may be about to fetch; its handle is twice the thread's number, and one more for
    /// errors.
    CodeLog = 0x1c1,
    /// The programs of executable graphs.
    Graphs = 0x1c2,
    /// The memory that the client maps itself.
    Mapped = 0x1c3,
}

/// A number that names no kind of blob, as in an image of a later version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no kind of blob has the number {0:#x}")]
pub struct UnknownBlobKind(pub u32);

impl BlobKind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::ArrivingCode,
        Self::ArrayContent,
        Self::DeferredCommands,
        Self::KernelHeap,
        Self::Printed,
        Self::CodeLog,
        Self::Graphs,
        Self::Mapped,
    ];
}

impl From<BlobKind> for u32 {
    fn from(kind: BlobKind) -> Self {
        kind as Self
    }
}

impl TryFrom<u32> for BlobKind {
    type Error = UnknownBlobKind;

    fn try_from(number: u32) -> Result<Self, UnknownBlobKind> {
        Self::ALL.into_iter().find(|kind| u32::from(*kind) == number).ok_or(UnknownBlobKind(number))
    }
}

impl Blob {
    /// Whether it is of this kind.
    #[must_use]
    pub fn is(&self, kind: BlobKind) -> bool {
        self.kind == u32::from(kind)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_kinds_stay_as_they_are_on_disk() {
        assert_eq!(BlobKind::ALL.map(u32::from), [1, 2, 3, 4, 0x1c0, 0x1c1, 0x1c2, 0x1c3]);
        assert!(BlobKind::ALL.into_iter().all(|kind| BlobKind::try_from(u32::from(kind)) == Ok(kind)));
        assert_eq!(BlobKind::try_from(5), Err(UnknownBlobKind(5)));
    }
}
