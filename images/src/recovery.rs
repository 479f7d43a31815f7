//! Completing or removing what a killed writer has left in a directory.
//!
//! ```text
//!   a commit,      killed behind its commit record   ─► its manifest gets its name
//!                  killed before that                ─► files that no commit record names are removed
//!   a flattening,  whole, or killed as files moved   ─► its files move over those of the image that it was made of
//!                  else, or of another image         ─► it is removed: it must never take the place of a newer one
//! ```

use crate::ImageError;
use crate::dir::ImageDir;
use crate::envelope;
use crate::manifest::Manifest;
use crate::names::{BESIDE, COMMIT, LAST_RESTORE, MANIFEST, MANIFEST_TEMPORARY, Name};
use crate::record::{CommitRecord, FileEntry};

/// Completes the last step of a commit that was killed in it, and removes what no commit record names. Returns the record
/// of the image that is there. A record that cannot be read counts as none.
pub(crate) fn settle_commit(dir: &ImageDir) -> Result<Option<CommitRecord>, ImageError> {
    let found = CommitRecord::read(dir).unwrap_or_default();
    let record = found.filter(|it| it.sizes().is_ok() && matches!(it.manifest(dir), Ok(Some(_))));
    if let Some(record) = &record
        && !matches!(envelope::open(dir, envelope::MANIFEST), Ok(Some(manifest)) if record.is_of(&manifest))
    {
        dir.rename(MANIFEST_TEMPORARY, MANIFEST)?;
    }
    let names = dir.names()?;
    if record.is_none() && names.iter().any(|name| name == COMMIT) {
        dir.remove(COMMIT)?;
    }
    // A record and its manifest must be durable before what they do not name is gone, and the record gone before its files.
    dir.sync()?;
    let mut kept = record.as_ref().map(CommitRecord::names).unwrap_or_default();
    if record.is_some() {
        kept.insert(LAST_RESTORE);
    }
    for name in names.iter().filter(|name| Name::parse(name).is_some() && !kept.contains(name.as_str())) {
        dir.remove(name)?;
    }
    Ok(record)
}

/// Completes a flattening in the directory that was killed while files moved over, or after it was whole; removes what
/// is left of one that came less far, or of another image. Whether there was one to complete.
pub(crate) fn settle_flattening(dir: &ImageDir) -> Result<bool, ImageError> {
    let Some(beside) = dir.inner_dir(BESIDE)? else { return Ok(false) };
    match CommitRecord::read(&beside)? {
        Some(record) if belongs(dir, &record)? => move_over(dir, &beside, &record).map(|()| true),
        _ => dir.remove_dir(BESIDE).map(|()| false),
    }
}

/// Whether a committed image beside the one in `dir` was made of that: both are the same checkpoint. While files move over
/// there is no commit record in `dir`, and its manifest, if it is there, is of either.
fn belongs(dir: &ImageDir, record: &CommitRecord) -> Result<bool, ImageError> {
    if let Some(own) = CommitRecord::read(dir)? {
        return Ok(own.id == record.id);
    }
    match Manifest::peek(dir) {
        Ok(manifest) => Ok(manifest.id == record.id),
        Err(ImageError::NotAnImage { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Moves a committed image over that of the directory around it. Every step may have been done before.
pub(crate) fn move_over(dir: &ImageDir, beside: &ImageDir, record: &CommitRecord) -> Result<(), ImageError> {
    let manifest = FileEntry { name: MANIFEST.to_owned(), size: record.manifest_length };
    for FileEntry { name, size } in record.files.iter().chain([&manifest]) {
        let found = beside.open_file(name)?.map_or_else(|| dir.require_file(name), Ok)?.1;
        if found != *size {
            return Err(ImageError::corrupt(name, format!("it has {found} bytes, and {size} were written")));
        }
    }
    // The folder itself first: it must not be lost with what it takes the place of.
    dir.sync()?;
    dir.remove(COMMIT)?;
    dir.sync()?;
    let names = record.files.iter().map(|it| it.name.as_str());
    for name in names.clone().chain([MANIFEST]) {
        if beside.open_file(name)?.is_some() {
            dir.move_in(beside, name, name)?;
        }
    }
    for name in dir.names()? {
        let kept = name == MANIFEST || names.clone().any(|it| it == name);
        if Name::parse(&name).is_some() && !kept {
            dir.remove(&name)?;
        }
    }
    dir.sync()?;
    // From here on it is whole again.
    dir.move_in(beside, COMMIT, COMMIT)?;
    dir.sync()?;
    dir.remove_dir(BESIDE)
}
