//! A program in a container of any engine: its container shares a folder with the test, and the test learns from that folder how far
//! the program is and what it has printed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::app::{self, Hold, undisturbed};
use crate::wait::until_true;
use crate::{Node, Result, stage};

/// The program, which is in the folder that [`stage::apps`] names.
const NAME: &str = "globals";
const ARGUMENTS: [&str; 4] = ["--iterations", "600", "--sleep-us", "4000"];
/// The progress at which the program waits until the test has done what it wants to.
const HELD_AT: u64 = 500;

/// Where the container has the folder of the programs.
pub const APPS: &str = "/apps";
/// Where the container has the folder that it shares with the test.
pub const SHARED: &str = "/shared";

/// The program.
#[derive(Debug)]
pub struct Contained {
    shared: PathBuf,
    hold: Hold,
    expected: String,
}

impl Contained {
    /// Prepares the shared folder of a container with this name. The engine starts [`Contained::command`] in it.
    pub fn new(node: &Node, name: &str) -> Result<Self> {
        let shared = node.path(name);
        fs::create_dir(&shared)?;
        let hold = Hold::new(shared.join("hold"), HELD_AT)?;
        Ok(Self { shared, hold, expected: undisturbed(NAME, &ARGUMENTS)? })
    }

    /// The folder that the container has at [`SHARED`].
    pub fn shared(&self) -> &Path {
        &self.shared
    }

    /// The variable of the container's environment that holds the program back, as `NAME=VALUE`.
    pub fn variable(&self) -> String {
        format!("{}={SHARED}/hold", self.hold.variable().0)
    }

    /// A command for the container's shell. It writes what the program prints into the shared folder, since an engine that restores a
    /// container may connect the output elsewhere.
    pub fn command() -> String {
        format!("exec {APPS}/{NAME} --progress {SHARED}/progress {} >{SHARED}/out 2>{SHARED}/err", ARGUMENTS.join(" "))
    }

    fn progress(&self) -> u64 {
        let text = fs::read_to_string(self.shared.join("progress")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }

    /// Waits until the program is further than now.
    pub fn goes_on(&self) -> Result {
        let before = self.progress();
        until_true(&format!("progress beyond {before}"), || {
            let errors = fs::read_to_string(self.shared.join("err")).unwrap_or_default();
            ensure!(errors.is_empty(), "the program says {errors}");
            Ok(self.progress() > before)
        })
    }

    /// Forgets the progress of a program that has ended, so that only one that goes on reports any.
    pub fn forget_progress(&self) -> Result {
        app::no_progress(&self.shared.join("progress"))
    }

    /// Lets the program go on to its end, and checks that it has printed what a program prints that nobody disturbs.
    pub fn finish(self) -> Result {
        self.hold.lift();
        let printed = || fs::read_to_string(self.shared.join("out")).unwrap_or_default();
        until_true("the program prints its result", || Ok(printed().len() >= self.expected.len()))?;
        ensure!(printed() == self.expected, "printed {:?}, not {:?}", printed(), self.expected);
        Ok(())
    }
}

/// Whether there is a program of this name; says that the test is skipped otherwise.
pub fn is_installed(program: &str, what: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|it| it.join(program).exists());
    if !found {
        eprintln!("skipped: there is no {program} (scripts/lib/tree build fetches it, or install {what})");
    }
    found
}

/// Writes the root directory of the tests' image as an archive.
pub fn root_archive(archive: &Path) -> Result {
    let lib = stage::repository()?.join("scripts/lib/podman.sh");
    // The script builds the root directory and hands it to podman; here its archive is kept instead.
    let script = format!(". '{}'; podman_() {{ cat >'{}'; }}; container_image x", lib.display(), archive.display());
    let status = Command::new("bash").args(["-euc", &script]).status()?;
    ensure!(status.success(), "bash ended with {status}");
    Ok(())
}

/// Makes the root directory of the tests' image.
pub fn root_directory(node: &Node, root: &Path) -> Result {
    let archive = node.path("root.tar");
    root_archive(&archive)?;
    fs::create_dir_all(root)?;
    let status = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(root).status().context("tar")?;
    ensure!(status.success(), "tar ended with {status}");
    Ok(())
}
