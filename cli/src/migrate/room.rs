//! Room for the pages of the last image, made at the target while the processes run.
//!
//! The target writes nearly all of their memory into that image while they stand still: from what was sent before. To write a GiB into
//! a new file of a tmpfs takes 0.88 s where it takes 0.34 s into a file that has its memory (medians of three, a virtual machine with two
//! cores). So files without content, which have their memory already, become those of the image:
//!
//! ```text
//!   they run:          memory/PID is made, of so many bytes ──► room/0, room/1, ...   as many bytes each
//!   they stand still:  pages-1.img is to be made            ──► room/0 is that file
//! ```
//!
//! What was not written of such a file is zeros, as in any other. Memory that is not there in time, or for which there is no room, is
//! found as the files are written.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate, renameat_with};

/// The directory of that room among a migration's files.
const ROOM: &str = "room";
/// How many bytes are allocated at a time: in between it can be stopped.
const STEP: u64 = 16 << 20;

/// Files that have memory, and no content.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The sizes that are expected.
    wanted: Vec<u64>,
    /// Makes them.
    maker: Option<JoinHandle<Vec<PathBuf>>>,
    /// Tells it to end.
    stopped: Arc<AtomicBool>,
    /// Those that are made, the largest last.
    made: Vec<PathBuf>,
}

impl Room {
    /// The last image will have files of about these sizes.
    pub(super) fn expect(&mut self, sizes: impl Iterator<Item = u64>) {
        self.wanted = sizes.filter(|it| *it > 0).collect();
        self.wanted.sort_unstable();
    }

    /// Begins to make what is expected, in a migration's directory. Does nothing if it has begun before.
    pub(super) fn begin(&mut self, dir: &Path) {
        let wanted = std::mem::take(&mut self.wanted);
        if wanted.is_empty() {
            return;
        }
        let (dir, stopped) = (dir.join(ROOM), Arc::clone(&self.stopped));
        let make = move || {
            // Without it, the image is written a little later.
            let _ = fs::create_dir(&dir);
            let make = |(number, bytes): (usize, u64)| allocated(&dir.join(number.to_string()), bytes, &stopped).ok();
            let mut made: Vec<_> = wanted.into_iter().enumerate().rev().filter_map(make).collect();
            made.reverse();
            made
        };
        self.maker = std::thread::Builder::new().name("room".to_owned()).spawn(make).ok();
    }

    /// Makes a file of this size, of room if there is some. The largest has to come first. Nothing more is allocated from then on.
    pub(super) fn make(&mut self, path: &Path, size: u64) -> io::Result<()> {
        self.stop();
        let takes_room = |room: PathBuf| renameat_with(CWD, &room, CWD, path, RenameFlags::NOREPLACE).is_ok();
        let file = match self.made.pop().is_some_and(takes_room) {
            true => File::options().write(true).open(path)?,
            false => File::create_new(path)?,
        };
        file.set_len(size)
    }

    /// Removes what is left.
    pub(super) fn remove(mut self, dir: &Path) {
        self.stop();
        let _ = fs::remove_dir_all(dir.join(ROOM));
    }

    fn stop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        if let Some(maker) = self.maker.take() {
            self.made = maker.join().unwrap_or_default();
        }
    }
}

/// Makes a file that has memory for so many bytes, or for as many as there are until this is stopped or there is no more.
fn allocated(path: &Path, bytes: u64, stopped: &AtomicBool) -> io::Result<PathBuf> {
    let file = File::create_new(path)?;
    for at in (0..bytes).step_by(STEP as usize) {
        let length = STEP.min(bytes - at);
        if stopped.load(Ordering::Relaxed) || fallocate(file.as_fd(), FallocateFlags::empty(), at, length).is_err() {
            break;
        }
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    /// Room of these sizes, all of which is made.
    fn room_of(dir: &Path, sizes: &[u64]) -> Room {
        let mut room = Room::default();
        room.expect(sizes.iter().copied());
        room.begin(dir);
        // The second time it does nothing.
        room.begin(dir);
        room.made = room.maker.take().unwrap().join().unwrap();
        room
    }

    #[test]
    fn room_becomes_files_of_zeros_and_of_their_sizes_the_largest_first() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut room = room_of(dir.path(), &[8192, 0, STEP + (1 << 20)]);
        assert_eq!(room.made.len(), 2);
        for (name, size) in [("largest", STEP + 4096), ("next", 20_000), ("without room", 5)] {
            let path = dir.path().join(name);
            room.make(&path, size).unwrap();
            File::options().write(true).open(&path).unwrap().write_all_at(b"x", 3).unwrap();
            let content = fs::read(&path).unwrap();
            assert_eq!(content.len() as u64, size, "{name}");
            assert!(content.iter().enumerate().all(|(at, byte)| *byte == if at == 3 { b'x' } else { 0 }), "{name}");
            if name == "largest" {
                assert!(fs::metadata(&path).unwrap().blocks() * 512 >= size);
            }
        }
        assert_eq!(fs::read_dir(dir.path().join(ROOM)).unwrap().count(), 0);
        room.remove(dir.path());
        assert!(!dir.path().join(ROOM).exists());
    }

    #[test]
    fn what_is_being_made_is_stopped_and_removed() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut room = Room::default();
        room.expect([STEP, STEP].into_iter());
        room.begin(dir.path());
        room.remove(dir.path());
        assert!(!dir.path().join(ROOM).exists());
    }

    #[test]
    fn another_file_is_not_replaced_and_files_are_made_where_there_is_too_little_room() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("there");
        fs::write(&path, "content").unwrap();
        let mut room = room_of(dir.path(), &[4096]);
        assert!(room.make(&path, 10).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"content");
        // Nothing could be allocated.
        let stopped = AtomicBool::new(false);
        fs::create_dir_all(dir.path().join(ROOM)).unwrap();
        let mut room = Room {
            made: vec![allocated(&dir.path().join(ROOM).join("none"), 0, &stopped).unwrap()],
            ..Room::default()
        };
        room.make(&dir.path().join("new"), 10).unwrap();
        assert_eq!(fs::read(dir.path().join("new")).unwrap(), [0; 10]);
    }
}
