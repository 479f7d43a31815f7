//! `rekindle images ls` and `rekindle images show`.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use rekindle_stores::{Address, Container, Head, Store, StoreError, StoredFile};
use serde::Serialize;

use super::place::CommonOptions;
use crate::failure::Failure;
use crate::output;

/// Lists the images in a store. Those that cannot be read are named on standard error.
pub(super) fn list(url: &str, common: &CommonOptions) -> Result<(), Failure> {
    let store = Address::parse(url)?.open(common.key.get()?.as_ref())?;
    let store = store.ok_or_else(|| StoreError::NoStore { url: url.to_owned() })?;
    let (images, errors): (Vec<_>, Vec<_>) = store.images()?.into_iter().partition(Result::is_ok);
    let images: Vec<Head> = images.into_iter().flatten().collect();
    if common.json {
        output::print_json(&images)?;
    } else {
        output::print(&table(&images))?;
    }
    let mut bad = 0;
    for error in errors.into_iter().filter_map(Result::err) {
        if !error.is_bad_image() {
            return Err(error.into());
        }
        eprintln!("rekindle: {error}");
        bad += 1;
    }
    if bad > 0 {
        return Err(Failure::bad_image(anyhow!("{bad} images in {url} cannot be read")));
    }
    Ok(())
}

fn table(images: &[Head]) -> String {
    let head = ["NAME", "HOST", "CONTAINER", "AGE", "FILES", "SIZE", "STORED", "BUILDS ON"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
    rows.extend(images.iter().map(|it| {
        vec![
            output::plain(&it.name),
            output::plain(&it.host),
            it.container.as_ref().map_or_else(|| "-".to_owned(), |it| output::plain(&it.name)),
            age(now.saturating_sub(it.created)),
            it.files.to_string(),
            output::size(it.bytes),
            output::size(it.stored),
            match it.parents {
                0 => "-".to_owned(),
                parents => format!("{parents}, with it"),
            },
        ]
    }));
    output::table(&rows, &[3, 4, 5, 6])
}

fn age(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// A store in short.
#[derive(Serialize)]
struct Described {
    url: String,
    /// Whether it has a key.
    keyed: bool,
    encrypted: bool,
    images: usize,
}

pub(super) fn describe(store: &Store, json: bool) -> Result<(), Failure> {
    let images = store.images()?.len();
    let described =
        Described { url: store.url().to_owned(), keyed: store.is_keyed(), encrypted: store.is_encrypted(), images };
    if json {
        output::print_json(&described)?;
        return Ok(());
    }
    let kept = match (described.encrypted, described.keyed) {
        (true, _) => "encrypted",
        (false, true) => "with a key, not encrypted",
        (false, false) => "without a key",
    };
    output::print(&format!("{}: a store {kept}, {images} images\n", output::plain(&described.url)))?;
    Ok(())
}

/// An image with its files.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    head: Head,
    /// The image's folder among those that it is copied with; empty where it builds on no other.
    folder: String,
    /// The folders of the images that it builds on.
    parents_folders: Vec<String>,
    contents: Vec<StoredFile>,
}

/// Shows a store, or an image in it.
pub(super) fn show(url: &str, common: &CommonOptions) -> Result<(), Failure> {
    let (store, name) = Address::parse(url)?.find(common.key.get()?.as_ref())?;
    let Some(name) = name else { return describe(&store, common.json) };
    let image = store.image(&name)?;
    let shown = Shown {
        folder: image.folder().to_owned(),
        parents_folders: image.parents().to_vec(),
        contents: image.files(),
        head: image.head,
    };
    if common.json {
        output::print_json(&shown)?;
        return Ok(());
    }
    let Head { name, checkpoint, host, files, bytes, stored, .. } = &shown.head;
    let mut text = format!(
        "{}: checkpoint {} of {}\n{files} files, {}, {} stored\n",
        output::plain(name),
        output::plain(checkpoint),
        output::plain(host),
        output::size(*bytes),
        output::size(*stored)
    );
    if let Some(Container { name, id }) = &shown.head.container {
        text += &format!("an archive of podman's container {}, {}\n", output::plain(name), output::plain(id));
    }
    if !shown.parents_folders.is_empty() {
        let (folder, parents) = (output::plain(&shown.folder), output::plain(&shown.parents_folders.join(", ")));
        text += &format!("in {folder}, builds on the images in {parents}\n");
    }
    let head = ["MODE", "SIZE", "HOLES", "PIECES", "PATH"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(shown.contents.iter().filter(|it| it.kind != "folder").map(|it| {
        let number = |it: u64| if it == 0 { "-".to_owned() } else { output::size(it) };
        vec![
            format!("{:04o}", it.mode),
            output::size(it.size),
            number(it.holes),
            it.pieces.to_string(),
            output::plain(&it.path),
        ]
    }));
    output::print(&(text + &output::table(&rows, &[1, 2, 3])))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_short() {
        assert_eq!([5, 119, 120, 7200, 172_800].map(age), ["5 s", "119 s", "2 min", "2 h", "2 d"]);
    }
}
