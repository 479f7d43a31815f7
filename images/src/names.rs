//! The names of an image's files, and which names in a directory are ours.

use crate::hash::CodeHash;

/// The manifest.
pub const MANIFEST: &str = "rekindle.img";

/// The commit record.
pub const COMMIT: &str = "rekindle.commit";

/// The manifest until it is whole.
pub(crate) const MANIFEST_TEMPORARY: &str = "rekindle.img.tmp";

/// The commit record until it is whole.
pub(crate) const COMMIT_TEMPORARY: &str = "rekindle.commit.tmp";

/// What the last restore of the image was like. The image is the same without it.
pub(crate) const LAST_RESTORE: &str = "rekindle-restore.json";

/// The folder in which an image is made that is to take the place of the one around it.
pub(crate) const BESIDE: &str = "rekindle-flatten";

/// The name of [`LAST_RESTORE`] until it is whole. The number is random: two daemons may restore one image at the same time.
pub(crate) fn last_restore_temporary(number: u64) -> String {
    format!("rekindle-restore-{number:016x}.tmp")
}

/// Data file number `index`.
#[must_use]
pub fn data_name(index: u32) -> String {
    format!("rekindle-data-{index}.raw")
}

/// The file of the code image with this hash.
#[must_use]
pub fn code_name(hash: CodeHash) -> String {
    format!("rekindle-code-{hash}.bin")
}

/// Whether a file of this name in an image's directory belongs to the image.
#[must_use]
pub fn is_image_file(name: &str) -> bool {
    Name::parse(name).is_some()
}

/// A file of ours, told by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    Manifest,
    Commit,
    Temporary,
    LastRestore,
    Data(u32),
    Code(CodeHash),
}

impl Name {
    /// The kind of file that `name` names; `None` for a file that is not ours, and for every name with a `/`.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        match name {
            MANIFEST => return Some(Self::Manifest),
            COMMIT => return Some(Self::Commit),
            MANIFEST_TEMPORARY | COMMIT_TEMPORARY => return Some(Self::Temporary),
            LAST_RESTORE => return Some(Self::LastRestore),
            _ => {}
        }
        let between = |prefix, suffix| name.strip_prefix(prefix)?.strip_suffix(suffix);
        if let Some(number) = between("rekindle-restore-", ".tmp") {
            let number = u64::from_str_radix(number, 16).ok()?;
            return (last_restore_temporary(number) == name).then_some(Self::Temporary);
        }
        if let Some(hash) = between("rekindle-code-", ".bin") {
            return hash.parse().ok().map(Self::Code);
        }
        let index = between("rekindle-data-", ".raw")?.parse().ok()?;
        // Each file has exactly one name: not "+1", not "01".
        (data_name(index) == name).then_some(Self::Data(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_made_here_is_known_here() {
        let hash = CodeHash::of(b"x");
        assert_eq!(Name::parse(&code_name(hash)), Some(Name::Code(hash)));
        assert_eq!(Name::parse(&data_name(0)), Some(Name::Data(0)));
        assert_eq!(Name::parse("rekindle.img"), Some(Name::Manifest));
        assert_eq!(Name::parse("rekindle.commit"), Some(Name::Commit));
        assert_eq!(Name::parse(LAST_RESTORE), Some(Name::LastRestore));
        for number in [0, 0xab, u64::MAX] {
            assert_eq!(Name::parse(&last_restore_temporary(number)), Some(Name::Temporary));
        }
    }

    #[test]
    fn other_names_are_not_ours() {
        for name in [
            "",
            "inventory.img",
            "rekindle",
            "rekindle-data-.raw",
            "rekindle-data-01.raw",
            "rekindle-data-+1.raw",
            "rekindle-data-4294967296.raw",
            "rekindle-data-1.raw.bak",
            "../rekindle-data-1.raw",
            "rekindle-code-.bin",
            "rekindle-restore-.tmp",
            "rekindle-restore-+000000000000001.tmp",
            "rekindle-restore-00000000000000AB.tmp",
            "rekindle-restore.json.bak",
            "rekindle-code-../../../../../../etc/passwd.bin",
        ] {
            assert_eq!(Name::parse(name), None, "{name:?}");
        }
    }
}
