//! Answers to NVML's queries: which GPUs a process may see, how much memory they have free, and which processes use them.
//!
//! Answers about the CUDA driver come from workers, other answers from the machine's NVML, if there is one. A query that
//! neither can answer is not supported, as with NVML itself. NVML knows no virtual GPUs: it is asked about the GPU that a virtual
//! one is a part of, and what is another for a part comes from workers.

use std::time::{Duration, Instant};

use rekindle_cuda_abi::nvml::{self as table, Route};
use rekindle_wire::attach::{Attached, Device};
use rekindle_wire::control::{Failure, Reply, Request};
use rekindle_wire::gpus::name;
use rekindle_wire::nvml::{Answer, Argument, Gpu, Gpus, HelperQuestion, Memory, Process, Question, fits};

use super::Daemon;
use super::peer::is_operator;
use super::pidns::PidView;
use super::process::{self, Process as Asker};
use super::sys::Credentials;
use super::worker::{Worker, describe_all};

/// `nvmlReturn_t`.
const SUCCESS: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const NOT_SUPPORTED: u32 = 3;
const INSUFFICIENT_SIZE: u32 = 7;
const ARGUMENT_VERSION_MISMATCH: u32 = 25;

/// The size of `nvmlMemory_v2`, and the places of its fields.
const MEMORY_SIZE: usize = 40;
const MEMORY_VERSION: u32 = 2 << 24 | MEMORY_SIZE as u32;
/// The size of `nvmlPciInfo_t`, and the places of its fields.
const PCI_SIZE: usize = 68;
const PCI_DEVICE: usize = 28;
const PCI_SUBSYSTEM: usize = 32;
/// The size of `nvmlProcessInfo_t`, and how many of them the daemon asks for.
const PROCESS_SIZE: usize = 24;
const PROCESSES: usize = 1024;

/// How long the daemon asks one worker after another for the free memory of a GPU.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(3);

/// The process that asks, and the GPUs that it may see.
struct Peer<'a> {
    daemon: &'a Daemon,
    credentials: Credentials,
    attached: Attached,
    /// The GPUs' numbers among the workers' devices, in NVML's order.
    gpus: Vec<usize>,
}

impl<'a> Peer<'a> {
    fn new(daemon: &'a Daemon, credentials: Credentials, process: Asker) -> Result<Self, Failure> {
        let allowed = daemon.grants.of(process)?;
        let attached = daemon.pool.seen()?;
        let mut gpus: Vec<_> = (0..attached.devices.len()).collect();
        gpus.retain(|at| allowed.gpus().is_none_or(|gpus| gpus.contains(&attached.devices[*at].uuid)));
        gpus.sort_by_key(|at| attached.devices[*at].pci_bus_id.to_ascii_lowercase());
        Ok(Self { daemon, credentials, attached, gpus })
    }

    fn devices(&self) -> impl Iterator<Item = &Device> {
        self.gpus.iter().filter_map(|at| self.attached.devices.get(*at))
    }

    /// The GPU at a place among the visible ones: its number and its description.
    fn gpu(&self, place: u32) -> Result<(usize, &Device), Failure> {
        let number = self.gpus.get(place as usize).copied();
        let device = number.and_then(|it| self.attached.devices.get(it));
        number.zip(device).ok_or_else(|| Failure::refused(format!("there is no GPU {place} that this process may see")))
    }
}

/// Answers an NVML query.
pub(crate) fn answer(daemon: &Daemon, credentials: Credentials, process: Asker, request: Request) -> Reply {
    let answered = Peer::new(daemon, credentials, process).and_then(|peer| match request {
        Request::Gpus => Ok(gpus(&peer)),
        Request::GpuMemory { gpu } => memory(&peer, gpu),
        Request::GpuProcesses { gpu } => processes(&peer, gpu),
        Request::GpuAsk(question) => ask(&peer, question),
        _ => Err(Failure::internal("this is no question about GPUs")),
    });
    answered.unwrap_or_else(Reply::Failed)
}

/// The GPUs that the peer may see.
fn gpus(peer: &Peer<'_>) -> Reply {
    Reply::Gpus(Gpus {
        driver_version: text(peer.daemon, "nvmlSystemGetDriverVersion"),
        nvml_version: text(peer.daemon, "nvmlSystemGetNVMLVersion"),
        cuda_driver_version: peer.attached.driver_version,
        gpus: peer.devices().map(|device| gpu(peer.daemon, device)).collect(),
    })
}

fn gpu(daemon: &Daemon, device: &Device) -> Gpu {
    let pci = of(daemon, device, "nvmlDeviceGetPciInfo_v3", vec![vec![0; PCI_SIZE]]);
    let pci = |at| pci.as_ref().and_then(|it| word(it.first()?, at));
    let minor = of(daemon, device, "nvmlDeviceGetMinorNumber", vec![vec![0; 4]]);
    Gpu {
        name: device.name.clone(),
        uuid: device.uuid,
        memory: device.memory,
        pci_bus_id: device.pci_bus_id.clone(),
        pci_device: pci(PCI_DEVICE),
        pci_subsystem: pci(PCI_SUBSYSTEM),
        minor: minor.and_then(|it| word(it.first()?, 0)),
        attributes: device.attributes.clone(),
    }
}

/// The free memory of a GPU.
fn memory(peer: &Peer<'_>, gpu: u32) -> Result<Reply, Failure> {
    let daemon = peer.daemon;
    let device = peer.gpu(gpu)?.1;
    let mut ask = vec![0; MEMORY_SIZE];
    ask[..4].copy_from_slice(&MEMORY_VERSION.to_le_bytes());
    if let Some(buffers) = of(daemon, device, "nvmlDeviceGetMemoryInfo_v2", vec![ask])
        && let Some(told) = buffers.first().and_then(|it| told_memory(it))
    {
        return Ok(Reply::GpuMemory(of_part(daemon, device, told)));
    }
    // The peer's own worker comes first: each process has a software GPU of its own.
    let own = daemon.clients.registry.clients_among(&[peer.credentials.pid]).into_iter().map(|it| it.worker.clone());
    let others = daemon.clients.registry.clients().into_iter().map(|it| it.worker.clone());
    let asked = Instant::now();
    // Any worker knows. Where the first ones do not answer, the GPU hangs or the machine is overloaded.
    let workers = own.chain(daemon.pool.any()).chain(others);
    for worker in workers.take_while(|_| asked.elapsed() < MEMORY_TIMEOUT) {
        if let Ok(devices) = worker.memory()
            && let Some(memory) = place(&worker, device).and_then(|place| devices.get(place))
        {
            return Ok(Reply::GpuMemory(of_part(daemon, device, *memory)));
        }
    }
    Err(Failure::internal("no worker says how much memory is free"))
}

/// The memory of a device, of whose GPU this is told. Of a virtual GPU's part that is free which its clients do not have.
fn of_part(daemon: &Daemon, device: &Device, told: Memory) -> Memory {
    if device.part_of.is_none() {
        return told;
    }
    let clients = daemon.clients.registry.clients();
    let workers: Vec<_> = clients.iter().map(|client| &*client.worker).collect();
    let described = workers.iter().zip(describe_all(&workers));
    let used = described.map(|(worker, described)| on_device(worker, device, &described.physical));
    let left = device.memory.saturating_sub(used.fold(0, u64::saturating_add));
    Memory { total: device.memory, reserved: 0, free: told.free.min(left) }
}

/// What a worker says of one device, where it says something of each that it sees.
fn on_device(worker: &Worker, device: &Device, of_each: &[u64]) -> u64 {
    place(worker, device).and_then(|place| of_each.get(place).copied()).unwrap_or(0)
}

/// The place of a device among those that a worker sees.
fn place(worker: &Worker, device: &Device) -> Option<usize> {
    worker.attached().devices.iter().position(|it| it.uuid == device.uuid)
}

fn told_memory(bytes: &[u8]) -> Option<Memory> {
    Some(Memory { total: long(bytes, 8)?, reserved: long(bytes, 16)?, free: long(bytes, 24)? })
}

/// The processes on a GPU that the peer may know of: clients, and, where NVML reports them, others.
fn processes(peer: &Peer<'_>, gpu: u32) -> Result<Reply, Failure> {
    let Peer { daemon, credentials, .. } = *peer;
    let (_, device) = peer.gpu(gpu)?;
    let view = PidView::of(credentials.pid)?;
    let told = told_processes(daemon, device);
    let clients = daemon.clients.registry.clients();
    let operator = is_operator(credentials);
    let shown = |pid: i32| {
        let allowed = operator || process::user(pid) == Some(credentials.uid);
        allowed.then(|| view.to_theirs(pid)).flatten().and_then(|pid| u32::try_from(pid).ok())
    };
    // The peer learns nothing of other processes, so their workers are left alone.
    let visible: Vec<_> = clients.iter().filter_map(|it| Some((shown(it.process.pid)?, it))).collect();
    let workers: Vec<_> = visible.iter().map(|(_, client)| &*client.worker).collect();
    let mut found = Vec::new();
    for ((pid, client), described) in visible.iter().zip(describe_all(&workers)) {
        let described = on_device(&client.worker, device, &described.device_memory);
        // The driver counts more for a worker: contexts, and code. But it cannot say on which virtual GPU.
        let told = device.part_of.is_none().then_some(&told).into_iter().flatten();
        let mut of_driver = told.filter(|(pid, _)| *pid == client.worker.pid()).map(|(_, bytes)| *bytes);
        if described > 0 {
            found.push(Process { pid: *pid, memory: of_driver.next().unwrap_or(described) });
        }
    }
    let is_ours = |pid: i32| {
        clients.iter().any(|it| it.worker.pid() == pid) || process::command(pid) == process::command(own_pid())
    };
    let others = told.iter().filter(|(pid, _)| !is_ours(*pid));
    found.extend(others.filter_map(|(pid, memory)| Some(Process { pid: shown(*pid)?, memory: *memory })));
    Ok(Reply::GpuProcesses(found))
}

fn own_pid() -> i32 {
    std::process::id() as i32
}

/// NVML's list of processes on a GPU, as pids and bytes.
fn told_processes(daemon: &Daemon, device: &Device) -> Vec<(i32, u64)> {
    let count = (PROCESSES as u32).to_le_bytes().to_vec();
    let buffers = vec![count, vec![0; PROCESSES * PROCESS_SIZE]];
    let Some(buffers) = of(daemon, device, "nvmlDeviceGetComputeRunningProcesses_v3", buffers) else {
        return Vec::new();
    };
    let count = buffers.first().and_then(|it| word(it, 0)).unwrap_or(0) as usize;
    let entries = buffers.get(1).map_or(&[][..], |it| it).chunks_exact(PROCESS_SIZE);
    let entry = |bytes: &[u8]| Some((i32::try_from(word(bytes, 0)?).ok()?, long(bytes, 8)?));
    entries.take(count).filter_map(entry).collect()
}

/// A call that the machine's NVML answers.
fn ask(peer: &Peer<'_>, question: Question) -> Result<Reply, Failure> {
    let table = table::parse(table::TEXT).map_err(|e| Failure::internal(e.to_string()))?;
    let function = table.find(&question.function).filter(|f| f.route == Route::Ask);
    let shapes =
        function.and_then(|f| table.shapes(f)).ok_or_else(|| Failure::refused("no function that can be asked"))?;
    if !fits(&shapes, &question.arguments, peer.gpus.len()) {
        return Err(Failure::refused(format!("{}: arguments that are none of it", question.function)));
    }
    let gpus = peer.devices().map(name_of_whole).collect();
    let peers = between_peers(peer, &question);
    // NVML would be asked about one GPU twice.
    let siblings = peers.clone().filter(|_| is_between_siblings(peer, &question));
    let answer = siblings.or_else(|| peer.daemon.nvml.ask(&HelperQuestion { question, gpus })).or(peers);
    Ok(Reply::GpuAnswer(answer.unwrap_or(Answer { result: NOT_SUPPORTED, buffers: Vec::new() })))
}

/// Whether a question about two GPUs is about two virtual ones of the same.
fn is_between_siblings(peer: &Peer<'_>, question: &Question) -> bool {
    let [Argument::Device(one), Argument::Device(other), ..] = question.arguments[..] else { return false };
    let part_of = |place| peer.gpu(place).ok().and_then(|(_, device)| device.part_of);
    one != other && part_of(one).is_some() && part_of(one) == part_of(other)
}

/// What the CUDA driver says of access between two GPUs, for a machine without NVML; it says nothing of NVLink and of atomics.
fn between_peers(peer: &Peer<'_>, question: &Question) -> Option<Answer> {
    const OK: u32 = 0;
    const STATUS_NOT_SUPPORTED: u32 = 5;
    const READ_OR_WRITE: std::ops::RangeInclusive<u64> = 0..=1;
    let ("nvmlDeviceGetP2PStatus", [Argument::Device(one), Argument::Device(other), Argument::Number(what), _]) =
        (question.function.as_str(), &question.arguments[..])
    else {
        return None;
    };
    let ((_, device), (other, _)) = (peer.gpu(*one).ok()?, peer.gpu(*other).ok()?);
    let can = READ_OR_WRITE.contains(what) && *device.peers.get(other)?;
    let status = if can { OK } else { STATUS_NOT_SUPPORTED };
    Some(Answer { result: SUCCESS, buffers: vec![status.to_ne_bytes().to_vec()] })
}

/// Asks the machine's NVML about one GPU; returns the buffers if the call succeeds.
fn of(daemon: &Daemon, device: &Device, function: &str, buffers: Vec<Vec<u8>>) -> Option<Vec<Vec<u8>>> {
    let buffers = buffers.into_iter().map(Argument::Buffer);
    let arguments = std::iter::once(Argument::Device(0)).chain(buffers).collect();
    told(daemon, function, arguments, vec![name_of_whole(device)])
}

/// The name under which NVML knows a device, or the GPU that the device is a part of.
fn name_of_whole(device: &Device) -> String {
    name(&device.part_of.unwrap_or(device.uuid))
}

/// Asks the machine's NVML for a text about the machine.
fn text(daemon: &Daemon, function: &str) -> Option<String> {
    const LENGTH: usize = 96;
    let arguments = vec![Argument::Buffer(vec![0; LENGTH]), Argument::Number(LENGTH as u64)];
    let buffers = told(daemon, function, arguments, Vec::new())?;
    let text = buffers.first()?.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

fn told(daemon: &Daemon, function: &str, arguments: Vec<Argument>, gpus: Vec<String>) -> Option<Vec<Vec<u8>>> {
    let question = Question { function: function.to_owned(), arguments };
    let answer = daemon.nvml.ask(&HelperQuestion { question, gpus })?;
    if !matches!(
        answer.result,
        SUCCESS | NOT_SUPPORTED | INVALID_ARGUMENT | INSUFFICIENT_SIZE | ARGUMENT_VERSION_MISMATCH
    ) {
        tracing::debug!(function, result = answer.result, "NVML refuses");
    }
    (answer.result == SUCCESS).then_some(answer.buffers)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
