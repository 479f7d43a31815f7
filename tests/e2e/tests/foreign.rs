//! Processes that use no GPU: CRIU handles them as it does where the plugin is not installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::criu::{Outcome, Setting};
use rekindle_e2e::{App, Fate, Node, Result, process};

/// A program that keeps a token in its memory, and prints it when the file `go` exists.
const PROGRAM: &str = r#"token=$1; : >"$0/ready"; until [ -e "$0/go" ]; do :; done; echo "$token""#;
const TOKEN: &str = "kept in memory";

/// The setup of CRIU for a dump and a restore.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Installed {
    No,
    WithDaemon,
    WithoutDaemon,
}

struct Foreign {
    node: Node,
    criu: Setting,
}

impl Foreign {
    fn new(installed: Installed) -> Result<Self> {
        let node = if installed == Installed::WithDaemon { Node::start()? } else { Node::without_daemon()? };
        fs::create_dir(node.path("no-plugins"))?;
        let mut criu = node.criu();
        if installed == Installed::No {
            criu.plugins = Some(node.path("no-plugins"));
        }
        Ok(Self { node, criu })
    }

    /// Starts the process. Returns when the process has read its token and waits.
    fn run(&self) -> Result<App> {
        let ready = self.node.path("ready");
        // The process is no client of the daemon, so its environment does not name the socket.
        let mut command = Command::new("bash");
        command.args(["-c", PROGRAM]).arg(ready.parent().unwrap_or(Path::new("/"))).arg(TOKEN);
        let app = App::start(&mut command, &self.node.fresh("foreign"), None)?;
        rekindle_e2e::until("the process has its token", || Ok(ready.exists().then_some(())))?;
        fs::remove_file(ready)?;
        Ok(app)
    }

    fn dump(&self, app: &App, fate: Fate) -> Result<Outcome> {
        let _ = fs::remove_dir_all(self.node.path("image"));
        fs::create_dir(self.node.path("image"))?;
        self.criu.dump(app.pid(), &self.node.path("image"), fate, self.node.path("dump.log"))?.wait()
    }

    fn restore(&self) -> Result<Outcome> {
        self.criu.restore(&self.node.path("image"), self.node.path("restore.log"))?.wait()
    }

    fn says_its_token(&self, app: App) -> Result {
        fs::write(self.node.path("go"), "")?;
        assert_eq!(app.finish()?, format!("{TOKEN}\n"));
        fs::remove_file(self.node.path("go"))?;
        Ok(())
    }
}

/// Dumps a process and leaves it running; dumps another one, kills it and restores it. Returns the names of the image's
/// files.
fn is_dumped_and_restored(installed: Installed) -> Result<Vec<String>> {
    let foreign = Foreign::new(installed)?;
    let app = foreign.run()?;
    foreign.dump(&app, Fate::Running)?.succeeds()?;
    foreign.says_its_token(app)?;

    let app = foreign.run()?;
    let identity = app.identity().clone();
    foreign.dump(&app, Fate::Killed)?.succeeds()?;
    app.was_killed(&[identity.pid])?;
    let mut files = Vec::new();
    for entry in fs::read_dir(foreign.node.path("image"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        // The names of the other files contain process ids and other numbers.
        files.push(name.trim_matches(|c: char| c.is_ascii_digit() || "-.img".contains(c)).to_owned());
    }
    files.sort();
    foreign.restore()?.succeeds()?;
    foreign.says_its_token(App::adopt(identity))?;
    foreign.node.finish()?;
    Ok(files)
}

#[test]
fn foreign_processes_are_dumped_as_without_the_plugin() -> Result {
    let without = is_dumped_and_restored(Installed::No)?;
    assert_eq!(is_dumped_and_restored(Installed::WithDaemon)?, without, "with a daemon");
    assert_eq!(is_dumped_and_restored(Installed::WithoutDaemon)?, without, "without a daemon");
    Ok(())
}

#[test]
fn an_image_of_foreign_processes_needs_no_plugin() -> Result {
    let mut foreign = Foreign::new(Installed::WithDaemon)?;
    let app = foreign.run()?;
    let identity = app.identity().clone();
    foreign.dump(&app, Fate::Killed)?.succeeds()?;
    app.was_killed(&[identity.pid])?;
    foreign.criu.plugins = Some(foreign.node.path("no-plugins"));
    foreign.restore()?.succeeds()?;
    foreign.says_its_token(App::adopt(identity))?;
    foreign.node.finish()
}

/// Runs a pre-dump, and returns CRIU's exit code and errors. On most kernels it fails, for want of soft-dirty.
fn pre_dump(installed: Installed) -> Result<(Option<i32>, Vec<String>)> {
    let foreign = Foreign::new(installed)?;
    let app = foreign.run()?;
    fs::create_dir(foreign.node.path("image"))?;
    let criu = foreign.criu.pre_dump(app.pid(), &foreign.node.path("image"), foreign.node.path("pre-dump.log"))?;
    let outcome = criu.wait()?;
    let errors = outcome.log.lines().filter_map(|line| line.split_once(" Error ")).map(|(_, error)| error.to_owned());
    let errors = errors.collect();
    foreign.says_its_token(app)?;
    foreign.node.finish()?;
    Ok((outcome.status.code(), errors))
}

#[test]
fn a_pre_dump_is_as_without_the_plugin() -> Result {
    let without = pre_dump(Installed::No)?;
    assert_eq!(pre_dump(Installed::WithDaemon)?, without, "with a daemon");
    assert_eq!(pre_dump(Installed::WithoutDaemon)?, without, "without a daemon");
    Ok(())
}

#[test]
fn a_foreign_dump_leaves_gpu_processes_alone() -> Result {
    let arguments = ["--iterations", "100", "--sleep-us", "5000"];
    let expected = undisturbed("streams4", &arguments)?;
    let foreign = Foreign::new(Installed::WithDaemon)?;
    let gpu = foreign.node.run("streams4", &arguments)?;
    gpu.reaches(20)?;
    let app = foreign.run()?;
    let identity = app.identity().clone();
    foreign.dump(&app, Fate::Killed)?.succeeds()?;
    app.was_killed(&[identity.pid])?;
    foreign.restore()?.succeeds()?;
    foreign.says_its_token(App::adopt(identity))?;
    assert!(!process::is_gone(gpu.pid()), "it was to run longer");
    assert_eq!(gpu.finish()?, expected);
    foreign.node.finish()
}
