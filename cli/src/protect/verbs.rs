//! The verbs of this program that a supervisor starts: they do the work, and say in JSON how it went.
//!
//! Each is a process of its own, for three reasons: a supervisor that is killed does not cut a dump off, a verb that is killed does not
//! end the supervisor, and a verb's memory is given back. The supervisor's lock is the standard input of those that change images, so the
//! next supervisor waits until they have ended.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, anyhow};
use rekindle_protect::record::Wishes;
use rekindle_protect::{Container, Cost};
use serde_json::Value;

use super::archive::{self, Unpacked, Wrong};
use super::container;

/// The exit code of a bad image.
const BAD_IMAGE: i32 = 4;
/// The most that is kept of what a verb says of a failure.
const LONGEST: usize = 500;

/// How a verb has failed.
#[derive(Debug)]
pub(super) struct Failed {
    /// Whether the image is bad.
    pub(super) bad_image: bool,
    pub(super) why: String,
}

/// Starts verbs for a protection.
pub(super) struct Verbs {
    wishes: Wishes,
    lock: File,
}

impl Verbs {
    pub(super) fn new(wishes: &Wishes, lock: File) -> Self {
        Self { wishes: wishes.clone(), lock }
    }

    /// Makes a checkpoint, and returns for how many seconds the job stood still, and whether the protocol was a concurrent one. None
    /// for a job without GPU processes. A container's builds on no other.
    pub(super) fn checkpoint(&self, pid: i32, dir: &Path, on: Option<&Path>) -> Result<Option<Cost>, Failed> {
        let mut arguments: Vec<OsString> = vec!["checkpoint".into(), "--json".into()];
        match &self.wishes.container {
            None => arguments.extend([pid.to_string().into(), dir.into()]),
            Some(container) => {
                arguments.extend(["--container", &container.id, "--compress", "none"].map(Into::into));
                archive::make_dir(dir)?;
                arguments.extend(["--export".into(), archive::archive(dir).into()]);
                arguments.extend(of_podman(container));
            }
        }
        arguments.extend(on.into_iter().flat_map(|it| ["--on".into(), it.into()]));
        arguments.extend(self.wishes.checkpoint.iter().map(Into::into));
        let said = self.run(&arguments)?;
        Ok(cost(&said["dump"]))
    }

    /// Restores an image of processes, after it was verified, and returns when all of it is loaded. That of a container must have been
    /// verified ([`verify`](Self::verify)), and what was left of the container removed; it runs then, and is loaded meanwhile.
    pub(super) fn restore(&self, dir: &Path) -> Result<(), Failed> {
        let mut arguments: Vec<OsString> = vec!["restore".into(), "--json".into()];
        match &self.wishes.container {
            None => {
                arguments.push(dir.into());
                arguments.extend(["--restore-detached", "--wait-loaded", "--verify"].map(Into::into));
            }
            Some(container) => {
                // Without --name, it gets the id, the name and the addresses that it had.
                arguments.extend(["--import".into(), archive::archive(dir).into()]);
                arguments.extend(of_podman(container));
            }
        }
        arguments.extend(self.wishes.restore.iter().map(Into::into));
        self.run(&arguments).map(drop)
    }

    /// Removes what is left of the container ([`container::remove`]).
    pub(super) fn remove(&self, container: &Container, by_force: bool) -> anyhow::Result<()> {
        container::remove(container, self.lock()?, by_force)
    }

    /// Compares every hash of an image; of an archive that was verified before, the one of the whole file.
    pub(super) fn verify(&self, dir: &Path) -> Result<(), Failed> {
        if self.wishes.container.is_none() {
            return self.verify_image(dir);
        }
        if let Some(has_its_hash) = archive::has_its_hash(dir) {
            return Ok(has_its_hash?);
        }
        let lock = self.lock().map_err(|error| Failed { bad_image: false, why: format!("{error:#}") })?;
        self.verify_image(&Unpacked::of(dir, lock)?.image())?;
        Ok(archive::note_hash(dir)?)
    }

    /// As [`verify`](Self::verify), for an image that is kept and beside the job: it is read from the disk, and no other supervisor
    /// waits for it.
    pub(super) fn verify_again(&self, dir: &Path) -> Result<(), Failed> {
        forget_cached(dir);
        if self.wishes.container.is_some() {
            let unknown = || Err(Wrong::Failed("it has no hash to compare with".to_owned()));
            return Ok(archive::has_its_hash(dir).unwrap_or_else(unknown)?);
        }
        let verify: [OsString; 3] = ["verify".into(), dir.into(), "--json".into()];
        self.run_with(&verify, Stdio::null()).map(drop)
    }

    /// Whether an image is good that the former supervisor has not noted. An archive that was never verified is not: a crash of the machine
    /// may have left it with a part of its bytes, which only its hash would tell.
    pub(super) fn verify_unknown(&self, dir: &Path) -> Result<(), Failed> {
        if self.wishes.container.is_none() {
            return self.verify_image(dir);
        }
        archive::has_its_hash(dir).unwrap_or_else(|| Err(Wrong::Damaged("it was never verified".to_owned())))?;
        Ok(())
    }

    fn verify_image(&self, dir: &Path) -> Result<(), Failed> {
        self.run(&["verify".into(), dir.into(), "--json".into()]).map(drop)
    }

    /// Makes an image independent of others.
    pub(super) fn flatten(&self, dir: &Path) -> Result<(), Failed> {
        self.run(&["flatten".into(), dir.into()]).map(drop)
    }

    /// Copies an image into a store, under this name.
    pub(super) fn upload(&self, dir: &Path, url: &str, name: &str) -> Result<(), Failed> {
        self.images(&["copy".as_ref(), dir.as_os_str(), format!("{url}/{name}").as_ref()]).map(drop)
    }

    /// Copies an image of a store into this directory, which must not be there, and returns where in it the image is: one that builds on
    /// others comes with them. An archive is in the directory itself.
    pub(super) fn fetch(&self, url: &str, name: &str, dir: &Path) -> Result<PathBuf, Failed> {
        let said = self.images(&["copy".as_ref(), format!("{url}/{name}").as_ref(), dir.as_os_str()])?;
        if let Some(container) = &self.wishes.container {
            if said["container"]["id"] != container.id.as_str() {
                let why = format!("{url}/{name} is no archive of container {}", container.name);
                return Err(Failed { bad_image: true, why });
            }
            return Ok(dir.to_owned());
        }
        Ok(said["image"].as_str().map_or_else(|| dir.to_owned(), PathBuf::from))
    }

    /// The images of a store: their names, and the checkpoints of which they are.
    pub(super) fn stored(&self, url: &str) -> Result<BTreeMap<String, String>, Failed> {
        let said = self.images(&["ls".as_ref(), url.as_ref()])?;
        let text = |it: &Value, field: &str| it[field].as_str().unwrap_or_default().to_owned();
        Ok(said.as_array().into_iter().flatten().map(|it| (text(it, "name"), text(it, "checkpoint"))).collect())
    }

    /// Removes an image from a store.
    pub(super) fn remove_stored(&self, url: &str, name: &str) -> Result<(), Failed> {
        self.images(&["rm".as_ref(), format!("{url}/{name}").as_ref()]).map(drop)
    }

    /// Removes from a store what no image needs.
    pub(super) fn collect(&self, url: &str) -> Result<(), Failed> {
        self.images(&["gc".as_ref(), url.as_ref()]).map(drop)
    }

    fn images(&self, arguments: &[&OsStr]) -> Result<Value, Failed> {
        let mut all: Vec<OsString> = vec!["images".into()];
        all.extend(arguments.iter().map(Into::into));
        all.push("--json".into());
        all.extend(self.wishes.key.iter().flat_map(|it| ["--key".into(), it.into()]));
        self.run(&all)
    }

    fn command(&self, arguments: &[OsString]) -> anyhow::Result<Command> {
        let mut command = Command::new(std::env::current_exe().context("cannot tell where rekindle is")?);
        command.args(arguments).env("REKINDLE_SOCKET", &self.wishes.socket);
        Ok(command)
    }

    /// The lock, for what is started.
    fn lock(&self) -> anyhow::Result<File> {
        self.lock.try_clone().context("cannot hand the lock on")
    }

    fn run(&self, arguments: &[OsString]) -> Result<Value, Failed> {
        let lock = self.lock().map_err(|error| Failed { bad_image: false, why: format!("{error:#}") })?;
        self.run_with(arguments, lock.into())
    }

    fn run_with(&self, arguments: &[OsString], stdin: Stdio) -> Result<Value, Failed> {
        let ran = || -> anyhow::Result<Output> {
            self.command(arguments)?.stdin(stdin).output().context("cannot run rekindle")
        };
        let output = ran().map_err(|error| Failed { bad_image: false, why: format!("{error:#}") })?;
        let said = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if output.status.success() { Ok(said) } else { Err(failed(&output, &said)) }
    }
}

/// Has the kernel forget what it keeps in memory of the files in a directory, so that who reads them next reads the disk. What is not on
/// the disk yet stays in memory.
fn forget_cached(dir: &Path) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|it| it.path()) {
        // Pipes and the like are opened by nobody here.
        if path.is_file()
            && let Ok(file) = File::open(path)
        {
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}

impl From<Wrong> for Failed {
    fn from(wrong: Wrong) -> Self {
        match wrong {
            Wrong::Damaged(why) => Self { bad_image: true, why },
            Wrong::Failed(why) => Self { bad_image: false, why },
        }
    }
}

/// Arguments of checkpoints and restores of a container. Its volumes stay on this host as they are, like the files of processes.
fn of_podman(container: &Container) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["--ignore-volumes".into()];
    arguments.extend(container.podman.iter().flat_map(|it| ["--podman".into(), it.into()]));
    arguments
}

/// Why a verb has failed.
fn failed(output: &Output, said: &Value) -> Failed {
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().rfind(|it| !it.trim().is_empty()).map(|it| it.trim_start_matches("rekindle: "));
    let reason = said["reason"].as_str().or(last).map(str::to_owned);
    let mut why = reason.unwrap_or_else(|| anyhow!("it ended with {}", output.status).to_string());
    if let Some((end, _)) = why.char_indices().nth(LONGEST) {
        why.truncate(end);
    }
    Failed { bad_image: output.status.code() == Some(BAD_IMAGE), why }
}

/// What a dump has cost, by its report. The job stands still in CRIU's freeze too, which is not part of the stall.
fn cost(dump: &Value) -> Option<Cost> {
    let phases = dump["phases"].as_array()?.iter();
    let still = phases.filter(|it| it["name"] == "stall" || it["name"] == "freeze");
    let still: f64 = still.filter_map(|it| it["duration_ns"].as_f64()).sum();
    let concurrent = dump["protocol"] != "stop";
    Some(Cost { stall: still / 1e9, durable: dump["seconds"].as_f64()?, concurrent })
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_stands_still_in_the_freeze_and_in_the_stall() {
        let phase = |name: &str, ms: u64| json!({ "name": name, "duration_ns": ms * 1_000_000, "bytes": 0 });
        let phases = [phase("quiesce", 7), phase("freeze", 300), phase("copy", 900), phase("stall", 20)];
        let dump = json!({ "protocol": "cow", "seconds": 1.5, "phases": phases });
        assert_eq!(cost(&dump), Some(Cost { stall: 0.32, durable: 1.5, concurrent: true }));
        assert_eq!(cost(&json!(null)), None);
    }

    #[test]
    fn the_reason_of_a_failure_is_what_the_verb_says() {
        let output = |code: i32, stderr: &str| Output {
            status: ExitStatus::from_raw(code << 8),
            stdout: Vec::new(),
            stderr: stderr.into(),
        };
        let bad = failed(&output(4, "image, byte 3: wrong\nrekindle: the image is bad\n"), &Value::Null);
        assert!(bad.bad_image && bad.why == "the image is bad");
        let refused = failed(&output(3, "x"), &json!({ "reason": "a sharer" }));
        assert!(!refused.bad_image && refused.why == "a sharer");
        assert!(failed(&output(1, ""), &Value::Null).why.contains("exit status: 1"));
        assert_eq!(failed(&output(1, &"é".repeat(900)), &Value::Null).why.chars().count(), LONGEST);
    }
}
