//! This release restores images of earlier releases, which are kept in `tests/e2e/kept`. The name of each is its
//! state's and its client's version. `docs/compatibility.md` says when to make another.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::Identity;
use rekindle_e2e::kept::{self, After};
use rekindle_e2e::{App, Node, Result, process, stage, until};
use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::{frame, reply};

/// A process that maps the memory that another process shared with its worker.
struct Revenant {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Revenant {
    fn of(folder: &Path, node: &Node) -> Result<Self> {
        let mut process = Command::new(stage::helper("revenant")?)
            .arg(folder)
            .env("REKINDLE_SOCKET", node.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (process.stdin.take().context("stdin")?, process.stdout.take().context("stdout")?);
        let mut revenant = Self { process, input, output: BufReader::new(output) };
        ensure!(revenant.answer()? == "mapped");
        Ok(revenant)
    }

    fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    fn answer(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "it has ended");
        Ok(line.trim_end().to_owned())
    }

    fn ask(&mut self, what: &str) -> Result<String> {
        writeln!(self.input, "{what}")?;
        self.answer()
    }
}

fn restored(folder: &Path) -> Result {
    let after: After = serde_json::from_str(&std::fs::read_to_string(folder.join("after.json"))?)?;
    let node = Node::start()?;
    // The daemon writes beside an image what its restore took.
    let copy = node.path("kept");
    std::fs::create_dir(&copy)?;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        std::fs::copy(entry.path(), copy.join(entry.file_name()))?;
    }
    let folder = &*copy;
    let mut revenant = Revenant::of(folder, &node)?;
    let pid = revenant.pid();
    let before = kept::regions(folder, pid)?;
    let changes = after.regions.iter().filter(|(what, hash)| before.get(*what) != Some(hash)).count();
    assert!(changes * 2 > after.regions.len(), "the ring's commands change nothing: {before:?}");
    let stream = UnixStream::connect(node.socket())?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let dir = File::open(folder)?;
    frame::send(&stream, &Opening::new(&Request::Restore)?, &[], &[dir.as_raw_fd()])?;
    let (restore, socket) = match frame::receive(&stream)?.body {
        Reply::Prepared { restore, sockets } => (restore, sockets.first().context("no socket")?.id),
        other => bail!("Restore was answered by {other:?}"),
    };
    assert_eq!(revenant.ask(&format!("reattach {restore} {socket}"))?, "reattached");
    // The process id differs from the original's, so the daemon knows the process only once it has seen its connection.
    until("the process is one of the restore's", || {
        frame::send(&stream, &Request::Resume { pid }, &[], &[])?;
        match frame::receive(&stream)?.body {
            Reply::Resumed { ours: false, open: false } => Ok(None),
            Reply::Resumed { ours: true, open: true } => Ok(Some(())),
            other => bail!("Resume was answered by {other:?}"),
        }
    })?;
    drop(stream);

    // The worker executes the commands of the ring, and answers the call that the process waits for.
    until("all of the ring is consumed", || {
        let ring = revenant.ask("ring")?;
        let (head, tail) = ring.split_once(' ').context("two numbers")?;
        Ok((head == tail).then_some(()))
    })?;
    let done = format!("{} 0", reply::DONE);
    until("its wait is answered", || {
        let answer = revenant.ask(&format!("reply {}", after.waits_in))?;
        Ok((answer == done).then_some(()))
    })?;
    let identity = Identity {
        name: "revenant".to_owned(),
        pid,
        out: node.path("revenant.out"),
        err: node.path("revenant.err"),
        progress: None,
        hold: None,
    };
    let app = App::adopt(identity);
    assert_eq!(kept::after(&node, &app)?, after.regions, "{}", folder.display());
    drop(app);
    process::wait_gone("the revenant", pid)?;
    node.finish()
}

#[test]
fn every_image_that_is_kept_is_restored_and_its_process_goes_on_to_the_same_state() -> Result {
    let all = kept::all()?;
    assert!(!all.is_empty());
    for folder in all {
        restored(&folder)?;
    }
    Ok(())
}

#[test]
#[ignore = "makes what is kept of a new state version, where REKINDLE_KEEP says; what is there is never changed"]
fn make_kept_image() -> Result {
    let folder = std::env::var_os("REKINDLE_KEEP").context("REKINDLE_KEEP is not set")?;
    kept::make(Path::new(&folder))
}
