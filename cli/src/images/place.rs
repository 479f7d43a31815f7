//! What a user's FROM and TO mean.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::Args;
use rekindle_stores::{Address, Store, StoreKey};

use crate::failure::Failure;

/// The environment variable with the path of a key.
const KEY_VARIABLE: &str = "REKINDLE_STORE_KEY";
/// The name that says that there is no key.
const NONE: &str = "none";

/// Options that all of `rekindle images` have.
#[derive(Debug, Args)]
pub(crate) struct CommonOptions {
    #[command(flatten)]
    pub(super) key: Key,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// Where the key of a store is.
#[derive(Debug, Clone, Args)]
pub(crate) struct Key {
    /// The file with the store's key, or `none` [default: the file that REKINDLE_STORE_KEY names, or systemd's
    /// credential rekindle-store-key]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

impl Key {
    /// The key in this file.
    pub(super) fn in_file(path: &Path) -> Self {
        Self { key: Some(path.to_owned()) }
    }

    /// The absolute path of the file with the key, if one is named.
    pub(crate) fn file(&self) -> anyhow::Result<Option<PathBuf>> {
        self.named().map(|it| if it == Path::new(NONE) { Ok(it) } else { Ok(std::path::absolute(it)?) }).transpose()
    }

    fn named(&self) -> Option<PathBuf> {
        let variable = || std::env::var_os(KEY_VARIABLE).filter(|it| !it.is_empty()).map(PathBuf::from);
        self.key.clone().or_else(variable)
    }

    /// Reads the key, if there is one.
    pub(crate) fn get(&self) -> Result<Option<StoreKey>, Failure> {
        match self.named() {
            Some(path) if path == Path::new(NONE) => Ok(None),
            Some(path) => Ok(Some(StoreKey::read(&path)?)),
            None => Ok(StoreKey::from_credential()?),
        }
    }
}

/// A directory with an image, or a store and perhaps the name of an image in it.
pub(super) enum Place {
    Directory(PathBuf),
    Store(Box<Store>, Option<String>),
}

impl Place {
    /// A path is a directory, unless it is that of a store, or of a name in one.
    pub(super) fn of(text: &str, key: &Key) -> Result<Self, Failure> {
        let address = Address::parse(text)?;
        if let Some(path) = address.as_directory()
            && !text.contains("://")
            && !Address::is_store_path(path)
        {
            return Ok(Self::Directory(path.to_owned()));
        }
        let (store, name) = address.find(key.get()?.as_ref())?;
        Ok(Self::Store(Box::new(store), name))
    }
}

/// An image in a store, which must be named.
pub(super) fn named(url: &str, key: &Key) -> Result<(Store, String), Failure> {
    let (store, name) = Address::parse(url)?.find(key.get()?.as_ref())?;
    let name = name.ok_or_else(|| Failure::usage(anyhow!("{url} is a store: say which image, {url}/NAME")))?;
    Ok((store, name))
}
