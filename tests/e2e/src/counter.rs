//! The program `counter`, which answers over UDP how far it has counted on its GPU.

use std::fs::File;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::wait::until;
use crate::{App, Node, Result};

/// The time to wait for an answer. The question is then sent again, as the program may be stopped.
const ANSWER: Duration = Duration::from_millis(500);

/// The address of a counter.
#[derive(Clone, Copy, Debug)]
pub struct Counter {
    port: u16,
    /// A process in the counter's network namespace, if that is not the test's.
    inside: Option<i32>,
}

impl Counter {
    /// Starts a counter with this much data on its GPU, and waits until it answers.
    pub fn start(node: &Node, mib: u32) -> Result<(App, Self)> {
        let app = node.run("counter", &["--mib", &mib.to_string()])?;
        let port = app.says("port ")?.parse()?;
        let counter = Self { port, inside: None };
        counter.count()?;
        Ok((app, counter))
    }

    /// A counter that answers on this port in the network namespace of process `pid`.
    pub fn inside(port: u16, pid: i32) -> Self {
        Self { port, inside: Some(pid) }
    }

    /// The count. The GPU's count and the process's own must be equal: a restored state that takes them from different
    /// moments is a state that the program was never in.
    pub fn count(&self) -> Result<u64> {
        let answer = self.ask("count")?;
        let numbers: Vec<u64> = answer.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [device, own] = numbers[..] else { bail!("count was answered by {answer:?}") };
        ensure!(device == own, "the GPU has counted {device} steps, and the process {own}");
        Ok(device)
    }

    /// Waits until the counter has reached `count`.
    pub fn reaches(&self, count: u64) -> Result<u64> {
        until(&format!("the counter reaches {count}"), || {
            let now = self.count()?;
            Ok((now >= count).then_some(now))
        })
    }

    /// Checks that all data on the GPU is right for the present count.
    pub fn check(&self) -> Result {
        let answer = self.ask("check")?;
        ensure!(answer.starts_with("ok "), "the data is {answer:?}");
        Ok(())
    }

    /// Asks the counter to end successfully.
    pub fn quit(&self) -> Result {
        let answer = self.ask("quit")?;
        ensure!(answer.trim() == "bye", "quit was answered by {answer:?}");
        Ok(())
    }

    fn ask(&self, request: &str) -> Result<String> {
        match self.inside {
            None => self.ask_here(request),
            Some(pid) => {
                let namespace = File::open(format!("/proc/{pid}/ns/net"))?;
                // A namespace belongs to a thread: a new thread enters it, so that no other code is affected.
                std::thread::scope(|scope| {
                    let asked = scope.spawn(|| {
                        // SAFETY: changes this thread's namespace; no pointers.
                        let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
                        ensure!(entered == 0, "setns: {}", std::io::Error::last_os_error());
                        self.ask_here(request)
                    });
                    asked.join().unwrap_or_else(|_| bail!("asking the counter panicked"))
                })
            }
        }
    }

    fn ask_here(&self, request: &str) -> Result<String> {
        until(&format!("the counter answers to {request}"), || {
            // A new socket for each try, so that a late answer to an earlier question is not taken for the answer to
            // this one.
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
            socket.set_read_timeout(Some(ANSWER))?;
            let mut answer = [0; 100];
            let sent = socket.connect((Ipv4Addr::LOCALHOST, self.port)).and_then(|()| socket.send(request.as_bytes()));
            let received = sent.and_then(|_| socket.recv(&mut answer));
            match received {
                Ok(length) => Ok(Some(String::from_utf8_lossy(&answer[..length]).into_owned())),
                // No process listens yet, or the counter cannot answer now.
                Err(error) if is_temporary(error.kind()) => Ok(None),
                Err(error) => Err(error).context("cannot ask the counter"),
            }
        })
    }
}

fn is_temporary(kind: ErrorKind) -> bool {
    use ErrorKind::{ConnectionRefused, Interrupted, NetworkUnreachable, TimedOut, WouldBlock};
    matches!(kind, WouldBlock | TimedOut | ConnectionRefused | NetworkUnreachable | Interrupted)
}
