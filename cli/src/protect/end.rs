//! The end of a protection at a user's wish.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::anyhow;

use super::folder::Folder;
use crate::failure::Failure;
use crate::output;

const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a supervisor may be in the middle of something.
const PATIENCE: Duration = Duration::from_secs(600);

/// Stops a protection: the job is left alone, and the images are kept.
pub(super) fn stop(all: &Path, name: &str) -> Result<(), Failure> {
    let folder = find(all, name, Container::Matches)?;
    let name = folder.name();
    folder.wish_stop()?;
    let began = Instant::now();
    loop {
        let record = folder.record()?;
        if record.phase.is_final() {
            let images = record.shelf.good().count();
            let dir = record.wishes.images.display();
            return Ok(output::print(&format!("{name} is {}; {images} images are in {dir}\n", record.phase.name()))?);
        }
        if folder.supervisor().is_none() && folder.guard().is_none() {
            return Err(Failure::refused(anyhow!(
                "nobody supervises {name}: `rekindle protect --supervise {name}` ends it now"
            )));
        }
        if began.elapsed() > PATIENCE {
            return Err(
                anyhow!("the supervisor of {name} does not answer: its log is in {}", folder.path().display()).into()
            );
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Removes a protection that has come to its end, and its images.
pub(super) fn forget(all: &Path, name: &str) -> Result<(), Failure> {
    let folder = find(all, name, Container::MatchesNot)?;
    let record = folder.record()?;
    if !record.phase.is_final() {
        let name = folder.name();
        return Err(Failure::refused(anyhow!("{name} is {}: stop it first", record.phase.name())));
    }
    // Its supervisor may still be uploading an image.
    let _lock = folder.lock()?;
    if record.wishes.images.exists() {
        fs::remove_dir_all(&record.wishes.images)
            .map_err(|error| anyhow!("cannot remove {}: {error}", record.wishes.images.display()))?;
    }
    Ok(folder.remove()?)
}

/// Whether the name of a container is as good as that of its protection. Not where images are removed: a later container may have the name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Container {
    Matches,
    MatchesNot,
}

/// The protection with this name, or of this process; or of this container, as long as it has not come to its end.
fn find(all: &Path, name: &str, container: Container) -> Result<Folder, Failure> {
    let folder = Folder::named(all, name)?;
    if folder.path().exists() {
        return Ok(folder);
    }
    let pid = name.parse().ok();
    let is_of = |it: &Folder| {
        it.record().is_ok_and(|it| match &it.wishes.container {
            Some(of) => container == Container::Matches && !it.phase.is_final() && of.name == name,
            None => pid.is_some() && it.job.map(|it| it.pid) == pid,
        })
    };
    let found = Folder::all(all)?.into_iter().rfind(is_of);
    found.ok_or_else(|| Failure::refused(anyhow!("there is no protection {name}: `rekindle protect --list` shows all")))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use rekindle_protect::record::{Every, Wishes};
    use rekindle_protect::{Container as Protected, Event, Record, Rules};

    use super::*;

    fn wishes(images: PathBuf, container: &str) -> Wishes {
        Wishes {
            every: Every::Auto,
            keep: 3,
            chain: 0,
            images,
            levels: Vec::new(),
            key: None,
            mtbf: 3600.0,
            verify_every: 3600.0,
            rules: Rules { restore: true, nonzero_fails: false, limit: 5 },
            checkpoint: Vec::new(),
            restore: Vec::new(),
            socket: PathBuf::from("/socket"),
            command: Vec::new(),
            container: Some(Protected { id: format!("id of {container}"), name: container.to_owned(), podman: None }),
        }
    }

    #[test]
    fn a_container_names_its_protection_only_as_long_as_that_goes_on_and_never_for_its_removal() {
        let all = tempfile::tempdir().unwrap();
        let folder = Folder::named(all.path(), "train").unwrap();
        let mut record = Record::new(wishes(all.path().join("images"), "job"), None, String::new());
        folder.make(&record).unwrap();
        assert_eq!(find(all.path(), "job", Container::Matches).unwrap().name(), "train");
        assert!(find(all.path(), "job", Container::MatchesNot).is_err());
        record.phase = std::mem::take(&mut record.phase).next(Event::Stop, record.wishes.rules);
        record.write(folder.path()).unwrap();
        assert!(find(all.path(), "job", Container::Matches).is_err());
        assert!(forget(all.path(), "job").is_err() && folder.path().exists());
        forget(all.path(), "train").unwrap();
        assert!(!folder.path().exists() && !all.path().join("images").exists());
    }
}
