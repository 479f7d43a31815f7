//! A private network for one test. podman creates and removes its bridges and rules there, and the machine's network
//! does not change.

use std::fs::File;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::process::Command;

use anyhow::{bail, ensure};

use crate::Result;

/// The network's address on the link to the other machine.
pub const HERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// The other machine's address there.
pub const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);

/// A network for the thread that made it, and for all processes that the thread starts. Dropping this value returns the
/// thread to its previous network.
#[derive(Debug)]
pub struct Network {
    before: File,
    /// The network namespace of the other machine.
    name: String,
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
        ip(&format!("netns add {name}"))?;
        let network = Self { before, name };
        let name = &network.name;
        ip(&format!("link add cable type veth peer name cable netns {name}"))?;
        ip(&format!("address add {HERE}/24 dev cable"))?;
        ip("link set cable up")?;
        ip(&format!("-netns {name} link set lo up"))?;
        ip(&format!("-netns {name} address add {ELSEWHERE}/24 dev cable"))?;
        ip(&format!("-netns {name} link set cable up"))?;
        Ok(network)
    }

    /// Runs a closure in the network of the other machine.
    pub fn elsewhere<T: Send>(&self, act: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let namespace = File::open(format!("/run/netns/{}", self.name))?;
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
}

impl Drop for Network {
    fn drop(&mut self) {
        // SAFETY: changes this thread's namespace; no pointers. It was in that one before.
        unsafe { libc::setns(self.before.as_raw_fd(), libc::CLONE_NEWNET) };
        let _ = ip(&format!("netns delete {}", self.name));
    }
}

fn ip(arguments: &str) -> Result {
    let output = Command::new("ip").args(arguments.split_whitespace()).output()?;
    ensure!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
