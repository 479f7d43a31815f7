//! The output of `rekindle restore` at its end: a line or a report.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_wire::control::{FailureKind, PhaseInfo, RestoreInfo, RestoredInfo};
use serde::Serialize;

use crate::failure::Failure;
use crate::output;

/// A restore that has succeeded, as far as it was to be waited for.
pub(super) struct Restored {
    /// None where the daemon does not tell.
    pub(super) info: Option<RestoreInfo>,
    /// From CRIU's start until it ended, and until all was loaded if that was asked for.
    pub(super) time: Duration,
}

/// The outcome: as JSON for programs, as one line for people.
#[derive(Serialize)]
pub(super) struct Report {
    outcome: &'static str,
    image: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    restore: Option<Times>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<FailureKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<String>,
}

/// A successful restore.
#[derive(Serialize)]
struct Times {
    /// From CRIU's start until it ended, or until all was loaded if that was asked for.
    seconds: f64,
    /// From CRIU's first request until the processes ran.
    running_ms: Option<f64>,
    /// From CRIU's first request until all GPU memory was loaded; none where it is still being loaded.
    loaded_ms: Option<f64>,
    gpu_bytes: u64,
    phases: Vec<PhaseInfo>,
    clients: Vec<RestoredInfo>,
}

impl Report {
    /// The report on a restore that has succeeded.
    pub(super) fn done(image: &Path, restored: Restored) -> Self {
        let ms = |ns: u64| ns as f64 / 1e6;
        let times = |info: RestoreInfo| Times {
            seconds: restored.time.as_secs_f64(),
            running_ms: info.running_ns.map(ms),
            loaded_ms: info.loaded_ns.map(ms),
            gpu_bytes: info.bytes,
            phases: info.phases,
            clients: info.clients,
        };
        let restore = restored.info.map(times);
        Self { outcome: "done", image: image.to_owned(), restore, kind: None, reason: None, errors: Vec::new() }
    }

    /// The report on a restore that has failed.
    pub(super) fn failed(image: &Path, kind: FailureKind, reason: String, errors: Vec<String>) -> Self {
        let outcome = match kind {
            FailureKind::Refused | FailureKind::Version => "refused",
            _ => "failed",
        };
        let (kind, reason) = (Some(kind), Some(reason));
        Self { outcome, image: image.to_owned(), restore: None, kind, reason, errors }
    }

    pub(super) fn show(&self, json: bool) -> Result<(), Failure> {
        if json {
            return Ok(output::print_json(self)?);
        }
        if self.outcome == "done" {
            return Ok(output::print(&self.line())?);
        }
        let reason = self.reason.as_deref().unwrap_or_default();
        self.errors.iter().filter(|it| !it.contains(reason)).for_each(|it| eprintln!("  {}", output::plain(it)));
        Ok(())
    }

    fn line(&self) -> String {
        let image = self.image.display();
        let Some(times) = &self.restore else { return format!("restored the image in {image}\n") };
        let whom = match times.clients.as_slice() {
            [RestoredInfo { pid: Some(pid), .. }] => format!("process {pid}"),
            clients => format!("{} GPU processes", clients.len()),
        };
        let ns = |ms: f64| output::time((ms * 1e6) as u64);
        let running = times.running_ms.map(|it| format!(", running after {}", ns(it))).unwrap_or_default();
        let phases: Vec<_> =
            times.phases.iter().map(|it| format!("{} {}", it.name, output::time(it.duration_ns))).collect();
        let loaded = match times.loaded_ms {
            Some(it) => format!("loaded after {}", ns(it)),
            None => "its content is still being loaded".to_owned(),
        };
        let bytes = output::size(times.gpu_bytes);
        format!("restored {whom} from {image}: {bytes}{running} ({}), {loaded}\n", output::plain(&phases.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn restored(clients: usize, loaded_ns: Option<u64>) -> Restored {
        let phase = |name: &str, ms: u64| PhaseInfo { name: name.to_owned(), duration_ns: ms * 1_000_000, bytes: 0 };
        let client = RestoredInfo { pid: Some(7), command: "app".to_owned(), bytes: 3, ..RestoredInfo::default() };
        let info = RestoreInfo {
            bytes: 1 << 30,
            phases: vec![phase("check", 1), phase("criu", 1200)],
            clients: vec![client; clients],
            running_ns: Some(1_201_000_000),
            loaded_ns,
            ..RestoreInfo::default()
        };
        Restored { info: Some(info), time: Duration::from_millis(1500) }
    }

    #[test]
    fn one_line_says_what_it_took() {
        let line = |clients, loaded| Report::done(Path::new("/i"), restored(clients, loaded)).line();
        let expected = "restored process 7 from /i: 1.0 GiB, running after 1.20 s (check 1.0 ms, criu 1.20 s), its content is \
                        still being loaded\n";
        assert_eq!(line(1, None), expected);
        let expected = "restored 2 GPU processes from /i: 1.0 GiB, running after 1.20 s (check 1.0 ms, criu 1.20 s), loaded \
                        after 2.50 s\n";
        assert_eq!(line(2, Some(2_500_000_000)), expected);
        let unknown = Restored { info: None, time: Duration::ZERO };
        assert_eq!(Report::done(Path::new("/i"), unknown).line(), "restored the image in /i\n");
    }

    #[test]
    fn a_program_learns_the_outcome_the_kind_and_the_times() {
        let json = |report: Report| serde_json::to_value(report).unwrap();
        let done = json(Report::done(Path::new("/i"), restored(1, None)));
        assert_eq!((&done["outcome"], &done["image"]), (&json!("done"), &json!("/i")));
        let restore = &done["restore"];
        assert_eq!((&restore["running_ms"], &restore["loaded_ms"]), (&json!(1201.0), &json!(null)));
        assert_eq!((&restore["clients"][0]["pid"], &restore["phases"][1]["name"]), (&json!(7), &json!("criu")));
        assert_eq!((done.get("kind"), done.get("errors")), (None, None));
        for (kind, outcome) in [
            (FailureKind::Refused, "refused"),
            (FailureKind::Version, "refused"),
            (FailureKind::BadImage, "failed"),
            (FailureKind::Other, "failed"),
        ] {
            let failed = json(Report::failed(Path::new("/i"), kind, "why".to_owned(), vec!["line".to_owned()]));
            let expected = json!({
                "outcome": outcome, "image": "/i", "kind": kind.as_str(), "reason": "why", "errors": ["line"]
            });
            assert_eq!(failed, expected);
        }
    }
}
