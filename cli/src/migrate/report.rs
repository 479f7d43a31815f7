//! The report of a migration.

use std::net::IpAddr;

use serde::Serialize;

use crate::output::size;

/// What a migration has done.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    migration: String,
    pid: i32,
    /// The container, if one has moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    host: String,
    /// The addresses that move with the processes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) addresses: Vec<IpAddr>,
    /// Whether the processes were handed over.
    moved: bool,
    /// The copies of the processes' own memory while they ran.
    pub(super) memory: Vec<Round>,
    /// The copies of GPU memory while they ran.
    pub(super) rounds: Vec<Round>,
    /// Bytes that were sent while the processes stood still.
    pub(super) last_sent: u64,
    /// Bytes of their own memory that the target had by then, at their addresses.
    pub(super) unchanged: u64,
    /// Milliseconds for which the processes stood still.
    pub(super) pause_ms: Option<u64>,
    /// What they waited for.
    pub(super) pause: Option<Pause>,
    /// Milliseconds of all.
    pub(super) total_ms: u64,
}

/// A copy of memory while the processes ran.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Round {
    /// Bytes that had changed since the one before.
    pub(super) bytes: u64,
    /// Bytes of files that were sent.
    pub(super) sent: u64,
    /// Milliseconds until they were at the target.
    pub(super) ms: u64,
}

/// The parts of the time for which the processes stand still, in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Pause {
    /// They are dumped.
    pub(super) dump_ms: u64,
    /// Their own memory is read where it is, and what of it is new is sent. 0 if CRIU writes it, as of a container.
    pub(super) memory_ms: u64,
    /// What is left of the image is sent.
    pub(super) send_ms: u64,
    /// The target restores them.
    pub(super) restore_ms: u64,
    /// They are handed over, and let run.
    pub(super) hand_over_ms: u64,
}

impl Report {
    pub(super) fn new(migration: &str, pid: i32, container: Option<&str>, host: &str) -> Self {
        let (migration, host, container) = (migration.to_owned(), host.to_owned(), container.map(str::to_owned));
        Self { migration, pid, container, host, ..Self::default() }
    }

    /// The processes were handed over.
    pub(super) fn is_moved(&mut self) {
        self.moved = true;
    }

    /// The report for people, of a migration that has succeeded.
    pub(super) fn text(&self) -> String {
        let memory = self
            .memory
            .iter()
            .map(|Round { sent, ms, .. }| format!("its own memory: {} in {ms} ms, while it ran\n", size(*sent)));
        let rounds = self.rounds.iter().enumerate().map(|(number, it)| {
            let Round { sent, ms, .. } = it;
            format!("round {number}: {} in {ms} ms, while it ran\n", size(*sent))
        });
        let pause = self.pause_ms.unwrap_or_default();
        let unchanged = match self.unchanged {
            0 => String::new(),
            bytes => format!("; {} of its own memory had not changed", size(bytes)),
        };
        let last = format!("then {} while it stood still{unchanged}\n", size(self.last_sent));
        let parts = self.pause.map(|it| {
            let Pause { dump_ms, memory_ms, send_ms, restore_ms, hand_over_ms } = it;
            format!(
                "dump {dump_ms} ms, its own memory {memory_ms} ms, send {send_ms} ms, restore {restore_ms} ms, hand over {hand_over_ms} ms\n"
            )
        });
        let what =
            self.container.as_ref().map_or_else(|| format!("process {}", self.pid), |it| format!("container {it}"));
        let moved = format!("{what} runs on {}: it stood still for {pause} ms", self.host);
        let addresses = self.addresses.iter().map(|it| format!("address {it} moved with it\n"));
        memory.chain(rounds).chain([last]).chain(parts).chain(addresses).collect::<String>()
            + &format!("{moved}, of {} ms\n", self.total_ms)
    }
}
