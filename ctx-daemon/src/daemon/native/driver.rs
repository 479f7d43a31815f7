//! What the driver is asked about native processes, and how one is given back.
//!
//! | state in the driver | given back by |
//! |---|---|
//! | running | nothing |
//! | locked | unlock |
//! | checkpointed | restore, unlock |
//! | failed | nothing helps: the process is killed |
//!
//! The state is what the last call has led to. If that is not certain, since the call took too long and may still have been done, the
//! driver is asked. It is not asked without need: while a member of a job is locked, even that may hang.

use rekindle_cuda_abi::checkpoint::ProcessState;
use rekindle_cuda_abi::types::{CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OPERATING_SYSTEM};
use rekindle_wire::native::{About, Call, GpuPair};
use tracing::{debug, error, info, warn};

use super::super::mappings;
use super::super::process::{self, Process};
use super::error::NativeError;
use super::find;
use super::helper::{DriverHelper, HelperError};
use super::records::Records;
use crate::config::{Config, NativeConfig};
use crate::limit::Limit;

/// How often giving a process back is tried: the first call may have ended with its helper.
const TRIES: usize = 2;

/// A process that uses the driver by itself.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) process: Process,
    /// The thread that works for the driver, as the daemon numbers it.
    pub(crate) tid: i32,
    /// The process's number and command, for messages.
    pub(crate) name: String,
}

/// How long calls of the driver may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// A call that moves no memory.
    pub(crate) short: Limit,
    /// A call that moves all GPU memory of a process.
    pub(crate) long: Limit,
}

/// What the daemon needs for native processes.
pub(crate) struct Native {
    pub(super) helper: DriverHelper,
    pub(super) records: Records,
    config: NativeConfig,
    limits: Limits,
}

impl Native {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            helper: DriverHelper::new(config),
            records: Records::open(&config.state_dir),
            config: config.native.clone(),
            limits: Limits { short: config.timeouts.quiesce, long: config.timeouts.stall },
        }
    }

    /// How long calls may take.
    pub(crate) fn limits(&self) -> Limits {
        self.limits
    }

    /// What the driver is.
    pub(crate) fn about(&self) -> Result<About, HelperError> {
        self.helper.about(self.limits.short)
    }

    /// Whether a process of this machine may be native.
    pub(crate) fn any(&self) -> bool {
        self.config.enabled && find::any(&self.config.devices)
    }

    /// A device of the driver that a process has mapped or open.
    pub(crate) fn device_of(&self, pid: i32) -> Option<String> {
        find::device_of(pid, &self.config.devices)
    }

    /// A device of the driver that a process has mapped, as long as such processes are not another plugin's.
    pub(crate) fn device_mapped_by(&self, pid: i32) -> Option<String> {
        if !self.config.enabled {
            return None;
        }
        mappings::of(pid, &self.config.devices).ok().and_then(|it| it.device)
    }

    /// The native processes among these, in the order of their numbers.
    pub(crate) fn among(&self, pids: &[i32]) -> Result<Vec<Found>, NativeError> {
        if !self.config.enabled {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        for pid in pids {
            if let Some(device) = self.device_of(*pid)
                && let Some(one) = self.look(*pid, &device)?
            {
                found.push(one);
            }
        }
        found.sort_by_key(|it| it.process.pid);
        Ok(found)
    }

    /// The process, if the driver has a thread in it; none if it only has the device open, or has ended.
    pub(crate) fn look(&self, pid: i32, device: &str) -> Result<Option<Found>, NativeError> {
        let Ok(process) = Process::with_pid(pid) else { return Ok(None) };
        let name = format!("process {pid} ({})", process::command(pid));
        match self.helper.call(process, Call::RestoreThread, self.limits.short) {
            Ok(tid) if find::has_thread(pid, tid) => Ok(Some(Found { process, tid, name })),
            Ok(tid) => Err(NativeError::NoThread { name, tid }),
            Err(
                source @ HelperError::Refused { result: CUDA_ERROR_OPERATING_SYSTEM | CUDA_ERROR_NOT_SUPPORTED, .. },
            ) => {
                // The driver says nothing of the process: it does not work on any.
                Err(NativeError::Unusable { name, device: device.to_owned(), source })
            }
            Err(HelperError::Refused { .. } | HelperError::Gone) => {
                debug!("{name} has {device} open, and the driver does not know it");
                Ok(None)
            }
            Err(source) => Err(NativeError::Unusable { name, device: device.to_owned(), source }),
        }
    }

    /// The restored process, which has all its threads and is stopped. The image's number of the thread serves where the driver does
    /// not tell it.
    pub(crate) fn restored(&self, process: Process, own_number: u32) -> Result<Found, NativeError> {
        let pid = process.pid;
        let name = format!("process {pid} ({})", process::command(pid));
        let told = self.helper.call(process, Call::RestoreThread, self.limits.short);
        let told = told.inspect_err(|error| warn!("{name}: {error}; taking the image's word"));
        let tid = told.ok().filter(|tid| find::has_thread(pid, *tid));
        match tid.or_else(|| find::thread_by_its_own_number(pid, own_number)) {
            Some(tid) => Ok(Found { process, tid, name }),
            None => Err(NativeError::NoThread { name, tid: own_number.cast_signed() }),
        }
    }

    /// The state of a process in the driver.
    pub(crate) fn state(&self, one: &Found, limit: Limit) -> Result<ProcessState, NativeError> {
        let number = self.helper.call(one.process, Call::State, limit);
        let number = number.map_err(|source| NativeError::Call { name: one.name.clone(), source })?;
        let state = u32::try_from(number).ok().and_then(ProcessState::of);
        state.ok_or_else(|| NativeError::UnknownState { name: one.name.clone(), number })
    }

    /// Gives a process its GPU memory back, if that was taken, and unlocks it. A process that the driver leaves without its memory,
    /// or locked, is killed: it would wait for ever. `state` is what is known of its state.
    pub(crate) fn give_back(
        &self,
        one: &Found,
        state: Option<ProcessState>,
        gpus: &[GpuPair],
        limits: Limits,
    ) -> Result<(), NativeError> {
        let mut state = state;
        let mut tries = 0;
        let failed = loop {
            tries += 1;
            match self.try_give_back(one, state.take(), gpus, limits) {
                Ok(()) => {
                    self.records.forget(one.process);
                    return Ok(());
                }
                Err(_) if !one.process.is_alive() => {
                    self.records.forget(one.process);
                    debug!("{}: it has ended", one.name);
                    return Ok(());
                }
                Err(error) if tries == TRIES => break error,
                Err(error) => warn!("{error}; trying again"),
            }
        };
        error!("{failed}: the driver leaves no other way than to end the process; killing {}", one.name);
        one.process.kill();
        self.records.forget(one.process);
        Err(NativeError::Killed { name: one.name.clone(), reason: failed.to_string() })
    }

    fn try_give_back(
        &self,
        one: &Found,
        state: Option<ProcessState>,
        gpus: &[GpuPair],
        limits: Limits,
    ) -> Result<(), NativeError> {
        let call = |call, limit| {
            self.keep_record(one)?;
            let done = self.helper.call(one.process, call, limit);
            done.map_err(|source| NativeError::Call { name: one.name.clone(), source })
        };
        let mut state = state.map_or_else(|| self.state(one, limits.short), Ok)?;
        if state == ProcessState::Checkpointed {
            call(Call::Restore { gpus: gpus.to_vec() }, limits.long)?;
            info!("{}: its GPU memory is back", one.name);
            state = ProcessState::Locked;
        }
        match state {
            ProcessState::Running => Ok(()),
            ProcessState::Failed => Err(NativeError::Failed(one.name.clone())),
            _ => {
                call(Call::Unlock, limits.short)?;
                info!("{}: unlocked", one.name);
                Ok(())
            }
        }
    }

    /// Records that a process is locked, or about to be.
    pub(super) fn keep_record(&self, one: &Found) -> Result<(), NativeError> {
        let kept = self.records.keep(one.process, self.helper.process(), &one.name);
        kept.map_err(|source| NativeError::Record { name: one.name.clone(), source })
    }
}
