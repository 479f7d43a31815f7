//! The image that a new one builds on: the daemon finds it by a link in the new one's directory.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Component, Path, PathBuf};

use anyhow::Context;
use rekindle_images::{Base, ImageDir};

use crate::failure::Failure;

/// Makes the link in `dir`, which is there, to an image that can be built on. It is relative, so that the two directories
/// can be moved together.
pub(super) fn link(dir: &Path, on: &Path) -> Result<(), Failure> {
    let whole = |path: &Path| path.canonicalize().with_context(|| path.display().to_string());
    let target = relative(&whole(dir)?, &whole(on)?);
    Base::open(&ImageDir::open(dir)?, &target)?;
    unlink(dir)?;
    let link = dir.join(Base::LINK);
    Ok(symlink(target, &link).with_context(|| format!("cannot make {}", link.display()))?)
}

/// Removes a link that an earlier image has left in `dir`: what is made there builds on nothing that nobody asked for.
pub(super) fn unlink(dir: &Path) -> Result<(), Failure> {
    let link = dir.join(Base::LINK);
    if link.is_symlink() {
        fs::remove_file(&link).with_context(|| format!("cannot remove {}", link.display()))?;
    }
    Ok(())
}

/// The way from one directory to another, both without links and dots.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = from.components().skip(common).map(|_| Component::ParentDir);
    let way: PathBuf = up.chain(to.components().skip(common)).collect();
    if way.as_os_str().is_empty() { PathBuf::from(".") } else { way }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::{CreateOptions, ImageWriter, Manifest, Protocol};

    #[test]
    fn the_way_leads_there() {
        for (from, to, way) in [
            ("/a/b/second", "/a/b/first", "../first"),
            ("/a/second", "/b/c", "../../b/c"),
            ("/a", "/a/first", "first"),
            ("/a/first/second", "/a/first", ".."),
            ("/a", "/a", "."),
        ] {
            assert_eq!(relative(Path::new(from), Path::new(to)), Path::new(way), "{from} {to}");
        }
    }

    #[test]
    fn a_link_is_made_to_an_image_and_to_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| place.path().join(name));
        fs::create_dir(&second).unwrap();
        let link_to = |on: &Path| link(&second, on).map_err(|failure| failure.to_string());
        assert!(link_to(&first).unwrap_err().contains("first"));
        fs::create_dir(&first).unwrap();
        assert!(link_to(&first).unwrap_err().contains("no checkpoint of GPU state"));
        assert!(!second.join(Base::LINK).is_symlink());
        let writer = ImageWriter::create(ImageDir::open(&first).unwrap(), CreateOptions::new().unwrap()).unwrap();
        writer.commit(Manifest::new(1, Protocol::Stop)).unwrap();
        for _ in 0..2 {
            link_to(&first).unwrap();
            assert_eq!(fs::read_link(second.join(Base::LINK)).unwrap(), Path::new("../first"));
        }
        for _ in 0..2 {
            unlink(&second).unwrap();
            assert!(!second.join(Base::LINK).is_symlink());
        }
        // What would be overwritten cannot be built on.
        assert!(link(&first, &first).is_err());
    }
}
