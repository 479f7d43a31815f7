//! A summary of an image for a person or a scheduler.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::hash::CheckpointId;
use crate::manifest::{Client, Compression, Manifest, Native, PhaseName, Piece, Storage};

/// A manifest in short. Serialises to what `rekindle inspect --json` prints; shown, it is what
/// `rekindle inspect` prints. Sizes are bytes and times nanoseconds unless a name says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The checkpoint's name.
    pub id: CheckpointId,
    /// When it was taken, in seconds since 1970.
    pub created: u64,
    /// The same as text (RFC 3339, UTC).
    pub created_utc: String,
    /// Version of the image format.
    pub format_version: u32,
    /// Version of the product that wrote it.
    pub rekindle_version: String,
    /// Name of the machine.
    pub host: String,
    /// Version of CUDA's interface that the driver has.
    pub driver_version: String,
    /// The driver's own version; empty if it was not known.
    pub driver_build: String,
    /// The protocol that was used.
    pub protocol: &'static str,
    /// Why it was this one.
    pub protocol_reason: String,
    /// The GPUs that a restore needs the like of.
    pub gpus: Vec<GpuSummary>,
    /// The processes.
    pub clients: Vec<ClientSummary>,
    /// The processes that the driver has checkpointed: their GPU memory is in CRIU's files.
    pub natives: Vec<NativeSummary>,
    /// Sizes over all clients.
    pub bytes: ByteSummary,
    /// Names of the builds of Rekindle's libraries that the image carries, since its processes have mapped them.
    pub builds: Vec<String>,
    /// Objects of all clients by kind.
    pub objects: Vec<ObjectSummary>,
    /// The application's stall for the GPU side beyond CRIU's freeze, in nanoseconds; none where the application did not go on.
    pub stall_ns: Option<u64>,
    /// How long each phase took.
    pub phases: Vec<PhaseSummary>,
    /// The image it builds on.
    pub parent: Option<ParentSummary>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuSummary {
    /// UUID as NVIDIA's tools show it.
    pub uuid: String,
    /// Name.
    pub name: String,
    /// Compute capability, `major.minor`.
    pub compute_capability: String,
    /// Memory in bytes.
    pub total_memory: u64,
    /// PCI address.
    pub pci: String,
    /// How many multiprocessors it has; 0 if that was not recorded.
    pub multiprocessors: u32,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClientSummary {
    /// Its index in the image.
    pub index: u32,
    /// Its pid at the dump.
    pub pid: u32,
    /// Its pid as it sees itself.
    pub namespace_pid: u32,
    /// Its command name.
    pub command: String,
    /// Version of the protocol between interposer and worker.
    pub wire_version: u32,
    /// UUIDs of its GPUs, in the order of its numbers for them.
    pub gpus: Vec<String>,
    /// Number of device allocations.
    pub allocations: usize,
    /// Sizes.
    pub bytes: ByteSummary,
}

/// A process that uses NVIDIA's own driver library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NativeSummary {
    /// Its pid at the dump.
    pub pid: u32,
    /// Its pid as it sees itself.
    pub namespace_pid: u32,
    /// Its command name.
    pub command: String,
    /// The thread in it that works for the driver, as it sees that.
    pub restore_thread: u32,
    /// `cuDriverGetVersion` at the dump.
    pub driver_version: u32,
    /// UUIDs of the machine's GPUs.
    pub gpus: Vec<String>,
}

/// Sizes in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ByteSummary {
    /// Device memory.
    pub device: u64,
    /// Device globals.
    pub globals: u64,
    /// Pinned host memory.
    pub pinned: u64,
    /// Arrays and the like.
    pub other: u64,
    /// Content in this image's data files.
    pub stored: u64,
    /// Bytes of [`stored`](Self::stored) that are compressed.
    pub compressed: u64,
    /// Content that is zero and not stored.
    pub zero: u64,
    /// Content that is in a parent.
    pub parent: u64,
    /// Code images; for a client, those that its objects need.
    pub code: u64,
}

/// How many objects of a kind there are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ObjectSummary {
    /// The kind.
    pub kind: String,
    /// How many.
    pub count: u64,
}

/// A phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PhaseSummary {
    /// Its name.
    pub name: &'static str,
    /// Nanoseconds since the checkpoint was asked for.
    pub start_ns: u64,
    /// Nanoseconds.
    pub duration_ns: u64,
    /// Bytes that it handled.
    pub bytes: u64,
}

/// The image that an incremental one builds on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ParentSummary {
    /// Its directory, relative to this image's.
    pub path: String,
    /// Its name.
    pub id: CheckpointId,
}

impl Summary {
    /// The summary of a manifest.
    #[must_use]
    pub fn of(manifest: &Manifest) -> Self {
        let clients: Vec<_> = manifest.clients.iter().map(|client| client_summary(client, manifest)).collect();
        let mut bytes = ByteSummary::default();
        for client in &clients {
            bytes.add(&client.bytes);
        }
        // Code is shared: the sum over clients would count it twice.
        let libraries: Vec<_> = manifest.builds.iter().flat_map(|it| &it.libraries).map(|it| it.code).collect();
        let code = manifest.code.iter().filter(|it| !libraries.contains(&it.hash));
        bytes.code = sum(code.map(|code| code.size));
        let host = &manifest.host;
        Self {
            id: manifest.id,
            created: manifest.created,
            created_utc: utc(manifest.created),
            format_version: manifest.format_version,
            rekindle_version: manifest.rekindle_version.clone(),
            host: host.name.clone(),
            driver_version: host.driver_version.clone(),
            driver_build: host.driver_build.clone(),
            protocol: manifest.protocol.as_str(),
            protocol_reason: manifest.protocol_reason.clone(),
            gpus: host
                .gpus
                .iter()
                .map(|gpu| GpuSummary {
                    uuid: uuid(gpu.uuid),
                    name: gpu.name.clone(),
                    compute_capability: format!("{}.{}", gpu.compute_major, gpu.compute_minor),
                    total_memory: gpu.total_memory,
                    pci: gpu.pci.clone(),
                    multiprocessors: gpu.multiprocessors,
                })
                .collect(),
            clients,
            natives: manifest.natives.iter().map(native_summary).collect(),
            bytes,
            builds: manifest.builds.iter().map(|it| it.id.iter().map(|byte| format!("{byte:02x}")).collect()).collect(),
            objects: objects(manifest),
            stall_ns: manifest.phases.iter().find(|it| it.name == PhaseName::Stall).map(|it| it.duration),
            phases: manifest
                .phases
                .iter()
                .map(|phase| PhaseSummary {
                    name: phase.name.as_str(),
                    start_ns: phase.start,
                    duration_ns: phase.duration,
                    bytes: phase.bytes,
                })
                .collect(),
            parent: manifest
                .parent
                .as_ref()
                .map(|parent| ParentSummary { path: parent.path.to_string_lossy().into_owned(), id: parent.id }),
        }
    }
}

impl ByteSummary {
    fn add(&mut self, other: &Self) {
        let Self { device, globals, pinned, other: rest, stored, compressed, zero, parent, code } = *other;
        for (sum, more) in [
            (&mut self.device, device),
            (&mut self.globals, globals),
            (&mut self.pinned, pinned),
            (&mut self.other, rest),
            (&mut self.stored, stored),
            (&mut self.compressed, compressed),
            (&mut self.zero, zero),
            (&mut self.parent, parent),
            (&mut self.code, code),
        ] {
            *sum = sum.saturating_add(more);
        }
    }

    fn add_piece(&mut self, piece: &Piece) {
        if let Storage::Stored(extent) = &piece.storage
            && extent.compression != Compression::None
        {
            self.compressed = self.compressed.saturating_add(extent.length);
        }
        let (sum, more) = match &piece.storage {
            Storage::Zero => (&mut self.zero, piece.length),
            Storage::Stored(extent) => (&mut self.stored, extent.length),
            Storage::Parent { .. } => (&mut self.parent, piece.length),
        };
        *sum = sum.saturating_add(more);
    }
}

fn native_summary(native: &Native) -> NativeSummary {
    NativeSummary {
        pid: native.pid,
        namespace_pid: native.namespace_pid,
        command: native.command.clone(),
        restore_thread: native.restore_thread,
        driver_version: native.driver_version,
        gpus: native.gpus.iter().map(|gpu| uuid(gpu.uuid)).collect(),
    }
}

fn client_summary(client: &Client, manifest: &Manifest) -> ClientSummary {
    let code: std::collections::BTreeSet<_> = client.objects.iter().flat_map(|it| &it.code).collect();
    let needed = manifest.code.iter().filter(|it| code.contains(&it.hash));
    let mut bytes = ByteSummary {
        device: sum(client.allocations.iter().map(|it| it.size)),
        globals: sum(client.globals.iter().map(|it| it.size)),
        pinned: sum(client.pinned.iter().map(|it| it.size)),
        other: sum(client.blobs.iter().map(|it| it.size)),
        code: sum(needed.map(|it| it.size)),
        ..ByteSummary::default()
    };
    for piece in client.regions().flat_map(|region| region.pieces) {
        bytes.add_piece(piece);
    }
    let mut gpus: Vec<_> = client.gpus.iter().collect();
    gpus.sort_by_key(|gpu| gpu.ordinal);
    ClientSummary {
        index: client.index,
        pid: client.pid,
        namespace_pid: client.namespace_pid,
        command: client.command.clone(),
        wire_version: client.wire_version,
        gpus: gpus.into_iter().map(|gpu| uuid(gpu.uuid)).collect(),
        allocations: client.allocations.len(),
        bytes,
    }
}

/// Clients may have numbers of their own for the same kind, so they are counted by name.
fn objects(manifest: &Manifest) -> Vec<ObjectSummary> {
    let mut counts = BTreeMap::<String, u64>::new();
    for client in &manifest.clients {
        let mut kinds = BTreeMap::<u32, u64>::new();
        for object in &client.objects {
            *kinds.entry(object.kind).or_default() += 1;
        }
        for (kind, count) in kinds {
            let name = client.object_kinds.iter().find(|it| it.kind == kind);
            let name = name.map_or_else(|| format!("kind {kind}"), |it| it.name.clone());
            *counts.entry(name).or_default() += count;
        }
    }
    counts.into_iter().map(|(kind, count)| ObjectSummary { kind, count }).collect()
}

/// Of numbers that a hostile image may have chosen.
fn sum(numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(0, u64::saturating_add)
}

fn uuid(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Seconds since 1970 as `2026-01-31T23:59:59Z`, by the days of the Gregorian calendar counted
/// from 1 March of year 0, where the leap day comes last.
pub(crate) fn utc(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3_600, second / 60 % 60, second % 60)
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "checkpoint  {}", self.id)?;
        writeln!(f, "created     {} on {}", self.created_utc, plain(&self.host))?;
        writeln!(
            f,
            "written by  rekindle {}, format {}, driver {}",
            plain(&self.rekindle_version),
            self.format_version,
            [plain(&self.driver_build), plain(&self.driver_version)].join(" ").trim_start()
        )?;
        write!(f, "protocol    {}", self.protocol)?;
        match plain(&self.protocol_reason) {
            reason if reason.is_empty() => writeln!(f)?,
            reason => writeln!(f, ": {reason}")?,
        }
        if let Some(parent) = &self.parent {
            writeln!(f, "parent      {} ({})", plain(&parent.path), parent.id)?;
        }
        if let Some(stall) = self.stall_ns {
            writeln!(f, "stall       {} of the application by its GPU, beyond CRIU's freeze", Duration(stall))?;
        }
        for build in &self.builds {
            writeln!(f, "libraries   build {build}")?;
        }
        writeln!(f, "memory      {}", self.bytes)?;

        writeln!(f, "\ngpus")?;
        for gpu in &self.gpus {
            writeln!(
                f,
                "  {}, compute {}, {}, {}, {}",
                plain(&gpu.name),
                gpu.compute_capability,
                Size(gpu.total_memory),
                plain(&gpu.pci),
                gpu.uuid
            )?;
        }
        writeln!(f, "\nprocesses")?;
        for client in &self.clients {
            writeln!(
                f,
                "  {} {} (pid {}), {} gpus, {} allocations: {}",
                client.index,
                plain(&client.command),
                client.pid,
                client.gpus.len(),
                client.allocations,
                client.bytes
            )?;
        }
        for native in &self.natives {
            writeln!(
                f,
                "  {} (pid {}), by the driver's own checkpoint: its GPU memory is in CRIU's files",
                plain(&native.command),
                native.pid
            )?;
        }
        writeln!(f, "\nobjects")?;
        let width = self.objects.iter().map(|object| object.kind.len()).fold(22, usize::max) + 2;
        for object in &self.objects {
            writeln!(f, "  {:<width$}{:>10}", plain(&object.kind), object.count)?;
        }
        writeln!(f, "\nphases")?;
        for phase in &self.phases {
            let duration = Duration(phase.duration_ns).to_string();
            write!(f, "  {:<10}{duration:>12}", phase.name)?;
            match phase.bytes {
                0 => writeln!(f)?,
                bytes => writeln!(f, "  {}, {}", Size(bytes), Rate(bytes, phase.duration_ns))?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for ByteSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [
            (self.device, "on devices"),
            (self.globals, "in globals"),
            (self.pinned, "pinned"),
            (self.other, "in other objects"),
            (self.code, "of code"),
            (self.stored, "stored"),
            (self.compressed, "of that compressed"),
            (self.zero, "zero"),
            (self.parent, "in the parent"),
        ];
        let mut first = true;
        for (bytes, name) in named {
            // The number of stored bytes is shown even when it is zero.
            if bytes != 0 || name == "stored" {
                let comma = if first { "" } else { ", " };
                write!(f, "{comma}{} {name}", Size(bytes))?;
                first = false;
            }
        }
        Ok(())
    }
}

/// Text from an image, which must not command the terminal.
pub(crate) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Bytes with a unit.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let power = (self.0.ilog2() / 10) as usize;
        let value = self.0 as f64 / (1u64 << (10 * power)) as f64;
        write!(f, "{value:.1} {}", UNITS[power - 1])
    }
}

/// Bytes in nanoseconds, as a rate.
pub(crate) struct Rate(pub(crate) u64, pub(crate) u64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Bytes in a nanosecond are GB in a second.
        let rate = self.0 as f64 / self.1.max(1) as f64;
        if rate >= 1.0 { write!(f, "{rate:.1} GB/s") } else { write!(f, "{:.0} MB/s", rate * 1e3) }
    }
}

/// Nanoseconds with a unit.
pub(crate) struct Duration(pub(crate) u64);

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0 as f64;
        match self.0 {
            0..1_000_000 => write!(f, "{:.1} us", ns / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", ns / 1e6),
            _ => write!(f, "{:.2} s", ns / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
        // As large as a hostile image can make it.
        utc(u64::MAX);
    }

    #[test]
    fn sizes_have_units() {
        for (bytes, text) in
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 << 30, "80.0 GiB"), (u64::MAX, "16.0 EiB")]
        {
            assert_eq!(Size(bytes).to_string(), text);
        }
    }

    #[test]
    fn a_uuid_looks_as_in_nvidia_smi() {
        let bytes = [0x8f, 0x1c, 0, 0, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 1, 2, 3, 4, 5, 6];
        assert_eq!(uuid(bytes), "GPU-8f1c0000-1234-5678-9abc-010203040506");
    }
}
