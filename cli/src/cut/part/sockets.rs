//! The TCP sockets of processes.
//!
//! CRIU dumps and restores a connection in the kernel's repair mode (`TCP_REPAIR`, tcp(7)). In this mode a socket sends nothing, also when
//! it is closed. The mode takes the place of SO_REUSEADDR: the kernel turns that option off when a socket leaves it.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::super::manifest::Connection;
use super::super::talk::Seen;
use crate::failure::Failure;

/// The state of a listening socket, in `/proc/net/tcp`.
const LISTENS: &str = "0A";
/// Those in which a socket that was closed has to say something still: FIN_WAIT1, LAST_ACK and CLOSING.
const CLOSES: [&str; 3] = ["04", "09", "0B"];
/// Those of a connection that waits to be accepted: SYN_RECV, ESTABLISHED, and CLOSE_WAIT if the other end has closed it.
const WAITS: [&str; 3] = ["01", "03", "08"];

/// Options of sockets, by level and name.
const REPAIR: (i32, i32) = (libc::IPPROTO_TCP, libc::TCP_REPAIR);
const REUSE: (i32, i32) = (libc::SOL_SOCKET, libc::SO_REUSEADDR);
/// Their values.
const ON: i32 = 1;
const OFF: i32 = 0;
/// The inode of a socket that no process has.
const NOBODY: u64 = 0;
/// How long to wait for a connection of before to end.
const ROOM: Duration = Duration::from_secs(2);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A socket of a process: its inode, and where the process has it.
type Sockets = HashMap<u64, (i32, i32)>;

/// The connections of these processes, which are in one network namespace.
pub(super) fn connections(pids: &[i32]) -> Result<Vec<Connection>, Failure> {
    let own = sockets(pids);
    let found = rows(pids)?.into_iter().filter(|(inode, _)| own.contains_key(inode)).map(|(_, it)| it);
    Ok(found.collect::<BTreeSet<_>>().into_iter().collect())
}

/// The connections of these processes, those that wait to be accepted by them, and those on this host that are being closed.
pub(super) fn seen(pids: &[i32]) -> Result<Seen, Failure> {
    let Some(pid) = pids.first() else { return Ok(Seen::default()) };
    let mut own = sockets(pids);
    let lines = lines(*pid)?;
    // What was accepted meanwhile.
    own.extend(sockets(pids));
    let (ports, mut seen) = (ports(&lines, &own), Seen::default());
    for line in &lines {
        let Some((inode, connection)) = row(line) else { continue };
        let is = |states: &[&str]| line.split_ascii_whitespace().nth(3).is_some_and(|it| states.contains(&it));
        if own.contains_key(&inode) {
            seen.connections.push(connection);
        } else if inode == NOBODY && is(&CLOSES) {
            seen.orphans.push(connection);
        } else if inode == NOBODY && is(&WAITS) && ports.contains(&connection.own.port()) {
            seen.unaccepted.push(connection);
        }
    }
    for list in [&mut seen.connections, &mut seen.unaccepted, &mut seen.orphans] {
        list.sort();
        list.dedup();
    }
    seen.addresses = addresses()?;
    Ok(seen)
}

/// What tells the network of this process from others of this start of the machine.
pub(super) fn network() -> Result<String, Failure> {
    Ok(fs::read_link("/proc/self/ns/net").context("cannot tell this host's network")?.to_string_lossy().into_owned())
}

/// The addresses of this host.
fn addresses() -> Result<Vec<IpAddr>, Failure> {
    let read = |name: &str| {
        let path = format!("/proc/self/net/{name}");
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}, which has the addresses of this host"))
    };
    let mut all = of_trie(&read("fib_trie")?);
    // A kernel without IPv6 has no such file.
    all.extend(read("if_inet6").unwrap_or_default().lines().filter_map(|line| {
        let digits = line.split_ascii_whitespace().next().filter(|it| it.len() == 32)?;
        Some(IpAddr::from(Ipv6Addr::from(u128::from_str_radix(digits, 16).ok()?)))
    }));
    Ok(all.into_iter().collect())
}

/// The local addresses of `/proc/net/fib_trie`, which has what an address is for in the lines behind it.
fn of_trie(text: &str) -> BTreeSet<IpAddr> {
    let (mut found, mut last) = (BTreeSet::new(), None);
    for line in text.lines().map(str::trim) {
        match line.strip_prefix("|-- ") {
            Some(address) => last = address.parse::<Ipv4Addr>().ok(),
            None if line.starts_with("/32 host LOCAL") => found.extend(last.map(IpAddr::from)),
            None => {}
        }
    }
    found
}

/// The ports at which these processes listen.
pub(super) fn listening(pids: &[i32]) -> Vec<u16> {
    let Some(pid) = pids.first() else { return Vec::new() };
    ports(&lines(*pid).unwrap_or_default(), &sockets(pids))
}

/// The ports at which these sockets listen.
fn ports(lines: &[String], own: &Sockets) -> Vec<u16> {
    let port = |line: &String| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let inode = words.get(9)?.parse().ok()?;
        let listens = *words.get(3)? == LISTENS && own.contains_key(&inode);
        listens.then(|| address(words.get(1)?).map(|it| it.port())).flatten()
    };
    lines.iter().filter_map(port).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The namespaces of these processes are that of this one.
pub(super) fn is_own_network(pids: &[i32]) -> bool {
    let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/net")).ok();
    let own = of("self");
    pids.iter().filter_map(|pid| of(&pid.to_string())).all(|it| Some(it) == own)
}

/// The connections of these processes that do not have SO_REUSEADDR, by the socket's inode.
pub(super) fn exclusive(pids: &[i32]) -> BTreeSet<u64> {
    let is_exclusive = |socket: &OwnedFd| option(socket, REUSE).is_ok_and(|it| it == OFF);
    connected(pids).filter(|(_, socket)| is_exclusive(socket)).map(|(inode, _)| inode).collect()
}

/// From now on the connections of these processes say nothing, also when the processes end.
pub(super) fn mute(pids: &[i32]) {
    for (_, socket) in connected(pids) {
        // It may have been reset meanwhile.
        let _ = set_option(&socket, REPAIR, ON);
    }
}

/// Takes out of repair mode what a CRIU has left in it that was killed. `exclusive` is what had no SO_REUSEADDR before.
pub(super) fn unmute(pids: &[i32], exclusive: &BTreeSet<u64>) {
    for (inode, socket) in connected(pids) {
        if option(&socket, REPAIR).is_ok_and(|it| it == ON) {
            let _ = set_option(&socket, REPAIR, OFF);
            // Without it nobody could listen at the port for a minute after the connection's end. A connection that was made when it
            // had been noted which ones are exclusive gets it, too.
            if !exclusive.contains(&inode) {
                let _ = set_option(&socket, REUSE, ON);
            }
        }
    }
}

/// The sockets of these processes that are connections, by inode.
fn connected(pids: &[i32]) -> impl Iterator<Item = (u64, OwnedFd)> {
    let connected: HashSet<u64> = rows(pids).unwrap_or_default().into_iter().map(|(inode, _)| inode).collect();
    let own = sockets(pids).into_iter().filter(move |(inode, _)| connected.contains(inode));
    // A process or a socket may have gone meanwhile.
    own.filter_map(|(inode, (pid, fd))| Some((inode, socket(pid, fd)?)))
}

/// The sockets of processes.
fn sockets(pids: &[i32]) -> Sockets {
    let mut found = Sockets::new();
    for pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let link = fs::read_link(entry.path()).unwrap_or_default();
            let inode = link.to_str().and_then(|it| it.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            let fd = entry.file_name().to_str().and_then(|it| it.parse().ok());
            if let (Some(inode), Some(fd)) = (inode, fd) {
                found.insert(inode, (*pid, fd));
            }
        }
    }
    found
}

/// All connections in the network namespace of these processes, by the socket's inode.
fn rows(pids: &[i32]) -> Result<Vec<(u64, Connection)>, Failure> {
    let Some(pid) = pids.first() else { return Ok(Vec::new()) };
    Ok(lines(*pid)?.iter().filter_map(|it| row(it)).collect())
}

/// The kernel's lines about all TCP sockets in the network namespace of this process.
fn lines(pid: i32) -> Result<Vec<String>, Failure> {
    let mut lines = Vec::new();
    for name in ["tcp", "tcp6"] {
        let path = format!("/proc/{pid}/net/{name}");
        match fs::read_to_string(&path) {
            Ok(text) => lines.extend(text.lines().skip(1).map(str::to_owned)),
            // A kernel without IPv6.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name == "tcp6" => {}
            Err(error) => return Err(error).with_context(|| format!("cannot read {path}"))?,
        }
    }
    Ok(lines)
}

/// Ends what the kernel has left of connections whose processes have ended: it may be there for a minute, and CRIU cannot restore the
/// connection as long as it is. Nobody else hears that if packets of these connections are locked.
pub(super) fn end_what_is_left_of(connections: &[Connection], ports: &[u16]) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let own = [std::process::id() as i32];
        // What came in at a port keeps it from being listened at.
        let is_in_the_way = |it: &Connection| connections.contains(it) || ports.contains(&it.own.port());
        let is_left = |(inode, it): &(u64, Connection)| *inode == NOBODY && is_in_the_way(it);
        let left: Vec<_> = rows(&own)?.into_iter().filter(is_left).map(|(_, it)| it).collect();
        let Some(Connection { own, other }) = left.first() else { return Ok(()) };
        if began.elapsed() > ROOM {
            return Err(Failure::refused(anyhow!(
                "the connection {own} to {other} of before has not ended yet: try again in a minute"
            )));
        }
        for Connection { own, other } in &left {
            // Without the program, or in a kernel without this, it ends by itself in time.
            let words = ["--tcp", "--all", "--kill", "src", &own.to_string(), "dst", &other.to_string()];
            let _ = Command::new("ss")
                .args(words)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// A line of `/proc/net/tcp` or `tcp6`, if it is a connection's.
fn row(line: &str) -> Option<(u64, Connection)> {
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    let (own, other, state, inode) = (words.get(1)?, words.get(2)?, words.get(3)?, words.get(9)?);
    let connection = Connection { own: address(own)?, other: address(other)? };
    let inode = inode.parse().ok()?;
    (*state != LISTENS && connection.other.port() != 0).then_some((inode, connection))
}

/// An address there: words of 32 bits in the byte order of the machine, in hexadecimal digits.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words = (0..address.len() / 8).map(|at| u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok());
    let bytes: Vec<u8> = words.collect::<Option<Vec<_>>>()?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let ip: IpAddr = match <[u8; 16]>::try_from(bytes.as_slice()) {
        Ok(bytes) => Ipv6Addr::from(bytes).to_canonical(),
        Err(_) => Ipv4Addr::from(<[u8; 4]>::try_from(bytes.as_slice()).ok()?).into(),
    };
    Some(SocketAddr::new(ip, port))
}

/// Another process's socket.
fn socket(pid: i32, fd: i32) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(process, fd, PidfdGetfdFlags::empty()).ok()
}

fn option(socket: &OwnedFd, (level, name): (i32, i32)) -> io::Result<i32> {
    let (mut value, mut length) = (0_i32, size_of::<i32>() as libc::socklen_t);
    // SAFETY: the pointers are to live locals, and the length is that of the value.
    let got = unsafe {
        let (value, length) = ((&raw mut value).cast(), &raw mut length);
        libc::getsockopt(socket.as_fd().as_raw_fd(), level, name, value, length)
    };
    if got == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}

fn set_option(socket: &OwnedFd, (level, name): (i32, i32), to: i32) -> io::Result<()> {
    // SAFETY: the pointer is to a live local, and the length is its own.
    let set = unsafe {
        let (value, length) = ((&raw const to).cast(), size_of::<i32>() as libc::socklen_t);
        libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, value, length)
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn lines_of_connections_are_read() {
        let line =
            "   0: 0100007F:1389 0200000A:1770 01 00000000:00000000 00:00000000 00000000     0        0 4242 1 0";
        let expected = Connection { own: "127.0.0.1:5001".parse().unwrap(), other: "10.0.0.2:6000".parse().unwrap() };
        assert_eq!(row(line), Some((4242, expected)));
        assert_eq!(row(&line.replace(" 01 ", " 0A ")), None);
        assert_eq!(row("  sl  local_address rem_address   st tx_queue"), None);
        let mapped = address("0000000000000000FFFF00000100007F:1389");
        assert_eq!(mapped, Some("127.0.0.1:5001".parse().unwrap()));
        assert_eq!(address("00000000000000000000000001000000:1389"), Some("[::1]:5001".parse().unwrap()));
        assert_eq!(address("0100007:1"), None);
    }

    #[test]
    fn both_ends_of_a_connection_are_found_but_no_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _accepted = listener.accept().unwrap();
        let found = connections(&[std::process::id() as i32]).unwrap();
        let one = Connection { own: stream.local_addr().unwrap(), other: stream.peer_addr().unwrap() };
        assert!(found.contains(&one) && found.contains(&one.turned()), "{found:?}");
        assert!(is_own_network(&[std::process::id() as i32]));
    }

    #[test]
    fn a_connection_that_waits_to_be_accepted_is_seen_and_one_that_is_closed_with_something_to_say() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let own = [std::process::id() as i32];
        let one = Connection { own: stream.local_addr().unwrap(), other: stream.peer_addr().unwrap() };
        let found = seen(&own).unwrap();
        assert!(found.connections.contains(&one) && found.unaccepted.contains(&one.turned()), "{found:?}");
        assert!(found.addresses.contains(&IpAddr::from([127, 0, 0, 1])), "{found:?}");
        let accepted = listener.accept().unwrap();
        let found = seen(&own).unwrap();
        assert!(found.connections.contains(&one.turned()) && !found.unaccepted.contains(&one.turned()), "{found:?}");
        // More than the other end takes.
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        drop(stream);
        assert!(seen(&own).unwrap().orphans.contains(&one));
        drop(accepted);
    }

    #[test]
    fn local_addresses_are_told_from_others() {
        let text = "Main:\n  +-- 10.0.0.0/24 2 0 2\n     |-- 10.0.0.0\n        /24 link UNICAST\n     |-- 10.0.0.1\n        /32 host LOCAL\n     |-- 10.0.0.255\n        /32 link BROADCAST\n";
        assert_eq!(of_trie(text), BTreeSet::from([IpAddr::from([10, 0, 0, 1])]));
    }

    #[test]
    fn a_connection_that_leaves_repair_mode_has_the_option_that_it_had() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = || OwnedFd::from(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let (reusing, not) = (connect(), connect());
        set_option(&reusing, REUSE, ON).unwrap();
        let inode = |it: &OwnedFd| rustix::fs::fstat(it).unwrap().st_ino;
        let own = [std::process::id() as i32];
        let exclusive = exclusive(&own);
        assert!(exclusive.contains(&inode(&not)) && !exclusive.contains(&inode(&reusing)), "{exclusive:?}");
        for socket in [&reusing, &not] {
            match set_option(socket, REPAIR, ON) {
                // Only root may.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return,
                set => set.unwrap(),
            }
        }
        unmute(&own, &exclusive);
        for (socket, expected) in [(&reusing, ON), (&not, OFF)] {
            assert_eq!((option(socket, REPAIR).unwrap(), option(socket, REUSE).unwrap()), (OFF, expected));
        }
    }
}
