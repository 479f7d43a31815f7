//! The system calls that a worker may not make from its first client on (seccomp): those that neither the worker nor the driver
//! needs, and that attacks on kernels use. Calls that are not listed are allowed, since the driver decides which calls it
//! needs.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, apply_filter_all_threads, sock_filter,
};

use super::error::SandboxError;

/// Denied with any arguments.
const DENIED: &[c_long] = &[
    // Other processes: their memory, their descriptors.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_migrate_pages,
    // Other programs.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_uselib,
    libc::SYS_personality,
    // Mounts, roots, namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    // Files, accessed other than by their path.
    libc::SYS_open_by_handle_at,
    libc::SYS_name_to_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    // Large kernel subsystems that nothing here uses.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_lookup_dcookie,
    libc::SYS_nfsservctl,
    libc::SYS_modify_ldt,
    libc::SYS_vhangup,
    libc::SYS_acct,
    libc::SYS_syslog,
    // The machine.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    // Memory and messages that are shared by name or number.
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
];

/// From linux/bpf_common.h, linux/seccomp.h.
const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const ERROR: u32 = 0x0005_0000;
/// System calls of the x32 ABI have this bit, and numbers of their own.
const X32: u32 = 0x4000_0000;

/// Denies the calls in all threads of this process, permanently.
pub(super) fn deny() -> Result<(), SandboxError> {
    let failed = |source| SandboxError { step: "seccomp", source };
    let denied = denied().map_err(|error| failed(std::io::Error::other(error)))?;
    for program in [absent(), denied] {
        apply_filter_all_threads(&program).map_err(|error| failed(std::io::Error::other(error)))?;
    }
    Ok(())
}

/// Calls that fail as if the kernel did not support them: `clone3`, whose flags a filter cannot see, so that libc uses `clone`;
/// and the x32 ABI, by which all other calls could be made.
fn absent() -> BpfProgram {
    let step = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    vec![
        step(LOAD_WORD, 0, 0, 0), // seccomp_data.nr
        step(JUMP_IF_AT_LEAST, 1, 0, X32),
        step(JUMP_IF_EQUAL, 0, 1, libc::SYS_clone3 as u32),
        step(RETURN, 0, 0, ERROR | libc::ENOSYS as u32),
        step(RETURN, 0, 0, ALLOW),
    ]
}

fn denied() -> Result<BpfProgram, seccompiler::BackendError> {
    use SeccompCmpArgLen::{Dword, Qword};
    let mut rules: BTreeMap<_, _> = DENIED.iter().map(|call| (*call, Vec::new())).collect();
    let when = |argument, length, operator, value| {
        SeccompRule::new(vec![SeccompCondition::new(argument, length, operator, value)?])
    };
    // Creating threads is allowed, creating processes is not.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![when(0, Qword, SeccompCmpOp::MaskedEq(thread), 0)?]);
    // The worker finds a daemon by a Unix socket.
    let local = libc::AF_UNIX as u64;
    rules.insert(libc::SYS_socket, vec![when(0, Dword, SeccompCmpOp::Ne, local)?]);
    let dumpable = libc::PR_SET_DUMPABLE as u64;
    rules.insert(libc::SYS_prctl, vec![when(0, Dword, SeccompCmpOp::Eq, dumpable)?]);
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    SeccompFilter::new(rules, SeccompAction::Allow, refused, TargetArch::x86_64)?.try_into()
}
