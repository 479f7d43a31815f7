//! What a store is made of: named objects, and the few things that can be done with them.

use std::fmt;
use std::ops::Range;

use crate::StoreError;

/// The longest object that is read, in bytes. Pieces and packs are far shorter; a manifest may be long.
pub const MAX_OBJECT: u64 = 512 << 20;

/// A way to a store's objects.
///
/// It is narrow on purpose: a directory, an object store and a program at the other end of a pipe all have it, and so
/// will what moves memory between hosts by itself. All calls may come from several threads at a time, and each
/// returns when it is done.
pub trait Transport: fmt::Debug + Send + Sync {
    /// Writes an object, in place of one that has the name. A reader sees the old one or the new one, whole.
    ///
    /// # Errors
    /// It could not be written, or it is not known whether it was.
    fn put(&self, name: &ObjectName, content: &[u8]) -> Result<(), StoreError>;

    /// Writes an object unless there is one of that name; says whether it was written. Of several writers one
    /// succeeds. An answer that was lost on the way may make a writer take its own object for another's:
    /// [`crate::Store`] compares the content.
    ///
    /// # Errors
    /// As for [`put`](Self::put).
    fn put_if_absent(&self, name: &ObjectName, content: &[u8]) -> Result<bool, StoreError>;

    /// Reads an object, or a range of it, which is shorter where the object ends before; `None` if there is no such
    /// object.
    ///
    /// # Errors
    /// It could not be read, or is longer than [`MAX_OBJECT`].
    fn get(&self, name: &ObjectName, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, StoreError>;

    /// What is known of an object; `None` if there is none.
    ///
    /// # Errors
    /// The store did not say.
    fn head(&self, name: &ObjectName) -> Result<Option<Found>, StoreError>;

    /// The objects whose names begin with `folder` and a slash. What was there before the call and is not removed
    /// meanwhile is listed; names that cannot be ours are not.
    ///
    /// # Errors
    /// The store did not say.
    fn list(&self, folder: &str) -> Result<Vec<Found>, StoreError>;

    /// Removes an object; it is no error if there is none.
    ///
    /// # Errors
    /// It could not be removed.
    fn delete(&self, name: &ObjectName) -> Result<(), StoreError>;
}

/// An object that is there.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Found {
    /// Its name.
    pub name: ObjectName,
    /// Its length in bytes.
    pub size: u64,
    /// When it was written, in milliseconds since 1970, by the store's clock. Only times of one store are compared.
    pub modified: u64,
}

/// The name of an object: folders and a last part, of lower-case letters, digits, `-`, `_` and dots that begin no part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ObjectName(String);

impl ObjectName {
    /// The longest name, in bytes.
    pub const MAX: usize = 200;

    /// `None` for a text that is no name of an object.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let part = |part: &str| {
            let allowed = |byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.');
            !part.is_empty() && !part.starts_with('.') && part.bytes().all(allowed)
        };
        (text.len() <= Self::MAX && text.split('/').all(part)).then(|| Self(text.to_owned()))
    }

    /// A name that this crate has put together.
    ///
    /// # Errors
    /// It is none: a part of it came from elsewhere.
    pub(crate) fn made(text: String) -> Result<Self, StoreError> {
        Self::parse(&text).ok_or_else(|| StoreError::damaged(text, "this is no name of an object"))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The part behind the last slash.
    pub(crate) fn last(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or(&self.0)
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<ObjectName> for String {
    fn from(name: ObjectName) -> Self {
        name.0
    }
}

impl TryFrom<String> for ObjectName {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("no name of an object")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_nowhere_else() {
        for name in ["", "/", "a/", "/a", "a//b", "..", "a/../b", ".a", "a/.b", "A", "a b", "a\0", "a\\b", "ä"] {
            assert_eq!(ObjectName::parse(name), None, "{name:?}");
        }
        assert_eq!(ObjectName::parse(&"a".repeat(201)), None);
        assert_eq!(ObjectName::parse("pieces/0a/0a1b-2.c").unwrap().last(), "0a1b-2.c");
    }
}
