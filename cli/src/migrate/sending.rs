//! A directory's files, sent on several connections at a time.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, anyhow};

use super::link::{Link, Output, Way};
use super::stream::{self, Extent, StreamError};
use super::talk::Directory;
use crate::failure::Failure;

/// The most bytes of a file that one stream takes at a time.
pub(super) const SHARE: u64 = 16 << 20;
/// The beginning of the names of files that only the target reads, once they are sent.
const DATA: &str = "rekindle-data-";

/// The files and links of a directory, and what of the files is to be sent.
pub(super) fn list(name: &str, dir: &Path) -> Result<(Directory, Vec<Extent>), Failure> {
    let mut directory = Directory { name: name.to_owned(), ..Directory::default() };
    let mut extents = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let entry = entry.with_context(|| format!("cannot list {}", dir.display()))?;
        let path = entry.path();
        let about = || format!("cannot send {}", path.display());
        let file = entry.file_name().into_string().map_err(|_| anyhow!("{}: no such name is sent", about()))?;
        let kind = entry.file_type().with_context(about)?;
        if kind.is_symlink() {
            let target = fs::read_link(&path).with_context(about)?;
            let target =
                target.to_str().map(str::to_owned).ok_or_else(|| anyhow!("{}: no such link is sent", about()))?;
            directory.links.push((file, target));
        } else if kind.is_file() {
            let sent = format!("{name}/{file}");
            extents.extend(stream::extents(&sent, &path, SHARE).map_err(|error| anyhow!(error))?);
            directory.files.push((file, entry.metadata().with_context(about)?.len()));
        } else {
            return Err(anyhow!("{}: it is no file", about()).into());
        }
    }
    Ok((directory, extents))
}

/// Sends parts of files on all streams. Returns the bytes of their content that were sent.
pub(super) fn send_all<T: Sync>(
    way: &dyn Way,
    streams: &mut [Link],
    parts: &[T],
    send: impl Fn(&mut Output, &T, &mut Vec<u8>) -> Result<u64, StreamError> + Sync,
) -> Result<u64, Failure> {
    let (send, next) = (&send, &AtomicUsize::new(0));
    let results = std::thread::scope(|scope| {
        let send = |link| scope.spawn(move || send_some(link, parts, next, send));
        let senders: Vec<_> = streams.iter_mut().map(send).collect();
        senders.into_iter().map(|it| it.join()).collect::<Vec<_>>()
    });
    let lost = |error: &StreamError| Failure::from(anyhow!("{}: {error}", way.host()));
    results.into_iter().try_fold(0, |sum, result| match result {
        Ok(Ok(sent)) => Ok(sum + sent),
        Ok(Err(error)) => Err(lost(&error)),
        Err(_) => Err(anyhow!("a thread that sends has failed").into()),
    })
}

/// Sends parts that no other stream has taken, and waits until they are written.
fn send_some<T>(
    link: &mut Link,
    parts: &[T],
    next: &AtomicUsize,
    send: impl Fn(&mut Output, &T, &mut Vec<u8>) -> Result<u64, StreamError>,
) -> Result<u64, StreamError> {
    let closed = || StreamError::Io(io::ErrorKind::NotConnected.into());
    let (to, from) = link.ends().ok_or_else(closed)?;
    let (mut sent, mut piece) = (0, Vec::new());
    while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
        sent += send(to, part, &mut piece)?;
    }
    stream::mark(to, from)?;
    Ok(sent)
}

/// Gives back the memory that content takes which was sent.
pub(super) fn forget_content(dir: &Path) -> Result<(), Failure> {
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(DATA) {
            let opened = File::options().write(true).open(entry.path());
            let forgotten = opened.and_then(|file| stream::forget(&file));
            forgotten.with_context(|| format!("cannot make room in {}", dir.display()))?;
        }
    }
    Ok(())
}
