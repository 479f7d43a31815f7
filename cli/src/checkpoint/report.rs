//! The output of `rekindle checkpoint` at its end: a line or a report.

use std::path::PathBuf;

use rekindle_wire::control::{CheckInfo, DumpInfo, DumpOutcome, FailureKind, PhaseInfo};
use serde::Serialize;

use super::maker::Maker;
use crate::failure::Failure;
use crate::{check, output};

/// The outcome: as JSON for programs, as one line for people.
#[derive(Serialize)]
pub(super) struct Report {
    outcome: &'static str,
    pid: i32,
    /// The directory or file; none where podman keeps it.
    image: Option<PathBuf>,
    /// How many dumps were tried.
    attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    dump: Option<Dump>,
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
            pid: maker.root(),
            image: maker.image().map(Into::into),
            attempts: 1,
            dump: None,
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

    /// Shows why no dump was tried.
    pub(super) fn refused(mut self, processes: &[CheckInfo], json: bool) -> Result<(), Failure> {
        if !json {
            let text = check::describe(self.pid, processes).map_err(anyhow::Error::from)?;
            eprint!("{text}");
            return Ok(());
        }
        self.outcome = "refused";
        self.processes = processes.to_vec();
        Ok(output::print_json(&self)?)
    }

    /// Shows why the checkpoint has failed.
    pub(super) fn failed(
        mut self,
        kind: FailureKind,
        reason: &str,
        errors: &[String],
        json: bool,
    ) -> Result<(), Failure> {
        if !json {
            errors.iter().filter(|it| *it != reason).for_each(|it| eprintln!("  {}", output::plain(it)));
            return Ok(());
        }
        self.outcome = "failed";
        self.kind = Some(kind);
        self.reason = Some(reason.to_owned());
        self.errors = errors.to_vec();
        Ok(output::print_json(&self)?)
    }

    /// Shows the checkpoint that was made.
    pub(super) fn done(mut self, info: Option<&DumpInfo>, json: bool) -> Result<(), Failure> {
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
        if json { Ok(output::print_json(&self)?) } else { Ok(output::print(&self.line())?) }
    }

    fn line(&self) -> String {
        let place = self.image.as_ref().map(|it| format!(" to {}", it.display())).unwrap_or_default();
        let Some(dump) = &self.dump else {
            return format!("checkpointed process {}{place}: no process of its tree uses a GPU\n", self.pid);
        };
        let stall = dump.stall_ns.map(|it| format!(", stall {}", output::time(it))).unwrap_or_default();
        let phases = dump.phases.iter().filter(|it| it.name != "stall");
        let phases: Vec<_> = phases.map(|it| format!("{} {}", it.name, output::time(it.duration_ns))).collect();
        format!(
            "checkpointed process {}{place}: {}{stall}, total {:.2} s, protocol {} ({})\n",
            self.pid,
            output::size(dump.gpu_bytes),
            dump.seconds,
            output::plain(&dump.protocol),
            output::plain(&phases.join(", ")),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_says_what_it_took() {
        let phase = |name: &str, ms: u64| PhaseInfo { name: name.to_owned(), duration_ns: ms * 1_000_000, bytes: 0 };
        let report = Report {
            outcome: "done",
            pid: 7,
            image: Some("/i".into()),
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
            processes: Vec::new(),
            kind: None,
            reason: None,
            errors: Vec::new(),
        };
        let expected = "checkpointed process 7 to /i: 1.0 GiB, stall 12.3 ms, total 1.50 s, protocol stop \
                        (quiesce 1.0 ms, copy 1.20 s)\n";
        assert_eq!(report.line(), expected);
    }
}
