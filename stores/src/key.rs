//! The key of a store, and the keys that are derived from it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::StoreError;
use crate::hash::Hash;

/// The environment variable of systemd with the directory of a service's credentials.
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";
/// The name of the credential.
pub const CREDENTIAL: &str = "rekindle-store-key";

/// The secret of a store's owner: 32 random bytes. Who has it can read and forge what is in the store.
#[derive(Clone)]
pub struct StoreKey([u8; 32]);

impl std::fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreKey(…)")
    }
}

impl StoreKey {
    /// A key of these bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Reads a key from a file with 32 bytes, or with 64 hexadecimal digits.
    ///
    /// # Errors
    /// The file cannot be read, is readable for everybody, or holds something else.
    pub fn read(path: &Path) -> Result<Self, StoreError> {
        let shown = path.display();
        let bad = |what: String| StoreError::key(format!("the key file {shown} {what}"));
        let status = fs::metadata(path).map_err(|error| bad(format!("cannot be read: {error}")))?;
        if status.permissions().mode() & 0o006 != 0 {
            return Err(bad(format!("is open to everybody: chmod 600 {shown}")));
        }
        let content = fs::read(path).map_err(|error| bad(format!("cannot be read: {error}")))?;
        if let Ok(bytes) = <[u8; 32]>::try_from(&*content) {
            return Ok(Self(bytes));
        }
        let digits = std::str::from_utf8(&content).ok().map(str::trim);
        digits.and_then(|it| it.parse::<Hash>().ok()).map(|it| Self(it.to_bytes())).ok_or_else(|| {
            bad(format!("has neither 32 bytes nor 64 hexadecimal digits: head -c 32 /dev/urandom >{shown} makes one"))
        })
    }

    /// The key in systemd's credential `rekindle-store-key`, if the process has one.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn from_credential() -> Result<Option<Self>, StoreError> {
        let Some(directory) = std::env::var_os(CREDENTIALS) else { return Ok(None) };
        let path = Path::new(&directory).join(CREDENTIAL);
        if path.exists() { Self::read(&path).map(Some) } else { Ok(None) }
    }
}

/// The keys for the different uses, so that nothing made for one use counts for another.
pub(crate) struct Keys {
    /// Names pieces and images.
    pub(crate) name: [u8; 32],
    /// Says that an object was written by an owner of the key.
    pub(crate) tag: [u8; 32],
    /// Encrypts.
    pub(crate) encryption: [u8; 32],
    /// Chooses where content is cut, so that the lengths of pieces do not say what they hold.
    pub(crate) cut: [u8; 32],
}

impl Keys {
    /// The keys of a store. Without a secret everybody has them: they find mistakes of disks and networks, and no
    /// forgery.
    pub(crate) fn derive(secret: Option<&StoreKey>) -> Self {
        let secret = secret.map_or([0; 32], |it| it.0);
        Self {
            name: blake3::derive_key("rekindle-stores 1 names of pieces and images", &secret),
            tag: blake3::derive_key("rekindle-stores 1 tags of objects", &secret),
            encryption: blake3::derive_key("rekindle-stores 1 encryption of objects", &secret),
            cut: blake3::derive_key("rekindle-stores 1 cuts of content", &secret),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_bytes_or_digits_and_nobody_elses() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("key");
        let write = |content: &[u8], mode| {
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            StoreKey::read(&path)
        };
        assert_eq!(write(&[7; 32], 0o600).unwrap().0, [7; 32]);
        let digits = format!("{}\n", "0f".repeat(32));
        assert_eq!(write(digits.as_bytes(), 0o640).unwrap().0, [15; 32]);
        let said = write(&[7; 31], 0o600).unwrap_err().to_string();
        assert!(said.contains("neither 32 bytes nor 64 hexadecimal digits"), "{said}");
        let said = write(&[7; 32], 0o644).unwrap_err().to_string();
        assert!(said.contains("open to everybody: chmod 600"), "{said}");
    }
}
