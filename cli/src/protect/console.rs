//! The console of a protected command: two files, which this process copies to its own output.
//!
//! The job writes into files because these outlive whoever waits for it, and because CRIU restores an open file by its name. After a
//! restore the files are as long as they were at the image, and the job writes the rest again. Whoever follows them shows each byte
//! once: it goes on where it was when the file is that long again. A program that writes something else the second time has its output
//! mixed here; the files have what it has written last.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::anyhow;
use rekindle_protect::Phase;

use super::folder::Folder;
use crate::failure::Failure;

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A file that is followed.
struct Followed {
    path: PathBuf,
    shown: u64,
}

impl Followed {
    /// Copies what is new in the file.
    fn copy(&mut self, to: &mut impl Write) -> io::Result<()> {
        let Ok(file) = File::open(&self.path) else { return Ok(()) };
        let mut block = [0; 16 << 10];
        loop {
            let read = file.read_at(&mut block, self.shown)?;
            if read == 0 {
                return to.flush();
            }
            to.write_all(&block[..read])?;
            self.shown += read as u64;
        }
    }
}

/// Shows what the job writes, until the protection has come to its end. Then this process ends with the job's status.
pub(super) fn follow(folder: &Folder) -> Result<(), Failure> {
    let mut files = folder.console().map(|path| Followed { path, shown: 0 });
    loop {
        // What the job has written before its end is in the files when the record tells of the end.
        let phase = folder.record()?.phase;
        let [out, err] = &mut files;
        // Nobody may read it any more. The job goes on all the same.
        let _ = out.copy(&mut io::stdout()).and_then(|()| err.copy(&mut io::stderr()));
        match phase {
            Phase::Over { ending } => match ending.status() {
                Some(status) => std::process::exit(status),
                None => return Err(anyhow!("the job has failed: {ending}").into()),
            },
            Phase::GivenUp { why } => {
                let advice = format!("its images are kept: `rekindle protect --list` shows {}", folder.name());
                return Err(anyhow!("{why}; {advice}").into());
            }
            Phase::Stopped => {
                eprintln!("rekindle: the protection was stopped, and the job runs on without it");
                return Ok(());
            }
            Phase::Watching { .. } | Phase::Restoring { .. } => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_again_is_shown_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut followed = Followed { path: file.path().to_owned(), shown: 0 };
        let mut shown = Vec::new();
        for (content, expected) in [("one\ntwo\n", "one\ntwo\n"), ("one\n", ""), ("one\ntwo\nthree\n", "three\n")] {
            std::fs::write(file.path(), content).unwrap();
            shown.clear();
            followed.copy(&mut shown).unwrap();
            assert_eq!(String::from_utf8_lossy(&shown), expected);
        }
    }
}
