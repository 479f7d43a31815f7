//! The native processes of a restore: CRIU brings their memory, in which the driver has left the content of their GPU memory, and the
//! driver gives it back to a GPU before they run.

use std::sync::{Arc, Mutex};

use rekindle_cuda_abi::checkpoint::ProcessState;
use rekindle_images::{Manifest, Native as Record};
use rekindle_wire::control::{Allowances, NativeThread};
use rekindle_wire::native::{About, GpuPair};
use rekindle_wire::version::NATIVES;

use super::super::dump::driver_version;
use super::super::lock;
use super::super::native::{Found, Native, NativeError, pairs};
use super::super::pidns::PidView;
use super::super::process::{self, Process};
use super::made::{Made, Maker};

/// The native processes that are still to be given back.
pub(super) struct Natives {
    native: Arc<Native>,
    waiting: Mutex<Vec<Waiting>>,
    /// The processes that CRIU has told of.
    told: Mutex<Vec<Process>>,
}

/// A native process of the image.
struct Waiting {
    record: Record,
    /// The GPUs of the dump, and those that take their places; none where they are the same.
    gpus: Vec<GpuPair>,
    /// The process, once CRIU has made it.
    here: Option<Found>,
}

impl Natives {
    /// Checks whether this machine's driver can give the image's native processes back.
    pub(super) fn check(
        native: &Arc<Native>,
        manifest: &Manifest,
        allowed: Allowances,
        wire: u32,
    ) -> Result<Self, NativeError> {
        let mut waiting = Vec::new();
        if !manifest.natives.is_empty() {
            if wire < NATIVES {
                return Err(NativeError::OldPlugin);
            }
            let about = native.about()?;
            for record in &manifest.natives {
                let gpus = places(record, &about, allowed)?;
                waiting.push(Waiting { record: record.clone(), gpus, here: None });
            }
        }
        Ok(Self { native: Arc::clone(native), waiting: Mutex::new(waiting), told: Mutex::default() })
    }

    /// Whether the image has any that were not given back yet.
    pub(super) fn are_awaited(&self) -> bool {
        !lock(&self.waiting).is_empty()
    }

    /// If the process, which is complete and stopped, is native: the thread that must run for the driver, as the peer numbers it.
    /// From now on the process is killed with the restore.
    pub(super) fn begin(
        &self,
        view: PidView,
        process: Process,
        made: &Made,
    ) -> Result<Option<NativeThread>, NativeError> {
        let number = process::namespace_pids(process.pid).unwrap_or_default().last().copied().unwrap_or(process.pid);
        let mut waiting = lock(&self.waiting);
        let one = waiting.iter_mut().find(|it| it.record.namespace_pid == number.unsigned_abs() && it.here.is_none());
        let Some(one) = one else { return Ok(None) };
        made.note(process);
        lock(&self.told).push(process);
        let found = self.native.restored(process, one.record.restore_thread)?;
        let theirs = view.to_theirs(process.pid).zip(view.to_theirs(found.tid));
        let no_thread = || NativeError::NoThread { name: found.name.clone(), tid: found.tid };
        let (pid, tid) = theirs.ok_or_else(no_thread)?;
        one.here = Some(found);
        Ok(Some(NativeThread { pid, tid }))
    }

    /// Kills the processes that CRIU has told of: their restore has failed.
    pub(super) fn kill(&self) {
        lock(&self.told).iter().for_each(Process::kill);
    }

    /// Kills the processes that a CRIU which has died had made whole, and of which it had not told yet: they run, and their first call
    /// of the driver would wait for ever. They are known by their numbers, by their age, and by their state in the driver.
    pub(super) fn kill_orphans(&self, maker: &Maker) {
        let Some(criu) = maker.dead_criu() else { return };
        let waiting = lock(&self.waiting);
        let numbers: Vec<_> = waiting.iter().filter(|it| it.here.is_none()).map(|it| &it.record).collect();
        if numbers.is_empty() {
            return;
        }
        for process in process::all().unwrap_or_default().into_iter().filter_map(|pid| Process::with_pid(pid).ok()) {
            let own = process::namespace_pids(process.pid).ok().and_then(|it| it.last().copied());
            let record = numbers.iter().find(|it| Some(it.namespace_pid) == own.map(i32::unsigned_abs));
            let Some(record) = record.filter(|_| process.start >= criu.start) else { continue };
            let found = self.native.restored(process, record.restore_thread);
            let state = found.and_then(|it| self.native.state(&it, self.native.limits().short));
            if matches!(state, Ok(ProcessState::Checkpointed)) {
                maker.made().note(process);
                maker.made().kill();
            }
        }
    }

    /// Has the driver give a process its GPU memory back, and unlock it.
    pub(super) fn give_back(&self, pid: i32) -> Result<(), NativeError> {
        let (found, gpus) = {
            let waiting = lock(&self.waiting);
            let here = waiting.iter().filter_map(|it| Some((it.here.clone()?, it.gpus.clone())));
            here.into_iter().find(|(found, _)| found.process.pid == pid).ok_or(NativeError::NotHeld(pid))?
        };
        self.native.give_back(&found, Some(ProcessState::Checkpointed), &gpus, self.native.limits())?;
        lock(&self.waiting).retain(|it| it.here.as_ref().map(|it| it.process) != Some(found.process));
        Ok(())
    }
}

/// On which GPUs a process gets its memory back.
fn places(record: &Record, about: &About, allowed: Allowances) -> Result<Vec<GpuPair>, NativeError> {
    let name = || format!("process {} ({})", record.namespace_pid, record.command.escape_debug());
    let is = about.version.unsigned_abs();
    if is != record.driver_version && !allowed.other_driver {
        let text = |version: u32| driver_version(version.cast_signed());
        return Err(NativeError::OtherDriver { name: name(), was: text(record.driver_version), is: text(is) });
    }
    pairs(&record.gpus, &about.gpus).ok_or_else(|| {
        let list = |names: Vec<&str>| {
            if names.is_empty() { "none".to_owned() } else { names.join(", ").escape_debug().to_string() }
        };
        NativeError::OtherGpus {
            name: name(),
            was: list(record.gpus.iter().map(|it| it.name.as_str()).collect()),
            is: list(about.gpus.iter().map(|it| it.name.as_str()).collect()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::NativeGpu;
    use rekindle_wire::native::Gpu;

    #[test]
    fn another_driver_is_refused_unless_it_is_allowed_and_other_gpus_are_mapped() {
        let record = Record {
            namespace_pid: 7,
            command: "train".to_owned(),
            driver_version: 13_000,
            gpus: vec![NativeGpu { uuid: [1; 16], name: "H200".to_owned() }],
            ..Record::default()
        };
        let about = |version, uuid| About { version, gpus: vec![Gpu { uuid: [uuid; 16], name: "H200".to_owned() }] };
        let none = Allowances::default();
        assert_eq!(places(&record, &about(13_000, 1), none).unwrap(), []);
        assert_eq!(places(&record, &about(13_000, 2), none).unwrap(), [([1; 16], [2; 16])]);
        let error = places(&record, &about(13_010, 1), none).unwrap_err().to_string();
        assert!(error.contains("a driver of CUDA 13.0, and it is CUDA 13.1 here"), "{error}");
        let allowed = Allowances { other_driver: true, ..none };
        assert_eq!(places(&record, &about(13_010, 1), allowed).unwrap(), []);
        let error = places(&record, &About { version: 13_000, gpus: Vec::new() }, none).unwrap_err().to_string();
        assert!(error.contains("with the GPUs H200, and here are none"), "{error}");
    }
}
