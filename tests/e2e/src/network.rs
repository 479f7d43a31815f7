//! A private network for one test. podman creates and removes its bridges and rules there, and the machine's network
//! does not change.
//!
//! ```text
//!   here 198.51.100.1 ───── 198.51.100.2 the other machine           here 198.51.100.1 ──┬── 198.51.100.2 the other machine
//!                                                                                        └── 198.51.100.3 clients
//! ```

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::Result;

/// The network's address on the link to the other machine.
pub const HERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// The other machine's address there.
pub const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

/// The addresses of the clients, where there are any.
const CLIENTS: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 3);
const CLIENTS_6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 3);
/// The device of each machine.
pub const DEVICE: &str = "cable";

/// A network for the thread that made it, and for all processes that the thread starts. Dropping this value returns the
/// thread to its previous network.
#[derive(Debug)]
pub struct Network {
    before: File,
    /// The network namespace of the other machine.
    name: String,
    /// Those of clients and of a switch, if there are any.
    more: Vec<String>,
}

/// A machine of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// This one.
    Here,
    /// The other one.
    Elsewhere,
    /// That of clients.
    Clients,
}

impl Network {
    /// From now on connections that have ended leave nothing behind (`TIME_WAIT`).
    pub fn forgets_connections(&self) -> Result {
        Ok(std::fs::write("/proc/sys/net/ipv4/tcp_max_tw_buckets", "0")?)
    }

    /// Moves this thread into a new network with a loopback interface and a link to another machine.
    pub fn new() -> Result<Self> {
        let before = File::open("/proc/thread-self/ns/net")?;
        // SAFETY: changes this thread's namespace; no pointers.
        ensure!(unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0, "unshare: {}", std::io::Error::last_os_error());
        // SAFETY: no pointers.
        let name = format!("machine-{}", unsafe { libc::gettid() });
        ip("link set lo up")?;
        add(&name)?;
        let network = Self { before, name, more: Vec::new() };
        let name = &network.name;
        ip(&format!("link add cable type veth peer name cable netns {name}"))?;
        ip(&format!("address add {HERE}/24 dev cable"))?;
        ip("link set cable up")?;
        ip(&format!("-netns {name} link set lo up"))?;
        ip(&format!("-netns {name} address add {ELSEWHERE}/24 dev cable"))?;
        ip(&format!("-netns {name} link set cable up"))?;
        Ok(network)
    }

    /// The same, where three machines are on a switch: this one, the other one and one of clients. All know both hosts' way to the clients
    /// from the beginning, and the clients believe for an hour what they have heard last of where an address is.
    pub fn with_clients() -> Result<Self> {
        let mut network = Self::new()?;
        ip(&format!("link delete {DEVICE}"))?;
        let [switch, clients] = ["switch", "clients"].map(|it| network.name.replace("machine", it));
        for name in [&switch, &clients] {
            add(name)?;
            network.more.push(name.clone());
        }
        ip(&format!("-netns {switch} link add bridge type bridge"))?;
        ip(&format!("-netns {switch} link set bridge up"))?;
        let ports =
            [(1, "here", Machine::Here), (2, "elsewhere", Machine::Elsewhere), (3, "clients", Machine::Clients)];
        for (number, port, machine) in ports {
            let machine = network.option(machine);
            ip(&format!("{machine} link add {DEVICE} type veth peer name {port} netns {switch}"))?;
            ip(&format!("-netns {switch} link set {port} master bridge up"))?;
            ip(&format!("{machine} address add 198.51.100.{number}/24 dev {DEVICE}"))?;
            ip(&format!("{machine} address add fd00::{number}/64 dev {DEVICE} nodad"))?;
            ip(&format!("{machine} link set {DEVICE} up"))?;
        }
        ip(&format!("-netns {clients} link set lo up"))?;
        let hardware = network.hardware(Machine::Clients)?;
        for machine in [Machine::Here, Machine::Elsewhere] {
            for address in [IpAddr::from(CLIENTS), CLIENTS_6.into()] {
                let option = network.option(machine);
                ip(&format!("{option} neigh replace {address} lladdr {hardware} nud permanent dev {DEVICE}"))?;
            }
        }
        network.among_clients(|| {
            for family in ["ipv4", "ipv6"] {
                let file = |name| format!("/proc/sys/net/{family}/neigh/{DEVICE}/{name}");
                std::fs::write(file("base_reachable_time_ms"), "3600000")?;
                std::fs::write(file("delay_first_probe_time"), "3600")?;
            }
            Ok(())
        })?;
        Ok(network)
    }

    /// The option by which `ip` works on a machine.
    fn option(&self, machine: Machine) -> String {
        match machine {
            Machine::Here => String::new(),
            Machine::Elsewhere => format!("-netns {} ", self.name),
            Machine::Clients => format!("-netns {} ", self.clients()),
        }
    }

    fn clients(&self) -> String {
        self.name.replace("machine", "clients")
    }

    /// Runs `ip` on a machine, and returns what it prints.
    pub fn ip(&self, machine: Machine, arguments: &str) -> Result<String> {
        ip(&format!("{}{arguments}", self.option(machine)))
    }

    /// The address of a machine's device on the link.
    pub fn hardware(&self, machine: Machine) -> Result<String> {
        let said = self.ip(machine, &format!("-brief link show {DEVICE}"))?;
        Ok(said.split_whitespace().nth(2).context("no device")?.to_owned())
    }

    /// Runs a closure on the machine of the clients.
    pub fn among_clients<T: Send>(&self, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(&self.clients(), act)
    }

    /// Runs a closure in the network of the other machine.
    pub fn elsewhere<T: Send>(&self, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        inside(&self.name, act)
    }
}

/// Runs a closure in a network.
fn inside<T: Send>(name: &str, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = File::open(format!("/run/netns/{name}"))?;
    // A namespace belongs to a thread: a new thread enters it, so that no other code is affected.
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            // SAFETY: changes this thread's namespace; no pointers.
            let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
            ensure!(entered == 0, "setns: {}", std::io::Error::last_os_error());
            act()
        });
        acting.join().unwrap_or_else(|_| bail!("what was done elsewhere panicked"))
    })
}

impl Drop for Network {
    fn drop(&mut self) {
        // SAFETY: changes this thread's namespace; no pointers. It was in that one before.
        unsafe { libc::setns(self.before.as_raw_fd(), libc::CLONE_NEWNET) };
        for name in self.more.iter().chain([&self.name]) {
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

/// Adds a network namespace.
fn add(name: &str) -> Result {
    ip(&format!("netns add {name}"))?;
    Ok(())
}

/// Runs `ip`, and returns what it prints.
fn ip(arguments: &str) -> Result<String> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output()?;
    ensure!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}
