//! From an address to a store.

use std::path::Path;
use std::sync::Arc;

use crate::StoreError;
use crate::address::Address;
use crate::directory::Directory;
use crate::key::StoreKey;
#[cfg(feature = "s3")]
use crate::s3::S3;
use crate::ssh::Ssh;
use crate::store::Store;
use crate::transport::Transport;

/// The way to the objects at an address.
///
/// # Errors
/// The address is not within reach, as far as that can be told without asking.
pub fn transport(address: &Address) -> Result<Arc<dyn Transport>, StoreError> {
    Ok(match address {
        Address::Directory(path) => Arc::new(Directory::new(path)),
        #[cfg(not(feature = "s3"))]
        Address::S3 { .. } => return Err(StoreError::refused("this rekindle was built without S3")),
        #[cfg(feature = "s3")]
        Address::S3 { bucket, prefix } => Arc::new(S3::open(&address.to_string(), bucket, prefix)?),
        Address::Ssh { user, host, port, directory } => {
            Arc::new(Ssh::new(address.to_string(), user.as_deref(), host, *port, directory))
        }
    })
}

impl Address {
    /// Opens the store at this address; `None` if there is none.
    ///
    /// # Errors
    /// The errors of [`Store::open`].
    pub fn open(&self, key: Option<&StoreKey>) -> Result<Option<Store>, StoreError> {
        Store::open(transport(self)?, &self.to_string(), key)
    }

    /// Makes a store at this address.
    ///
    /// # Errors
    /// The errors of [`Store::create`].
    pub fn create(&self, key: Option<&StoreKey>, encrypted: bool) -> Result<Store, StoreError> {
        Store::create(transport(self)?, &self.to_string(), key, encrypted)
    }

    /// Opens the store at this address, or the one around it: then the last part of the address is the name of an
    /// image.
    ///
    /// # Errors
    /// [`StoreError::NoStore`] if there is neither, and the errors of [`Store::open`].
    pub fn find(&self, key: Option<&StoreKey>) -> Result<(Store, Option<String>), StoreError> {
        if let Some(store) = self.open(key)? {
            return Ok((store, None));
        }
        if let Some((around, name)) = self.split()
            && let Some(store) = around.open(key)?
        {
            return Ok((store, Some(name)));
        }
        Err(StoreError::NoStore { url: self.to_string() })
    }

    /// Whether a path is that of a store, or of an image in one: its directory, or the one around it, has a store's
    /// object.
    #[must_use]
    pub fn is_store_path(path: &Path) -> bool {
        let has = |it: &Path| it.join(crate::store::STORE).is_file();
        has(path)
            || (!path.exists()
                && path.parent().is_some_and(|it| has(if it.as_os_str().is_empty() { Path::new(".") } else { it })))
    }
}
