//! What clients of a warm image have taught about their writes (`rekindle_wire::control::Learned`), for clients that borrow memory.
//! It is kept in a file for each image, under the checksum of the manifest: the daemon that comes next knows it too.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use rekindle_images::Checksum;
use rekindle_wire::control::Learned;
use serde::{Deserialize, Serialize};
use tracing::warn;

use super::super::super::{lock, state_dir};

/// The folder in the state directory.
const FOLDER: &str = "learned";
/// The version of the files.
const VERSION: u32 = 1;
/// The most images that files are kept for.
const MOST_FILES: usize = 256;
/// How long lessons that come one after the other wait to be written.
const INTERVAL: Duration = Duration::from_secs(1);

/// A file.
#[derive(Serialize, Deserialize)]
struct Kept {
    version: u32,
    /// By the places of the image's clients.
    clients: Vec<Learned>,
}

/// The lessons of an image's clients, by their places.
pub(super) struct Lessons {
    file: PathBuf,
    state: Mutex<State>,
}

struct State {
    clients: Vec<Learned>,
    /// When the file is to be written; none if it has everything.
    due: Option<Instant>,
}

impl Lessons {
    /// The lessons of an image that has so many clients.
    pub(super) fn open(state: &Path, image: Checksum, clients: usize) -> Self {
        let file = state.join(FOLDER).join(format!("{image}.json"));
        let trusted = state_dir::is_ours(state) && state_dir::is_ours(&state.join(FOLDER));
        let mut known = if trusted { read(&file) } else { Vec::new() };
        known.resize_with(clients, Learned::default);
        Self { file, state: Mutex::new(State { clients: known, due: None }) }
    }

    /// What the client at a place, and its former selves, have taught.
    pub(super) fn of(&self, place: usize) -> Learned {
        lock(&self.state).clients.get(place).cloned().unwrap_or_default()
    }

    /// A client has taught more. `is_last`: it is about to end.
    pub(super) fn add(&self, place: usize, more: &Learned, is_last: bool) {
        let mut state = lock(&self.state);
        let Some(known) = state.clients.get_mut(place) else { return };
        known.add(more);
        let now = Instant::now();
        state.due = match state.due {
            _ if is_last => Some(now),
            None => Some(now + INTERVAL),
            due => due,
        };
    }

    /// In how long the file is to be written; none if it has everything.
    pub(super) fn due_in(&self) -> Option<Duration> {
        lock(&self.state).due.map(|due| due.saturating_duration_since(Instant::now()))
    }

    /// Writes the file if it lacks something. Only the image's own thread does that: a disk may be slow.
    pub(super) fn write(&self) {
        let clients = {
            let mut state = lock(&self.state);
            if state.due.take().is_none() {
                return;
            }
            state.clients.clone()
        };
        if let Err(error) = self.try_write(&Kept { version: VERSION, clients }) {
            warn!("cannot keep what clients of an image have taught in {}: {error}", self.file.display());
        }
    }

    fn try_write(&self, kept: &Kept) -> io::Result<()> {
        if let Some(folder) = self.file.parent() {
            state_dir::make(folder)?;
            make_room(folder, &self.file)?;
        }
        state_dir::write(&self.file, &serde_json::to_vec(kept)?)
    }
}

fn read(file: &Path) -> Vec<Learned> {
    let Ok(bytes) = fs::read(file) else { return Vec::new() };
    match serde_json::from_slice::<Kept>(&bytes) {
        Ok(Kept { version: VERSION, clients }) => clients,
        // Another release has written it. Everything can be learned again.
        _ => Vec::new(),
    }
}

/// Removes the files that were written longest ago, so that there is room for one more.
fn make_room(folder: &Path, file: &Path) -> io::Result<()> {
    let others = fs::read_dir(folder)?.flatten().map(|it| it.path()).filter(|it| it != file);
    let mut others: Vec<(SystemTime, PathBuf)> =
        others.filter_map(|it| Some((fs::metadata(&it).ok()?.modified().ok()?, it))).collect();
    others.sort();
    let surplus = (others.len() + 1).saturating_sub(MOST_FILES);
    others.into_iter().take(surplus).try_for_each(|(_, it)| fs::remove_file(it))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(address: u64) -> Learned {
        Learned { kernels: Vec::new(), written: vec![address] }
    }

    #[test]
    fn lessons_outlive_the_daemon_and_old_ones_make_room() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        state_dir::make(&state).unwrap();
        let image = |number: u8| Checksum::from_bytes([number; 16]);
        let lessons = Lessons::open(&state, image(1), 2);
        assert_eq!(lessons.due_in(), None);
        lessons.add(9, &written(5), true);
        assert_eq!(lessons.due_in(), None, "there is no such client");
        lessons.add(1, &written(7), false);
        assert!(lessons.due_in().is_some_and(|it| !it.is_zero()));
        lessons.add(1, &written(5), true);
        assert_eq!(lessons.due_in(), Some(Duration::ZERO));
        assert_eq!((lessons.of(0), lessons.of(1).written), (Learned::default(), vec![5, 7]));
        lessons.write();
        assert_eq!(lessons.due_in(), None);
        assert_eq!(Lessons::open(&state, image(1), 2).of(1).written, [5, 7]);
        assert_eq!(Lessons::open(&state, image(2), 2).of(1), Learned::default());

        let folder = state.join(FOLDER);
        for number in 0..2 * MOST_FILES {
            fs::write(folder.join(format!("{number}.json")), "{}").unwrap();
        }
        lessons.add(0, &written(3), true);
        lessons.write();
        assert_eq!(fs::read_dir(&folder).unwrap().count(), MOST_FILES);
        assert_eq!(Lessons::open(&state, image(1), 2).of(0), written(3));
        fs::write(folder.join(format!("{}.json", image(1))), "{\"version\":99}").unwrap();
        assert_eq!(Lessons::open(&state, image(1), 1).of(0), Learned::default());
    }
}
