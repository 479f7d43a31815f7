//! Addresses of this host that move to another one, as iproute2 shows and sets them.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::anyhow;
use serde::{Deserialize, Serialize};

use super::tools::{ip, json_of_ip};
use crate::failure::Failure;

/// The lifetime of an address that has no end, as iproute2 shows it.
const FOREVER: u64 = u32::MAX as u64;

/// How long an address is to last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// So many seconds. Then the kernel removes it.
    Seconds(u32),
    Forever,
}

/// An address that moves, as it is at the host that it comes from.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct Address {
    /// The address.
    pub(crate) ip: IpAddr,
    /// The length of its network's prefix.
    prefix: u8,
    /// The device that gets it at the other host.
    device_there: String,
    /// What its label has behind the device's name.
    #[serde(default)]
    label: Option<String>,
    /// Its network's address for all.
    #[serde(default)]
    broadcast: Option<Ipv4Addr>,
    /// Whether the kernel makes no route to its network.
    #[serde(default)]
    no_prefix_route: bool,
    /// Whether no connection is to begin from it unless a program asks for it.
    #[serde(default)]
    deprecated: bool,
}

/// A device of this host, and its addresses.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Device {
    pub(crate) ifindex: i32,
    #[serde(rename = "ifname")]
    pub(crate) name: String,
    #[serde(default)]
    flags: Vec<String>,
    #[serde(default)]
    pub(crate) link_type: String,
    /// Its address on the link.
    #[serde(rename = "address", default)]
    pub(crate) hardware: Option<String>,
    #[serde(rename = "addr_info", default)]
    addresses: Vec<Info>,
}

/// An address of a device.
#[derive(Clone, Debug, Deserialize)]
struct Info {
    local: Option<IpAddr>,
    /// The other end of a link with two.
    #[serde(rename = "address", default)]
    peer: Option<IpAddr>,
    #[serde(rename = "prefixlen")]
    prefix: u8,
    #[serde(default)]
    broadcast: Option<Ipv4Addr>,
    #[serde(default)]
    label: Option<String>,
    #[serde(default)]
    secondary: bool,
    #[serde(rename = "noprefixroute", default)]
    no_prefix_route: bool,
    #[serde(default)]
    deprecated: bool,
    #[serde(rename = "valid_life_time", default)]
    valid: Option<u64>,
}

impl Info {
    fn is_temporary(&self) -> bool {
        self.valid.is_some_and(|it| it != FOREVER)
    }
}

/// The devices of this host.
pub(crate) fn devices() -> Result<Vec<Device>, Failure> {
    parse(&json_of_ip(&["address", "show"])?)
}

fn parse(json: &str) -> Result<Vec<Device>, Failure> {
    // Older versions print an empty object for what they were not asked.
    let all: Vec<serde_json::Value> = serde_json::from_str(json)
        .map_err(|error| anyhow!("ip says what this version does not understand: {error}"))?;
    let devices = all.into_iter().filter(|it| it.get("ifname").is_some()).map(serde_json::from_value);
    let devices = devices.collect::<Result<_, _>>();
    Ok(devices.map_err(|error| anyhow!("ip says what this version does not understand: {error}"))?)
}

/// The device that has this address.
pub(crate) fn holder(devices: &[Device], ip: IpAddr) -> Option<&Device> {
    found(devices, ip).map(|(device, _)| device)
}

fn found(devices: &[Device], ip: IpAddr) -> Option<(&Device, &Info)> {
    devices.iter().find_map(|device| Some((device, device.addresses.iter().find(|it| it.local == Some(ip))?)))
}

impl Address {
    /// An address of this host, which is to move to a device of the other one: of the same name, if none is named.
    pub(crate) fn find(devices: &[Device], ip: IpAddr, device_there: Option<&str>) -> Result<Self, Failure> {
        let refused = |why: String| Failure::refused(anyhow!("address {ip} cannot move: {why}"));
        let Some((device, info)) = found(devices, ip) else {
            return Err(refused("this host does not have it (ip address)".to_owned()));
        };
        let is_of_one_link = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
        if ip.is_loopback() || ip.is_multicast() || is_of_one_link || device.flags.iter().any(|it| it == "LOOPBACK") {
            return Err(refused("it is of no use to others than this host".to_owned()));
        }
        if info.is_temporary() {
            return Err(refused("it is here for a limited time, so whoever gave it would give it again".to_owned()));
        }
        if info.peer.is_some() {
            return Err(refused("its link has two ends".to_owned()));
        }
        let lost = secondaries(device, info);
        if !info.secondary && !lost.is_empty() && !promotes(&device.name) {
            let lost = lost.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let name = &device.name;
            return Err(refused(format!(
                "with it this host would lose those of the same network: {lost}. sysctl net.ipv4.conf.{name}.promote_secondaries=1 keeps them"
            )));
        }
        let label = info.label.as_deref().and_then(|it| it.strip_prefix(&device.name)).filter(|it| !it.is_empty());
        Ok(Self {
            ip,
            prefix: info.prefix,
            device_there: device_there.unwrap_or(&device.name).to_owned(),
            label: label.map(str::to_owned),
            broadcast: info.broadcast,
            no_prefix_route: info.no_prefix_route,
            deprecated: info.deprecated,
        })
    }

    /// Whether this host can take it.
    pub(crate) fn is_welcome(&self, devices: &[Device]) -> Result<(), Failure> {
        let Self { ip, device_there, .. } = self;
        if let Some(device) = holder(devices, *ip) {
            return Err(Failure::refused(anyhow!("it has the address {ip} already, on its device {}", device.name)));
        }
        match devices.iter().find(|it| it.name == *device_there) {
            None => Err(Failure::refused(anyhow!(
                "it has no device {device_there} for the address {ip}: name one by --with-address {ip},DEVICE"
            ))),
            Some(device) if !device.flags.iter().any(|it| it == "UP") => Err(Failure::refused(anyhow!(
                "its device {device_there}, to which the address {ip} is to move, is down"
            ))),
            Some(_) => Ok(()),
        }
    }

    /// Gives it to this host, or changes how long this host has it.
    pub(crate) fn set(&self, lifetime: Lifetime) -> Result<(), Failure> {
        ip(&self.words(lifetime))
    }

    /// The words of iproute2 by which a host gets it.
    fn words(&self, lifetime: Lifetime) -> Vec<String> {
        let Self { ip, prefix, device_there, .. } = self;
        let valid = match lifetime {
            Lifetime::Seconds(seconds) => seconds.to_string(),
            Lifetime::Forever => "forever".to_owned(),
        };
        let preferred = if self.deprecated { "0" } else { &valid };
        let mut words = ["address", "replace"].map(str::to_owned).to_vec();
        words.extend([format!("{ip}/{prefix}"), "dev".into(), device_there.clone()]);
        if let Some(label) = &self.label {
            words.extend(["label".into(), format!("{device_there}{label}")]);
        }
        if let Some(broadcast) = &self.broadcast {
            words.extend(["broadcast".into(), broadcast.to_string()]);
        }
        if ip.is_ipv6() {
            // Nobody else has it: a search for others would find the host that it comes from.
            words.push("nodad".into());
        }
        words.extend(self.no_prefix_route.then(|| "noprefixroute".to_owned()));
        words.extend(["valid_lft".into(), valid.clone(), "preferred_lft".into(), preferred.into()]);
        words
    }

    /// Whether its device and its label have names that are no options.
    pub(crate) fn has_plain_names(&self) -> bool {
        let is_plain = |it: &str| !it.contains(|c: char| c == '/' || c.is_whitespace());
        let Self { device_there, label, .. } = self;
        !device_there.is_empty()
            && !device_there.starts_with('-')
            && is_plain(device_there)
            && label.as_deref().is_none_or(is_plain)
    }

    /// Whether this host has it for an unlimited time.
    pub(crate) fn is_for_good(&self) -> Result<bool, Failure> {
        Ok(found(&devices()?, self.ip).is_some_and(|(_, info)| !info.is_temporary()))
    }

    /// Takes it from this host, if that has it.
    pub(crate) fn remove(&self) -> Result<(), Failure> {
        let devices = devices()?;
        let Some((device, info)) = found(&devices, self.ip) else { return Ok(()) };
        let words = ["address", "delete", &format!("{}/{}", self.ip, info.prefix), "dev", &device.name];
        let removed = ip(&words.map(str::to_owned));
        // Somebody else may have removed it.
        removed.or_else(|failure| if holder(&self::devices()?, self.ip).is_some() { Err(failure) } else { Ok(()) })
    }
}

/// The addresses that the kernel removes with the first one of a network.
fn secondaries(device: &Device, first: &Info) -> Vec<Ipv4Addr> {
    let network = |ip: Ipv4Addr| u32::from(ip).checked_shr(32 - u32::from(first.prefix.min(32))).unwrap_or(0);
    let Some(IpAddr::V4(own)) = first.local else { return Vec::new() };
    let same = device.addresses.iter().filter(|it| it.secondary && it.prefix == first.prefix);
    same.filter_map(|it| match it.local {
        Some(IpAddr::V4(other)) if network(other) == network(own) => Some(other),
        _ => None,
    })
    .collect()
}

/// Whether the kernel keeps them.
fn promotes(device: &str) -> bool {
    let is_set = |name: &str| {
        let value = fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{name}/promote_secondaries"));
        value.is_ok_and(|it| it.trim() != "0")
    };
    is_set("all") || is_set(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = r#"[{},
        {"ifindex":1,"ifname":"lo","flags":["LOOPBACK","UP","LOWER_UP"],"link_type":"loopback","address":"00:00:00:00:00:00",
         "addr_info":[{"family":"inet","local":"127.0.0.1","prefixlen":8,"scope":"host","label":"lo","valid_life_time":4294967295}]},
        {"ifindex":2,"ifname":"no-such-device","flags":["BROADCAST","UP"],"link_type":"ether","address":"02:00:00:00:00:01","addr_info":[
         {"family":"inet","local":"10.0.0.1","prefixlen":24,"broadcast":"10.0.0.255","scope":"global","label":"no-such-device",
          "valid_life_time":4294967295,"preferred_life_time":4294967295},
         {"family":"inet","local":"10.0.0.9","prefixlen":24,"scope":"global","secondary":true,"label":"no-such-device:vip",
          "noprefixroute":true,"valid_life_time":4294967295,"preferred_life_time":4294967295},
         {"family":"inet","local":"10.0.1.7","prefixlen":24,"dynamic":true,"label":"no-such-device","valid_life_time":60},
         {"family":"inet","local":"10.0.2.1","address":"10.0.2.2","prefixlen":32,"valid_life_time":4294967295},
         {"family":"inet6","local":"fd00::9","prefixlen":64,"scope":"global","deprecated":true,"valid_life_time":4294967295,
          "preferred_life_time":0},
         {"family":"inet6","local":"fe80::1","prefixlen":64,"scope":"link","valid_life_time":4294967295}]},
        {"ifindex":3,"ifname":"off","flags":[],"link_type":"ether","address":"02:00:00:00:00:02","addr_info":[]}]"#;

    fn find(ip: &str, there: Option<&str>) -> Result<Address, String> {
        let devices = parse(SAID).unwrap();
        Address::find(&devices, ip.parse().unwrap(), there).map_err(|failure| failure.to_string())
    }

    #[test]
    fn an_address_gets_to_the_other_host_as_it_was() {
        let words = |address: &Address, lifetime| address.words(lifetime).join(" ");
        let four = find("10.0.0.9", Some("eth1")).unwrap();
        let expected =
            "address replace 10.0.0.9/24 dev eth1 label eth1:vip noprefixroute valid_lft 60 preferred_lft 60";
        assert_eq!(words(&four, Lifetime::Seconds(60)), expected);
        let six = find("fd00::9", None).unwrap();
        let expected = "address replace fd00::9/64 dev no-such-device nodad valid_lft forever preferred_lft 0";
        assert_eq!(words(&six, Lifetime::Forever), expected);
    }

    #[test]
    fn what_cannot_move_is_refused_with_the_reason() {
        for (ip, why) in [
            ("10.0.0.8", "does not have it"),
            ("127.0.0.1", "of no use"),
            ("fe80::1", "of no use"),
            ("10.0.1.7", "limited time"),
            ("10.0.2.1", "two ends"),
            ("10.0.0.1", "10.0.0.9"),
        ] {
            let said = find(ip, None).unwrap_err();
            assert!(said.contains(why), "{ip}: {said}");
        }
    }

    #[test]
    fn a_host_takes_an_address_on_a_device_that_is_up_if_it_does_not_have_it() {
        let devices = parse(SAID).unwrap();
        let mut address = find("10.0.0.9", None).unwrap();
        let said =
            |address: &Address| address.is_welcome(&devices).map_err(|it| it.to_string()).err().unwrap_or_default();
        assert!(said(&address).contains("already"));
        address.ip = "10.0.0.10".parse().unwrap();
        assert_eq!(said(&address), "");
        address.device_there = "off".into();
        assert!(said(&address).contains("is down"));
        address.device_there = "eth9".into();
        assert!(said(&address).contains("no device eth9"));
    }
}
