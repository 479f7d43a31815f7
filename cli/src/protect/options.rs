//! The options of `rekindle protect`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use rekindle_images::Protocol;
use rekindle_protect::Level;
use rekindle_protect::record::Every;

use crate::{criu, daemon, images};

/// The options of `rekindle protect`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Protect this process and its descendants
    #[arg(group = "what")]
    pub(super) pid: Option<i32>,
    /// Run the program behind `--`, protected, and wait for its end. Its exit status is that of the command
    #[arg(long, group = "what", requires = "program")]
    pub(super) command: bool,
    /// List the protections
    #[arg(long, group = "what")]
    pub(super) list: bool,
    /// Stop the protection with this name, or of this process or container: the job runs on, and the images stay
    #[arg(long, group = "what", value_name = "NAME")]
    pub(super) stop: Option<String>,
    /// Remove a protection that has come to its end, and its images
    #[arg(long, group = "what", value_name = "NAME")]
    pub(super) forget: Option<String>,
    /// Supervise a protection in this process, if nobody does: after a reboot, for example (rekindle-protect@.service)
    #[arg(long, group = "what", value_name = "NAME")]
    pub(super) supervise: Option<String>,
    /// Protect this container of podman's
    #[arg(long, group = "what", value_name = "NAME", conflicts_with_all = ["chain", "criu"])]
    pub(super) container: Option<String>,
    /// The name of the protection [default: that of the container, or the program's name and the number of its process]
    #[arg(long)]
    pub(super) name: Option<String>,
    /// The time from one checkpoint to the next, `500ms`, `30s`, `5m` or `1h`; or `auto`, which loses least
    #[arg(long, value_name = "TIME", default_value = "auto", value_parser = every)]
    pub(super) every: Every,
    /// How many images are kept
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(super) keep: u64,
    /// How many images one may build on. With 0 each image has all of the memory, as those of containers have always
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u64).range(0..=32))]
    pub(super) chain: u64,
    /// The directory for the images [default: with the record, where the daemon's configuration says]
    #[arg(long)]
    pub(super) dir: Option<PathBuf>,
    /// Copy images into this store too, beside the job. `,keep=N` and `,every=TIME` behind the address say how many it keeps and how
    /// often it gets one [default: as many as the directory, and each]. May be repeated, the nearest store first
    #[arg(long, value_name = "URL", value_parser = level)]
    pub(super) to: Vec<Level>,
    #[command(flatten)]
    pub(super) key: images::Key,
    /// How long after its last verification an image that is kept is verified again, beside the job. One at a time, in at most a
    /// twentieth of the time
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time)]
    pub(super) verify_every: Duration,
    /// The mean time between failures of one GPU [default: `protect.mtbf_hours` of the daemon's configuration]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(super) mtbf: Option<Duration>,
    /// What to do when the job fails: a signal or the death of its worker ends it, or it is gone after a reboot
    #[arg(long, value_enum, default_value_t, value_name = "WHAT")]
    pub(super) on_failure: OnFailure,
    /// A job that ends by itself with another status than 0 has failed too
    #[arg(long)]
    pub(super) nonzero_fails: bool,
    /// How many restores there may be without an image in between
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) limit: u32,
    /// The protocol of the checkpoints: auto, stop, clone, cow or recopy [default: the one that `rekindle protocol PID` shows]
    #[arg(long, value_name = "NAME")]
    pub(super) protocol: Option<Protocol>,
    /// Begin each checkpoint when the application calls `rekindle_checkpoint`
    #[arg(long)]
    pub(super) at_moment: bool,
    #[command(flatten)]
    pub(super) kept: criu::Keep,
    /// The criu program [default: the one in PATH]
    #[arg(long, value_name = "PATH")]
    pub(super) criu: Option<PathBuf>,
    /// With --command: Rekindle's libcuda.so.1, or its directory [default: ../lib/rekindle, relative to this program]
    #[arg(long, value_name = "PATH", requires = "command")]
    pub(super) lib: Option<PathBuf>,
    /// With --container: the podman program [default: the one in PATH]
    #[arg(long, value_name = "PATH", requires = "container")]
    pub(super) podman: Option<PathBuf>,
    #[command(flatten)]
    pub(super) daemon: daemon::At,
    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
    /// With --command: the program and its arguments
    #[arg(last = true, value_name = "PROGRAM", requires = "command")]
    pub(super) program: Vec<OsString>,
}

/// What to do when a job fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum OnFailure {
    /// Restore it from the newest good image
    #[default]
    Restore,
    /// Keep the images
    Nothing,
}

fn every(text: &str) -> Result<Every, String> {
    if text == "auto" { Ok(Every::Auto) } else { time(text).map(|it| Every::Seconds(it.as_secs_f64())) }
}

/// The address of a store with its policy behind it.
fn level(text: &str) -> Result<Level, String> {
    let mut level = Level { url: text.to_owned(), keep: None, every: None };
    while let Some((url, last)) = level.url.rsplit_once(',') {
        match last.split_once('=') {
            Some(("keep", number)) if level.keep.is_none() => {
                let keep = number.parse().ok().filter(|it| (1..=1000).contains(it));
                level.keep = Some(keep.ok_or_else(|| format!("keep={number}: write a number from 1 to 1000"))?);
            }
            Some(("every", text)) if level.every.is_none() => level.every = Some(time(text)?.as_secs_f64()),
            Some((name @ ("keep" | "every"), _)) => return Err(format!("{name} is there twice")),
            // An address may have commas.
            _ => break,
        }
        level.url = url.to_owned();
    }
    Ok(level)
}

/// A number and a unit.
fn time(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 5] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86_400.0)];
    let unit = UNITS.iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
    let seconds = unit.and_then(|(number, seconds)| Some(number.parse::<f64>().ok()? * seconds));
    let time = seconds.filter(|it| *it > 0.0).and_then(|it| Duration::try_from_secs_f64(it).ok());
    time.ok_or_else(|| format!("{text:?} is no time: write a number with ms, s, m, h or d behind it, as in 30s"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_an_address_with_its_policy_behind_it() {
        let plain = |url: &str| Ok(Level { url: url.to_owned(), keep: None, every: None });
        assert_eq!((level("s3://b/x"), level("/a,b")), (plain("s3://b/x"), plain("/a,b")));
        let both = Level { url: "/a,b".to_owned(), keep: Some(2), every: Some(3600.0) };
        assert_eq!((level("/a,b,keep=2,every=1h"), level("/a,b,every=60m,keep=2")), (Ok(both.clone()), Ok(both)));
        for bad in ["/a,keep=0", "/a,keep=x", "/a,keep=1001", "/a,every=5", "/a,keep=1,keep=2", "/a,every=1s,every=2s"]
        {
            assert!(level(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_time_is_a_number_with_a_unit() {
        assert_eq!(time("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(time("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!((time("2h"), time("1d")), (Ok(Duration::from_secs(7200)), Ok(Duration::from_secs(86_400))));
        for bad in ["", "5", "s", "-1s", "0s", "1e999h", "NaNs", "5 s", "auto"] {
            assert!(time(bad).is_err(), "{bad}");
        }
        assert_eq!((every("auto"), every("2s")), (Ok(Every::Auto), Ok(Every::Seconds(2.0))));
    }
}
