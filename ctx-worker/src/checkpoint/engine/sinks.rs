//! Measures how fast a file takes the data written to it, by plain writes and by ours: `rekindle-bench write`, which
//! `scripts/bench write` calls. An image must be on its disk when a dump is over, so the measured time ends when `fsync`
//! returns.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use rekindle_images::{CreateOptions, DataWriter, ImageDir, ImageError, ImageWriter, PIECE_LENGTH};
use serde::Serialize;

use super::bench::BenchError;

const PAGE: usize = 4096;
const LENGTH: usize = PIECE_LENGTH as usize;

/// The figures for this many threads: GB/s, one for each repeat; none where the file system does not support the method.
#[derive(Debug, Default, Serialize)]
struct Figures {
    threads: usize,
    buffered: Vec<f64>,
    /// The same into as many files as there are threads.
    buffered_files: Vec<f64>,
    /// Each piece is sent to the disk as soon as it is written (`sync_file_range`).
    early: Vec<f64>,
    direct: Vec<f64>,
    /// The file's blocks are allocated before.
    direct_reserved: Vec<f64>,
    /// Written as a worker writes an image into one file, with the hashing of each piece.
    ours: Vec<f64>,
    /// The same into as many files as there are threads, as images of much memory are written.
    ours_files: Vec<f64>,
}

/// How pieces are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Buffered,
    BufferedFiles,
    Early,
    Direct,
    DirectReserved,
}

/// Writes this many bytes into new files in `dir`, with each number of threads, and prints JSON.
///
/// # Errors
/// A write failed.
pub(crate) fn bench(dir: &Path, bytes: u64, threads: &[usize], repeats: usize) -> Result<(), BenchError> {
    let mut all: Vec<_> = threads.iter().map(|&threads| Figures { threads, ..Figures::default() }).collect();
    for _ in 0..repeats {
        for figures in &mut all {
            let threads = figures.threads.max(1);
            let measure = |how, rates: &mut Vec<f64>| match write(dir, bytes, threads, how) {
                Ok(rate) => {
                    rates.extend(rate);
                    Ok(())
                }
                Err(source) => Err(BenchError::Write { dir: dir.to_owned(), source }),
            };
            measure(How::Buffered, &mut figures.buffered)?;
            measure(How::BufferedFiles, &mut figures.buffered_files)?;
            measure(How::Early, &mut figures.early)?;
            measure(How::Direct, &mut figures.direct)?;
            measure(How::DirectReserved, &mut figures.direct_reserved)?;
            for (files, rates) in [(1, &mut figures.ours), (threads, &mut figures.ours_files)] {
                rates.push(write_image(dir, bytes, threads, files)?);
            }
        }
    }
    println!("{}", serde_json::to_string(&all)?);
    Ok(())
}

/// Creates a file that is deleted when it is closed.
fn create(dir: &Path, flags: i32) -> io::Result<File> {
    File::options().read(true).write(true).custom_flags(libc::O_TMPFILE | flags).mode(0o600).open(dir)
}

/// Writes the pieces. Returns GB/s, or `None` where the file system cannot.
fn write(dir: &Path, bytes: u64, threads: usize, how: How) -> io::Result<Option<f64>> {
    let direct = matches!(how, How::Direct | How::DirectReserved);
    let count = if how == How::BufferedFiles { threads } else { 1 };
    let open = |_| create(dir, if direct { libc::O_DIRECT } else { 0 });
    let files = match (0..count).map(open).collect::<io::Result<Vec<_>>>() {
        Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
        files => files?,
    };
    let pieces = bytes.div_ceil(PIECE_LENGTH);
    let began = Instant::now();
    if how == How::DirectReserved {
        // SAFETY: no pointers.
        if unsafe { libc::fallocate(files[0].as_raw_fd(), 0, 0, (pieces * PIECE_LENGTH) as libc::off_t) } < 0 {
            return Ok(None);
        }
    }
    in_threads(threads, pieces, |thread, offset, content| {
        let file = &files[thread % count];
        file.write_all_at(content, offset)?;
        if how == How::Early {
            let (fd, from, length) = (file.as_raw_fd(), offset as libc::off64_t, LENGTH as libc::off64_t);
            // SAFETY: no pointers.
            if unsafe { libc::sync_file_range(fd, from, length, libc::SYNC_FILE_RANGE_WRITE) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    })?;
    files.iter().try_for_each(File::sync_all)?;
    Ok(Some(pieces as f64 * PIECE_LENGTH as f64 / began.elapsed().as_secs_f64() / 1e9))
}

/// Writes the pieces into this many files of a separate image, which is then discarded. Returns GB/s.
fn write_image(dir: &Path, bytes: u64, threads: usize, files: usize) -> Result<f64, ImageError> {
    let at = dir.join(format!("rekindle-bench-{}", std::process::id()));
    let made = std::fs::create_dir(&at);
    let other = |action, source| ImageError::Io { action, file: at.display().to_string(), source };
    made.map_err(|error| other("make", error))?;
    let measured = (|| {
        let image = ImageWriter::create(ImageDir::open(&at)?, CreateOptions::new()?)?;
        let mut all = vec![image.data_file(0)?];
        for _ in 1..files {
            all.push(image.another_data_file()?);
        }
        let direct: Vec<_> = all.iter().filter_map(|(index, _)| image.direct_file(*index)).collect();
        let mut writer = DataWriter::of(all, image.key())?;
        if direct.len() == files {
            writer = writer.with_direct(direct);
        }
        let pieces = bytes.div_ceil(PIECE_LENGTH);
        let began = Instant::now();
        let written = in_threads(threads, pieces, |_, offset, content| {
            writer.append_hashed(offset, content, writer.hash(content)).map(drop).map_err(io::Error::other)
        });
        written.map_err(|error| other("write", error))?;
        writer.seal()?;
        image.sync()?;
        let rate = (pieces * PIECE_LENGTH) as f64 / began.elapsed().as_secs_f64() / 1e9;
        image.abort()?;
        Ok(rate)
    })();
    let _ = std::fs::remove_dir_all(&at);
    measured
}

/// Has these threads write these pieces, each from a buffer of its own. Each call receives the thread's number and the
/// position.
fn in_threads(
    threads: usize,
    pieces: u64,
    write: impl Fn(usize, u64, &[u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let next = AtomicU64::new(0);
    let (next, write) = (&next, &write);
    let thread = |thread| {
        let mut buffer = vec![0x5a_u8; LENGTH + PAGE];
        let start = buffer.as_ptr().align_offset(PAGE);
        buffer[start] = 1;
        let content = &buffer[start..start + LENGTH];
        std::iter::repeat_with(|| next.fetch_add(1, Relaxed))
            .take_while(|i| *i < pieces)
            .try_for_each(|i| write(thread, i * PIECE_LENGTH, content))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || thread(number))).collect();
        let ended = |it: std::thread::ScopedJoinHandle<'_, _>| {
            it.join().unwrap_or_else(|_| Err(io::Error::other("a thread failed")))
        };
        threads.into_iter().map(ended).fold(Ok(()), io::Result::and)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_write_works_where_the_file_system_has_it() {
        let dir = tempfile::tempdir().unwrap();
        for how in [How::Buffered, How::BufferedFiles, How::Early] {
            assert!(write(dir.path(), 3 * PIECE_LENGTH, 2, how).unwrap().unwrap() > 0.0);
        }
        for how in [How::Direct, How::DirectReserved] {
            write(dir.path(), 3 * PIECE_LENGTH, 2, how).unwrap();
        }
        for files in [1, 2] {
            assert!(write_image(dir.path(), 3 * PIECE_LENGTH, 2, files).unwrap() > 0.0);
        }
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none());
    }
}
