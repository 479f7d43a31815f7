//! The way from one directory to another, as an image says where its parent is.

use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::dir::ImageDir;
use crate::{ImageError, names};

impl ImageDir {
    /// The directory at a path relative to this one; links on the way are followed, since CRIU's is one.
    pub(crate) fn open_relative(&self, path: &Path) -> Result<Self, ImageError> {
        if path.is_absolute() || path.as_os_str().is_empty() {
            return Err(ImageError::corrupt(names::MANIFEST, format!("{} is no relative path", path.display())));
        }
        self.open_below(path)
    }

    /// The numbers that tell this directory from every other.
    pub(crate) fn identity(&self) -> Result<(u64, u64), ImageError> {
        let status = self.status()?;
        Ok((status.dev(), status.ino()))
    }

    /// The relative path that leads from this directory to `other`, so that the two can be moved together; `None` where
    /// there is none, as between different roots.
    ///
    /// # Errors
    /// The system says nothing of one of them.
    pub fn way_to(&self, other: &Self) -> Result<Option<PathBuf>, ImageError> {
        let (Ok(from), Ok(to)) = (self.place(), other.place()) else { return Ok(None) };
        let way = relative(&from, &to);
        // The path of a directory under another root, or of one that was removed, leads elsewhere or nowhere.
        match self.open_relative(&way) {
            Ok(found) => Ok((found.identity()? == other.identity()?).then_some(way)),
            Err(_) => Ok(None),
        }
    }

    /// The way to where the link `name` in this directory leads, by which that is found when the link is gone or leads
    /// elsewhere; `name` itself where it is no link, or where there is no such way.
    pub(crate) fn way_through(&self, name: &str) -> PathBuf {
        let by_name = || PathBuf::from(name);
        match self.read_link(name) {
            Some(target) if target.is_relative() => target,
            Some(_) => {
                let other = self.open_relative(Path::new(name));
                other.and_then(|it| self.way_to(&it)).ok().flatten().unwrap_or_else(by_name)
            }
            None => by_name(),
        }
    }
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
    fn there_is_no_way_to_what_was_removed() {
        let place = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| {
            std::fs::create_dir(place.path().join(name)).unwrap();
            ImageDir::open(place.path().join(name)).unwrap()
        });
        assert_eq!(second.way_to(&first).unwrap().unwrap(), Path::new("../first"));
        std::fs::remove_dir(first.path()).unwrap();
        assert_eq!(second.way_to(&first).unwrap(), None);
        // Another of that name is not it.
        std::fs::create_dir(first.path()).unwrap();
        assert_eq!(second.way_to(&first).unwrap(), None);
    }
}
