//! The image that a new one builds on: the daemon finds it by a link in the directory of the new image.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::Context;
use rekindle_images::{Base, ImageDir};

use crate::failure::Failure;

/// Makes the link in the existing `dir` to an image that can be built on. The link is relative, so that the two directories
/// can be moved together.
pub(crate) fn link(dir: &Path, on: &Path) -> Result<(), Failure> {
    let (from, to) = (ImageDir::open(dir)?, ImageDir::open(on)?);
    let target = from.way_to(&to)?.with_context(|| {
        let (dir, on) = (dir.display(), on.display());
        format!("there is no relative path from {dir} to {on}: choose a directory beside it")
    })?;
    Base::open(&from, &target)?;
    unlink(dir)?;
    let link = dir.join(Base::LINK);
    Ok(symlink(target, &link).with_context(|| format!("cannot make {}", link.display()))?)
}

/// Removes a link that an earlier image has left in `dir`, so that a new image there builds on no image by accident. The
/// earlier image does not need the link.
pub(crate) fn unlink(dir: &Path) -> Result<(), Failure> {
    let link = dir.join(Base::LINK);
    if link.is_symlink() {
        fs::remove_file(&link).with_context(|| format!("cannot remove {}", link.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use super::*;
    use rekindle_images::{CreateOptions, Image, ImageWriter, Manifest, Protocol};

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
        // An image that would be overwritten cannot be built on.
        assert!(link(&first, &first).is_err());
    }
    /// Prepares a dump into a directory that has an image; the dump may fail before it has written anything.
    #[test]
    fn an_image_that_was_built_on_another_does_not_need_the_link() {
        let place = tempfile::tempdir().unwrap();
        let [first, second, third] = ["first", "second", "third"].map(|name| {
            fs::create_dir(place.path().join(name)).unwrap();
            place.path().join(name)
        });
        for dir in [&first, &third] {
            let writer = ImageWriter::create(ImageDir::open(dir).unwrap(), CreateOptions::new().unwrap()).unwrap();
            writer.put_code(b"some code").unwrap();
            writer.commit(Manifest::new(1, Protocol::Stop)).unwrap();
        }
        link(&second, &first).unwrap();
        let dir = ImageDir::open(&second).unwrap();
        let base = Base::find(&dir).unwrap();
        assert!(base.is_some());
        let writer = ImageWriter::create_on(dir, CreateOptions::new().unwrap(), base).unwrap();
        writer.put_code(b"some code").unwrap();
        writer.commit(Manifest::new(2, Protocol::Stop)).unwrap();
        let is_whole = || {
            let image = Image::open(&second).unwrap();
            image.depth() == 1 && image.read_code(image.manifest().code[0].hash).unwrap() == b"some code"
        };
        assert!(is_whole());
        link(&second, &third).unwrap();
        assert!(is_whole());
        // The image's own base is not overwritten.
        let failure = link(&first, &second).unwrap_err();
        assert!(failure.to_string().contains("`rekindle flatten "), "{failure}");
        assert_eq!(failure.exit_code(), ExitCode::from(3));
        assert!(!first.join(Base::LINK).is_symlink() && is_whole());
        unlink(&second).unwrap();
        assert!(is_whole());
    }
}
