//! Files for the pages of the last image, made at the target while the processes run.
//!
//! The target writes nearly all of their memory into that image while they stand still: from what was sent before. To write a GiB into
//! a new file of a tmpfs takes 0.88 s on a virtual machine with two cores. Most of that memory has not changed, though, and lies in CRIU's file in
//! the order in which it was sent. So the files are there before, as copies of what was sent, and only what differs is written:
//!
//! ```text
//!   they run:          memory/PID has all that was sent at first ──► room/PID is made, a copy of it
//!   they stand still:  pages-1.img, of the process PID           ──► room/PID is that file; the source hears how much of it was copied
//! ```
//!
//! A copy that is not complete in time is as good as its beginning: behind that the file is zeros, as any other is.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::stream::is_zeros;
use super::talk::MEMORY;

/// The directory of these files among a migration's. No image has this name.
pub(super) const ROOM: &str = "room";
const PAGE: usize = 4096;
/// How many bytes are copied at a time: in between it can be stopped.
const STEP: usize = 4 << 20;

/// The copies, by process: each with its bytes. Behind them, the file has nothing.
type Copies = BTreeMap<u32, (File, u64)>;

/// Copies of processes' memory.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// The processes, and how much of their memory is copied.
    wanted: Vec<(u32, u64)>,
    /// Makes the copies.
    maker: Option<JoinHandle<Copies>>,
    /// Tells it to end.
    stopped: Arc<AtomicBool>,
    made: Copies,
}

impl Room {
    /// The last image will have so much memory of these processes.
    pub(super) fn expect(&mut self, processes: &[(u32, u64)]) {
        self.wanted = processes.iter().copied().filter(|(_, bytes)| *bytes > 0).collect();
    }

    /// Begins to make what is expected, in a migration's directory: the memory has come. Does nothing if it has begun before.
    pub(super) fn begin(&mut self, dir: &Path) {
        let wanted = std::mem::take(&mut self.wanted);
        if wanted.is_empty() {
            return;
        }
        let (dir, stopped) = (dir.to_owned(), Arc::clone(&self.stopped));
        let make = move || {
            // Without it, the image is written a little later.
            let _ = fs::create_dir(dir.join(ROOM));
            let copy = |(pid, bytes): (u32, u64)| {
                let copy = copy(&dir.join(MEMORY).join(pid.to_string()), &path(&dir, pid), bytes, &stopped);
                Some((pid, copy.ok()?))
            };
            wanted.into_iter().take_while(|_| !stopped.load(Ordering::Relaxed)).filter_map(copy).collect()
        };
        self.maker = std::thread::Builder::new().name("room".to_owned()).spawn(make).ok();
    }

    /// Makes a file of this size: of a copy of the memory of this process, if there is one. Returns how many bytes are copied, whole pages from
    /// the file's beginning on; all others are zeros. Nothing more is copied from then on.
    pub(super) fn make(&mut self, dir: &Path, file: &Path, size: u64, of: Option<u32>) -> io::Result<u64> {
        self.stop();
        let copy = of.and_then(|pid| Some((pid, self.made.remove(&pid)?)));
        let becomes = |pid: u32| renameat_with(CWD, path(dir, pid), CWD, file, RenameFlags::NOREPLACE).is_ok();
        match copy {
            Some((pid, (copy, bytes))) if becomes(pid) => {
                let copied = bytes.min(size) / PAGE as u64 * PAGE as u64;
                copy.set_len(copied)?;
                copy.set_len(size)?;
                Ok(copied)
            }
            _ => File::create_new(file)?.set_len(size).map(|()| 0),
        }
    }

    /// Removes what is left.
    pub(super) fn remove(mut self, dir: &Path) {
        self.stop();
        let _ = fs::remove_dir_all(dir.join(ROOM));
    }

    /// Waits until all is copied.
    pub(super) fn wait(&mut self) {
        if let Some(maker) = self.maker.take() {
            self.made = maker.join().unwrap_or_default();
        }
    }

    fn stop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.wait();
    }
}

fn path(dir: &Path, pid: u32) -> PathBuf {
    dir.join(ROOM).join(pid.to_string())
}

/// Copies the first `bytes` of a file into a new one, pages of zeros as holes, until this is stopped or there is no more room. Returns the file,
/// and how many bytes are as in the other.
fn copy(from: &Path, to: &Path, bytes: u64, stopped: &AtomicBool) -> io::Result<(File, u64)> {
    let from = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(from)?;
    let to = File::create_new(to)?;
    let (mut buffer, mut at) = (vec![0; STEP], 0);
    while at < bytes && !stopped.load(Ordering::Relaxed) {
        let part = &mut buffer[..(bytes - at).min(STEP as u64) as usize];
        from.read_exact_at(part, at)?;
        if write_pages(&to, part, at).is_err() {
            break;
        }
        at += part.len() as u64;
    }
    // What was written of a part that failed must not stay.
    to.set_len(at)?;
    Ok((to, at))
}

/// Writes pages, but those of zeros, which are where nothing was written.
fn write_pages(to: &File, pages: &[u8], at: u64) -> io::Result<()> {
    let mut begin = 0;
    while begin < pages.len() {
        let rest = pages[begin..].chunks(PAGE);
        let zeros: usize = rest.clone().take_while(|page| is_zeros(page)).map(<[u8]>::len).sum();
        let content: usize = rest.skip(zeros.div_ceil(PAGE)).take_while(|page| !is_zeros(page)).map(<[u8]>::len).sum();
        begin += zeros;
        to.write_all_at(&pages[begin..begin + content], at + begin as u64)?;
        begin += content;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// A migration's directory with the memory of processes, and the copies that are made of it.
    fn room_of(dir: &Path, processes: &[(u32, &[u8])]) -> Room {
        fs::create_dir(dir.join(MEMORY)).unwrap();
        for (pid, content) in processes {
            fs::write(dir.join(MEMORY).join(pid.to_string()), content).unwrap();
        }
        let mut room = Room::default();
        let expected: Vec<_> = processes.iter().map(|(pid, content)| (*pid, content.len() as u64 - 100)).collect();
        room.expect(&expected);
        room.begin(dir);
        // The second time it does nothing.
        room.begin(dir);
        room.made = room.maker.take().unwrap().join().unwrap();
        room
    }

    #[test]
    fn a_copy_becomes_a_file_of_any_size_and_others_are_zeros() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let content: Vec<u8> = (0..STEP + 50_000).map(|it| (it % 251) as u8 + 1).collect();
        let processes = [(7, &content[..]), (8, &content[..9000]), (9, &content[..9000])];
        let mut room = room_of(dir.path(), &processes);
        for (name, size, of, copied) in [
            ("less", 5000, Some(8), PAGE as u64),
            ("more", 20_000, Some(9), 2 * PAGE as u64),
            ("large", content.len() as u64, Some(7), (content.len() as u64 - 100) / PAGE as u64 * PAGE as u64),
            ("again", 300, Some(7), 0),
            ("none", 300, None, 0),
        ] {
            let file = dir.path().join(name);
            assert_eq!(room.make(dir.path(), &file, size, of).unwrap(), copied, "{name}");
            let made = fs::read(&file).unwrap();
            assert!(made.len() as u64 == size && made[..copied as usize] == content[..copied as usize], "{name}");
            assert!(made[copied as usize..].iter().all(|it| *it == 0), "{name}");
        }
        assert_eq!(fs::read_dir(dir.path().join(ROOM)).unwrap().count(), 0);
        room.remove(dir.path());
        assert!(!dir.path().join(ROOM).exists());
    }

    #[test]
    fn holes_stay_holes_and_what_is_stopped_is_its_beginning() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        let file = File::create(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(&[5; 4096], 40 << 20).unwrap();
        let (_, copied) = copy(&from, &to, 60 << 20, &AtomicBool::new(false)).unwrap();
        assert_eq!(copied, 60 << 20);
        let made = fs::metadata(&to).unwrap();
        assert_eq!((made.len(), made.blocks() * 512), (60 << 20, 4096));
        assert!(fs::read(&to).unwrap()[..] == fs::read(&from).unwrap()[..60 << 20]);
        fs::remove_file(&to).unwrap();
        assert_eq!(copy(&from, &to, 60 << 20, &AtomicBool::new(true)).unwrap().1, 0);
        assert_eq!(fs::metadata(&to).unwrap().len(), 0);
        // A file that is shorter than was said, or a link, is no copy.
        fs::remove_file(&to).unwrap();
        assert!(copy(&from, &to, 65 << 20, &AtomicBool::new(false)).is_err());
        fs::remove_file(&to).unwrap();
        std::os::unix::fs::symlink(&from, dir.path().join("link")).unwrap();
        assert!(copy(&dir.path().join("link"), &to, 4096, &AtomicBool::new(false)).is_err());
    }

    #[test]
    fn what_is_being_made_is_stopped_and_removed_and_another_file_is_not_replaced() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let there = dir.path().join("there");
        fs::write(&there, "content").unwrap();
        let mut room = room_of(dir.path(), &[(7, &[1; 8192])]);
        assert!(room.make(dir.path(), &there, 10, Some(7)).is_err());
        assert_eq!(fs::read(&there).unwrap(), b"content");
        let mut room = Room::default();
        room.expect(&[(7, 8192), (1234, 8192)]);
        room.begin(dir.path());
        room.remove(dir.path());
        assert!(!dir.path().join(ROOM).exists());
    }
}
