//! Rekindle's libraries that the processes of a tree have mapped. The image carries them: CRIU maps the same files again, also on a
//! machine that has only another build.

use std::collections::BTreeSet;
use std::io::Read;

use rekindle_builds::{BuildError, Library, Store, needs};
use rekindle_images::{Build, ImageWriter, Library as Saved};
use tracing::warn;

use super::super::process;
use super::error::SaveError;

/// Puts the builds that processes of a tree have mapped into the image. A library that lies outside of the store is not found: a
/// restore then needs it where it was.
pub(super) fn save(writer: &ImageWriter, store: &Store, root: i32) -> Result<Vec<Build>, SaveError> {
    let (builds, tree) = match (store.list(), process::tree(root)) {
        (Ok(builds), Ok(tree)) => (builds, tree),
        (Err(error), _) => {
            warn!("the image does not carry Rekindle's libraries: {error}");
            return Ok(Vec::new());
        }
        (_, Err(error)) => {
            warn!("the image does not carry Rekindle's libraries: cannot list the tree of {root}: {error}");
            return Ok(Vec::new());
        }
    };
    let mapped: BTreeSet<_> = tree.iter().flat_map(|pid| needs::mapped(*pid, &builds)).collect();
    let mut saved = Vec::new();
    for build in builds.into_iter().filter(|it| mapped.contains(&it.id)) {
        let mut libraries = Vec::new();
        for Library { name, mut file } in Library::in_dir(&build.dir)? {
            let mut content = Vec::new();
            let path = build.dir.join(name);
            file.read_to_end(&mut content).map_err(|source| BuildError::File { what: "cannot read", path, source })?;
            libraries.push(Saved { name: name.to_owned(), code: writer.put_code(&content)? });
        }
        saved.push(Build { id: build.id.to_bytes(), directory: build.dir, libraries });
    }
    Ok(saved)
}
