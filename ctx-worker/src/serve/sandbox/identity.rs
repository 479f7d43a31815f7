//! The identity of a worker: a separate user, without groups, capabilities, or a way to get them.

use super::error::{SandboxError, check};
use crate::serve::confinement::Identity;

/// The maximum number of descriptors. A client and the driver open far fewer.
const DESCRIPTORS: libc::rlim_t = 16384;
/// The maximum number of threads: the driver has a few, and the software GPU has one for each stream.
const THREADS: libc::rlim_t = 8192;

/// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h, whose sets are two words each.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

#[repr(C)]
struct CapabilityHeader {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Becomes that user, or keeps its user and drops its capabilities. To be called while there is one thread.
pub(super) fn assume(identity: Option<&Identity>) -> Result<(), SandboxError> {
    limit("RLIMIT_CORE", libc::RLIMIT_CORE, 0)?;
    limit("RLIMIT_NOFILE", libc::RLIMIT_NOFILE, DESCRIPTORS)?;
    if let Some(identity) = identity {
        // Some kernels count the memory that the driver pins.
        raise(libc::RLIMIT_MEMLOCK);
        // Counted by user, so not set if the worker shares the daemon's user.
        limit("RLIMIT_NPROC", libc::RLIMIT_NPROC, THREADS)?;
        drop_bounding_set()?;
        become_user(identity)?;
    }
    drop_capabilities()?;
    // SAFETY: no pointers.
    unsafe {
        check("no new privileges", libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        // No process of the same user may access its memory or its descriptors, and there is no core file.
        check("not dumpable", libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0))
    }
}

/// Drops the bounding set, so that no program that the worker might execute has capabilities.
fn drop_bounding_set() -> Result<(), SandboxError> {
    for capability in 0.. {
        // SAFETY: no pointers.
        unsafe {
            if libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) < 0 {
                break; // This kernel has no more.
            }
            check("the bounding set", libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0))?;
        }
    }
    Ok(())
}

fn become_user(identity: &Identity) -> Result<(), SandboxError> {
    let groups: Vec<libc::gid_t> = identity.device_group.into_iter().collect();
    let (uid, gid) = (identity.uid, identity.gid);
    // SAFETY: the pointer is to as many groups as are said.
    unsafe {
        check("supplementary groups", libc::setgroups(groups.len(), groups.as_ptr()))?;
        check("its group", libc::setresgid(gid, gid, gid))?;
        check("its user", libc::setresuid(uid, uid, uid))?;
        // Verifies that becoming root fails now.
        if libc::setresuid(0, 0, 0) == 0 {
            return Err(SandboxError { step: "its user", source: std::io::Error::other("it can become root again") });
        }
    }
    Ok(())
}

fn drop_capabilities() -> Result<(), SandboxError> {
    let header = CapabilityHeader { version: CAPABILITY_VERSION, pid: 0 };
    let none = [CapabilitySets::default(); 2];
    // SAFETY: a header of that version and the two sets that belong to it, alive during the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    check("capabilities", if result < 0 { -1 } else { 0 })?;
    // SAFETY: no pointers.
    let result = unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    check("ambient capabilities", result)
}

/// Lowers a limit permanently.
fn limit(name: &'static str, resource: libc::__rlimit_resource_t, most: libc::rlim_t) -> Result<(), SandboxError> {
    let mut found = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes the local.
    check(name, unsafe { libc::getrlimit(resource, &raw mut found) })?;
    let most = most.min(found.rlim_max);
    let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
    // SAFETY: the kernel reads the local.
    check(name, unsafe { libc::setrlimit(resource, &raw const limit) })
}

/// Removes a limit, if that is allowed.
fn raise(resource: libc::__rlimit_resource_t) {
    let limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel reads the local.
    unsafe { libc::setrlimit(resource, &raw const limit) };
}
