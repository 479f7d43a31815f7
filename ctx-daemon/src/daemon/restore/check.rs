//! The checks of an image before any part of it runs.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rekindle_images::limits::MAX_ANCESTORS;
use rekindle_images::{Client as Record, CodeHash, Gpu, Host, Image, ImageError, Manifest};
use rekindle_wire::attach::Attached;
use rekindle_wire::control::{Allowances, Failing, FailureKind};
use rekindle_wire::{Dialect, NotServed, gpus};
use thiserror::Error;
use tracing::warn;

use rekindle_ctx_worker::failure;
use rekindle_ctx_worker::state::{self, StateError};

use super::super::at_once;
use super::super::dump::{MOST_DATA_FILES, driver_build, driver_version, gpu, is_unattached};

/// The most data files of a client: those of its own image and of each image that this one builds on.
const MAX_DATA_FILES: usize = (MAX_ANCESTORS + 1) * MOST_DATA_FILES;

/// Why an image cannot be restored here.
#[derive(Debug, Error)]
pub(in crate::daemon) enum CheckError {
    #[error("{0}: {1}")]
    NotServed(String, NotServed),
    #[error("{0}: {1}")]
    NotRead(String, StateError),
    #[error("bad image: {0}")]
    Image(#[from] ImageError),
    #[error("bad image: the memory of {0} is in a data file of another process")]
    Files(String),
    #[error("bad image: the memory of {client} is in {found} data files, and at most {MAX_DATA_FILES} are allowed")]
    TooManyFiles { client: String, found: usize },
    #[error("bad image: socket {0} is listed twice")]
    Socket(u32),
    #[error("bad image: {0} uses a GPU that the image does not describe")]
    UnknownGpu(String),
    #[error("{client} needs {needed} GPUs, and there are {found} here: restore on a machine with enough GPUs")]
    Count { client: String, needed: usize, found: usize },
    #[error(
        "GPU {ordinal} was a {} of compute capability {}.{} and is a {} of {}.{} here: restore on a GPU of the same kind",
        .was.name, .was.compute_major, .was.compute_minor, .is.name, .is.compute_major, .is.compute_minor
    )]
    Architecture { ordinal: u32, was: Box<Gpu>, is: Box<Gpu> },
    #[error(
        "the GPU's driver was {was} and is {is} here, which may place code at other addresses than the function pointers in GPU memory: restore with the former driver, or allow another (rekindle restore --allow-other-driver, or restore.allow_other_driver in the daemon's configuration)"
    )]
    Driver { was: String, is: String },
    #[error(
        "GPU {ordinal} was a {} and is a {} here, and the program may rely on properties of the former: restore on the same model, or allow another (rekindle restore --allow-other-gpu, or restore.allow_other_gpu in the daemon's configuration)",
        describe(.was), describe(.is)
    )]
    Model { ordinal: u32, was: Box<Gpu>, is: Box<Gpu> },
    #[error("the image needs {needed} bytes on GPU {ordinal}, which has {found}: restore on a GPU with more memory")]
    Memory { ordinal: u32, needed: u64, found: u64 },
}

impl Failing for CheckError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NotServed(..) | Self::NotRead(..) => FailureKind::Version,
            Self::Image(error) => failure::of_image(error),
            Self::Files(_) | Self::TooManyFiles { .. } | Self::Socket(_) | Self::UnknownGpu(_) => FailureKind::BadImage,
            Self::Count { .. }
            | Self::Architecture { .. }
            | Self::Driver { .. }
            | Self::Model { .. }
            | Self::Memory { .. } => FailureKind::Refused,
        }
    }
}

/// Checks the image by itself. A load compares its code and the content of its memory with their hashes.
pub(super) fn image(image: &Image) -> Result<(), CheckError> {
    let (mut sockets, mut owners) = (BTreeSet::new(), BTreeMap::new());
    for record in &image.manifest().clients {
        if !is_unattached(record) {
            self::record(record)?;
        }
        for id in &record.socket_ids {
            if !sockets.insert(*id) {
                return Err(CheckError::Socket(*id));
            }
        }
        let files = record.data_files();
        if files.len() > MAX_DATA_FILES {
            return Err(CheckError::TooManyFiles { client: name(record), found: files.len() });
        }
        for file in files.iter().filter(|it| it.depth == 0) {
            // A worker that is given a file has access to all of it.
            if *owners.entry(file.index).or_insert(record.index) != record.index {
                return Err(CheckError::Files(name(record)));
            }
        }
    }
    Ok(())
}

/// Compares the image's code with its hashes, on several cores, for an image that is kept: whoever keeps it hears now that it is bad.
/// A restore leaves this to its workers.
pub(super) fn code(image: &Image) -> Result<(), CheckError> {
    let mut all: Vec<_> = image.manifest().code.iter().collect();
    // The largest come first: otherwise one thread would still read the largest when the others have nothing left.
    all.sort_by_key(|it| Reverse(it.size));
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = vec![(); cores.min(all.len()).max(1)];
    let checked = at_once(&threads, |()| {
        while let Some(code) = all.get(next.fetch_add(1, Relaxed)) {
            image.read_code(code.hash)?;
        }
        Ok(())
    });
    checked.into_iter().collect()
}

/// Checks that the client's commands are served, and its worker's state is read, by workers of this release.
pub(in crate::daemon) fn record(record: &Record) -> Result<(), CheckError> {
    // The client's interposer comes back with it, and goes on sending the commands that it was built to send.
    let served = Dialect::from_parts(record.wire_version, &record.shared_state).is_served();
    served.map_err(|why| CheckError::NotServed(name(record), why))?;
    state::check(record.worker_version).map_err(|why| CheckError::NotRead(name(record), why))
}

/// Compares the dump's GPUs with those of the workers, which are in the order of the clients that have one. Returns whether all, and
/// their driver, are the same, so that the driver places code as it did.
pub(super) fn devices(manifest: &Manifest, workers: &[&Attached], allowed: Allowances) -> Result<bool, CheckError> {
    devices_of(&manifest.host, attached(manifest).zip(workers.iter().copied()), allowed)
}

/// Compares the GPUs that clients had on a host with those of the workers that they are to have. Returns whether they do not differ.
pub(in crate::daemon) fn devices_of<'a>(
    host: &Host,
    pairs: impl Iterator<Item = (&'a Record, &'a Attached)>,
    allowed: Allowances,
) -> Result<bool, CheckError> {
    let mut needed = BTreeMap::<u32, (u64, u64)>::new();
    // Differences that can be allowed come last, so that an operator does not allow one in vain.
    let mut different = Vec::new();
    let (mut is_unknown, mut is_cut_otherwise) = (false, false);
    for (record, worker) in pairs {
        let driver = other_driver(host, worker);
        is_unknown |= host.driver_build != driver_build(worker);
        let mut pairs = Vec::new();
        for used in &record.gpus {
            let device = worker.devices.get(used.ordinal as usize);
            let device = device.ok_or_else(|| CheckError::Count {
                client: name(record),
                needed: used.ordinal as usize + 1,
                found: worker.devices.len(),
            })?;
            let was = host.gpus.iter().find(|it| it.uuid == used.uuid);
            let was = was.ok_or_else(|| CheckError::UnknownGpu(name(record)))?;
            let is = gpu(device);
            let capability = |it: &Gpu| (it.compute_major, it.compute_minor);
            if capability(was) != capability(&is) {
                return Err(CheckError::Architecture {
                    ordinal: used.ordinal,
                    was: Box::new(was.clone()),
                    is: Box::new(is),
                });
            }
            if !is_same_model(was, &is, driver.is_some()) {
                let (was, is) = (Box::new(was.clone()), Box::new(is));
                different.push(CheckError::Model { ordinal: used.ordinal, was, is });
            }
            needed.entry(used.ordinal).or_default().1 = device.memory;
            pairs.push((used.uuid, device.uuid));
        }
        is_cut_otherwise |= !gpus::are_cut_alike(&pairs);
        different.extend(driver);
        for allocation in &record.allocations {
            let sum = &mut needed.entry(allocation.device).or_default().0;
            *sum = sum.saturating_add(allocation.size);
        }
    }
    for (ordinal, (needed, found)) in needed {
        if needed > found {
            return Err(CheckError::Memory { ordinal, needed, found });
        }
    }
    let is_allowed = |it: &CheckError| match it {
        CheckError::Driver { .. } => allowed.other_driver,
        _ => allowed.other_gpu,
    };
    let are_same = different.is_empty() && !is_unknown && !is_cut_otherwise;
    for difference in different {
        if !is_allowed(&difference) {
            return Err(difference);
        }
        warn!("allowed: {difference}");
    }
    Ok(are_same)
}

/// The error for another driver than at the dump. An image from before its version was recorded has CUDA's version alone.
fn other_driver(host: &Host, worker: &Attached) -> Option<CheckError> {
    let is = driver(&driver_build(worker), &driver_version(worker.driver_version));
    let was = driver(&host.driver_build, &host.driver_version);
    let same = if host.driver_build.is_empty() {
        host.driver_version == driver_version(worker.driver_version)
    } else {
        was == is
    };
    (!same).then_some(CheckError::Driver { was, is })
}

fn driver(build: &str, version: &str) -> String {
    if build.is_empty() { version.to_owned() } else { format!("{build} ({version})") }
}

/// Whether a program finds the properties of a GPU that it knows. Two drivers may keep different amounts of memory for
/// themselves.
fn is_same_model(was: &Gpu, is: &Gpu, other_driver: bool) -> bool {
    was.name == is.name
        && (was.multiprocessors == is.multiprocessors || was.multiprocessors == 0)
        && (was.total_memory == is.total_memory || other_driver)
}

fn describe(gpu: &Gpu) -> String {
    let processors = match gpu.multiprocessors {
        0 => String::new(),
        count => format!("{count} multiprocessors and "),
    };
    format!("{} with {processors}{} MiB", gpu.name, gpu.total_memory >> 20)
}

/// The clients that need a worker.
pub(super) fn attached(manifest: &Manifest) -> impl Iterator<Item = &Record> {
    manifest.clients.iter().filter(|record| !is_unattached(record))
}

/// The code that a client has loaded.
pub(super) fn code_of(record: &Record) -> BTreeSet<CodeHash> {
    record.objects.iter().flat_map(|it| it.code.iter().copied()).collect()
}

/// The name of a client, for messages.
pub(super) fn name(record: &Record) -> String {
    format!("process {} ({})", record.namespace_pid, record.command)
}
