//! The beginning of a protection: of a process that runs, or of a command.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use rekindle_protect::record::Wishes;
use rekindle_protect::{Container, Level, Record, Rules};
use rekindle_stores::{Address, StoreError};
use rekindle_wire::control::{ProtectInfo, Reply, Request};
use serde::Serialize;

use super::folder::Folder;
use super::job::{self, Clients};
use super::options::{OnFailure, Options};
use super::uploads::stored_number;
use super::{console, container as podman, ended, guard};
use crate::engine::Engine;
use crate::failure::Failure;
use crate::process::{Process, boot};
use crate::{check, daemon, output, run};

/// A protection that has begun.
#[derive(Serialize)]
struct Begun {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    images: PathBuf,
}

/// What the daemon's configuration says.
pub(super) fn configuration(socket: &Path) -> Result<ProtectInfo, Failure> {
    match daemon::ask(socket, &Request::Status)? {
        Reply::Status(status) => status.protect.ok_or_else(|| {
            Failure::refused(anyhow!(
                "the daemon is of an earlier release, which knows nothing of protections: restart it"
            ))
        }),
        _ => Err(daemon::unexpected_answer().into()),
    }
}

/// Protects a process that runs.
pub(super) fn process(options: &Options, pid: i32) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let configuration = configuration(&socket)?;
    let process = ended::process(pid).ok_or_else(|| Failure::refused(anyhow!("there is no process {pid}")))?;
    if Process::find(pid).is_some_and(|it| it.has_terminal()) {
        return Err(Failure::refused(anyhow!(
            "process {pid} has a terminal, which no restore could give back to it: start it with `rekindle protect --command`, or in a \
             session of its own (setsid)"
        )));
    }
    refuse_obstacles(&socket, pid)?;
    let _lock = Folder::lock_all(&configuration.dir)?;
    if let Some(folder) = Folder::protecting(&configuration.dir, |it| it.job == Some(process))? {
        return Err(Failure::refused(anyhow!("process {pid} is protected already, as {}", folder.name())));
    }
    let name = match &options.name {
        Some(name) => name.clone(),
        None => default_name(&std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default(), pid),
    };
    let folder = Folder::named(&configuration.dir, &name)?;
    let wishes = wishes(options, &configuration, &folder, socket, Vec::new())?;
    begin(options, &folder, &Record::new(wishes, Some(process), boot()))
}

/// Protects a container that runs.
pub(super) fn container(options: &Options, name: &str) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let configuration = configuration(&socket)?;
    let program = options.podman.as_deref().map(podman::program).transpose()?;
    let said = podman::to_protect(&Engine::podman(program.as_deref()), name)?;
    let pid = said.state.pid;
    let process = ended::process(pid).ok_or_else(|| Failure::refused(anyhow!("container {name} has just ended")))?;
    refuse_obstacles(&socket, pid)?;
    let _lock = Folder::lock_all(&configuration.dir)?;
    let is_of = |it: &Record| it.wishes.container.as_ref().is_some_and(|it| it.id == said.id);
    if let Some(folder) = Folder::protecting(&configuration.dir, is_of)? {
        return Err(Failure::refused(anyhow!("container {name} is protected already, as {}", folder.name())));
    }
    let folder = Folder::named(&configuration.dir, options.name.as_ref().unwrap_or(&said.name))?;
    let mut wishes = wishes(options, &configuration, &folder, socket, Vec::new())?;
    wishes.chain = 0;
    wishes.container = Some(Container { id: said.id, name: said.name, podman: program });
    begin(options, &folder, &Record::new(wishes, Some(process), boot()))
}

/// Begins a protection of what runs.
fn begin(options: &Options, folder: &Folder, record: &Record) -> Result<(), Failure> {
    let bytes = Clients::of(&record.wishes.socket, &job::tree(record.job.map_or(0, |it| it.pid)));
    folder.make(record)?;
    // The newest image stays until its successor is complete. All of a container's take room in full, and its next one is unpacked to be
    // verified.
    let kept = u64::try_from(record.wishes.keep.max(1)).unwrap_or(u64::MAX);
    let copies = if record.wishes.container.is_some() { kept.saturating_add(2) } else { 2 };
    if let Err(failure) = has_room(&record.wishes.images, bytes.map_or(0, |it| it.bytes), copies) {
        folder.remove()?;
        return Err(failure);
    }
    guard::start(folder)?;
    let container = record.wishes.container.as_ref().map(|it| it.name.clone());
    let pid = record.job.map(|it| it.pid);
    let begun = Begun { name: folder.name(), container, pid, images: record.wishes.images.clone() };
    if options.json {
        return Ok(output::print_json(&begun)?);
    }
    let what = match (&begun.container, pid) {
        (Some(name), _) => format!("container {}", output::plain(name)),
        (None, pid) => format!("process {}", pid.unwrap_or_default()),
    };
    Ok(output::print(&format!("protecting {what} as {}: images in {}\n", begun.name, begun.images.display()))?)
}

/// Runs a command, protected, and waits for its end. Its exit status is that of this process then.
pub(super) fn command(options: &Options) -> Result<(), Failure> {
    let socket = options.daemon.socket()?;
    let configuration = configuration(&socket)?;
    let mut command = Vec::new();
    if let Some(lib) = &options.lib {
        let lib = std::path::absolute(lib).context("cannot tell the current directory")?;
        command.extend(["--lib".to_owned(), text(lib.as_os_str())?]);
    }
    command.push("--".to_owned());
    for argument in &options.program {
        command.push(text(argument)?);
    }
    let program = options.program.first().map(PathBuf::from).unwrap_or_default();
    let own = std::process::id().cast_signed();
    let name = options.name.clone();
    let name = name.unwrap_or_else(|| default_name(&program.file_name().unwrap_or_default().to_string_lossy(), own));
    let folder = Folder::named(&configuration.dir, &name)?;
    let wishes = wishes(options, &configuration, &folder, socket, command)?;
    let record = Record::new(wishes, None, boot());
    folder.make(&record)?;
    guard::start(&folder)?;
    console::follow(&folder)
}

/// Becomes the command of a protection: what the guard starts. Returns only on an error.
pub(super) fn job(path: &Path) -> Result<(), Failure> {
    let folder = Folder::at(path);
    let record = folder.record()?;
    // CRIU dumps whole sessions.
    rustix::process::setsid().context("cannot begin a session")?;
    let [out, err] = folder.console();
    rustix::stdio::dup2_stdout(super::folder::append(&out)?).context("cannot write to the console's file")?;
    let own = ended::process(std::process::id().cast_signed()).context("cannot look at this process")?;
    folder.claim_job(own)?;
    rustix::stdio::dup2_stderr(super::folder::append(&err)?).context("cannot write to the console's file")?;
    run::run(run::Options::of_protection(&record.wishes.socket, &record.wishes.command)?)
}

fn refuse_obstacles(socket: &Path, pid: i32) -> Result<(), Failure> {
    let Reply::Checked(checked) = daemon::ask(socket, &Request::Check { pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    if checked.is_empty() {
        let why = "no process of its tree uses a GPU through Rekindle yet";
        return Err(Failure::refused(anyhow!("process {pid} cannot be protected: {why}")));
    }
    if checked.iter().any(|it| !it.reasons.is_empty()) {
        eprint!("{}", check::describe(pid, &checked).map_err(anyhow::Error::from)?);
        return Err(Failure::refused(anyhow!("process {pid} cannot be protected: it cannot be checkpointed now")));
    }
    Ok(())
}

fn wishes(
    options: &Options,
    configuration: &ProtectInfo,
    folder: &Folder,
    socket: PathBuf,
    command: Vec<String>,
) -> Result<Wishes, Failure> {
    let images = match &options.dir {
        Some(dir) => std::path::absolute(dir).context("cannot tell the current directory")?.join(folder.name()),
        None => folder.path().join("images"),
    };
    let levels = options.to.iter().map(|it| level(options, folder, it)).collect::<Result<Vec<_>, _>>()?;
    let (mut checkpoint, mut restore) = (Vec::new(), Vec::new());
    if let Some(protocol) = options.protocol {
        checkpoint.extend(["--protocol".to_owned(), protocol.as_str().to_owned()]);
    }
    if options.at_moment {
        checkpoint.push("--at-moment".to_owned());
    }
    for arguments in [&mut checkpoint, &mut restore] {
        arguments.extend(options.kept.options().map(str::to_owned));
    }
    if let Some(criu) = &options.criu {
        let criu = std::path::absolute(criu).context("cannot tell the current directory")?;
        for arguments in [&mut checkpoint, &mut restore] {
            arguments.extend(["--criu".to_owned(), text(criu.as_os_str())?]);
        }
    }
    let rules = Rules {
        restore: options.on_failure == OnFailure::Restore,
        nonzero_fails: options.nonzero_fails,
        limit: options.limit,
    };
    Ok(Wishes {
        every: options.every,
        keep: usize::try_from(options.keep).unwrap_or(usize::MAX),
        chain: usize::try_from(options.chain).unwrap_or(usize::MAX),
        images,
        levels,
        key: options.key.file()?,
        verify_every: options.verify_every.as_secs_f64(),
        mtbf: options.mtbf.map_or(configuration.mtbf_ms as f64 / 1e3, |it| it.as_secs_f64()),
        rules,
        checkpoint,
        restore,
        socket,
        command,
        container: None,
    })
}

/// A level whose store is there, can be opened, and has no image of a protection of this name: what stands in the way is said now, and
/// not with each image.
fn level(options: &Options, folder: &Folder, level: &Level) -> Result<Level, Failure> {
    let address = match Address::parse(&level.url)? {
        Address::Directory(dir) => {
            Address::Directory(std::path::absolute(dir).context("cannot tell the current directory")?)
        }
        address => address,
    };
    let opened = address.open(options.key.get()?.as_ref())?;
    let url = address.to_string();
    let store = opened.ok_or_else(|| StoreError::NoStore { url: url.clone() })?;
    let mut images = store.images()?.into_iter().flatten();
    if let Some(taken) = images.find(|it| stored_number(&folder.name(), &it.name).is_some()) {
        return Err(Failure::refused(anyhow!(
            "{url} has an image {} of a protection of this name: choose another name with --name. `rekindle restore` restores \
             that image; if nobody needs it, remove it with `rekindle images rm`",
            taken.name
        )));
    }
    Ok(Level { url, ..level.clone() })
}

/// Whether so many images of a job with so much memory fit.
fn has_room(images: &Path, bytes: u64, copies: u64) -> Result<(), Failure> {
    let free = rekindle_images::ImageDir::open(images)?.free_space()?;
    let needed = bytes.saturating_mul(copies);
    if free >= needed {
        return Ok(());
    }
    let (free, needed, images) = (output::size(free), output::size(needed), images.display());
    Err(Failure::refused(anyhow!(
        "{images} has room for {free}, and {copies} images of this job take {needed}: name a directory with more room with --dir"
    )))
}

fn default_name(program: &str, pid: i32) -> String {
    let plain = |it: char| if it.is_ascii_alphanumeric() || "._+@".contains(it) { it } else { '-' };
    let name: String = program.trim().chars().take(40).map(plain).collect();
    format!("{}-{pid}", name.trim_start_matches(['-', '.']))
}

fn text(argument: &std::ffi::OsStr) -> Result<String, Failure> {
    let text = argument.to_str().map(str::to_owned);
    text.ok_or_else(|| Failure::usage(anyhow!("{} is no text", argument.display())))
}
