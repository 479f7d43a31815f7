//! `rekindle protect --list`.

use std::path::{Path, PathBuf};

use rekindle_protect::record::{Every, Happened};
use rekindle_protect::{Choice, Cost, Level, Phase, Record, Standing};
use serde::Serialize;

use super::folder::{Folder, image_dir};
use super::{ended, supervisor};
use crate::failure::Failure;
use crate::output;

/// A protection.
#[derive(Serialize)]
struct Shown {
    name: String,
    #[serde(flatten)]
    phase: Phase,
    /// The container's name, if one is protected.
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    pid: Option<i32>,
    runs: bool,
    supervisor: Option<i32>,
    guard: Option<i32>,
    /// Whether the interval was chosen by a formula.
    auto: bool,
    interval: Choice,
    cost: Option<Cost>,
    /// Seconds between failures of the job, as far as is known.
    mtbf: f64,
    failures: u32,
    restores: u32,
    failed_checkpoints: u32,
    keep: usize,
    images: Vec<ShownImage>,
    levels: Vec<ShownLevel>,
    log: PathBuf,
    events: Vec<Happened>,
}

#[derive(Serialize)]
struct ShownImage {
    number: u64,
    dir: PathBuf,
    good: bool,
    /// Whether it is one of those that are to be kept; another one is there because these build on it.
    kept: bool,
    /// Why it was set aside.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
    on: Option<u64>,
    /// Milliseconds since 1970 when it was last verified again; 0 if it was only when it was made.
    verified_ms: u64,
    stored: Vec<String>,
}

/// A store that gets images.
#[derive(Serialize)]
struct ShownLevel {
    #[serde(flatten)]
    level: Level,
    /// The numbers of the images that it has.
    images: Vec<u64>,
}

/// Lists the protections. One whose record cannot be read is named on standard error.
pub(super) fn list(all: &Path, json: bool) -> Result<(), Failure> {
    let mut shown = Vec::new();
    for folder in Folder::all(all)? {
        match folder.record() {
            Ok(record) => shown.push(describe(&folder, record)),
            Err(failure) => eprintln!("rekindle: {failure}"),
        }
    }
    if json {
        return Ok(output::print_json(&shown)?);
    }
    Ok(output::print(&table(&shown))?)
}

fn describe(folder: &Folder, record: Record) -> Shown {
    let mtbf = record.failures.mean_time(std::time::Duration::from_secs_f64(record.wishes.mtbf), record.gpus);
    let kept = record.shelf.kept(record.wishes.keep);
    let image = |it: &rekindle_protect::Image| ShownImage {
        number: it.number,
        dir: image_dir(&record.wishes.images, it.number),
        good: it.standing == Standing::Good,
        kept: kept.contains(&it.number),
        why: match &it.standing {
            Standing::Good => None,
            Standing::Aside(why) | Standing::Damaged(why) => Some(why.clone()),
        },
        on: it.on,
        verified_ms: it.verified_ms,
        stored: record.copies.of(it.number).map(str::to_owned).collect(),
    };
    let level = |it: &Level| ShownLevel { level: it.clone(), images: record.copies.whole_in(&it.url).collect() };
    Shown {
        name: folder.name(),
        container: record.wishes.container.as_ref().map(|it| it.name.clone()),
        pid: record.job.map(|it| it.pid),
        runs: record.job.is_some_and(ended::is_alive),
        supervisor: folder.supervisor(),
        guard: folder.guard(),
        auto: record.wishes.every == Every::Auto,
        interval: supervisor::choice(&record),
        cost: supervisor::cost(&record),
        mtbf,
        failures: record.failures.seen,
        restores: record.restores,
        failed_checkpoints: record.failed_checkpoints,
        keep: record.wishes.keep,
        images: record.shelf.images().iter().map(image).collect(),
        levels: record.wishes.levels.iter().map(level).collect(),
        log: folder.path().join("supervisor.log"),
        phase: record.phase,
        events: record.events,
    }
}

fn table(all: &[Shown]) -> String {
    let heads = ["NAME", "PID", "STATE", "EVERY", "IMAGES", "RESTORES", "WHY"];
    let mut rows = vec![heads.map(str::to_owned).to_vec()];
    rows.extend(all.iter().map(|it| {
        vec![
            output::plain(&it.name),
            it.pid.map(|pid| pid.to_string()).unwrap_or_default(),
            state(it),
            output::time((it.interval.interval * 1e9) as u64),
            format!("{} of {}", it.images.iter().filter(|it| it.kept).count(), it.keep),
            it.restores.to_string(),
            output::plain(&why(it)),
        ]
    }));
    output::table(&rows, &[1, 3])
}

fn state(shown: &Shown) -> String {
    let is_alone = !shown.phase.is_final() && shown.supervisor.is_none() && shown.guard.is_none();
    if is_alone { format!("{}, unsupervised", shown.phase.name()) } else { shown.phase.name().to_owned() }
}

/// The figures of the interval, or how the protection has ended.
fn why(shown: &Shown) -> String {
    match &shown.phase {
        Phase::Over { ending } => ending.to_string(),
        Phase::GivenUp { why } => why.clone(),
        Phase::Stopped => String::new(),
        Phase::Watching { .. } | Phase::Restoring { .. } => {
            let ns = |seconds: f64| output::time((seconds * 1e9) as u64);
            let Some(cost) = shown.cost else { return "no checkpoint yet".to_owned() };
            format!(
                "{}: stall {}, durable after {}, a failure in {:.1} h; {:.2} % are lost",
                shown.interval.formula.as_str(),
                ns(cost.stall),
                ns(cost.durable),
                shown.mtbf / 3600.0,
                shown.interval.loss * 100.0
            )
        }
    }
}
