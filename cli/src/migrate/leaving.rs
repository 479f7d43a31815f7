//! Addresses that move with processes, at the host that they come from.
//!
//! ```text
//!   stand_still   nobody begins a connection, and those that begin are taken; then no packet comes or goes  ─► dump
//!   are_gone      the decision has been made: the addresses are removed here, then packets come and go again
//!   stay          the processes go on here: packets come and go, and all neighbours hear where the addresses are
//! ```
//!
//! A guard has the rules that keep packets away (`guard.rs`). If the command is killed, it lifts them as soon as it is decided where the
//! processes go on.

use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};

use super::guarded::{Guarded, Say};
use super::options::WithAddress;
use super::place::Place;
use crate::failure::Failure;
use crate::network::address::{self, Address};
use crate::network::announce::{self, Announced};
use crate::network::connection::Connection;
use crate::network::{firewall, sockets, tools};
use crate::output;
use crate::process::Process;

/// How long connections that begin may take until the processes have taken them. Others are not kept waiting for longer.
const BEGINNING: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Addresses that move from here.
#[derive(Debug)]
pub(super) struct Leaving {
    root: i32,
    place: Place,
    addresses: Vec<Address>,
    /// The processes' connections, once the dump is complete.
    connections: Vec<Connection>,
    /// None if there are none, or when it is over.
    guard: Option<Guarded>,
    /// Whether packets were kept away.
    stood_still: bool,
    announced: Option<Announced>,
}

impl Leaving {
    /// The addresses that are to move with these processes, by the migration of this name.
    pub(super) fn find(wanted: &[WithAddress], root: i32, migration: &str, socket: &Path) -> Result<Self, Failure> {
        let place = Place::of(migration);
        let mut leaving = Self {
            root,
            place,
            addresses: Vec::new(),
            connections: Vec::new(),
            guard: None,
            stood_still: false,
            announced: None,
        };
        if wanted.is_empty() {
            return Ok(leaving);
        }
        must_have_tools()?;
        if !sockets::is_own_network(&leaving.pids()?) {
            return Err(Failure::refused(anyhow!(
                "process {root} has a network of its own, whose addresses do not move: only those of this command's network do"
            )));
        }
        let devices = address::devices()?;
        for WithAddress { ip, device_there } in wanted {
            if leaving.addresses.iter().any(|it| it.ip == *ip) {
                return Err(Failure::usage(anyhow!("address {ip} is given twice")));
            }
            leaving.addresses.push(Address::find(&devices, *ip, device_there.as_deref())?);
        }
        leaving.guard = Some(Guarded::start(migration, socket, root, &leaving.addresses)?);
        Ok(leaving)
    }

    /// The addresses.
    pub(super) fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    pub(super) fn ips(&self) -> Vec<IpAddr> {
        self.addresses.iter().map(|it| it.ip).collect()
    }

    fn pids(&self) -> Result<Vec<i32>, Failure> {
        Ok(Process::trees_of(&[self.root]).context("cannot list processes")?)
    }

    /// From now on no packet comes or goes, and no connection is halfway: CRIU would not know it, or refuse to dump what waits.
    pub(super) fn stand_still(&mut self) -> Result<(), Failure> {
        let (ips, pids) = (self.ips(), self.pids()?);
        let Some(guard) = &mut self.guard else { return Ok(()) };
        self.stood_still = true;
        guard.ask(&Say::BeginNone)?;
        let began = Instant::now();
        while sockets::is_one_beginning(&pids, &ips) && began.elapsed() < BEGINNING {
            std::thread::sleep(POLL_INTERVAL);
        }
        guard.ask(&Say::StandStill)
    }

    /// CRIU's option by which it locks connections in a way that can be undone when it has ended.
    pub(super) fn option(&self) -> Option<&'static str> {
        if self.addresses.is_empty() { None } else { firewall::option() }
    }

    /// The dump is complete. Notes what is to be removed here if the processes are handed over and this command is killed.
    pub(super) fn note(&mut self) -> Result<(), Failure> {
        if self.addresses.is_empty() {
            return Ok(());
        }
        if let Some(guard) = &mut self.guard {
            // Whoever begins a connection without it would be taken for one whom the processes have heard.
            guard.ask(&Say::Stay)?;
        }
        self.connections = sockets::connections(&self.pids()?)?;
        self.place.write_addresses(&self.addresses)
    }

    /// The processes were handed over: removes the addresses from this host, and then lets packets come and go.
    pub(super) fn are_gone(&mut self) -> Result<(), Failure> {
        remove(&self.addresses)?;
        self.guard = None;
        self.place.forget_addresses();
        Ok(())
    }

    /// CRIU has ended: removes the rules by which it has locked the connections. They would keep packets from processes that come back.
    pub(super) fn unlock(&self) {
        if !self.connections.is_empty()
            && let Err(failure) = firewall::remove_those_of_criu(&self.connections)
        {
            output::warn(format_args!("CRIU's rules that lock the connections stay here: {failure}"));
        }
    }

    /// It is not known where the processes go on.
    pub(super) fn are_undecided(&mut self) {
        self.guard.take().into_iter().for_each(Guarded::leave);
    }

    /// The processes go on here.
    pub(super) fn stay(&mut self) {
        self.guard = None;
        self.place.forget_addresses();
        if std::mem::take(&mut self.stood_still) {
            self.announced = announced(&self.addresses);
        }
    }
}

/// Refuses a host without the programs by which an address moves.
pub(super) fn must_have_tools() -> Result<(), Failure> {
    match ["ip", "ss", "nft"].into_iter().find(|it| !tools::has(it)) {
        None => Ok(()),
        Some(program) => Err(Failure::refused(anyhow!(
            "there is no {program}, by which an address moves: install iproute2 and nftables"
        ))),
    }
}

/// Ends a migration whose command has not: removes the addresses that have moved with its processes, or says where they are.
pub(super) fn settle(migration: &str, moved: bool) -> Result<(), Failure> {
    let place = Place::of(migration);
    // The guard may do so at the same time.
    let Some(_lock) = place.lock()? else { return Ok(()) };
    let addresses = place.addresses();
    if moved {
        remove(&addresses)?;
        // What the kernel has of the connections of killed processes would say that they have ended.
        addresses.iter().for_each(|it| sockets::end_those_of(it.ip));
        addresses.iter().for_each(|it| firewall::remove_those_of_criu_at(it.ip));
    } else {
        drop(announced(&addresses));
    }
    place.forget_addresses();
    Ok(())
}

/// Addresses come to this host. No earlier migration from here may remove them any more.
pub(super) fn are_back(addresses: &[Address]) {
    for place in Place::all().map(|it| Place::of(&it)) {
        if place.addresses().iter().any(|it| addresses.iter().any(|back| back.ip == it.ip)) {
            place.forget_addresses();
        }
    }
}

/// Forgets the addresses of migrations whose command was killed, and whose processes went on here.
pub(super) fn sweep(kept: impl Fn(&str) -> bool) {
    let noted = Place::all().filter(|it| !Place::of(it).addresses().is_empty());
    noted.filter(|it| kept(it)).for_each(|it| Place::of(&it).forget_addresses());
}

/// Removes all addresses that can be. Returns the first failure.
fn remove(addresses: &[Address]) -> Result<(), Failure> {
    let removed = addresses.iter().map(|address| {
        let what = || format!("this host may have the address {} still", address.ip);
        address.remove().map_err(|failure| failure.but(what()))
    });
    removed.fold(Ok(()), Result::and)
}

/// Announces that this host has addresses.
pub(super) fn announced(addresses: &[Address]) -> Option<Announced> {
    if addresses.is_empty() {
        return None;
    }
    let devices = match address::devices() {
        Ok(devices) => devices,
        Err(failure) => {
            output::warn(format_args!("neighbours may learn late where an address is: {failure}"));
            return None;
        }
    };
    let holders = addresses.iter().filter_map(|it| Some((it.ip, address::holder(&devices, it.ip)?)));
    Some(announce::announce(&holders.collect::<Vec<_>>()))
}
