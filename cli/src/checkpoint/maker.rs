//! The program that makes the checkpoint: CRIU, or the engine of containers, which runs CRIU.

use std::ffi::OsString;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use rekindle_wire::control::{TRACEPARENT, TraceParent};
use serde_json::Value;

use super::base;
use super::options::{Fate, Options};
use crate::criu;
use crate::engine::Engine;
use crate::failure::Failure;

/// CRIU's log, in the image's directory.
const LOG: &str = "dump.log";
/// How often, and in which intervals, to look whether a container has stopped.
const POLLS: u32 = 200;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A program that makes a checkpoint, and its arguments.
pub(super) struct Maker {
    program: PathBuf,
    arguments: Vec<OsString>,
    socket: PathBuf,
    root: i32,
    place: Place,
}

enum Place {
    /// The directory of CRIU's images and log.
    Directory { dir: PathBuf, log: PathBuf, on: Option<PathBuf> },
    /// A checkpoint of a container, which podman may also write to a file, and which other engines keep under a name.
    Container { container: String, engine: Engine, export: Option<PathBuf>, checkpoint: Option<String>, stops: bool },
}

impl Maker {
    /// CRIU, for the process that the options name.
    pub(super) fn of_process(options: &Options, socket: &Path) -> Result<Self, Failure> {
        match (options.pid, &options.dir) {
            (Some(pid), Some(dir)) => by_criu(options, pid, dir, socket),
            _ => Err(Failure::usage(anyhow!("give a process and a directory, or --container"))),
        }
    }

    /// The engine, for this container.
    pub(super) fn of_container(options: &Options, name: &str, socket: &Path) -> Result<Self, Failure> {
        let of = &options.containers;
        let engine = of.engine();
        let root = engine.pid(name)?;
        let (export, checkpoint) = (of.file(name), of.checkpoint.clone());
        let mut arguments: Vec<OsString> = if engine.kind.names_checkpoints() {
            vec!["checkpoint".into(), "create".into()]
        } else {
            vec!["container".into(), "checkpoint".into()]
        };
        let stops = options.fate() != Fate::Running;
        if !stops {
            arguments.push("--leave-running".into());
        }
        if let Some(file) = &export {
            arguments.extend(["--export".into(), file.into()]);
        }
        arguments.extend(options.kept.options().map(Into::into));
        arguments.extend(of.arguments());
        arguments.extend(options.more.iter().cloned());
        arguments.push(name.into());
        arguments.extend(checkpoint.iter().map(Into::into));
        let program = engine.program.clone();
        let place = Place::Container { container: name.to_owned(), engine, export, checkpoint, stops };
        Ok(Self { program, arguments, socket: socket.to_owned(), root, place })
    }

    /// The root of the tree.
    pub(super) fn root(&self) -> i32 {
        self.root
    }

    /// The container, if it is one.
    pub(super) fn container(&self) -> Option<&str> {
        match &self.place {
            Place::Directory { .. } => None,
            Place::Container { container, .. } => Some(container),
        }
    }

    /// The name under which the engine keeps the checkpoint, if it has one.
    pub(super) fn checkpoint(&self) -> Option<&str> {
        match &self.place {
            Place::Directory { .. } => None,
            Place::Container { checkpoint, .. } => checkpoint.as_deref(),
        }
    }

    /// What is checkpointed, for messages.
    pub(super) fn what(&self) -> String {
        match self.container() {
            Some(name) => format!("container {name} (process {})", self.root),
            None => format!("process {}", self.root),
        }
    }

    /// The program's name, for messages.
    pub(super) fn name(&self) -> String {
        self.program.display().to_string()
    }

    /// The image's directory or file; none where the engine keeps the image.
    pub(super) fn image(&self) -> Option<&Path> {
        match &self.place {
            Place::Directory { dir, .. } => Some(dir),
            Place::Container { export, .. } => export.as_deref(),
        }
    }

    /// Starts the program, which belongs to the span, and makes the image's directory if necessary.
    pub(super) fn start(&self, span: Option<TraceParent>) -> Result<Child, Failure> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).env("REKINDLE_SOCKET", &self.socket).stdout(Stdio::null());
        if let Some(span) = span {
            command.env(TRACEPARENT, span.to_string());
        }
        match &self.place {
            Place::Directory { dir, log, on } => {
                fs::create_dir_all(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
                match on {
                    Some(on) => base::link(dir, on)?,
                    None => base::unlink(dir)?,
                }
                // The log of an earlier dump.
                let _ = fs::remove_file(log);
                command.stdin(Stdio::null()).stderr(Stdio::null());
            }
            // The program writes a few lines, for which a pipe has room.
            Place::Container { export, .. } => {
                if let Some(dir) = export.as_deref().and_then(Path::parent).filter(|it| !it.as_os_str().is_empty()) {
                    fs::create_dir_all(dir).with_context(|| format!("cannot make the directory {}", dir.display()))?;
                }
                command.stdin(Engine::lock_on_stdin()).stdout(Stdio::piped()).stderr(Stdio::piped());
            }
        }
        Ok(command.spawn().with_context(|| format!("cannot run {}", self.name()))?)
    }

    /// Waits until the engine knows that it has stopped the container, if it had to: Docker returns before, and would take a
    /// container that is to be restored for one that runs.
    pub(super) fn wait_until_stopped(&self) {
        let Place::Container { container, engine, stops: true, .. } = &self.place else { return };
        for _ in 0..POLLS {
            if !engine.kind.names_checkpoints() || !engine.runs(container).unwrap_or(false) {
                return;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        eprintln!("rekindle: {} has not stopped yet", self.what());
    }

    /// The errors that the program, which has ended, has reported.
    pub(super) fn errors(&self, ended: &mut Child) -> Vec<String> {
        match &self.place {
            Place::Directory { log, .. } => criu::errors(&String::from_utf8_lossy(&fs::read(log).unwrap_or_default())),
            Place::Container { engine, .. } => engine.errors(&said(ended.stderr.take())),
        }
    }

    /// The statistics that podman, which has ended, has printed because it was asked to.
    pub(super) fn statistics(&self, ended: &mut Child) -> Option<Value> {
        // Without the option it prints a name.
        serde_json::from_slice(&said(ended.stdout.take())).ok().filter(Value::is_object)
    }
}

/// What a program that has ended has written.
fn said(pipe: Option<impl Read>) -> Vec<u8> {
    let mut said = Vec::new();
    if let Some(mut pipe) = pipe {
        let _ = pipe.read_to_end(&mut said);
    }
    said
}

fn by_criu(options: &Options, pid: i32, dir: &Path, socket: &Path) -> Result<Maker, Failure> {
    let program = criu::program(options.criu.as_deref())?;
    let dir = std::path::absolute(dir).context("cannot tell the current directory")?;
    let log = dir.join(LOG);
    let mut arguments = criu::dump(pid, &dir, &log)?;
    match options.fate() {
        Fate::Running => arguments.push("--leave-running".into()),
        Fate::Stopped => arguments.push("--leave-stopped".into()),
        Fate::Killed => {}
    }
    arguments.extend(options.kept.options().map(Into::into));
    arguments.extend(options.more.iter().cloned());
    let place = Place::Directory { dir, log, on: options.on.clone() };
    Ok(Maker { program, arguments, socket: socket.to_owned(), root: pid, place })
}
