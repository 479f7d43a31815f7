//! `rekindle builds`.

mod archive;

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use rekindle_builds::needs::{self, Needs};
use rekindle_builds::{Build, BuildError, BuildId, Library, Locked, Store};
use rekindle_images::Image;
use serde::Serialize;

use crate::failure::Failure;
use crate::{output, run};

const UNSEEN: &str = "cannot find out who needs the builds";

/// The options of `rekindle builds`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Option<Action>,
    /// The folder of Rekindle's libraries [default: ../lib/rekindle, relative to this program]
    #[arg(long, global = true, value_name = "DIR")]
    lib: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Add a build: that of a directory with Rekindle's libraries, or those that a checkpoint image carries, also one in an archive
    Add {
        /// The directory, or the archive
        #[arg(value_name = "DIR|ARCHIVE")]
        from: PathBuf,
        /// Give it to new applications from now on
        #[arg(long = "use")]
        choose: bool,
    },
    /// Remove the builds that nobody needs, and that were last added or given to new applications before this machine has booted
    Prune {
        /// Also those of since then
        #[arg(long)]
        now: bool,
        /// All that nobody needs, also the one that new applications are given
        #[arg(long)]
        all: bool,
    },
}

/// A build, as JSON has it.
#[derive(Debug, Serialize)]
struct Line {
    id: String,
    path: PathBuf,
    /// Whether new applications are given it.
    used: bool,
    processes: Vec<i32>,
    mounted: bool,
    containers: Vec<PathBuf>,
}

/// Lists, adds or removes builds.
pub(crate) fn builds(options: &Options) -> Result<(), Failure> {
    let folder = match &options.lib {
        Some(folder) => folder.clone(),
        None => run::beside_program()?,
    };
    let folder = folder.canonicalize().with_context(|| format!("there is no {}", folder.display()))?;
    let store = Store::new(&folder);
    match &options.action {
        None => list(&store, options.json),
        Some(Action::Add { from, choose }) => add(&store, from, *choose, options.json),
        Some(Action::Prune { now, all }) => prune(&store, *now, *all, options.json),
    }
}

fn list(store: &Store, json: bool) -> Result<(), Failure> {
    let builds = store.list()?;
    let lines = lines(store, &builds)?;
    if json {
        return Ok(output::print_json(&lines)?);
    }
    let mut rows = vec![["BUILD", "USED FOR", "PROCESSES", "PATH"].map(str::to_owned).to_vec()];
    rows.extend(lines.iter().map(|it| {
        let used = [(it.used, "new programs"), (it.mounted, "mounts"), (!it.containers.is_empty(), "containers")];
        let used: Vec<_> = used.into_iter().filter_map(|(is, what)| is.then_some(what)).collect();
        let used = if used.is_empty() { "-".to_owned() } else { used.join(", ") };
        vec![it.id.clone(), used, it.processes.len().to_string(), output::plain(&it.path.to_string_lossy())]
    }));
    Ok(output::print(&output::table(&rows, &[2]))?)
}

fn lines(store: &Store, builds: &[Build]) -> Result<Vec<Line>, Failure> {
    let mut needs = needs::of(builds).context(UNSEEN)?;
    let chosen = store.chosen();
    let line = |build: &Build| {
        let Needs { processes, mounted, containers } = needs.remove(&build.id).unwrap_or_default();
        Line {
            id: build.id.to_string(),
            path: build.dir.clone(),
            used: chosen == Some(build.id),
            processes: processes.into_iter().collect(),
            mounted,
            containers: containers.into_iter().collect(),
        }
    };
    Ok(builds.iter().map(line).collect())
}

fn add(store: &Store, from: &Path, choose: bool, json: bool) -> Result<(), Failure> {
    let (locked, added);
    if from.is_file() {
        // Read before the lock is taken, since it may take long.
        let carried = archive::carried(from)?;
        locked = store.lock()?;
        let add = |(id, libraries)| locked.add(libraries, Some(id));
        added = carried.into_iter().map(add).collect::<Result<Vec<_>, _>>()?;
    } else {
        locked = store.lock()?;
        added = if is_image(from) { of_image(&locked, from)? } else { vec![locked.add(Library::in_dir(from)?, None)?] };
    }
    if choose {
        let [build] = &added[..] else {
            let reason = format!("{} has {} builds: choose one of them by its directory", from.display(), added.len());
            return Err(Failure::refused(anyhow!(reason)));
        };
        locked.choose(build.id)?;
    }
    if json {
        return Ok(output::print_json(&lines(store, &added)?)?);
    }
    let said = added.iter().map(|it| format!("{}\n", it.dir.display()));
    Ok(output::print(&said.collect::<String>())?)
}

fn is_image(dir: &Path) -> bool {
    dir.join(rekindle_images::MANIFEST).exists()
}

/// Adds the builds that an image carries.
fn of_image(store: &Locked<'_>, dir: &Path) -> Result<Vec<Build>, Failure> {
    let image = Image::open(dir)?;
    if image.manifest().builds.is_empty() {
        return Err(Failure::refused(anyhow!("{} carries no build of Rekindle's libraries", dir.display())));
    }
    let mut added = Vec::new();
    for build in &image.manifest().builds {
        let mut libraries = Vec::new();
        for it in &build.libraries {
            let library = Library::named(&it.name, image.code_file(it.code)?);
            let unknown = || Failure::bad_image(anyhow!("bad image: {:?} is no library of Rekindle", it.name));
            libraries.push(library.ok_or_else(unknown)?);
        }
        added.push(store.add(libraries, Some(BuildId::from_bytes(build.id)))?);
    }
    Ok(added)
}

/// Removes builds, and reports those that stay because somebody needs them.
fn prune(store: &Store, now: bool, all: bool, json: bool) -> Result<(), Failure> {
    if !store.builds_dir().exists() {
        return Ok(());
    }
    let locked = store.lock()?;
    if all {
        // First: from here on no new program begins to need a build.
        locked.choose_none()?;
    }
    let booted = booted()?;
    let mut removed = Vec::new();
    for build in store.list()? {
        // A program may have been given it, and have shown nothing of it yet.
        let is_recent = store.used(build.id).is_none_or(|used| used >= booted);
        if store.chosen() == Some(build.id) || is_recent && !now && !all {
            continue;
        }
        // Looked at right before it goes.
        let needs = needs::of(std::slice::from_ref(&build)).context(UNSEEN)?;
        match needs.values().find_map(Needs::why) {
            Some(why) => eprintln!("rekindle: build {} stays: {why}", build.id),
            None => {
                locked.remove(build.id)?;
                removed.push(build.id.to_string());
            }
        }
    }
    if all {
        remove_if_empty(&store.builds_dir())?;
    }
    if json {
        return Ok(output::print_json(&removed)?);
    }
    Ok(output::print(&removed.iter().map(|id| format!("removed build {id}\n")).collect::<String>())?)
}

/// When this machine has booted.
fn booted() -> anyhow::Result<SystemTime> {
    let text = fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let seconds = text.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok());
    let seconds = seconds.context("/proc/stat does not say when this machine has booted")?;
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

fn remove_if_empty(dir: &Path) -> anyhow::Result<()> {
    match fs::remove_dir(dir) {
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            bail!("cannot remove {}: {error}", dir.display())
        }
        _ => Ok(()),
    }
}

impl From<BuildError> for Failure {
    fn from(error: BuildError) -> Self {
        match error {
            BuildError::File { .. } | BuildError::Busy(_) => anyhow::Error::from(error).into(),
            _ => Self::refused(error),
        }
    }
}
