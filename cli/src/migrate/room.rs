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
//! What was not written of such a file is zeros, as in any other. Without room, or with too little, files are made as ever.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use rustix::fs::{FallocateFlags, fallocate};

/// The directory of that room among a migration's files.
const ROOM: &str = "room";

/// Files that have memory, and no content.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The sizes that are expected.
    wanted: Vec<u64>,
    /// Makes them.
    maker: Option<JoinHandle<Vec<PathBuf>>>,
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
        if wanted.is_empty() || self.maker.is_some() {
            return;
        }
        let dir = dir.join(ROOM);
        let make = move || {
            // Without it, the image is written a little later.
            let _ = fs::create_dir(&dir);
            let make = |(number, bytes): (usize, u64)| allocated(&dir.join(number.to_string()), bytes).ok();
            wanted.into_iter().enumerate().filter_map(make).collect()
        };
        self.maker = std::thread::Builder::new().name("room".to_owned()).spawn(make).ok();
    }

    /// Makes a file of this size, of room if there is some. The largest has to come first.
    pub(super) fn make(&mut self, path: &Path, size: u64) -> io::Result<()> {
        if let Some(maker) = self.maker.take() {
            self.made = maker.join().unwrap_or_default();
        }
        let file = match self.made.pop() {
            Some(room) => {
                // Unlike a new name, a link replaces no other file.
                fs::hard_link(&room, path)?;
                fs::remove_file(&room)?;
                File::options().write(true).open(path)?
            }
            None => File::create_new(path)?,
        };
        file.set_len(size)
    }

    /// Removes what is left.
    pub(super) fn remove(dir: &Path) {
        let _ = fs::remove_dir_all(dir.join(ROOM));
    }
}

/// Makes a file that has memory for so many bytes.
fn allocated(path: &Path, bytes: u64) -> io::Result<PathBuf> {
    let file = File::create_new(path)?;
    let allocated = fallocate(file.as_fd(), FallocateFlags::empty(), 0, bytes);
    if let Err(error) = allocated {
        fs::remove_file(path)?;
        return Err(error.into());
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn room_becomes_files_of_zeros_and_of_their_sizes_the_largest_first() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let mut room = Room::default();
        room.expect([8192, 0, 1 << 20].into_iter());
        room.begin(dir.path());
        room.begin(dir.path());
        let make = |room: &mut Room, name: &str, size: u64| {
            let path = dir.path().join(name);
            room.make(&path, size).map(|()| path)
        };
        let sizes = [("largest", (1 << 20) - 4096), ("next", 20_000), ("more", 5)];
        for (name, size) in sizes {
            let path = make(&mut room, name, size).unwrap();
            File::options().write(true).open(&path).unwrap().write_all_at(b"x", 3).unwrap();
            let content = fs::read(&path).unwrap();
            assert_eq!(content.len() as u64, size, "{name}");
            assert!(content.iter().enumerate().all(|(at, byte)| *byte == if at == 3 { b'x' } else { 0 }), "{name}");
            let has_room = fs::metadata(&path).unwrap().blocks() * 512 >= size;
            assert_eq!(has_room, name != "next", "it was expected to be smaller");
        }
        assert!(make(&mut room, "more", 5).is_err(), "it is there");
        assert_eq!(fs::read_dir(dir.path().join(ROOM)).unwrap().count(), 0);
        Room::remove(dir.path());
        assert!(!dir.path().join(ROOM).exists());
    }

    #[test]
    fn another_file_is_not_replaced_and_without_room_files_are_made_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("there");
        fs::write(&path, "content").unwrap();
        let mut room = Room::default();
        room.expect([4096].into_iter());
        room.begin(dir.path());
        assert!(room.make(&path, 10).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"content");
        // More than any file system has.
        let mut room = Room::default();
        room.expect([1 << 62].into_iter());
        room.begin(dir.path());
        room.make(&dir.path().join("new"), 10).unwrap();
        assert_eq!(fs::read(dir.path().join("new")).unwrap(), [0; 10]);
    }
}
