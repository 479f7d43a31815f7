//! The daemon's part of the manifest, besides the workers' parts.
//!
//! A process that was frozen in the middle of its handshake has no worker and no GPU state, but a socket that leads here.
//! The process gets a client record without a ring, so that the restore connects its socket anew, and closes it at once: then
//! the process begins the handshake again.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rekindle_images::{Client as Record, Gpu, Grant, Host, Manifest, Phase, PhaseName, Setting};
use rekindle_wire::CLIENT_VERSION;
use rekindle_wire::attach::{Attach, Attached, Device};
use rekindle_wire::control::{Secured, Waits};
use rekindle_wire::layout::SHARED_SIZE;

use super::super::clients::Client;
use super::super::process::{self, Process};
use super::protocol::Chosen;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const COMPUTE_CAPABILITY: [usize; 2] = [75, 76];

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSORS: usize = 16;

/// The owner of a socket that CRIU dumped.
#[derive(Clone, Debug)]
pub(super) enum Whose {
    Client(Process),
    Unattached(Unattached),
}

impl Whose {
    pub(super) fn unattached(&self) -> Option<&Unattached> {
        match self {
            Self::Unattached(it) => Some(it),
            Self::Client(_) => None,
        }
    }
}

/// A process in the middle of its handshake, or of a question about GPUs: the process begins again when it is restored. The
/// process may be a client besides.
#[derive(Clone, Debug)]
pub(super) struct Unattached {
    pub(super) process: Process,
    namespace_pid: i32,
    command: String,
    socket: String,
}

impl Unattached {
    /// The record of the process. A process that has said nothing has most likely connected to the socket that we listen on.
    pub(super) fn new(process: Process, said: Option<&Attach>, socket: &Path) -> Self {
        let pid = process.pid;
        let pids = process::namespace_pids(pid).unwrap_or_default();
        Self {
            process,
            namespace_pid: pids.last().copied().unwrap_or(pid),
            command: said.map_or_else(|| process::command(pid), |it| it.command.clone()),
            socket: said.map_or_else(|| socket.display().to_string(), |it| it.socket.clone()),
        }
    }

    fn record(&self, index: u32, sockets: &[(Whose, u32)]) -> Record {
        Record {
            index,
            pid: self.process.pid.unsigned_abs(),
            namespace_pid: self.namespace_pid.unsigned_abs(),
            command: self.command.clone(),
            wire_version: CLIENT_VERSION,
            socket_path: self.socket.clone().into(),
            socket_ids: ids_of(self.process, false, sockets),
            ..Record::default()
        }
    }
}

/// Whether a record is of a process without a worker.
pub(in crate::daemon) fn is_unattached(record: &Record) -> bool {
    record.ring.size == 0
}

/// Overwrites the fields of a worker's record that the daemon knows for certain.
pub(super) fn identify(record: &mut Record, client: &Client, namespace_pid: i32, sockets: &[(Whose, u32)]) {
    let attach = &client.attach;
    record.pid = client.process.pid.unsigned_abs();
    record.namespace_pid = namespace_pid.unsigned_abs();
    record.command = attach.command.clone();
    record.wire_version = attach.dialect.version;
    record.socket_path = attach.socket.clone().into();
    record.socket_ids = ids_of(client.process, true, sockets);
    // A record without a ring is that of a process without a worker.
    if record.ring.size == 0 {
        record.ring.size = SHARED_SIZE as u64;
    }
    record.shared_state = attach.dialect.call_bytes();
    let setting = |(name, value): &(String, String)| Setting { name: name.clone(), value: value.clone() };
    record.settings = attach.settings.iter().map(setting).collect();
    record.grant = client.allowed.container.as_deref().map(|it| Grant {
        container: it.id.clone(),
        all_gpus: it.gpus.is_none(),
        device_memory: it.limits.device_memory,
        pinned_memory: it.limits.pinned_memory,
        workers: it.limits.workers,
        protocol: it.protocol,
        share: it.share,
    });
}

/// Overwrites the fields of the record of a client that lives on with what the daemon knows for certain.
pub(in crate::daemon) fn describe_client(record: &mut Record, client: &Client) {
    identify(record, client, client.namespace_pid() as i32, &[]);
}

/// The sockets of a process, either as a client or as a process that begins again.
fn ids_of(process: Process, attached: bool, sockets: &[(Whose, u32)]) -> Vec<u32> {
    let of_it = |(whose, id): &(Whose, u32)| {
        let owner = match whose {
            Whose::Client(process) => (*process, true),
            Whose::Unattached(it) => (it.process, false),
        };
        (owner == (process, attached)).then_some(*id)
    };
    sockets.iter().filter_map(of_it).collect()
}

/// The times of a dump's steps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeline {
    pub(super) began: Instant,
    pub(super) quiesce_began: Instant,
    /// Bytes copied before the quiesce, and how long that took.
    pub(super) precopied: (u64, Duration),
    pub(super) idle_at: Instant,
    /// The processes were stopped.
    pub(super) frozen_at: Instant,
    /// CRIU announced the freeze, and workers began.
    pub(super) saving_at: Instant,
    pub(super) costs: Costs,
    /// Everything that needs closed rings was copied.
    pub(super) may_open_at: Instant,
    pub(super) copied_at: Instant,
    pub(super) synced_at: Instant,
    pub(super) finished_at: Instant,
    /// The rings opened; none where the tasks do not go on.
    pub(super) opened_at: Option<Instant>,
    pub(super) bytes: u64,
}

impl Timeline {
    /// The phases, as the manifest has them.
    pub(super) fn phases(&self) -> Vec<Phase> {
        let phase = |name, from: Instant, to: Instant, bytes| Phase {
            name,
            start: nanoseconds(self.began, from),
            duration: nanoseconds(from, to),
            bytes,
        };
        let mut phases = Vec::new();
        if !self.precopied.1.is_zero() {
            phases.push(phase(PhaseName::PreCopy, self.began, self.began + self.precopied.1, self.precopied.0));
        }
        phases.extend([
            phase(PhaseName::Quiesce, self.quiesce_began, self.idle_at, 0),
            phase(PhaseName::Freeze, self.frozen_at, self.finished_at, 0),
            phase(PhaseName::Copy, self.saving_at, self.copied_at, self.bytes),
            // The copy has written into the page cache, and the part of it that was not on disk yet is unknown: maybe none.
            phase(PhaseName::Write, self.copied_at, self.synced_at, 0),
        ]);
        let costs = [(PhaseName::Hash, self.costs.hash), (PhaseName::Clone, self.costs.clone)];
        for (name, (bytes, duration)) in costs.into_iter().filter(|(_, (bytes, _))| *bytes > 0) {
            phases.push(phase(name, self.saving_at, self.saving_at + duration, bytes));
        }
        if let Some(opened_at) = self.opened_at {
            let freeze = self.finished_at.saturating_duration_since(self.frozen_at);
            let closed = opened_at.saturating_duration_since(self.idle_at);
            let resume_from = self.may_open_at.max(self.finished_at);
            phases.push(phase(PhaseName::Resume, resume_from, opened_at, 0));
            phases.push(Phase {
                name: PhaseName::Stall,
                start: nanoseconds(self.began, self.idle_at),
                duration: closed.saturating_sub(freeze).as_nanos() as u64,
                bytes: 0,
            });
            if self.costs.waits.commands > 0 {
                let ns = Duration::from_nanos(self.costs.waits.ns);
                phases.push(phase(PhaseName::Wait, opened_at, opened_at + ns, self.costs.waits.cloned));
            }
        }
        phases
    }
}

/// The cost of securing memory, in bytes and time, of the worker that took longest.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Costs {
    hash: (u64, Duration),
    clone: (u64, Duration),
    /// How long commands have waited since the rings opened.
    waits: Waits,
}

impl Costs {
    /// Adds the cost of one more worker.
    pub(super) fn add(&mut self, secured: &Secured) {
        let longer = |all: &mut (u64, Duration), bytes: u64, ns: u64| {
            *all = (all.0.saturating_add(bytes), all.1.max(Duration::from_nanos(ns)));
        };
        longer(&mut self.hash, secured.hashed, secured.hash_ns);
        longer(&mut self.clone, secured.cloned, secured.clone_ns);
    }

    /// Adds the waits of one more worker; see [`Costs::waits`].
    pub(super) fn wait(&mut self, waits: &Waits) {
        self.waits.commands = self.waits.commands.saturating_add(waits.commands);
        self.waits.cloned = self.waits.cloned.saturating_add(waits.cloned);
        self.waits.ns = self.waits.ns.max(waits.ns);
    }
}

fn nanoseconds(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_nanos()).unwrap_or(u64::MAX)
}

/// Builds the manifest.
pub(super) fn build<'a>(
    timeline: &Timeline,
    chosen: &Chosen,
    workers: impl Iterator<Item = &'a Attached>,
    mut records: Vec<Record>,
    sockets: &[(Whose, u32)],
) -> Manifest {
    let unattached: BTreeMap<_, _> =
        sockets.iter().filter_map(|(whose, _)| whose.unattached()).map(|it| (it.process.pid, it)).collect();
    let next = records.iter().map(|it| it.index + 1).max().unwrap_or(0);
    let more = (next..).zip(unattached.values());
    records.extend(more.map(|(index, it)| it.record(index, sockets)));

    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let mut manifest = Manifest::new(now.map_or(0, |it| it.as_secs()), chosen.protocol);
    manifest.protocol_reason.clone_from(&chosen.reason);
    env!("CARGO_PKG_VERSION").clone_into(&mut manifest.rekindle_version);
    manifest.host = describe_host(workers, &records);
    manifest.phases = timeline.phases();
    manifest.clients = records;
    manifest
}

/// The host as its workers, and the records of their clients, describe it.
pub(in crate::daemon) fn describe_host<'a>(workers: impl Iterator<Item = &'a Attached>, records: &[Record]) -> Host {
    let used = |uuid| {
        let mut gpus = records.iter().flat_map(|it| &it.gpus);
        gpus.any(|gpu| gpu.uuid == uuid)
    };
    let mut host = Host {
        name: std::fs::read_to_string("/proc/sys/kernel/hostname")
            .map(|it| it.trim_end().to_owned())
            .unwrap_or_default(),
        ..Host::default()
    };
    for worker in workers {
        host.driver_version = driver_version(worker.driver_version);
        host.driver_build = driver_build(worker);
        for device in &worker.devices {
            let known = host.gpus.iter().any(|it| it.uuid == device.uuid);
            if used(device.uuid) && !known {
                host.gpus.push(gpu(device));
            }
        }
    }
    host
}

/// The version of CUDA in its usual notation, such as 12.4.
pub(in crate::daemon) fn driver_version(number: i32) -> String {
    format!("CUDA {}.{}", number / 1000, number % 1000 / 10)
}

/// The driver's own version, and its kernel module's if that differs; empty where neither is known.
pub(in crate::daemon) fn driver_build(worker: &Attached) -> String {
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").ok();
    name_build(&worker.driver_build, module.as_deref().and_then(module_version).unwrap_or_default())
}

fn name_build(library: &str, module: &str) -> String {
    match (library, module) {
        (only, "") | ("", only) => only.to_owned(),
        (library, module) if library == module => library.to_owned(),
        (library, module) => format!("{library} with kernel module {module}"),
    }
}

/// Finds the version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue ...`, or
/// `... Open Kernel Module for x86_64  580...`.
fn module_version(text: &str) -> Option<&str> {
    let is_version = |it: &&str| it.contains('.') && it.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.lines().next()?.split_whitespace().find(is_version)
}

/// The properties of a device that a restore compares.
pub(in crate::daemon) fn gpu(device: &Device) -> Gpu {
    let attribute = |number: usize| device.attributes.get(number).map_or(0, |(_, value)| value.unsigned_abs());
    let capability = COMPUTE_CAPABILITY.map(attribute);
    Gpu {
        uuid: device.uuid,
        name: device.name.clone(),
        compute_major: capability[0],
        compute_minor: capability[1],
        total_memory: device.memory,
        pci: device.pci_bus_id.clone(),
        multiprocessors: attribute(MULTIPROCESSORS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::Protocol;

    #[test]
    fn a_driver_is_named_by_its_library_and_by_its_kernel_module_where_that_is_another() {
        let closed =
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Oct  7 2025\nGCC version:  gcc 13.3.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (root@host)\n";
        assert_eq!((module_version(closed), module_version(open)), (Some("580.159.04"), Some("575.57.08")));
        assert_eq!(module_version("no version\n580.1\n"), None);
        assert_eq!(name_build("580.159.04", "580.159.04"), "580.159.04");
        assert_eq!(name_build("580.159.04", "575.57.08"), "580.159.04 with kernel module 575.57.08");
        assert_eq!(
            (name_build("580.1", ""), name_build("", "575.1"), name_build("", "")),
            ("580.1".into(), "575.1".into(), String::new())
        );
    }

    #[test]
    fn the_stall_is_what_the_rings_were_closed_for_less_the_freeze() {
        let began = Instant::now();
        let at = |ms| began + Duration::from_millis(ms);
        let mut timeline = Timeline {
            began,
            quiesce_began: began,
            precopied: Default::default(),
            costs: Costs::default(),
            idle_at: at(10),
            frozen_at: at(20),
            saving_at: at(25),
            may_open_at: at(500),
            copied_at: at(500),
            synced_at: at(700),
            finished_at: at(120),
            opened_at: Some(at(510)),
            bytes: 5,
        };
        let phase = |timeline: &Timeline, name| {
            let phases = timeline.phases();
            let found = phases.iter().find(|it| it.name == name).copied();
            found.map(|it| (it.start / 1_000_000, it.duration / 1_000_000, it.bytes))
        };
        assert_eq!(phase(&timeline, PhaseName::Quiesce), Some((0, 10, 0)));
        assert_eq!(phase(&timeline, PhaseName::Freeze), Some((20, 100, 0)));
        assert_eq!(phase(&timeline, PhaseName::Copy), Some((25, 475, 5)));
        assert_eq!(phase(&timeline, PhaseName::Write), Some((500, 200, 0)));
        assert_eq!(phase(&timeline, PhaseName::Resume), Some((500, 10, 0)));
        assert_eq!(phase(&timeline, PhaseName::Stall), Some((10, 400, 0)));
        // Memory that a clone or a guard keeps is copied afterwards.
        timeline.may_open_at = at(125);
        timeline.opened_at = Some(at(126));
        timeline.costs.add(&Secured { cloned: 7, clone_ns: 3_000_000, ..Secured::default() });
        assert_eq!(phase(&timeline, PhaseName::Clone), Some((25, 3, 7)));
        assert_eq!(phase(&timeline, PhaseName::Hash), None);
        assert_eq!(phase(&timeline, PhaseName::Resume), Some((125, 1, 0)));
        assert_eq!(phase(&timeline, PhaseName::Stall), Some((10, 16, 0)));
        timeline.opened_at = None;
        assert_eq!(phase(&timeline, PhaseName::Stall), None);
    }

    #[test]
    fn a_process_without_a_worker_has_a_record_without_a_ring() {
        let process = Process { pid: 7, start: 1 };
        let unattached = Unattached::new(process, None, Path::new("/run/s"));
        // The process may be a client too, and be asking about GPUs.
        let sockets = [(Whose::Unattached(unattached), 31), (Whose::Client(process), 32)];
        assert_eq!(ids_of(process, true, &sockets), [32]);
        let now = Instant::now();
        let timeline = Timeline {
            began: now,
            quiesce_began: now,
            precopied: Default::default(),
            costs: Costs::default(),
            idle_at: now,
            frozen_at: now,
            saving_at: now,
            may_open_at: now,
            copied_at: now,
            synced_at: now,
            finished_at: now,
            opened_at: None,
            bytes: 0,
        };
        let chosen = Chosen { protocol: Protocol::Stop, reason: String::new() };
        let manifest = build(&timeline, &chosen, std::iter::empty(), Vec::new(), &sockets);
        let [record] = manifest.clients.as_slice() else { panic!("{:?}", manifest.clients) };
        assert!(is_unattached(record));
        assert_eq!(record.socket_ids, [31]);
        assert_eq!(record.socket_path, Path::new("/run/s"));
    }
}
