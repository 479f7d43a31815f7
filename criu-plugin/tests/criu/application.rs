//! A process like one that uses the interposer: it holds a connection to the daemon and shares a sealed memfd with it. The
//! process counts in that memory, so a test sees whether it runs, and from where after a restore.

use std::env;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rekindle_wire::attach::{Answer, Attach};
use rekindle_wire::control::{Opening, Request};
use rekindle_wire::frame;

/// The words of the shared memory.
pub(crate) const COUNT: usize = 0;
/// A question that the daemon writes,
pub(crate) const QUESTION: usize = 1;
/// and the application copies here.
pub(crate) const ANSWER: usize = 2;

/// The name of the shared memfd.
pub(crate) const RING: &str = "ring";
/// The size of the shared memfd.
pub(crate) const SIZE: usize = 4096;

/// The kind of process: `client`, `foreign`, `tree`, which is a client with a client and a foreign child, or `forked`, which is
/// a client with a child that has everything that the client had when it forked. With `TEST_ECHO` set, the process also
/// connects there and sends back what it receives.
pub(crate) const KIND: &str = "TEST_APPLICATION";
pub(crate) const ECHO: &str = "TEST_ECHO";

pub(crate) fn run() {
    // SAFETY: no preconditions. A session of its own: no terminal that CRIU would have to know of.
    unsafe { libc::setsid() };
    match env::var(KIND).unwrap().as_str() {
        "client" => count(Some(attach(&ring()))),
        "foreign" => count(None),
        "tree" => {
            for child in [true, false] {
                // SAFETY: this process's other thread, the test harness's, holds no lock: it waits for this one.
                if unsafe { libc::fork() } == 0 {
                    count(child.then(|| attach(&ring())));
                }
            }
            count(Some(attach(&ring())));
        }
        "forked" => {
            let client = attach(&ring());
            // SAFETY: as above.
            let child = unsafe { libc::fork() } == 0;
            // The child keeps what it inherited, but its count is its own.
            let (_held, counter) = if child { (Some(client), None) } else { (None, Some(client)) };
            count(counter)
        }
        other => panic!("{other}"),
    }
}

/// Makes a memfd as the interposer does.
fn ring() -> File {
    let name = std::ffi::CString::new(RING).unwrap();
    // SAFETY: a fresh descriptor.
    let file = unsafe {
        let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
        File::from_raw_fd(libc::memfd_create(name.as_ptr(), flags))
    };
    file.set_len(SIZE as u64).unwrap();
    // SAFETY: a descriptor and constants.
    assert_eq!(0, unsafe {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals)
    });
    file
}

fn map(file: &File) -> &'static [AtomicU64] {
    // SAFETY: a new mapping of the file's size, never unmapped.
    unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        let address = libc::mmap(std::ptr::null_mut(), SIZE, protection, libc::MAP_SHARED, fd, 0);
        assert_ne!(address, libc::MAP_FAILED);
        std::slice::from_raw_parts(address.cast(), SIZE / 8)
    }
}

fn attach(ring: &File) -> (UnixStream, File) {
    let path = env::var("REKINDLE_SOCKET").unwrap();
    let socket = UnixStream::connect(&path).unwrap();
    let attach = Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: std::process::id() as i32,
        command: "application".into(),
        socket: path,
        cookie: rekindle_criu::socket::cookie(socket.as_raw_fd()).unwrap(),
        settings: Vec::new(),
    };
    let opening = Opening::new(&Request::Attach(attach)).unwrap();
    frame::send(&socket, &opening, &[], &[ring.as_raw_fd(), ring.as_raw_fd()]).unwrap();
    let Answer::Attached(_) = frame::receive(&socket).unwrap().body else {
        panic!("refused");
    };
    (socket, ring.try_clone().unwrap())
}

fn count(client: Option<(UnixStream, File)>) -> ! {
    let mut echo = env::var(ECHO).ok().map(|address| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    });
    let ring = client.as_ref().map_or_else(ring, |(_, ring)| ring.try_clone().unwrap());
    let words = map(&ring);
    loop {
        words[COUNT].fetch_add(1, Ordering::Relaxed);
        words[ANSWER].store(words[QUESTION].load(Ordering::Relaxed), Ordering::Relaxed);
        if let Some(echo) = &mut echo {
            let mut bytes = [0; 64];
            if let Ok(got @ 1..) = echo.read(&mut bytes) {
                echo.write_all(&bytes[..got]).unwrap();
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
}
