//! `rekindle flatten`.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::Context;
use rekindle_images::{Base, Image, ImageDir, is_image_file};

use crate::descriptors;
use crate::failure::Failure;
use crate::output;

/// Copies the data that an image has in other images into the image itself, or into a copy of it.
pub(crate) fn flatten(dir: &Path, out: Option<&Path>) -> Result<(), Failure> {
    descriptors::with_most(|| write(dir, out))
}

fn write(dir: &Path, out: Option<&Path>) -> Result<(), Failure> {
    let Some(out) = out else {
        let done = rekindle_images::flatten_in_place(dir)?;
        output::print(if done { "flattened\n" } else { "it builds on no other image\n" })?;
        return Ok(());
    };
    let image = Image::open(dir)?;
    match fs::create_dir(out) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(anyhow::Error::from(error).context(format!("cannot make {}", out.display())).into());
        }
        _ => {}
    }
    let committed = rekindle_images::flatten(&image, ImageDir::open(out)?)?;
    copy_others(dir, out).with_context(|| format!("cannot copy CRIU's files to {}", out.display()))?;
    output::print(&format!("{}: {} in {} files\n", out.display(), output::size(committed.bytes), committed.files))?;
    Ok(())
}

/// Copies CRIU's files. CRIU's own link to a parent leads to the same directory as before: CRIU needs that only where it
/// was told to track memory.
fn copy_others(dir: &Path, out: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (name, kind, to) = (entry.file_name(), entry.file_type()?, out.join(entry.file_name()));
        if name.to_str().is_some_and(is_image_file) {
            continue;
        }
        if kind.is_file() {
            fs::copy(entry.path(), &to).with_context(|| to.display().to_string())?;
        } else if kind.is_symlink() && name == Base::CRIU_LINK {
            let target = fs::canonicalize(entry.path()).or_else(|_| fs::read_link(entry.path()))?;
            symlink(target, &to).with_context(|| to.display().to_string())?;
        }
    }
    Ok(())
}
