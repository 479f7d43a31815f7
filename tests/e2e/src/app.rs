//! A running program of `tests/apps`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context, bail, ensure};

use crate::namespace::Entry;
use crate::wait::until;
use crate::{Result, process, stage};

/// The attributes of a program that dumps and restores preserve.
#[derive(Clone, Debug)]
pub struct Identity {
    /// The program's name.
    pub name: String,
    /// The process id, which CRIU restores.
    pub pid: i32,
    /// The file that receives stdout.
    pub out: PathBuf,
    /// The file that receives stderr.
    pub err: PathBuf,
    /// The file in which the program reports its progress, if it does.
    pub progress: Option<PathBuf>,
    /// The point at which the program waits until the test lifts the hold, if any.
    pub hold: Option<Hold>,
}

/// Makes a program wait, from a given progress on, for as long as a file exists. A test that acts on the program in its
/// middle thus finds it there on a machine of any speed.
#[derive(Clone, Debug)]
pub struct Hold {
    file: PathBuf,
    at: u64,
}

impl Hold {
    /// Creates the file.
    pub fn new(file: PathBuf, at: u64) -> Result<Self> {
        fs::write(&file, format!("{at}\n"))?;
        Ok(Self { file, at })
    }

    /// The environment variable that announces the hold to the program.
    pub fn variable(&self) -> (&'static str, &Path) {
        ("APP_HOLD", &self.file)
    }

    /// Removes the file, so that the program goes on.
    pub fn lift(&self) {
        // The hold may be lifted already.
        let _ = fs::remove_file(&self.file);
    }
}

/// A running program. Dropping this value kills the program and all its descendants.
#[derive(Debug)]
pub struct App {
    identity: Identity,
    ended: Cell<Option<ExitStatus>>,
    given_up: bool,
}

impl App {
    /// Starts a command in a session of its own, since CRIU dumps whole sessions. Its output goes to `base` with `.out`
    /// and `.err` behind it. Both files are opened for appending, so that CRIU does not require an unchanged size.
    pub fn start(command: &mut Command, base: &Path, progress: Option<PathBuf>) -> Result<Self> {
        Self::start_in(command, base, progress, None)
    }

    /// The same in these namespaces.
    pub(crate) fn start_in(
        command: &mut Command,
        base: &Path,
        progress: Option<PathBuf>,
        entry: Option<&Entry>,
    ) -> Result<Self> {
        process::adopt_orphans();
        let (out, err) = (base.with_extension("out"), base.with_extension("err"));
        let append = |path: &Path| File::options().append(true).create(true).open(path);
        command.stdin(Stdio::null()).stdout(append(&out)?).stderr(append(&err)?).current_dir("/");
        // SAFETY: the closure makes one system call.
        unsafe {
            command.pre_exec(|| match libc::setsid() {
                -1 => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let started = match entry {
            Some(entry) => entry.spawn(command),
            None => command.spawn().map_err(Into::into),
        };
        let child = started.with_context(|| format!("cannot start {command:?}"))?;
        let name = Path::new(command.get_program()).file_name().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        Ok(Self::adopt(Identity { name, pid: child.id() as i32, out, err, progress, hold: None }))
    }

    /// Records the hold that the program was started with.
    #[must_use]
    pub fn held(mut self, hold: Option<Hold>) -> Self {
        self.identity.hold = hold;
        self
    }

    /// Lifts the hold, so that the program runs to its end.
    pub fn lift(&self) {
        self.identity.hold.iter().for_each(Hold::lift);
    }

    /// Wraps an existing process: a child of this process, or one that becomes a child.
    pub fn adopt(identity: Identity) -> Self {
        Self { identity, ended: Cell::new(None), given_up: false }
    }

    /// The identity of the program, which a dump and a restore preserve.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.identity.pid
    }

    /// The program's stdout so far.
    pub fn output(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.identity.out)?)
    }

    /// The program's stderr so far.
    pub fn errors(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.identity.err)?)
    }

    /// The progress that the program reports.
    pub fn progress(&self) -> Result<u64> {
        let file = self.identity.progress.as_ref().context("this program does not say how far it is")?;
        let text = fs::read_to_string(file)?;
        text.trim().parse().with_context(|| format!("{} has {text:?}", file.display()))
    }

    /// Waits until the program reports this progress.
    pub fn reaches(&self, progress: u64) -> Result {
        if self.identity.hold.as_ref().is_some_and(|hold| hold.at < progress) {
            self.lift();
        }
        until(&format!("{} reaches {progress}", self.identity.name), || {
            self.must_run()?;
            Ok((self.progress()? >= progress).then_some(()))
        })
    }

    /// Waits until the program has advanced by this much, or waits at its hold: then it does not go on to its end, for which
    /// whatever comes next may be too late.
    pub fn advances_by(&self, more: u64) -> Result {
        let goal = self.progress()? + more;
        self.reaches(self.identity.hold.as_ref().map_or(goal, |hold| goal.min(hold.at)))
    }

    /// Waits until the program advances beyond its present progress. Lifts the hold only if the program stands still there: what comes
    /// next may need a program that runs, however long it takes.
    pub fn advances(&self) -> Result {
        let now = self.progress()?;
        self.reaches(now + 1)
    }

    /// Discards the reported progress, and waits until the program reports it anew. For a program that was just
    /// restored.
    pub fn position(&self) -> Result<u64> {
        self.lift();
        let file = self.identity.progress.as_ref().context("this program does not say how far it is")?;
        no_progress(file)?;
        until(&format!("{} says where it is", self.identity.name), || {
            self.must_run()?;
            Ok(Some(self.progress()?).filter(|progress| *progress > 0))
        })
    }

    /// Waits for a line of stdout that starts with `beginning`, and returns the rest of the line.
    pub fn says(&self, beginning: &str) -> Result<String> {
        self.lift();
        until(&format!("{} says {beginning:?}", self.identity.name), || {
            self.must_run()?;
            let output = self.output()?;
            let whole = output.rsplit_once('\n').map_or("", |(lines, _)| lines);
            Ok(whole.lines().find_map(|line| line.strip_prefix(beginning)).map(|rest| rest.trim().to_owned()))
        })
    }

    /// Waits until the program ends.
    pub fn end(&self) -> Result<ExitStatus> {
        self.lift();
        until(&format!("{} ends", self.identity.name), || Ok(self.status()))
    }

    /// Waits until the program ends successfully, and returns its stdout.
    pub fn finish(self) -> Result<String> {
        let status = self.end()?;
        ensure!(status.success(), "{} ended with {status}: {}", self.identity.name, self.errors()?);
        self.output()
    }

    /// Kills the program and all its descendants, and waits until they are gone.
    pub fn kill(mut self) -> Result {
        self.kill_tree()
    }

    /// Releases the process, which CRIU has killed. Waits until all of `tree` is gone.
    pub fn was_killed(mut self, tree: &[i32]) -> Result<Identity> {
        self.given_up = true;
        let killed = until(&format!("{} is killed", self.identity.name), || Ok(self.status()))?;
        ensure!(!killed.success(), "{} was to be killed, and ended by itself", self.identity.name);
        for pid in tree.iter().filter(|pid| **pid != self.pid()) {
            process::wait_gone("a process of a dumped tree", *pid)?;
        }
        process::wait_group_gone(self.pid())?;
        Ok(self.identity.clone())
    }

    /// Truncates the program's stdout to `since` bytes: a restored program writes the rest again.
    pub fn forget_output(identity: &Identity, since: u64) -> Result {
        File::options().write(true).open(&identity.out)?.set_len(since)?;
        Ok(())
    }

    fn status(&self) -> Option<ExitStatus> {
        if self.ended.get().is_none() {
            self.ended.set(process::reap(self.pid()));
        }
        self.ended.get()
    }

    fn must_run(&self) -> Result {
        match self.status() {
            None => Ok(()),
            Some(status) => bail!("{} has ended with {status}: {}", self.identity.name, self.errors()?),
        }
    }

    fn kill_tree(&mut self) -> Result {
        self.given_up = true;
        if self.ended.get().is_some() {
            return Ok(());
        }
        process::kill_all(&process::tree(self.pid()))
    }
}

impl Drop for App {
    fn drop(&mut self) {
        if !self.given_up {
            let _ = self.kill_tree();
        }
    }
}

/// Programs without the option `--progress`, by which all others report their progress.
const WITHOUT_PROGRESS: [&str; 10] =
    ["answers", "counter", "bad", "broken", "firstkernel", "micro", "moment", "never", "steps", "visible"];

/// Writes into a file that a program has made no progress yet. The file is as long as a program will leave it: CRIU restores a
/// process only if a file that it had open at the dump has the size of then.
pub fn no_progress(file: &Path) -> Result {
    let file = File::options().write(true).create(true).truncate(false).open(file)?;
    Ok(file.write_all_at(format!("{:20}\n", 0).as_bytes(), 0)?)
}

/// Whether a program can report its progress.
pub(crate) fn says_progress(name: &str) -> bool {
    !WITHOUT_PROGRESS.contains(&name)
}

thread_local! {
    /// The final progress of each program that this test has run undisturbed, by name and arguments. The map is per
    /// thread: a test that runs at the same time must not affect it.
    static ENDS: RefCell<BTreeMap<(String, Vec<String>), u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn key(name: &str, arguments: &[&str]) -> (String, Vec<String>) {
    (name.to_owned(), arguments.iter().map(|it| (*it).to_owned()).collect())
}

/// Three quarters of the program's final progress, if this test has run it undisturbed with these arguments.
pub(crate) fn late_in(name: &str, arguments: &[&str]) -> Option<u64> {
    ENDS.with_borrow(|ends| ends.get(&key(name, arguments)).map(|end| end * 3 / 4))
}

/// Runs a program directly on the software GPU, without Rekindle, and returns its stdout.
pub fn undisturbed(name: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(stage::app(name)?);
    stage::clean_environment(&mut command);
    command.args(arguments).env("LD_LIBRARY_PATH", stage::software_gpu()?);
    let progress = tempfile::NamedTempFile::new()?;
    let says = says_progress(name) && !arguments.contains(&"--progress");
    if says {
        command.arg("--progress").arg(progress.path());
    }
    let output = command.output().with_context(|| format!("cannot start {name}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} alone ended with {}: {errors}", output.status);
    let printed = String::from_utf8(output.stdout)?;
    ensure!(!printed.is_empty(), "{name} prints nothing: there would be nothing to compare");
    if says && let Ok(end) = fs::read_to_string(progress.path())?.trim().parse() {
        ENDS.with_borrow_mut(|ends| ends.insert(key(name, arguments), end));
    }
    Ok(printed)
}
