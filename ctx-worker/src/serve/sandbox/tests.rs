//! A process that has entered the sandbox tries operations that must fail, and others that must succeed. The process runs this
//! program again.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;

use super::*;
use crate::serve::confinement::Identity;

const INSIDE: &str = "REKINDLE_TEST_INSIDE";

/// Only root can assign users.
fn confinement() -> Confinement {
    let root = own_uid() == 0;
    let identity = Identity { uid: 1_900_070_001, gid: 1_900_070_000, device_group: None };
    Confinement { identity: root.then_some(identity), landlock: true, seccomp: true, read: Vec::new() }
}

fn own_uid() -> u32 {
    // SAFETY: always succeeds.
    unsafe { libc::geteuid() }
}

fn said(what: &str, result: io::Result<()>) {
    let result = result.map_or_else(|error| error.raw_os_error().unwrap_or(-1).to_string(), |()| "ok".to_owned());
    println!("tried: {what} {result}");
}

fn call(result: i64) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn open(path: &str) -> io::Result<()> {
    File::open(path).map(drop)
}

/// Not a test by itself: the operations of the process in the sandbox.
#[test]
fn inside() {
    let Ok(abstract_name) = std::env::var(INSIDE) else { return };
    let memfd = || {
        // SAFETY: makes a descriptor that is nobody else's.
        let fd = unsafe { libc::memfd_create(c"test".as_ptr(), 0) };
        call(fd.into())?;
        // SAFETY: as just said.
        File::from(unsafe { OwnedFd::from_raw_fd(fd) }).set_len(4096)
    };
    let given = tempfile::tempfile().unwrap();
    let place = tempfile::tempdir().unwrap();
    let open_to_all = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(place.path(), open_to_all).unwrap();
    enter(&confinement(), Path::new("/usr/lib/libcuda.so.1")).unwrap();
    said("machine", open("/sys/devices/system/cpu/online"));
    close(&confinement()).unwrap();

    said("library", std::fs::read_dir("/usr/lib").map(drop));
    said("own-maps", std::fs::read("/proc/self/maps").map(drop));
    said("own-descriptors", std::fs::read_dir("/proc/self/fd").map(drop));
    // SAFETY: always succeeds.
    let thread = format!("/proc/self/task/{}/comm", unsafe { libc::gettid() });
    said("thread-name", std::fs::write(thread, "named"));
    said("null", File::options().write(true).open("/dev/null").map(drop));
    said("given-file", given.set_len(4096).and_then(|()| io::Write::write_all(&mut &given, b"x")));
    said("memfd", memfd());
    said("thread", std::thread::Builder::new().spawn(|| ()).map(|it| it.join().unwrap()));
    said("unix-socket", UnixStream::pair().map(drop));

    said("passwd", open("/etc/passwd"));
    said("others", open("/proc/1/status"));
    said("new-file", File::create(place.path().join("x")).map(drop));
    let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
    said("abstract-socket", UnixStream::connect_addr(&address).map(drop));
    said("process", Command::new("/bin/true").status().map(drop));
    // SAFETY: calls that fail, without pointers or with null ones that are not looked at before they do.
    unsafe {
        said("root", call(libc::setresuid(0, 0, 0).into()));
        said("dumpable", call(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0).into()));
        said("inet-socket", call(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0).into()));
        said("netlink-socket", call(libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0).into()));
        said("ptrace", call(libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0)));
        said("fork", call(libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0)));
        said("clone3", call(libc::syscall(libc::SYS_clone3, 0, 0)));
        said("x32", call(libc::syscall(0x4000_0000 | libc::SYS_getpid)));
        for (name, number) in [
            ("execve", libc::SYS_execve),
            ("mount", libc::SYS_mount),
            ("unshare", libc::SYS_unshare),
            ("bpf", libc::SYS_bpf),
            ("io_uring", libc::SYS_io_uring_setup),
            ("userfaultfd", libc::SYS_userfaultfd),
            ("perf", libc::SYS_perf_event_open),
            ("pidfd_getfd", libc::SYS_pidfd_getfd),
            ("process_vm_writev", libc::SYS_process_vm_writev),
            ("keyctl", libc::SYS_keyctl),
        ] {
            said(name, call(libc::syscall(number, 0, 0, 0, 0, 0)));
        }
    }
}

#[test]
fn what_a_worker_needs_works_and_nothing_else_does() {
    if crate::serve::confinement::landlock_version() < 6 {
        return eprintln!("skipped: landlock on this kernel is too old to deny all of this");
    }
    let name = format!("rekindle-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let _outside = UnixListener::bind_addr(&address).unwrap();
    let arguments = ["--exact", "serve::sandbox::tests::inside", "--nocapture", "--test-threads=1"];
    let output = Command::new("/proc/self/exe").args(arguments).env(INSIDE, name).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let tried: Vec<_> =
        text.lines().filter_map(|line| line.split_once("tried: ").and_then(|(_, said)| said.split_once(' '))).collect();
    let result = |what: &str| tried.iter().find(|it| it.0 == what).map(|it| it.1);
    for what in [
        "machine",
        "library",
        "own-maps",
        "own-descriptors",
        "thread-name",
        "null",
        "given-file",
        "memfd",
        "thread",
        "unix-socket",
    ] {
        assert_eq!(result(what), Some("ok"), "{what}: {text}{}", String::from_utf8_lossy(&output.stderr));
    }
    let denied = libc::EACCES.to_string();
    for what in ["passwd", "others", "new-file"] {
        assert_eq!(result(what), Some(denied.as_str()), "{what}: {text}");
    }
    let absent = libc::ENOSYS.to_string();
    for what in ["clone3", "x32"] {
        assert_eq!(result(what), Some(absent.as_str()), "{what}: {text}");
    }
    let refused = libc::EPERM.to_string();
    for what in "abstract-socket process root dumpable inet-socket netlink-socket ptrace fork execve mount unshare bpf \
                 io_uring userfaultfd perf pidfd_getfd process_vm_writev keyctl"
        .split_ascii_whitespace()
    {
        // A worker of a daemon that is not root keeps its user.
        if what != "root" || own_uid() == 0 {
            assert_eq!(result(what), Some(refused.as_str()), "{what}: {text}");
        }
    }
}
