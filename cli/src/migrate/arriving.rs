//! Addresses that move with processes, at the host that they go to.
//!
//! ```text
//!   begin   no packet comes or goes; the host has the addresses for a minute, again and again: CRIU makes sockets with them
//!   up      the processes run: the host has the addresses for good, packets come and go, and all neighbours hear it
//!   down    the processes do not run here: the addresses are gone, and nobody has heard of the connections' end
//! ```
//!
//! If this process dies, the kernel removes the addresses a minute later. The rules stay until the migration is settled: the kernel would
//! tell the other ends that the connections of killed processes have ended.

use std::net::IpAddr;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::anyhow;

use super::leaving::{announced, are_back, must_have_tools};
use crate::failure::Failure;
use crate::network::address::{self, Address, Lifetime};
use crate::network::announce::Announced;
use crate::network::{block, firewall, sockets};
use crate::{output, tls};

/// How long the host has an address if nobody renews that, and how often somebody does.
const LIFETIME: Lifetime = Lifetime::Seconds(60);
const RENEWAL: Duration = Duration::from_secs(15);

/// Whether this host can take addresses.
pub(super) fn compare(addresses: &[Address]) -> Result<(), Failure> {
    if addresses.is_empty() {
        return Ok(());
    }
    must_have_tools()?;
    let devices = address::devices()?;
    addresses.iter().try_for_each(|it| it.is_welcome(&devices))?;
    let mut connections = [tls::CONNECTION, tls::BY_SSH].into_iter().filter_map(|it| std::env::var(it).ok());
    match connections.find_map(|it| comes_from(&it, addresses)) {
        None => Ok(()),
        Some(ip) => Err(Failure::refused(anyhow!(
            "the connection comes from the address {ip}, which is to move: the migration would cut itself off. Have it come from another one (ssh: BindAddress; TLS: the source address of the route)"
        ))),
    }
}

/// The address that moves and from which the other host reaches this one, as whoever runs this says it.
fn comes_from(connection: &str, addresses: &[Address]) -> Option<IpAddr> {
    let from: IpAddr = connection.split_ascii_whitespace().next()?.parse().ok()?;
    addresses.iter().map(|it| it.ip).find(|it| *it == from.to_canonical())
}

/// Addresses that this host has as long as this lives, and from which no packet comes or goes.
#[derive(Debug)]
pub(super) struct Arriving {
    over: Option<Sender<()>>,
    renewing: Option<JoinHandle<()>>,
}

impl Arriving {
    /// Begins to have them. What was left of an earlier time is replaced; not an address that this host has for good, unless the processes
    /// have been here before and are to be once more.
    pub(super) fn begin(addresses: &[Address], again: bool) -> Result<Self, Failure> {
        if addresses.is_empty() {
            return Ok(Self { over: None, renewing: None });
        }
        for it in addresses {
            // It has come since the hosts were compared.
            if !again && it.is_for_good()? {
                return Err(Failure::refused(anyhow!("it has the address {} by now: two hosts would have it", it.ip)));
            }
        }
        are_back(addresses);
        for it in addresses {
            let set = block::block(it.ip).and_then(|()| {
                // What a killed receiver, or CRIU when the processes were here before, has left would be in the way.
                sockets::end_those_of(it.ip);
                firewall::remove_those_of_criu_at(it.ip);
                it.set(LIFETIME)
            });
            set.map_err(|failure| failure.but(format!("the address {} cannot be brought up there", it.ip)))?;
        }
        let (over, is_over) = mpsc::channel();
        let addresses = addresses.to_vec();
        let renewing = std::thread::spawn(move || {
            while is_over.recv_timeout(RENEWAL) == Err(RecvTimeoutError::Timeout) {
                for it in &addresses {
                    if let Err(failure) = it.set(LIFETIME) {
                        output::warn(format_args!("the address {} may be lost here: {failure}", it.ip));
                    }
                }
            }
        });
        Ok(Self { over: Some(over), renewing: Some(renewing) })
    }
}

impl Drop for Arriving {
    /// From now on nobody renews them.
    fn drop(&mut self) {
        self.over = None;
        let _ = self.renewing.take().map(JoinHandle::join);
    }
}

/// The processes run here, and nobody renews the addresses any more: they are this host's.
pub(super) fn up(addresses: &[Address]) -> Result<Option<Announced>, Failure> {
    // One that fails keeps no other away.
    let (mut are_up, mut failed) = (Vec::new(), None);
    for it in addresses {
        match it.set(Lifetime::Forever).and_then(|()| block::unblock(it.ip)) {
            Ok(()) => are_up.push(it.clone()),
            Err(failure) => {
                let what = format!("the processes run there, without their address {}", it.ip);
                failed = failed.or(Some(failure.but(what)));
            }
        }
    }
    let announced = announced(&are_up);
    failed.map_or(Ok(announced), Err)
}

/// The processes are about to be killed here: their connections end without a word.
pub(super) fn mute(addresses: &[Address]) {
    if !addresses.is_empty() {
        sockets::mute_those_of(&addresses.iter().map(|it| it.ip).collect::<Vec<_>>());
    }
}

/// The processes do not run here.
pub(super) fn down(addresses: &[Address]) -> Result<(), Failure> {
    for it in addresses {
        let ip = it.ip;
        // What has been brought up for good belongs to a later migration.
        if it.is_for_good()? {
            continue;
        }
        sockets::end_those_of(ip);
        let gone = it.remove().and_then(|()| block::unblock(ip));
        gone.map_err(|failure| failure.but(format!("the address {ip} may be on two hosts")))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_that_comes_from_its_own_address_is_found() {
        let address: Address = serde_json::from_str(r#"{"ip":"10.0.0.9","prefix":32,"device_there":"eth0"}"#).unwrap();
        let from = |text: &str| comes_from(text, std::slice::from_ref(&address));
        assert_eq!(from("10.0.0.9 40000 10.0.0.2 22"), Some(address.ip));
        assert_eq!(from("::ffff:10.0.0.9 40000 ::ffff:10.0.0.2 22"), Some(address.ip));
        assert_eq!(from("10.0.0.1 40000 10.0.0.9 22"), None);
        assert_eq!(from(""), None);
    }
}
