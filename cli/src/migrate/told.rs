//! What the source says and a program hears as one of its words. It may be a source that is let in by TLS alone: then no word may be an
//! option, or name a program, that the target has not chosen.

use anyhow::anyhow;

use super::talk::{Needs, ToTarget};
use crate::criu;
use crate::failure::Failure;
use crate::network::address::Address;

/// Whether all such words of a message are what they should be.
pub(super) fn check(said: &ToTarget) -> Result<(), Failure> {
    let (mut ids, mut addresses): (Vec<&String>, &[Address]) = Default::default();
    // What each is, and the word.
    let mut words: Vec<(&str, &String)> = Vec::new();
    match said {
        ToTarget::Begin(begin) => {
            if let Some(needs) = &begin.what.container {
                let Needs { id, name, image, image_id, volumes, networks, .. } = &**needs;
                ids.push(id);
                words.extend([("the name", name), ("the image", image), ("the id of the image", image_id)]);
                words.extend(
                    volumes.iter().map(|it| ("a volume", it)).chain(networks.iter().map(|it| ("a network", it))),
                );
            }
            addresses = &begin.what.addresses;
        }
        ToTarget::Restore(restore) => {
            criu::are_kept(&restore.options)?;
            ids.extend(&restore.container);
            words.extend(restore.restart.iter().map(|it| ("the restart policy", it)));
            addresses = &restore.addresses;
        }
        ToTarget::Settle(settle) => ids.extend(&settle.container),
        _ => {}
    }
    let is_id = |it: &&&String| !it.is_empty() && it.chars().all(|c| c.is_ascii_hexdigit());
    if let Some(id) = ids.iter().find(|it| !is_id(it)) {
        return Err(Failure::refused(anyhow!("{id:?} is no id of a container")));
    }
    if let Some((what, word)) = words.iter().find(|(_, it)| it.is_empty() || it.starts_with('-')) {
        return Err(Failure::refused(anyhow!(
            "{what} of the container would be {word:?} there, which podman takes for no name: rename it on the host that it comes from"
        )));
    }
    match addresses.iter().find(|it| !it.has_plain_names()) {
        Some(it) => Err(Failure::refused(anyhow!("the address {} has a device of no good name", it.ip))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::talk::{Begin, Restore, Settle, What};
    use super::*;

    fn restore(change: impl FnOnce(&mut Restore)) -> ToTarget {
        let mut restore = Restore {
            options: vec!["--tcp-established".into(), "--file-locks".into()],
            container: Some("0a1b".into()),
            restart: Some("on-failure:3".into()),
            ..Restore::default()
        };
        change(&mut restore);
        ToTarget::Restore(restore)
    }

    #[test]
    fn no_option_and_no_program_comes_from_the_source() {
        check(&restore(|_| {})).unwrap();
        for option in ["--action-script=/x", "--libdir", "/x", "--ghost-limit=1M --libdir=/x", "--exec-cmd", "-d", ""] {
            assert!(check(&restore(|it| it.options.push(option.into()))).is_err(), "{option}");
        }
        for id in ["--all", "", "job", "0a 1b"] {
            assert!(check(&restore(|it| it.container = Some(id.into()))).is_err(), "{id}");
            let settle = Settle { migration: "a".into(), own: false, again: false, container: Some(id.into()) };
            assert!(check(&ToTarget::Settle(settle)).is_err(), "{id}");
        }
        assert!(check(&restore(|it| it.restart = Some("--latest".into()))).is_err());
    }

    fn begin(needs: Needs, addresses: &str) -> ToTarget {
        let what = What {
            host: "gpu1".into(),
            driver_version: None,
            gpus: Vec::new(),
            memory: 0,
            other_driver: false,
            other_gpu: false,
            container: Some(Box::new(needs)),
            addresses: serde_json::from_str(addresses).unwrap(),
        };
        ToTarget::Begin(Begin { version: 1, migration: "a".into(), what })
    }

    #[test]
    fn what_a_container_needs_has_names() {
        let needs = || Needs {
            id: "0a1b".into(),
            name: "job".into(),
            podman: "5.4.2".into(),
            image: "docker.io/library/debian:13".into(),
            image_id: "sha256:00".into(),
            volumes: vec!["data".into()],
            paths: Vec::new(),
            networks: vec!["podman".into()],
        };
        let address = |device: &str| format!(r#"[{{"ip":"10.0.0.9","prefix":24,"device_there":"{device}"}}]"#);
        check(&begin(needs(), &address("eth0.7"))).unwrap();
        assert!(check(&begin(Needs { image: "--root=/x".into(), ..needs() }, "[]")).is_err());
        let said = check(&begin(Needs { networks: vec![String::new()], ..needs() }, "[]")).unwrap_err().to_string();
        assert!(said.contains("a network of the container") && said.contains("rename"), "{said}");
        assert!(check(&begin(Needs { id: "--all".into(), ..needs() }, "[]")).is_err());
        for device in ["", "-batch", "a b", "a/b"] {
            assert!(check(&begin(needs(), &address(device))).is_err(), "{device}");
        }
    }
}
