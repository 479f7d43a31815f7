//! A hostile client, which speaks the protocol by hand and breaks it in the way that its argument names. It prints the
//! answers that matter to the test, and `ready` while it holds a resource until its input ends.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rekindle_wire::attach::{Answer, Attach, Attached, Pinned};
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{self, Kind};
use rekindle_wire::control::{Opening, Reply, Request};
use rekindle_wire::layout::{self, SEALS, SHARED_NAME, SHARED_SIZE, STAGING_NAME, STAGING_SIZE, Shared};
use rekindle_wire::ring::{self, CommandHeader};
use rekindle_wire::{frame, window};
use serde_json::{Value, json};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match attack(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("attacker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn attack(arguments: &[String]) -> Result<()> {
    let number = |at: usize| -> Result<u64> { Ok(arguments.get(at).context("a number is missing")?.parse()?) };
    match arguments.first().map(String::as_str) {
        Some("files") => files(),
        Some("deaths") => deaths(),
        Some("words") => words(),
        Some("asks") => asks(i32::try_from(number(1)?)?),
        Some("silent") => silent(number(1)?),
        Some("many") => many(number(1)?),
        Some("forks") => forks(),
        Some("memory") => memory(),
        Some("places") => places(),
        Some("indices") => indices(number(1)?),
        Some("commands") => commands(number(1)?),
        Some("changes") => changes(number(1)?),
        other => bail!("no attack {other:?}"),
    }
}

fn connect() -> Result<UnixStream> {
    let path = std::env::var_os("REKINDLE_SOCKET").context("REKINDLE_SOCKET is not set")?;
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

fn memfd(name: &CStr, size: u64, seals: i32) -> Result<OwnedFd> {
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    ensure!(fd >= 0, "no memfd");
    // SAFETY: new, and owned here.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(size)?;
    // SAFETY: no pointers.
    ensure!(unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } == 0, "no seals");
    Ok(file.into())
}

fn ring() -> Result<OwnedFd> {
    memfd(SHARED_NAME, SHARED_SIZE as u64, SEALS)
}

fn staging() -> Result<OwnedFd> {
    memfd(STAGING_NAME, STAGING_SIZE as u64, SEALS)
}

fn hello() -> Result<Opening> {
    let attach = Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: 1,
        command: "attacker".to_owned(),
        socket: "nowhere".to_owned(),
        cookie: u64::MAX,
        settings: Vec::new(),
    };
    Ok(Opening::new(&Request::Attach(attach))?)
}

/// Sends an opening with descriptors, and returns the daemon's answer.
fn answer(opening: &Value, fds: &[RawFd]) -> Result<String> {
    let stream = connect()?;
    // The daemon may close the connection before it has read everything.
    let _ = frame::send(&stream, opening, &[], fds);
    Ok(match frame::receive::<Value>(&stream) {
        Ok(message) => message.body.to_string(),
        Err(error) => format!("closed: {error}"),
    })
}

/// Sends descriptors that an attach must not have.
fn files() -> Result<()> {
    let (ring, staging) = (ring()?, staging()?);
    let file = tempfile::tempfile()?;
    file.set_len(SHARED_SIZE as u64)?;
    let (pair, _other) = UnixStream::pair()?;
    let open = |path: &str| File::options().read(true).write(true).open(path);
    let (zero, directory) = (open("/dev/zero")?, File::open("/")?);
    let read_only = File::open(format!("/proc/self/fd/{}", ring.as_raw_fd()))?;
    let unsealed = memfd(SHARED_NAME, SHARED_SIZE as u64, 0)?;
    let may_shrink = memfd(SHARED_NAME, SHARED_SIZE as u64, libc::F_SEAL_GROW | libc::F_SEAL_SEAL)?;
    let may_grow = memfd(SHARED_NAME, SHARED_SIZE as u64, libc::F_SEAL_SHRINK)?;
    let small = memfd(SHARED_NAME, 4096, SEALS)?;
    let large = memfd(SHARED_NAME, 1 << 40, SEALS)?;
    let unwritable = memfd(SHARED_NAME, SHARED_SIZE as u64, SEALS | libc::F_SEAL_WRITE)?;
    let good = (ring.as_raw_fd(), staging.as_raw_fd());
    let mut sets = vec![vec![], vec![good.0], vec![good.1, good.0], vec![good.0, good.0], vec![good.0, good.1, good.1]];
    sets.push(vec![good.0; 64]);
    sets.push(vec![good.0; 253]);
    let wrong = [
        file.as_raw_fd(),
        pair.as_raw_fd(),
        zero.as_raw_fd(),
        directory.as_raw_fd(),
        read_only.as_raw_fd(),
        unsealed.as_raw_fd(),
        may_shrink.as_raw_fd(),
        may_grow.as_raw_fd(),
        small.as_raw_fd(),
        large.as_raw_fd(),
        unwritable.as_raw_fd(),
    ];
    sets.extend(wrong.map(|fd| vec![fd, good.1]));
    sets.extend(wrong.map(|fd| vec![good.0, fd]));
    let opening = serde_json::to_value(hello()?)?;
    for set in sets {
        let answer = answer(&opening, &set)?;
        ensure!(!answer.contains("Attached"), "{set:?}: {answer}");
    }
    Ok(())
}

/// Closes the connection at every point of the handshake, with descriptors in transit.
fn deaths() -> Result<()> {
    let json = serde_json::to_vec(&hello()?)?;
    let mut bytes = (json.len() as u32).to_le_bytes().to_vec();
    bytes.extend(0_u32.to_le_bytes());
    bytes.extend(json);
    let (ring, staging) = (ring()?, staging()?);
    for length in [0, 1, 4, 7, 8, 9, 20, bytes.len() - 1, bytes.len()] {
        for half in [false, true] {
            let stream = connect()?;
            if length > 0 {
                send_with(&stream, &bytes[..1], &[ring.as_raw_fd(), staging.as_raw_fd()])?;
                (&stream).write_all(&bytes[1..length])?;
            }
            if half {
                // The client sends nothing more, but still reads.
                stream.shutdown(std::net::Shutdown::Write)?;
                let mut rest = Vec::new();
                let _ = (&stream).read_to_end(&mut rest);
            }
        }
    }
    // The client also dies with an answer half read.
    let stream = connect()?;
    frame::send(&stream, &hello()?, &[], &[ring.as_raw_fd(), staging.as_raw_fd()])?;
    (&stream).read_exact(&mut [0; 6])?;
    Ok(())
}

/// Sends bytes with descriptors.
fn send_with(stream: &UnixStream, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
    let mut control = [0_u64; 32];
    let mut iov = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: plain data for which zeros are valid; all pointers are to locals, and the space is enough for a few.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = &raw mut iov;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(size_of_val(fds) as u32) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of_val(fds) as u32) as _;
        std::ptr::copy_nonoverlapping(fds.as_ptr(), libc::CMSG_DATA(header).cast(), fds.len());
        libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    ensure!(sent == bytes.len() as isize, "not sent");
    Ok(())
}

/// Sends openings with invalid texts and numbers.
fn words() -> Result<()> {
    let (ring, staging) = (ring()?, staging()?);
    let fds = [ring.as_raw_fd(), staging.as_raw_fd()];
    let base = serde_json::to_value(hello()?)?;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut opening = base.clone();
        change(&mut opening);
        opening
    };
    let setting = |name: &str, value: &str| json!([[name, value]]);
    let long = "x".repeat(5000);
    let refused = [
        with(&|it| it["request"]["Attach"]["settings"] = setting("LD_PRELOAD", "/tmp/evil.so")),
        with(&|it| it["request"]["Attach"]["settings"] = setting("CUDA_DEVICE_ORDER", "a\0b")),
        with(&|it| it["request"]["Attach"]["settings"] = setting("CUDA_DEVICE_ORDER", &long)),
        with(&|it| it["request"]["Attach"]["pid"] = json!("one")),
        with(&|it| it["request"]["Attach"]["command"] = json!("x".repeat(70_000))),
        with(&|it| it["request"] = json!("Fly\nFORGED line\u{1b}[31m")),
        with(&|it| it["request"] = json!({"Fly\nFORGED line": 1})),
        with(&|it| it["request"] = Value::Null),
        with(&|it| it["wire"] = json!(u64::MAX)),
        with(&|it| it["table"] = json!(1)),
        json!("\nFORGED line"),
        json!({}),
        serde_json::from_str(&format!("{}{}", "[".repeat(100), "]".repeat(100)))?,
    ];
    for opening in refused {
        let answer = answer(&opening, &fds)?;
        ensure!(!answer.contains("Attached"), "{opening}: {answer}");
    }
    // The daemon accepts this command name, and shows it to others.
    Client::attach_as(&with(&|it| it["request"]["Attach"]["command"] = json!("a\nFORGED line\u{1b}]0;x\u{7}")))?;
    Ok(())
}

/// Sends requests that this process may not make, and requests about another client's process.
fn asks(victim: i32) -> Result<()> {
    let directory = File::open("/")?;
    let attached = Attached { driver_version: 0, driver_build: String::new(), api_version: 0, devices: Vec::new() };
    let Ok(Request::Attach(attach)) = serde_json::from_value(hello()?.request) else { bail!("no attach") };
    let rejoin = Request::Rejoin { attach, attached };
    let requests = [
        Request::Pause { root: victim, leave_running: true, traceparent: None },
        Request::Pause { root: 1, leave_running: false, traceparent: None },
        Request::Restore,
        rejoin.clone(),
        Request::Frozen { pid: victim },
        Request::Finish,
        Request::Resume { pid: victim },
        Request::Calls { pid: victim },
        Request::Check { pid: victim },
        Request::Reattach { restore: 0, socket: 0, cookie: 0 },
    ];
    for request in requests {
        let opening = serde_json::to_value(Opening::new(&request)?)?;
        let answer = answer(&opening, &[directory.as_raw_fd()])?;
        ensure!(answer.contains("Failed") || answer.contains("closed"), "{request:?}: {answer}");
    }
    let stream = connect()?;
    frame::send(&stream, &Opening::new(&Request::List)?, &[], &[])?;
    match frame::receive::<Reply>(&stream)?.body {
        Reply::Clients(clients) => ensure!(clients.is_empty(), "it sees {clients:?}"),
        other => bail!("{other:?}"),
    }
    let mut endpoint = std::env::var_os("REKINDLE_SOCKET").context("REKINDLE_SOCKET is not set")?;
    endpoint.push(".workers");
    // Root can connect to this endpoint in spite of its mode.
    if let Ok(stream) = UnixStream::connect(endpoint) {
        frame::send(&stream, &Opening::new(&rejoin)?, &[], &[stream.as_raw_fd()])?;
        let answer = frame::receive::<Value>(&stream)?.body.to_string();
        ensure!(answer.contains("is not a worker"), "{answer}");
    }
    Ok(())
}

/// Holds everything until the test closes this process's input.
fn hold() -> Result<()> {
    println!("ready");
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest)?;
    Ok(())
}

/// Opens connections that send nothing, or one byte.
fn silent(count: u64) -> Result<()> {
    let limit = libc::rlimit { rlim_cur: 4096, rlim_max: 4096 };
    // SAFETY: the kernel reads the local.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let mut held = Vec::new();
    for i in 0..count {
        let stream = connect()?;
        if i % 2 == 0 {
            let _ = (&stream).write_all(&[9]);
        }
        held.push(stream);
    }
    hold()
}

/// A client that has attached like an application.
struct Client {
    socket: UnixStream,
    shared: Shared,
}

impl Client {
    fn attach() -> Result<Self> {
        Self::attach_as(&serde_json::to_value(hello()?)?)
    }

    fn attach_as(opening: &Value) -> Result<Self> {
        let socket = connect()?;
        let (ring, staging) = (ring()?, staging()?);
        // SAFETY: a new mapping, which replaces nothing.
        let at = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), SHARED_SIZE, protection, libc::MAP_SHARED, ring.as_raw_fd(), 0)
        };
        ensure!(at != libc::MAP_FAILED, "no mapping");
        // SAFETY: as just mapped, and never unmapped.
        let shared = unsafe { Shared::new(at.cast()) };
        shared.initialise();
        frame::send(&socket, opening, &[], &[ring.as_raw_fd(), staging.as_raw_fd()])?;
        match frame::receive::<Answer>(&socket)?.body {
            Answer::Attached(_) => Ok(Self { socket, shared }),
            Answer::Refused { reason } => bail!("refused: {reason}"),
        }
    }

    /// Enqueues a command if the worker lives. Returns whether it does.
    fn send(&self, header: CommandHeader, parameters: &[u8]) -> bool {
        ring::enqueue(&self.shared, header, parameters, || self.is_alive()).is_ok() && self.is_alive()
    }

    /// Whether the worker still holds the connection. Messages after its first answer are discarded.
    fn is_alive(&self) -> bool {
        let mut bytes = [0_u8; 256];
        loop {
            // SAFETY: receives at most that many bytes into the local.
            let got = unsafe {
                libc::recv(self.socket.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT)
            };
            if got <= 0 {
                return got < 0 && std::io::Error::last_os_error().kind() == std::io::ErrorKind::WouldBlock;
            }
        }
    }

    fn head(&self) -> u64 {
        self.shared.header().head.load(Ordering::Acquire)
    }

    /// Waits until the worker has taken all commands, or is gone.
    fn settle(&self) {
        for _ in 0..2000 {
            if !self.is_alive() || self.head() >= self.shared.header().tail.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Attaches repeatedly, and keeps all connections.
fn many(count: u64) -> Result<()> {
    let mut clients = Vec::new();
    for _ in 0..count {
        clients.push(Client::attach()?);
    }
    hold()?;
    // Only one worker may be left for one process.
    let alive = || clients.iter().filter(|it| it.is_alive()).count();
    for _ in 0..5000 {
        // A killed worker takes a moment to end.
        if alive() <= 1 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    bail!("{} workers", alive())
}

/// Forks children that hold the connection of this process after it has ended.
fn forks() -> Result<()> {
    let client = Client::attach()?;
    for _ in 0..20 {
        // SAFETY: the child only waits, or becomes another program.
        unsafe {
            if libc::fork() == 0 {
                libc::fcntl(client.socket.as_raw_fd(), libc::F_SETFD, 0);
                libc::execl(c"/bin/sleep".as_ptr(), c"sleep".as_ptr(), c"600".as_ptr(), std::ptr::null::<u8>());
                libc::_exit(1);
            }
        }
    }
    println!("ready");
    Ok(())
}

/// Reserves addresses that are taken: the reservation fails, without further consequences.
fn places() -> Result<()> {
    let client = Client::attach()?;
    let (base, size) = (window::RESERVED_BASE, 4 << 20);
    for (at, length) in [(base, size), (base, size), (base + size / 2, size), (base + size, size)] {
        let mut words = Writer::new();
        [at, length].into_iter().for_each(|word| words.word(word));
        let header = CommandHeader { call: command::ADDRESS_RESERVE, reply: 1, ..CommandHeader::default() };
        client.send(header, words.bytes());
        client.settle();
        ensure!(client.is_alive(), "{length:#x} bytes at {at:#x} end it");
    }
    Ok(())
}

/// Announces memory that differs from its description, and asks for more memory than exists.
fn memory() -> Result<()> {
    let address = window::PINNED_BASE + (1 << 30);
    let size = 1 << 20;
    let announce = |client: &Client, file: RawFd, pinned: Pinned| {
        let _ = frame::send(&client.socket, &pinned, &[], &[file]);
        let mut words = Writer::new();
        for word in [pinned.address, pinned.size, 0, pinned.serial] {
            words.word(word);
        }
        let header = CommandHeader { call: command::PINNED_MAP, reply: 1, ..CommandHeader::default() };
        client.send(header, words.bytes());
        client.settle();
    };
    let (good, unsealed) = (memfd(c"rekindle-pinned-1", size, SEALS)?, memfd(c"rekindle-pinned-1", size, 0)?);
    let zero = File::options().read(true).write(true).open("/dev/zero")?;
    let (socket, _other) = UnixStream::pair()?;
    let own = |address, size| Pinned { address, size, serial: 1, file_offset: Some(0) };
    let attacks = [
        (unsealed.as_raw_fd(), own(address, size)),
        (zero.as_raw_fd(), own(address, size)),
        (socket.as_raw_fd(), own(address, size)),
        (good.as_raw_fd(), own(address, size * 2)),
        (good.as_raw_fd(), own(address + 1, size)),
        (good.as_raw_fd(), own(0x7000_0000_0000, size)),
        (good.as_raw_fd(), own(0x40_0000, size)),
        (good.as_raw_fd(), own(u64::MAX - 4095, size)),
        (good.as_raw_fd(), own(address, u64::MAX)),
        (good.as_raw_fd(), own(address, 0)),
    ];
    for (file, pinned) in attacks {
        announce(&Client::attach()?, file, pinned);
    }
    // Descriptors in any number, without a command that takes them.
    let client = Client::attach()?;
    for serial in 0..3000 {
        if frame::send(&client.socket, &Pinned { address, size, serial, file_offset: None }, &[], &[good.as_raw_fd()])
            .is_err()
        {
            break;
        }
    }
    let client = Client::attach()?;
    for _ in 0..100 {
        if send_with(&client.socket, &[0], &[good.as_raw_fd(); 10]).is_err() {
            break;
        }
    }
    // The header of a message of 4 GiB, whose content never follows.
    let client = Client::attach()?;
    let _ = (&client.socket).write_all(&[0xff; 64]);
    // Device memory and code without limit.
    let client = Client::attach()?;
    retain(&client);
    for size in [u64::MAX, 1 << 63, 1 << 46, 0] {
        let mut words = Writer::new();
        words.word(size);
        client.send(
            CommandHeader { call: command::MEM_ALLOC, reply: 1, context: context(), ..Default::default() },
            words.bytes(),
        );
    }
    for image in 0..2000 {
        let mut words = Writer::new();
        for word in [image, 0, 1 << 40] {
            words.word(word);
        }
        words.blob(&[7; 60_000]);
        if !client.send(CommandHeader { call: command::CODE_PART, ..Default::default() }, words.bytes()) {
            break;
        }
    }
    client.settle();
    Ok(())
}

/// The client's handle of its context.
fn context() -> u64 {
    Kind::Context.handle(1)
}

/// Retains a device's primary context.
fn retain(client: &Client) {
    let mut words = Writer::new();
    for word in [context(), 0, 0] {
        words.word(word);
    }
    client.send(CommandHeader { call: command::CONTEXT_RETAIN, reply: 1, ..Default::default() }, words.bytes());
}

/// Pseudo-random numbers, the same for the same seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = self.0;
        (x ^ (x >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (x >> 32)
    }

    /// A number that a worker may accept as valid: sizes, handles of all kinds, its own and foreign addresses.
    fn word(&mut self) -> u64 {
        let low = self.next() % 64;
        match self.next() % 12 {
            0 => 0,
            1 => low,
            2 => u64::MAX - low,
            3 => window::DEVICE_BASE + low * 4096,
            4 => window::PINNED_BASE + low * 4096,
            5 => 0x7000_0000_0000 + low * 4096,
            6 => 0x40_0000 + low * 64,
            7 => (low % 16) << 48 | 1,
            8 => context(),
            9 => 1 << low,
            10 => 0x7fff_ffff_e000,
            _ => self.next(),
        }
    }
}

/// Writes impossible ring indices, tickets and headers.
fn indices(seed: u64) -> Result<()> {
    let mut random = Random(seed);
    let client = Client::attach()?;
    let header = client.shared.header();
    header.tail.store(random.word(), Ordering::Release);
    header.head.store(random.word(), Ordering::Release);
    header.doorbell.store(random.next() as u32, Ordering::Release);
    header.worker_asleep.store(random.next() as u32, Ordering::Release);
    header.waiting_for_room.store(random.next() as u32, Ordering::Release);
    for byte in 0..layout::UNITS * layout::UNIT / 8 {
        // SAFETY: inside the ring's units, which are this process's to write.
        unsafe { client.shared.units().cast::<u64>().add(byte).write_volatile(random.word()) };
    }
    for unit in 0..layout::UNITS {
        let wrong = random.next().is_multiple_of(4);
        client.shared.seq(unit).store(if wrong { random.word() } else { unit as u64 + 1 }, Ordering::Release);
    }
    for chunk in 0..layout::CHUNKS {
        client.shared.chunk(chunk).store(random.next() as u32, Ordering::Release);
    }
    ring::ring_doorbell(&client.shared);
    std::thread::sleep(Duration::from_millis(30));
    Ok(())
}

/// Sends commands whose parameters are foreign or invalid handles, addresses, lengths and slots. A malformed command
/// ends the worker, and the next round gets another.
fn commands(seed: u64) -> Result<()> {
    let mut random = Random(seed);
    let own = 0..720_u16;
    let made = 0..700_u16;
    for _ in 0..8 {
        let client = Client::attach()?;
        retain(&client);
        for _ in 0..200 {
            let call = match random.next() % 3 {
                0 => own.start + (random.next() % u64::from(own.end)) as u16,
                _ => command::FIRST + (random.next() % u64::from(made.end)) as u16,
            };
            let mut words = Writer::new();
            for _ in 0..random.next() % 9 {
                words.word(random.word());
            }
            if random.next().is_multiple_of(3) {
                words.blob(&vec![random.next() as u8; (random.next() % 300) as usize]);
            }
            let reply = if random.next().is_multiple_of(2) { 0 } else { random.next() as u16 };
            let thread = random.next() as u32 % 4;
            let context = if random.next().is_multiple_of(4) { random.word() } else { context() };
            let header = CommandHeader { call, reply, context, thread, ..Default::default() };
            if !client.send(header, words.bytes()) {
                break;
            }
        }
        client.settle();
    }
    Ok(())
}

/// Changes the bytes of commands while the worker reads them.
fn changes(seed: u64) -> Result<()> {
    let client = Client::attach()?;
    retain(&client);
    client.settle();
    let stop = Arc::new(AtomicBool::new(false));
    let (stopping, shared) = (Arc::clone(&stop), client.shared);
    let changer = std::thread::spawn(move || {
        let mut random = Random(seed);
        while !stopping.load(Ordering::Relaxed) {
            let unit = random.next() as usize % layout::UNITS;
            // SAFETY: as in `indices`. The length and the call of whatever command begins there.
            unsafe {
                let at = shared.units().add(unit * layout::UNIT);
                at.add(4).cast::<u32>().write_volatile(random.next() as u32 % (1 << (random.next() % 32)));
            }
        }
    });
    for _ in 0..3000 {
        let mut words = Writer::new();
        words.word(context());
        words.blob(&[1; 200]);
        if !client
            .send(CommandHeader { call: command::COPY_BYTES, context: context(), ..Default::default() }, words.bytes())
        {
            break;
        }
    }
    client.settle();
    stop.store(true, Ordering::Relaxed);
    let _ = changer.join();
    Ok(())
}
