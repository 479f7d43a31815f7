//! Managed variables. The program learns where one lies by asking for it, and may read and write it there from then on. So at this
//! moment the process gets pages at the variable's place, which move as those of managed allocations do (`moving.rs`). The driver has
//! chosen the place, in the worker.

use std::ffi::{CString, c_void};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Pinned;
use rekindle_wire::command::{MANAGED_VARIABLE, ManagedVariable};
use rekindle_wire::layout::VARIABLES_NAME;

use crate::call::Call;
use crate::process::log;
use crate::process::memfd::{map_shared, sealed_memfd};
use crate::state::client::Client;
use crate::state::contexts;
use crate::state::memory::Allocation;
use crate::state::variables::{Gone, Variable};

/// The next memfd's number.
static SERIAL: AtomicU64 = AtomicU64::new(1);

/// The worker keeps a file open for each area, and may have so many.
const MOST: usize = 4096;

/// The program has asked for a managed variable of the current context, which lies in this range.
pub(crate) fn found(
    client: &'static Client,
    (parent, context): (u64, CUcontext),
    range: &Range<u64>,
) -> Result<(), CUresult> {
    // A library's module has the library's variables.
    let owner = client.functions.library_of(parent).map_or(parent, |(library, _)| library);
    let _one = client.variables.change();
    let (missing, areas) = {
        let known = client.variables.lock();
        let this = Variable { size: range.end - range.start, parent: owner, context };
        match known.at(range.start) {
            _ if range.is_empty() => return Ok(()),
            Some(known) if known == this => return Ok(()),
            Some(_) => {
                log::error("the driver has placed two __managed__ variables at one address");
                return Err(CUDA_ERROR_UNKNOWN);
            }
            None => {}
        }
        (known.missing(range), known.areas())
    };
    let Some(userfault) = client.managed.userfault() else {
        log::error(
            "the program has __managed__ variables, whose pages must move between the process and the GPU, and the kernel or \
            REKINDLE_MANAGED=host does not let them: REKINDLE_LOG=1 says why",
        );
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    };
    if areas >= MOST {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let mapped = if missing.is_empty() { None } else { Some(map(&missing)?) };
    let shown = mapped.as_ref().map_or(Ok(()), |(serial, file)| {
        let size = missing.end - missing.start;
        let announced = Pinned { address: missing.start, size, serial: *serial, file_offset: None };
        client.connection.announce(announced, &[file.as_raw_fd(), userfault.as_raw_fd()])
    });
    let shown = shown.and_then(|()| {
        let serial = mapped.as_ref().map_or(0, |(serial, _)| *serial);
        let (size, length) = (range.end - range.start, missing.end - missing.start);
        let mut call = Call::in_context(MANAGED_VARIABLE)?;
        call.put(&ManagedVariable { parent, address: range.start, size, pages: missing.start, length, serial });
        check(call.wait().0)
    });
    if let Err(error) = shown {
        unmap(&missing);
        return Err(error);
    }
    let size = range.end - range.start;
    client.variables.add(range.start, Variable { size, parent: owner, context }, missing);
    client.memory.insert(Allocation::Managed { base: range.start, size, context });
    client.managed.said.add(range.clone());
    Ok(())
}

/// Refuses to use code in another context than that in which its managed variables are. The worker does so, too, but nobody waits
/// for its answer to each launch.
pub(crate) fn in_their_context(client: &Client, parent: u64) -> Result<(), CUresult> {
    if !client.variables.has_any() {
        return Ok(());
    }
    let theirs = client.variables.lock().context_of(parent);
    if theirs.is_none_or(|theirs| theirs == client.contexts.owner(contexts::current())) {
        return Ok(());
    }
    log::refused("code with __managed__ variables in a second context");
    Err(CUDA_ERROR_NOT_SUPPORTED)
}

/// Maps pages of a new memfd where nothing is. Returns its number, too.
fn map(area: &Range<u64>) -> Result<(u64, OwnedFd), CUresult> {
    let serial = SERIAL.fetch_add(1, Relaxed);
    let size = (area.end - area.start) as usize;
    let name = CString::new(format!("{VARIABLES_NAME}{serial}")).map_err(|_| CUDA_ERROR_UNKNOWN)?;
    let file = sealed_memfd(&name, size).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let at = area.start as *mut c_void;
    let mapped = map_shared(&file, at, size, libc::MAP_FIXED_NOREPLACE).map_err(|why| match why.raw_os_error() {
        Some(libc::EEXIST) => {
            log::error(&format!(
                "the driver has placed __managed__ variables at {:#x}, where the program has mapped something else: start it again, \
                with address space randomization",
                area.start
            ));
            CUDA_ERROR_MAP_FAILED
        }
        _ => CUDA_ERROR_OUT_OF_MEMORY,
    })?;
    // A forked child would find zeros there, since its faults are not the worker's.
    // SAFETY: the range was mapped just now.
    let kept = unsafe { libc::madvise(mapped.cast(), size, libc::MADV_DONTFORK) };
    if mapped as u64 != area.start || kept != 0 {
        let there = mapped as u64;
        unmap(&(there..there + size as u64));
        return Err(CUDA_ERROR_MAP_FAILED);
    }
    Ok((serial, file))
}

fn unmap(area: &Range<u64>) {
    if area.is_empty() {
        return;
    }
    // SAFETY: an area that was mapped by `map`, with variables that are the program's no more.
    if unsafe { libc::munmap(area.start as *mut c_void, (area.end - area.start) as usize) } != 0 {
        log::note(&format!("pages of managed variables stay mapped: {}", io::Error::last_os_error()));
    }
}

fn take_back(client: &Client, gone: Gone) {
    for address in gone.variables {
        client.memory.remove(address);
        client.managed.said.remove(address);
    }
    gone.areas.iter().for_each(unmap);
}

/// Unloads code by a function that does so in the worker. Meanwhile nobody finds a variable where one of that code's was, or one of
/// that code.
pub(crate) fn unloading(
    client: &Client,
    parent: u64,
    unload: impl FnOnce() -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let _one = client.variables.change();
    unload()?;
    take_back(client, client.variables.forget(|it| it.parent == parent));
    Ok(())
}

/// Unmaps what a context had, which the worker no longer knows. The caller has kept others from finding variables
/// ([`Variables::change`](crate::state::variables::Variables::change)) since before it told the worker: the driver may place other
/// variables there from then on.
pub(crate) fn forget_context(client: &Client, context: CUcontext) {
    take_back(client, client.variables.forget(|it| it.context == context));
}
