//! The hooks that CRIU calls. Each hook keeps panics from CRIU, logs errors, and returns a result that CRIU understands.

use std::ffi::c_int;
use std::fmt::Display;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, PoisonError};

use crate::answer::{Answer, Exit};
use crate::competition;
use crate::dump::{Dump, DumpError};
use crate::log;
use crate::restore::{Restore, RestoreError};

/// The operation of this CRIU process, which has only one.
#[derive(Debug)]
enum Stage {
    /// A pre-dump, for which the plugin does nothing: CRIU calls no hook at which paused processes could continue.
    Idle,
    Dump(Dump),
    Restore(Restore),
}

/// CRIU has one thread; the lock only keeps this free of `unsafe`.
static STAGE: Mutex<Stage> = Mutex::new(Stage::Idle);

const STAGE_DUMP: c_int = 0;
const STAGE_RESTORE: c_int = 2;

/// Runs a hook. A panic has been logged when this returns None.
fn guarded<T>(body: impl FnOnce(&mut Stage) -> T) -> Option<T> {
    panic::catch_unwind(AssertUnwindSafe(|| body(&mut STAGE.lock().unwrap_or_else(PoisonError::into_inner)))).ok()
}

fn answer(result: Option<Result<Answer, impl Display>>) -> c_int {
    match result {
        Some(Ok(Answer::Done)) => 0,
        Some(Ok(Answer::Descriptor(fd))) => fd,
        Some(Ok(Answer::NotOurs)) => -libc::ENOTSUP,
        Some(Err(error)) => {
            log::error(&error.to_string());
            -1
        }
        None => -1,
    }
}

/// Runs a hook that acts in dumps only.
fn in_dump(body: impl FnOnce(&mut Dump) -> Result<Answer, DumpError>) -> c_int {
    answer(guarded(|stage| match stage {
        Stage::Dump(dump) => body(dump),
        _ => Ok(Answer::NotOurs),
    }))
}

/// CRIU begins. Only the restore of an image with GPU processes may fail here.
pub extern "C" fn init(stage: c_int) -> c_int {
    panic::set_hook(Box::new(|info| log::error(&info.to_string())));
    let begun = guarded(|state| {
        *state = match stage {
            STAGE_DUMP => {
                competition::look();
                Stage::Dump(Dump::begin())
            }
            STAGE_RESTORE => Stage::Restore(Restore::begin()?),
            _ => Stage::Idle,
        };
        Ok::<_, RestoreError>(Answer::Done)
    });
    match (stage, begun) {
        (STAGE_RESTORE, begun) => answer(begun),
        _ => 0,
    }
}

/// CRIU ends. Its result is settled; to change it, its process must end here.
pub extern "C" fn exit(_stage: c_int, status: c_int) {
    let mut abandon = None;
    let exit = guarded(|state| match state {
        Stage::Idle => Exit::Return,
        Stage::Dump(dump) => {
            abandon = matches!(dump, Dump::Saving(_)).then_some(Dump::abandon);
            dump.exit(status)
        }
        Stage::Restore(restore) => restore.exit(status),
    });
    let exit = match (exit, abandon) {
        (Some(exit), _) => exit,
        (None, Some(abandon)) if status == 0 => panic::catch_unwind(abandon).unwrap_or(Exit::Process),
        (None, _) => Exit::Process,
    };
    if exit == Exit::Process {
        // SAFETY: CRIU has no handlers or buffers that the process's end needs.
        unsafe { libc::_exit(1) }
    }
}

/// A task, the root first, is about to be stopped.
pub extern "C" fn pause_devices(pid: c_int) -> c_int {
    in_dump(|dump| dump.pause(pid))
}

/// A task is stopped.
pub extern "C" fn checkpoint_devices(pid: c_int) -> c_int {
    in_dump(|dump| dump.frozen(pid))
}

/// A socket leads outside the tree.
pub extern "C" fn dump_unix_sk(fd: c_int, id: c_int) -> c_int {
    in_dump(|dump| dump.socket(fd, id.cast_unsigned()))
}

/// CRIU recreates a socket that [`dump_unix_sk`] took.
pub extern "C" fn restore_unix_sk(id: c_int) -> c_int {
    answer(guarded(|stage| match stage {
        Stage::Restore(restore) => restore.socket(id.cast_unsigned()),
        _ => Ok(Answer::NotOurs),
    }))
}

/// A descriptor of a kind that CRIU does not know.
pub extern "C" fn dump_ext_file(fd: c_int, _id: c_int) -> c_int {
    in_dump(|dump| dump.external_file(fd))
}

/// CRIU recreates a descriptor that [`dump_ext_file`] took.
pub extern "C" fn restore_ext_file(_id: c_int) -> c_int {
    answer(guarded(|stage| match stage {
        Stage::Restore(restore) => restore.external_file(),
        _ => Ok(Answer::NotOurs),
    }))
}

/// A restored task is complete.
pub extern "C" fn resume_devices_late(pid: c_int) -> c_int {
    let result = guarded(|stage| match stage {
        Stage::Restore(restore) => restore.resume(pid),
        _ => Ok(Answer::NotOurs),
    });
    if result.is_none() {
        // The process must not run.
        let _ = guarded(|stage| {
            if let Stage::Restore(restore) = stage {
                restore.kill(pid);
            }
        });
    }
    answer(result)
}
