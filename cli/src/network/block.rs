//! Rules that keep all packets to and from an address away, but CRIU's own.
//!
//! While no process has the sockets of an address, the kernel would answer each packet for them by a reset, which ends the connection.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, PipeReader, Write as _};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Stdio};

use anyhow::{Context, anyhow};

use super::firewall::{MARK, deleted};
use super::tools::{command, nft, said};
use crate::failure::Failure;

/// Rules that end with the process that has them, also when it is killed: the kernel removes the table with the `nft` that owns it, and
/// that ends with its input.
#[derive(Debug)]
pub(crate) struct Block {
    nft: Child,
    to: ChildStdin,
    from: BufReader<PipeReader>,
    name: String,
    addresses: Vec<IpAddr>,
}

impl Block {
    /// Rules of this name for these addresses, which keep nothing away yet.
    pub(crate) fn new(name: &str, addresses: &[IpAddr]) -> Result<Self, Failure> {
        let started = || -> anyhow::Result<_> {
            let (from, to) = std::io::pipe()?;
            let mut nft = command("nft");
            let mut nft = nft.arg("-i").stdin(Stdio::piped()).stdout(to.try_clone()?).stderr(to).spawn()?;
            let input = nft.stdin.take().context("a process without its pipe")?;
            Ok((nft, input, from))
        };
        let (nft, to, from) = started().context("cannot run nft, which keeps packets from sockets")?;
        let mut block =
            Self { nft, to, from: BufReader::new(from), name: name.to_owned(), addresses: addresses.to_vec() };
        let table = format!("add table inet {name} {{ flags owner; }}\n{}", chains(name));
        block
            .say(&table)
            .map_err(|failure| failure.but("Linux 5.12 and nftables 1.0 or later are needed".to_owned()))?;
        Ok(block)
    }

    /// From now on nobody begins a connection to the addresses.
    pub(crate) fn connections_that_begin(&mut self) -> Result<(), Failure> {
        self.say(&beginnings(&self.name, &self.addresses))
    }

    /// From now on no packet comes or goes.
    pub(crate) fn all(&mut self) -> Result<(), Failure> {
        self.say(&packets(&self.name, &self.addresses))
    }

    /// Whether the rules are still there.
    pub(crate) fn is_there(&mut self) -> Result<(), Failure> {
        self.say("")
    }

    /// Has nft run commands, and waits until it has.
    fn say(&mut self, commands: &str) -> Result<(), Failure> {
        let end = format!("list table inet {}\n", self.name);
        let said = self.to.write_all(commands.as_bytes()).and_then(|()| self.to.write_all(end.as_bytes()));
        said.and_then(|()| self.to.flush()).context("nft has ended")?;
        let mut line = String::new();
        loop {
            line.clear();
            if self.from.read_line(&mut line).context("nft cannot be heard")? == 0 {
                return Err(anyhow!("nft has ended").into());
            }
            if line.contains("Error:") {
                return Err(anyhow!("nft: {}", line.trim_end()).into());
            }
            // The end of the table.
            if line.trim_end() == "}" {
                return Ok(());
            }
        }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let _ = self.nft.kill();
        let _ = self.nft.wait();
    }
}

/// The name of the rules that keep an address away until they are removed.
fn name_of(address: IpAddr) -> String {
    format!("rekindle-address-{address}").replace(':', "-")
}

/// Keeps all packets of an address away until [`unblock`]. What was left of an earlier time is replaced.
pub(crate) fn block(address: IpAddr) -> Result<(), Failure> {
    let name = name_of(address);
    nft(&format!("{}{}{}", anew("inet", &name), chains(&name), packets(&name, &[address])))?;
    if let Some(silence) = silence(address) {
        // In a kernel without these rules others may learn too early where the address is, and their packets are kept away.
        let _ = nft(&silence);
    }
    Ok(())
}

/// Undoes that.
pub(crate) fn unblock(address: IpAddr) -> Result<(), Failure> {
    let name = name_of(address);
    if let Err(failure) = nft(&format!("add table arp {name}\ndelete table arp {name}\n"))
        && said("nft", &["list", "tables", "arp"])?.lines().any(|it| it.trim() == format!("table arp {name}"))
    {
        return Err(failure);
    }
    nft(&deleted(&name))
}

/// Makes a table. It is made before it is deleted, so that it may be missing.
fn anew(family: &str, name: &str) -> String {
    format!("add table {family} {name}\ndelete table {family} {name}\nadd table {family} {name}\n")
}

fn chains(name: &str) -> String {
    let chain = |hook| format!("add chain inet {name} {hook} {{ type filter hook {hook} priority 0; }}\n");
    ["input", "output"].map(chain).concat()
}

fn family(address: &IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

fn beginnings(name: &str, addresses: &[IpAddr]) -> String {
    let rule = |it: &IpAddr| {
        format!("add rule inet {name} input {} daddr {it} tcp flags & (syn | ack) == syn drop\n", family(it))
    };
    addresses.iter().map(rule).collect()
}

fn packets(name: &str, addresses: &[IpAddr]) -> String {
    let mut text = String::new();
    for it in addresses {
        for (hook, end) in [("input", "daddr"), ("output", "saddr")] {
            let _ = writeln!(text, "add rule inet {name} {hook} meta mark != {MARK} {} {end} {it} drop", family(it));
        }
    }
    text
}

/// Has this host not say that it has an address. (Of IPv6, that is said from the address.)
fn silence(address: IpAddr) -> Option<String> {
    let IpAddr::V4(ip) = address else { return None };
    let name = name_of(address);
    let mut text = anew("arp", &name);
    for (hook, end) in [("input", "daddr"), ("output", "saddr")] {
        let _ = writeln!(text, "add chain arp {name} {hook} {{ type filter hook {hook} priority 0; }}");
        let _ = writeln!(text, "add rule arp {name} {hook} arp {end} ip {ip} drop");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_both_directions_are_kept_away_and_those_of_criu_are_not() {
        let text = packets("x", &["10.0.0.9".parse().unwrap(), "fd00::9".parse().unwrap()]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "add rule inet x input meta mark != 0xc114 ip daddr 10.0.0.9 drop",
                "add rule inet x output meta mark != 0xc114 ip saddr 10.0.0.9 drop",
                "add rule inet x input meta mark != 0xc114 ip6 daddr fd00::9 drop",
                "add rule inet x output meta mark != 0xc114 ip6 saddr fd00::9 drop",
            ]
        );
        let begins = beginnings("x", &["10.0.0.9".parse().unwrap()]);
        assert_eq!(begins, "add rule inet x input ip daddr 10.0.0.9 tcp flags & (syn | ack) == syn drop\n");
    }

    #[test]
    fn a_table_has_the_name_of_its_address_as_nft_takes_it() {
        assert_eq!(name_of("10.0.0.9".parse().unwrap()), "rekindle-address-10.0.0.9");
        assert_eq!(name_of("fd00::9".parse().unwrap()), "rekindle-address-fd00--9");
        let silent = silence("10.0.0.9".parse().unwrap()).unwrap();
        assert!(silent.contains("add rule arp rekindle-address-10.0.0.9 input arp daddr ip 10.0.0.9 drop"), "{silent}");
        assert_eq!(silence("fd00::9".parse().unwrap()), None);
    }
}
