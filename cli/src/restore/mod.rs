//! `rekindle restore`: checks that a directory has an image, has CRIU restore it, and reports the outcome. Containers are restored
//! by their engine (`containers.rs`).
//!
//! ```text
//!   check ─► watch ─► criu restore ──┬── the processes run ──┬── -d: the report
//!              │ progress            │                       └── --wait-loaded: all content is there ─► the report
//!              ▼                     └── failed ─► the reason
//!        a line on a terminal,
//!        removed before the processes run
//! ```

mod containers;
mod of_containers;
mod options;
mod report;
mod watch;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rekindle_images::Image;
use rekindle_wire::control::{ALLOW_VARIABLE, Allowances, FailureKind, Request, RestoreInfo};

use self::containers::Containers;
pub(crate) use self::options::Options;
use self::report::{Report, Restored};
use self::watch::Watch;
use crate::bar::Bar;
use crate::failure::Failure;
use crate::lazy_pages::LazyPages;
use crate::process::Process;
use crate::{cpu_image, criu, daemon, image, images, output, span};

/// CRIU's log, in the image's directory.
const LOG: &str = "restore.log";
/// The pause between two looks at the progress. The processes wait for one such look before they run, if there is a terminal.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How many such pauses the daemon may take to notice that CRIU has ended.
const POLLS: u32 = 200;

/// How often a restore is tried at most, and the pause in between, while a number is in use that no process has.
const TRIES: u32 = 4;
const LINGERS: Duration = Duration::from_millis(50);

/// A restore that has failed.
struct Failed {
    kind: FailureKind,
    failure: Failure,
    /// The failure's reason without the rest.
    reason: String,
    /// Lines of CRIU's log that report errors.
    errors: Vec<String>,
}

impl<E: Into<Failure>> From<E> for Failed {
    fn from(error: E) -> Self {
        let failure = error.into();
        Self { kind: failure.kind(), reason: failure.to_string(), failure, errors: Vec::new() }
    }
}

/// Restores images. One that fails does not stop the others.
pub(crate) fn restore(options: &Options) -> Result<(), Failure> {
    let (archives, dirs): (Vec<_>, Vec<_>) = sources(options)?.into_iter().partition(|it| it.is_file());
    let containers = Containers::of(options, &archives)?;
    if containers.is_some() && !dirs.is_empty() {
        let dir = dirs[0].display();
        return Err(Failure::usage(anyhow!(
            "{dir} is no archive, and options for containers are not for images in directories"
        )));
    }
    if let Some(containers) = containers {
        daemon::ask(&options.daemon.socket()?, &Request::Status)?;
        let restored = containers.restore(&options.daemon.socket()?);
        return conclude(restored, options.json, self::containers::print);
    }
    if !options.restore_detached && (options.json || dirs.len() > 1) {
        let what = if options.json { "--json" } else { "more than one directory" };
        return Err(Failure::usage(anyhow!("give --restore-detached with {what}")));
    }
    if let [dir] = dirs.as_slice() {
        let (report, result) = directory(options, dir);
        if let Some(report) = report {
            report.show(options.json)?;
        }
        return result;
    }
    let restored = dirs.iter().map(|dir| directory(options, dir));
    let restored = restored.filter_map(|(report, result)| Some((report?, result))).collect();
    conclude(restored, options.json, |report: &Report| report.show(false))
}

/// The images, after the one in a store was copied.
fn sources(options: &Options) -> Result<Vec<PathBuf>, Failure> {
    let text = |it: &PathBuf| it.to_str().map(str::to_owned);
    let Some(into) = &options.into else {
        let url = options.images.iter().filter_map(text).find(|it| it.contains("://"));
        return match url {
            Some(url) => Err(Failure::usage(anyhow!("say --into DIR, the directory that {url} is copied to"))),
            None => Ok(options.images.clone()),
        };
    };
    let [image] = options.images.as_slice() else {
        return Err(Failure::usage(anyhow!("--into is for one image")));
    };
    let url = text(image).ok_or_else(|| Failure::usage(anyhow!("{} is no address", image.display())))?;
    // Whoever has no daemon need not wait for a copy to learn that.
    daemon::ask(&options.daemon.socket()?, &Request::Status)?;
    Ok(vec![images::fetch(&url, &options.key, into, options.json)?])
}

/// Shows the outcome of several restores.
fn conclude<T: serde::Serialize>(
    restored: Vec<(T, Result<(), Failure>)>,
    json: bool,
    print: impl Fn(&T) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let count = restored.len();
    let (reports, results): (Vec<_>, Vec<_>) = restored.into_iter().unzip();
    match (json, reports.as_slice()) {
        (true, [report]) => output::print_json(report)?,
        (true, reports) => output::print_json(&reports)?,
        (false, reports) => reports.iter().try_for_each(print)?,
    }
    let mut failures: Vec<_> = results.into_iter().filter_map(Result::err).collect();
    if count == 1 {
        return failures.pop().map_or(Ok(()), Err);
    }
    failures.iter().for_each(|it| eprintln!("rekindle: {it}"));
    if failures.is_empty() {
        return Ok(());
    }
    Err(Failure::of_several(&failures, anyhow!("{} of {count} images are not restored", failures.len())))
}

/// Restores the image in a directory. There is no report of processes that were waited for.
fn directory(options: &Options, dir: &Path) -> (Option<Report>, Result<(), Failure>) {
    let mut result = run(options, dir);
    for _ in 1..TRIES {
        if !result.as_ref().is_err_and(|it| finds_numbers_in_use(&it.errors)) {
            break;
        }
        std::thread::sleep(LINGERS);
        result = run(options, dir);
    }
    match result {
        Ok(restored) => (options.restore_detached.then(|| Report::done(dir, restored)), Ok(())),
        Err(Failed { kind, failure, reason, errors }) => {
            (Some(Report::failed(dir, kind, reason, errors)), Err(failure))
        }
    }
}

/// Whether a restore has failed because a number was in use that no process has now. Linux 6.15 and later free the numbers of a process and
/// its threads a moment after it has been waited for.
fn finds_numbers_in_use(errors: &[String]) -> bool {
    errors.iter().any(|line| {
        // CRIU does not name the thread, whose number is one of a process that it has made itself.
        let forked = line.split_once("Can't fork for ").and_then(|(_, rest)| rest.strip_suffix(": File exists"));
        let is_free = |pid: &str| pid.parse().is_ok_and(|pid| Process::find(pid).is_none());
        line.contains("Unable to create a thread: -17") || forked.is_some_and(is_free)
    })
}

fn run(options: &Options, dir: &Path) -> Result<Restored, Failed> {
    let span = span::begin();
    let socket = options.daemon.socket()?;
    let criu = criu::program(options.criu.as_deref())?;
    Image::open(dir)?.check_companion()?;
    cpu_image::check_pages(dir)?;
    if options.verify {
        image::verify_before(dir)?;
    }
    daemon::ask(&socket, &Request::Status)?;
    let dir = dir.canonicalize().with_context(|| format!("cannot find {}", dir.display()))?;
    let log = dir.join(LOG);
    let _ = fs::remove_file(&log);
    let bar = Bar::new();
    let watch = match Watch::open(&socket, bar.is_shown(), span) {
        Err(failure) if options.wait_loaded => {
            let said = format!("--wait-loaded needs a newer daemon, or other rights: {failure}");
            return Err(Failure::refused(anyhow!(said)).into());
        }
        watch => watch.ok(),
    };
    let mut command = Command::new(&criu);
    command.args(criu::restore(&dir, &log)?);
    if options.restore_detached {
        command.arg("--restore-detached");
    }
    if options.lazy && cpu_image::has_lazy_parent(&dir) {
        return Err(Failure::refused(anyhow!(
            "{} was left by a migration with --lazy, and CRIU's server of pages does not read its parent: restore it without --lazy",
            dir.display()
        )).into());
    }
    let mut lazy = options.lazy.then(|| LazyPages::start(&criu, &dir, None, None)).transpose()?;
    if let Some(lazy) = &lazy {
        lazy.tell(&mut command);
    }
    let allowances = Allowances { other_driver: options.allow_other_driver, other_gpu: options.allow_other_gpu };
    if allowances != Allowances::default() {
        command.env(ALLOW_VARIABLE, allowances.to_string());
    }
    command.args(options.kept.options()).args(&options.more).env("REKINDLE_SOCKET", &socket).stdout(Stdio::inherit());
    let began = Instant::now();
    let mut running = command.spawn().with_context(|| format!("cannot run {}", criu.display()))?;
    if let Some(watch) = &watch {
        show(bar, watch, &mut running);
    }
    let status = running.wait().with_context(|| format!("cannot wait for {}", criu.display()))?;
    let mut info = watch.as_ref().and_then(Watch::progress);
    if let Some(watch) = &watch
        && !status.success()
    {
        info = failure_of(watch, info);
    }
    if let Some(lazy) = lazy.take_if(|_| !status.success())
        && let Some(why) = lazy.failed_because()
    {
        return Err(anyhow!("cannot restore the image in {}: {why}", dir.display()).into());
    }
    judge(&dir, status, info.as_ref(), &log)?;
    if let Some(lazy) = &mut lazy {
        lazy.must_be_guarded()?;
        if options.wait_loaded || !options.restore_detached {
            lazy.wait()?;
        }
    }
    if let Some(watch) = watch.filter(|_| options.wait_loaded && info.is_some()) {
        info = Some(wait_loaded(&watch)?);
        judge(&dir, status, info.as_ref(), &log)?;
    }
    Ok(Restored { info, time: began.elapsed() })
}

/// Shows the progress on a terminal until the processes are about to run, or CRIU has ended.
fn show(mut bar: Bar, watch: &Watch, running: &mut Child) {
    while bar.is_shown() && matches!(running.try_wait(), Ok(None)) {
        match watch.progress() {
            Some(info) if info.running_ns.is_some() => break,
            Some(info) => bar.show(&info.phase, info.done, info.bytes),
            None => {}
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    bar.clear();
    if bar.is_shown() {
        // The line is gone: the processes may write.
        watch.progress();
    }
}

/// The progress of a restore whose CRIU has failed: waits until the daemon has noticed that.
fn failure_of(watch: &Watch, mut info: Option<RestoreInfo>) -> Option<RestoreInfo> {
    for _ in 0..POLLS {
        if info.as_ref().is_none_or(|it| it.failure.is_some() || it.running_ns.is_some()) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
        info = watch.progress();
    }
    info
}

/// Waits until all content is loaded, or cannot be.
fn wait_loaded(watch: &Watch) -> Result<RestoreInfo, Failure> {
    loop {
        let info = watch.progress().context(
            "the processes run, and the daemon has ended before all GPU memory was loaded: its log and `rekindle ps` tell more",
        )?;
        if info.loaded_ns.is_some() || info.failure.is_some() {
            return Ok(info);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Whether the restore has succeeded so far.
fn judge(dir: &Path, status: ExitStatus, info: Option<&RestoreInfo>, log: &Path) -> Result<(), Failed> {
    let said = info.and_then(|it| it.failure.as_ref());
    if status.success() && said.is_none() {
        return Ok(());
    }
    let errors = criu::errors(&String::from_utf8_lossy(&fs::read(log).unwrap_or_default()));
    let (kind, reason) = match (said, errors.first()) {
        // The daemon has only noticed that CRIU ended; CRIU knows why.
        (Some(failure), Some(error)) if failure.kind == FailureKind::GivenUp => (FailureKind::Other, error.clone()),
        (Some(failure), _) => (failure.kind, failure.reason.clone()),
        (None, Some(error)) => (FailureKind::Other, error.clone()),
        (None, None) => (FailureKind::Other, format!("criu ended with {status}")),
    };
    let failure = Failure::of_kind(kind, anyhow!("cannot restore the image in {}: {reason}", dir.display()));
    Err(Failed { kind, failure, reason, errors })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_free_by_now_are_told_from_those_of_others() {
        let finds = |line: &str| finds_numbers_in_use(&[line.to_owned()]);
        assert!(finds("Error (pie/restorer.c:2089): Unable to create a thread: -17"));
        assert!(!finds("Error (pie/restorer.c:2089): Unable to create a thread: -12"));
        let forked = |pid: u32| finds(&format!("Error (criu/cr-restore.c:1228): 7: Can't fork for {pid}: File exists"));
        assert!(!forked(std::process::id()), "it is somebody's");
        assert!(forked(i32::MAX as u32), "no process has so high a number");
        assert!(!finds("Error (criu/cr-restore.c:1228): 7: Can't fork for 7: Permission denied"));
    }
}
