//! The program `counter` as a service over TCP: one connection that stays open, or a new connection for each question.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpStream};
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::Result;
use crate::wait::until;

/// The time limit for an answer over an open connection: only a failing test waits this long.
const ANSWER: Duration = Duration::from_secs(60);
/// The time limit for one attempt to connect.
const CONNECT: Duration = Duration::from_secs(1);

/// An open connection to a counter.
#[derive(Debug)]
pub struct Service {
    stream: TcpStream,
}

impl Service {
    /// Connects, as soon as a process listens at the address.
    pub fn connect(address: Ipv4Addr, port: u16) -> Result<Self> {
        let address = SocketAddrV4::new(address, port);
        until(&format!("something answers at {address}"), || {
            let stream = match TcpStream::connect_timeout(&address.into(), CONNECT) {
                Ok(stream) => stream,
                Err(error) if is_temporary(error.kind()) => return Ok(None),
                Err(error) => return Err(error).context("cannot connect"),
            };
            stream.set_read_timeout(Some(ANSWER))?;
            let mut service = Self { stream };
            // The process that publishes the port may accept the connection before the program listens.
            Ok(service.count().is_ok().then_some(service))
        })
    }

    /// The count, which must be the same on the GPU and in the process.
    pub fn count(&mut self) -> Result<u64> {
        let answer = self.ask("count\n")?;
        let numbers: Vec<u64> = answer.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [device, own] = numbers[..] else { bail!("count was answered by {answer:?}") };
        ensure!(device == own, "the GPU has counted {device} steps, and the process {own}");
        Ok(device)
    }

    /// Waits until the counter has reached `count`.
    pub fn reaches(&mut self, count: u64) -> Result<u64> {
        until(&format!("the counter reaches {count}"), || {
            let now = self.count()?;
            Ok((now >= count).then_some(now))
        })
    }

    /// Checks that all data on the GPU is right.
    pub fn check(&mut self) -> Result {
        let answer = self.ask("check\n")?;
        ensure!(answer.starts_with("ok "), "the data is {answer:?}");
        Ok(())
    }

    /// Asks the counter to end successfully.
    pub fn quit(mut self) -> Result {
        let answer = self.ask("quit\n")?;
        ensure!(answer.trim() == "bye", "quit was answered by {answer:?}");
        Ok(())
    }

    fn ask(&mut self, request: &str) -> Result<String> {
        self.stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            let mut some = [0; 100];
            match self.stream.read(&mut some).context("no answer")? {
                0 => bail!("the connection was closed instead of an answer to {request:?}"),
                length => answer.extend(some.iter().take(length)),
            }
        }
        Ok(String::from_utf8(answer)?)
    }
}

fn is_temporary(kind: ErrorKind) -> bool {
    use ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable, TimedOut, WouldBlock};
    matches!(kind, ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable | TimedOut | WouldBlock)
}
