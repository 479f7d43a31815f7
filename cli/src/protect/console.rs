//! The console of a protected command: two files, which this process copies to its own output.
//!
//! The job writes into files because these outlive whoever waits for it, and because CRIU restores an open file by its name. After a
//! restore the files are as long as they were at the image, and the job writes the rest again. Whoever follows them shows that once:
//! what is written again is compared with what was shown, and shown from the first difference on. So if a program writes something
//! else the second time, both can be seen here; the files have what it has written last.

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

/// How much of what was shown is compared again. What was shown before that is taken to be the same.
const COMPARED: usize = 1 << 20;

/// A file that is followed.
struct Followed {
    path: PathBuf,
    /// How many bytes of the file were shown.
    shown: u64,
    /// The last of these bytes.
    last: Vec<u8>,
    /// How many bytes of the file, as it is now, are the same as what was shown, as far as they were compared.
    same: u64,
}

impl Followed {
    fn new(path: PathBuf) -> Self {
        Self { path, shown: 0, last: Vec::new(), same: 0 }
    }

    /// Copies what is new in the file.
    fn copy(&mut self, to: &mut impl Write) -> io::Result<()> {
        let Ok(file) = File::open(&self.path) else { return Ok(()) };
        self.same = self.same.min(file.metadata()?.len());
        let mut block = [0; 16 << 10];
        loop {
            let read = file.read_at(&mut block, self.same)?;
            if read == 0 {
                return to.flush();
            }
            if self.same < self.shown {
                self.compare(&block[..read]);
            } else {
                to.write_all(&block[..read])?;
                self.note(&block[..read]);
            }
        }
    }

    /// Compares what was written again. From a difference on, the file is as if it had not been shown.
    fn compare(&mut self, again: &[u8]) {
        let kept_from = self.shown - self.last.len() as u64;
        let positions = self.same..self.shown;
        let was = |at: u64| Some(self.last[usize::try_from(at.checked_sub(kept_from)?).ok()?]);
        let is_same = |(at, byte): &(u64, &u8)| was(*at).is_none_or(|it| it == **byte);
        let same = positions.zip(again).take_while(is_same).count();
        let differs = same < again.len() && self.same + (same as u64) < self.shown;
        self.same += same as u64;
        if differs {
            self.last.truncate(usize::try_from(self.same - kept_from).unwrap_or(0));
            self.shown = self.same;
        }
    }

    fn note(&mut self, shown: &[u8]) {
        self.shown += shown.len() as u64;
        self.same = self.shown;
        self.last.extend_from_slice(shown);
        if self.last.len() > 2 * COMPARED {
            self.last.drain(..self.last.len() - COMPARED);
        }
    }
}

/// Shows what the job writes, until the protection has come to its end. Then this process ends with the job's status.
pub(super) fn follow(folder: &Folder) -> Result<(), Failure> {
    let mut files = folder.console().map(Followed::new);
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
    fn more_than_is_compared_again_is_shown_once_too() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut followed = Followed::new(file.path().to_owned());
        let content: Vec<u8> = (0..5 * COMPARED).map(|at| (at / 7) as u8).collect();
        for (length, expected) in [(content.len(), content.len()), (10, 0), (content.len() - 3, 0), (content.len(), 0)]
        {
            std::fs::write(file.path(), &content[..length]).unwrap();
            let mut shown = Vec::new();
            followed.copy(&mut shown).unwrap();
            assert_eq!(shown.len(), expected, "{length}");
        }
        assert!(followed.last.len() <= 2 * COMPARED);
        std::fs::write(file.path(), [&content[..content.len() - 3], b"end"].concat()).unwrap();
        followed.same = 0;
        let mut shown = Vec::new();
        followed.copy(&mut shown).unwrap();
        assert_eq!(shown, b"end");
    }

    #[test]
    fn what_is_written_again_is_shown_once() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut followed = Followed::new(file.path().to_owned());
        let mut shown = Vec::new();
        for (content, expected) in [
            ("one\ntwo\n", "one\ntwo\n"),
            ("one\n", ""),
            ("one\nt", ""),
            ("one\ntwo\nthree\n", "three\n"),
            ("one\n", ""),
            ("one\nend\n", "end\n"),
            ("one\nend\n", ""),
            ("", ""),
            ("one\nend\nof all\n", "of all\n"),
        ] {
            std::fs::write(file.path(), content).unwrap();
            shown.clear();
            followed.copy(&mut shown).unwrap();
            assert_eq!(String::from_utf8_lossy(&shown), expected);
        }
    }
}
