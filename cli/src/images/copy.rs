//! `rekindle images copy`.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, anyhow};
use rekindle_stores::{Archive, Container, Progress, Received, Sent, Store, StoreError};

use super::place::{CommonOptions, Key, Place, named};
use crate::bar::Bar;
use crate::failure::Failure;
use crate::output;

/// How the files of archives end that a store can take.
const ENDINGS: [&str; 2] = [".tar.zst", ".tar"];

/// A bar that threads show their progress on.
pub(super) struct Shown {
    what: &'static str,
    bar: Mutex<Bar>,
}

impl Shown {
    pub(super) fn new(what: &'static str, json: bool) -> Self {
        Self { what, bar: Mutex::new(if json { Bar::hidden() } else { Bar::new() }) }
    }

    pub(super) fn show(&self, progress: Progress) {
        let mut bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        bar.show(self.what, progress.done, progress.total);
    }

    pub(super) fn clear(&self) {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Copies an image.
pub(super) fn copy(from: &str, to: &str, from_key: Option<&Path>, common: &CommonOptions) -> Result<(), Failure> {
    let from_key = from_key.map_or_else(|| common.key.clone(), Key::in_file);
    let source = Place::of(from, &from_key)?;
    let target = Place::of(to, &common.key)?;
    let unnamed = || Failure::usage(anyhow!("{from} is a store: say which image, {from}/NAME"));
    match (source, target) {
        (Place::Directory(_), Place::Directory(_)) => {
            Err(Failure::usage(anyhow!("neither {from} nor {to} is a store: `rekindle images init` makes one")))
        }
        (Place::Directory(dir), Place::Store(store, name)) => {
            print_sent(&upload(&store, &dir, name, common.json)?, to, common.json)
        }
        (Place::Store(_, None), _) => Err(unnamed()),
        (Place::Store(store, Some(name)), Place::Directory(dir)) => {
            print_received(&download(&store, &name, &dir, common.json)?, common.json)
        }
        (Place::Store(source, Some(image)), Place::Store(target, name)) => {
            let found = source.image(&image)?;
            let shown = Shown::new("copy", common.json);
            let name = name.unwrap_or(image);
            let sent = target.put_stored(&source, &found, &name, &|it| shown.show(it));
            shown.clear();
            print_sent(&sent?, to, common.json)
        }
    }
}

/// A name in a store that an image is to have which is not made yet.
pub(crate) struct Target {
    store: Box<Store>,
    name: String,
    path: PathBuf,
    url: String,
}

impl Target {
    /// Makes sure that an image from this directory, or an archive from this file, can get its name.
    pub(crate) fn find(url: &str, key: &Key, path: &Path, is_archive: bool) -> Result<Self, Failure> {
        let Place::Store(store, name) = Place::of(url, key)? else {
            return Err(StoreError::NoStore { url: url.to_owned() }.into());
        };
        let absolute = std::path::absolute(path).context("cannot tell the current directory")?;
        let name = named_or_own(name, &absolute, is_archive)?;
        if store.has(&name)? {
            return Err(StoreError::ImageExists { name, url: store.url().to_owned() }.into());
        }
        Ok(Self { store, name, path: path.to_owned(), url: url.to_owned() })
    }

    /// Stores the image, which is there now.
    pub(crate) fn put(self, json: bool) -> Result<Sent, Failure> {
        let Self { store, name, path, url } = self;
        upload(&store, &path, Some(name), json).map_err(|failure| {
            let path = path.display();
            failure.but(format!(
                "the image is in {path} and not in the store (`rekindle images copy {path} {url}` goes on)"
            ))
        })
    }
}

/// The name of an image: the one that was given, or that of its directory or file.
fn named_or_own(name: Option<String>, path: &Path, is_archive: bool) -> Result<String, Failure> {
    let own = || {
        let own = path.file_name()?.to_str()?;
        let without = ENDINGS.iter().filter(|_| is_archive).find_map(|it| own.strip_suffix(it));
        Some(without.unwrap_or(own).to_owned())
    };
    let nameless = || Failure::usage(anyhow!("{} gives the image no name: say URL/NAME", path.display()));
    name.or_else(own).ok_or_else(nameless)
}

/// Copies an image from a store to a directory, for a restore, and returns the directory that it is in, or the archive.
pub(crate) fn fetch(url: &str, key: &Key, into: &Path, json: bool) -> Result<PathBuf, Failure> {
    let (store, name) = named(url, key)?;
    Ok(download(&store, &name, into, json)?.image)
}

/// Stores the image in a directory, or an archive of a container, under its own name unless another is given.
fn upload(store: &Store, path: &Path, name: Option<String>, json: bool) -> Result<Sent, Failure> {
    let found = path.canonicalize().with_context(|| format!("cannot open {}", path.display()))?;
    let name = named_or_own(name, &found, found.is_file())?;
    let archive = Archive::at(&found).map(|it| Archive::open(&it)).transpose()?;
    let shown = Shown::new("upload", json);
    let tell = |it| shown.show(it);
    let sent = match &archive {
        Some(archive) => store.put_archive(archive, &name, &tell),
        None => store.put_directory(path, &name, &tell),
    };
    shown.clear();
    Ok(sent?)
}

/// Writes an image to a directory.
fn download(store: &Store, name: &str, dir: &Path, json: bool) -> Result<Received, Failure> {
    let image = store.image(name)?;
    let shown = Shown::new("download", json);
    let received = store.get_to(&image, dir, &|it| shown.show(it));
    shown.clear();
    Ok(received?)
}

/// What an image has its bytes in.
fn described(container: Option<&Container>, files: u64) -> String {
    match container {
        Some(it) => format!("an archive of container {}", output::plain(&it.name)),
        None => format!("{files} files"),
    }
}

fn print_sent(sent: &Sent, to: &str, json: bool) -> Result<(), Failure> {
    if json {
        output::print_json(sent)?;
        return Ok(());
    }
    let Sent { name, container, files, bytes, pieces, sent_pieces, sent_bytes, .. } = sent;
    let (bytes, sent) = (output::size(*bytes), output::size(*sent_bytes));
    let what = described(container.as_ref(), *files);
    output::print(&format!("{to}: {name}, {bytes} in {what}; {sent} sent, {sent_pieces} of {pieces} pieces\n"))?;
    Ok(())
}

fn print_received(received: &Received, json: bool) -> Result<(), Failure> {
    if json {
        output::print_json(received)?;
        return Ok(());
    }
    let Received { image, container, parents, files, bytes, received_bytes } = received;
    let (bytes, came) = (output::size(*bytes), output::size(*received_bytes));
    let what = described(container.as_ref(), *files);
    let mut text = format!("{}: {bytes} in {what}; {came} received\n", image.display());
    for parent in parents {
        text += &format!("{}: an image that it builds on\n", parent.display());
    }
    output::print(&text)?;
    Ok(())
}
