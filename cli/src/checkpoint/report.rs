//! The output of `rekindle checkpoint` at its end: a line or a report.

use std::path::PathBuf;

use rekindle_stores::Sent;
use rekindle_wire::control::{CheckInfo, DumpInfo, DumpOutcome, FailureKind, PhaseInfo};
use serde::Serialize;
use serde_json::Value;

use super::maker::Maker;
use crate::failure::Failure;
use crate::{check, output};

/// The outcome: as JSON for programs, as one line for people.
#[derive(Serialize)]
pub(super) struct Report {
    outcome: &'static str,
    /// None for a container that does not run.
    pid: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    /// The directory or file; none where the engine keeps it.
    image: Option<PathBuf>,
    /// The name under which the engine keeps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<String>,
    /// How many dumps were tried.
    attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    dump: Option<Dump>,
    #[serde(skip_serializing_if = "Option::is_none")]
    podman: Option<Value>,
    /// The copy of the image in a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    stored: Option<Sent>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    processes: Vec<CheckInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<FailureKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    errors: Vec<String>,
}

/// A successful dump.
#[derive(Serialize)]
struct Dump {
    id: String,
    protocol: String,
    protocol_reason: String,
    gpu_bytes: u64,
    image_bytes: u64,
    seconds: f64,
    stall_ns: Option<u64>,
    phases: Vec<PhaseInfo>,
}

impl Report {
    pub(super) fn of(maker: &Maker) -> Self {
        Self {
            outcome: "done",
            pid: Some(maker.root()),
            container: maker.container().map(str::to_owned),
            image: maker.image().map(Into::into),
            checkpoint: maker.checkpoint().map(str::to_owned),
            attempts: 1,
            dump: None,
            podman: None,
            stored: None,
            processes: Vec::new(),
            kind: None,
            reason: None,
            errors: Vec::new(),
        }
    }

    /// Counts another dump.
    pub(super) fn again(&mut self) {
        self.attempts += 1;
    }

    /// A container of which there can be no checkpoint, since there is no process to begin with.
    pub(super) fn unmade(container: &str, failure: &Failure) -> Self {
        let outcome = if failure.kind() == FailureKind::Refused { "refused" } else { "failed" };
        Self {
            outcome,
            pid: None,
            container: Some(container.to_owned()),
            image: None,
            checkpoint: None,
            attempts: 0,
            dump: None,
            podman: None,
            stored: None,
            processes: Vec::new(),
            kind: Some(failure.kind()),
            reason: Some(failure.to_string()),
            errors: Vec::new(),
        }
    }

    /// No dump was tried, because of these processes.
    pub(super) fn refused(&mut self, processes: Vec<CheckInfo>) {
        self.outcome = "refused";
        self.processes = processes;
    }

    /// The checkpoint has failed.
    pub(super) fn failed(&mut self, kind: FailureKind, reason: &str, errors: &[String]) {
        self.outcome = "failed";
        self.kind = Some(kind);
        self.reason = Some(reason.to_owned());
        self.errors = errors.to_vec();
    }

    /// The checkpoint was made.
    pub(super) fn done(&mut self, info: Option<&DumpInfo>, podman: Option<Value>) {
        self.podman = podman;
        let durable = info.and_then(|it| Some((it, it.outcome.clone()?)));
        if let Some((info, DumpOutcome::Durable { id, protocol, protocol_reason, bytes, phases })) = durable {
            let stall = phases.iter().find(|it| it.name == "stall").map(|it| it.duration_ns);
            self.dump = Some(Dump {
                id,
                protocol,
                protocol_reason,
                gpu_bytes: info.bytes,
                image_bytes: bytes,
                seconds: info.elapsed_ms as f64 / 1e3,
                stall_ns: stall,
                phases,
            });
        }
    }

    /// The image was copied into a store.
    pub(super) fn stored(&mut self, sent: Sent) {
        self.stored = Some(sent);
    }

    /// Shows it to people: a checkpoint on stdout, and what is to be known of a failure beside its reason on stderr.
    pub(super) fn print(&self) -> Result<(), Failure> {
        match (self.outcome, self.pid) {
            ("done", _) => {
                output::print(&self.line())?;
                if let Some(Sent { name, sent_bytes, sent_pieces, pieces, .. }) = &self.stored {
                    let sent = output::size(*sent_bytes);
                    output::print(&format!("stored as {name}: {sent} sent, {sent_pieces} of {pieces} pieces\n"))?;
                }
            }
            ("refused", Some(pid)) => {
                eprint!("{}", check::describe(pid, &self.processes).map_err(anyhow::Error::from)?)
            }
            _ => {
                let reason = self.reason.as_deref().unwrap_or_default();
                self.errors.iter().filter(|it| *it != reason).for_each(|it| eprintln!("  {}", output::plain(it)));
            }
        }
        Ok(())
    }

    /// What was checkpointed.
    fn what(&self) -> String {
        let process = self.pid.map(|it| format!("process {it}"));
        match (&self.container, process) {
            (Some(name), Some(process)) => format!("container {} ({process})", output::plain(name)),
            (Some(name), None) => format!("container {}", output::plain(name)),
            (None, process) => process.unwrap_or_default(),
        }
    }

    fn line(&self) -> String {
        let place = match (&self.image, &self.checkpoint) {
            (Some(image), _) => format!(" to {}", image.display()),
            (None, Some(name)) => format!(" as {name}"),
            (None, None) => String::new(),
        };
        let Some(dump) = &self.dump else {
            return format!(
                "checkpointed {}{place}: no process of its tree uses a GPU\n{}",
                self.what(),
                self.statistics()
            );
        };
        let stall = dump.stall_ns.map(|it| format!(", stall {}", output::time(it))).unwrap_or_default();
        let phases = dump.phases.iter().filter(|it| it.name != "stall");
        let phases: Vec<_> = phases.map(|it| format!("{} {}", it.name, output::time(it.duration_ns))).collect();
        format!(
            "checkpointed {}{place}: {}{stall}, total {:.2} s, protocol {} ({})\n{}",
            self.what(),
            output::size(dump.gpu_bytes),
            dump.seconds,
            output::plain(&dump.protocol),
            output::plain(&phases.join(", ")),
            self.statistics(),
        )
    }

    /// Podman's statistics, as podman prints them.
    fn statistics(&self) -> String {
        let shown = self.podman.as_ref().and_then(|it| serde_json::to_string_pretty(it).ok());
        shown.map(|it| it + "\n").unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_it_took() {
        let phase = |name: &str, ms: u64| PhaseInfo { name: name.to_owned(), duration_ns: ms * 1_000_000, bytes: 0 };
        let mut report = Report {
            outcome: "done",
            pid: Some(7),
            container: None,
            image: Some("/i".into()),
            checkpoint: None,
            attempts: 1,
            dump: Some(Dump {
                id: "x".to_owned(),
                protocol: "stop".to_owned(),
                protocol_reason: String::new(),
                gpu_bytes: 1 << 30,
                image_bytes: 1 << 30,
                seconds: 1.5,
                stall_ns: Some(12_300_000),
                phases: vec![phase("quiesce", 1), phase("copy", 1200), phase("stall", 12)],
            }),
            podman: None,
            stored: None,
            processes: Vec::new(),
            kind: None,
            reason: None,
            errors: Vec::new(),
        };
        let expected = "checkpointed process 7 to /i: 1.0 GiB, stall 12.3 ms, total 1.50 s, protocol stop \
                        (quiesce 1.0 ms, copy 1.20 s)\n";
        assert_eq!(report.line(), expected);
        report.container = Some("job".to_owned());
        assert!(report.line().starts_with("checkpointed container job (process 7) to /i: 1.0 GiB"));
    }
}
