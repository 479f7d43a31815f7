//! The comparison of the two hosts, before the first byte of content is sent.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::anyhow;
use rekindle_images::ImageDir;
use rekindle_wire::control::{GpuInfo, Reply, Request, StatusInfo};

use super::arriving;
use super::held::Host;
use super::imported;
use super::source::status;
use super::talk::What;
use crate::failure::Failure;
use crate::output::size;
use crate::{criu, daemon};

/// Whether this host can take what moves. A migration to here may wait that has the same container.
pub(super) fn with(what: &What, host: &Host, dir: &Path, waiting: Option<&str>) -> Result<(), Failure> {
    let socket = &host.socket;
    criu::program(None)?;
    criu::libdir_option()?;
    let status = status(socket)?;
    let free = ImageDir::open(dir)?.free_space()?;
    if free < what.memory {
        return Err(Failure::refused(anyhow!(
            "{} has {} free, and the processes have {} of GPU memory: make room there, or name another directory with --dir-there",
            dir.display(),
            size(free),
            size(what.memory)
        )));
    }
    let gpus = free_memory(socket, status.gpus.len());
    if let Some(why) = differences(what, &status, &gpus) {
        return Err(Failure::refused(anyhow!(why)));
    }
    arriving::compare(&what.addresses)?;
    what.container.as_ref().map_or(Ok(()), |needs| imported::compare(needs, &host.podman, waiting))
}

/// Why the processes cannot go on with this driver and these GPUs, if they cannot.
fn differences(what: &What, here: &StatusInfo, free: &[u64]) -> Option<String> {
    if what.driver_version != here.driver_version && !what.other_driver {
        let shown = |it: Option<i32>| it.map_or_else(|| "unknown".to_owned(), |it| it.to_string());
        let (there, here) = (shown(what.driver_version), shown(here.driver_version));
        let from = &what.host;
        return Some(format!("its driver's version is {here}, and that of {from} {there}: see --allow-other-driver"));
    }
    let count = |gpus: &mut dyn Iterator<Item = &GpuInfo>| {
        let mut counted = BTreeMap::<(String, u64), usize>::new();
        gpus.for_each(|it| *counted.entry((it.name.clone(), it.memory)).or_default() += 1);
        counted
    };
    let needed = count(&mut what.gpus.iter().map(|(gpu, _)| gpu));
    let has = count(&mut here.gpus.iter());
    let lacks = needed.iter().find(|(kind, needed)| has.get(*kind).is_none_or(|it| it < *needed));
    if what.gpus.len() > here.gpus.len() {
        return Some(format!("it has {} GPUs, and the processes use {}", here.gpus.len(), what.gpus.len()));
    }
    if let Some(((name, memory), needed)) = lacks.filter(|_| !what.other_gpu) {
        let number = has.get(&(name.clone(), *memory)).copied().unwrap_or(0);
        return Some(format!(
            "it has {number} GPUs of the kind {name} with {}, and the processes use {needed}: see --allow-other-gpu",
            size(*memory)
        ));
    }
    let (mut used, mut free): (Vec<_>, Vec<_>) = (what.gpus.iter().map(|it| it.1).collect(), free.to_vec());
    used.sort_unstable_by(|a, b| b.cmp(a));
    free.sort_unstable_by(|a, b| b.cmp(a));
    let (used, free) = used.iter().zip(&free).find(|(used, free)| used > free)?;
    Some(format!("the processes use {} on a GPU, and {} are free on one there", size(*used), size(*free)))
}

/// The free memory of the GPUs; none where it cannot be known.
fn free_memory(socket: &Path, gpus: usize) -> Vec<u64> {
    let free = (0..gpus as u32).map(|gpu| match daemon::ask(socket, &Request::GpuMemory { gpu }) {
        Ok(Reply::GpuMemory(memory)) => Some(memory.free),
        _ => None,
    });
    free.collect::<Option<_>>().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, memory: u64) -> GpuInfo {
        GpuInfo { name: name.into(), memory, pci_bus_id: String::new(), uuid: String::new() }
    }

    fn here(gpus: &[GpuInfo]) -> StatusInfo {
        StatusInfo { driver_version: Some(13000), gpus: gpus.to_vec(), ..StatusInfo::default() }
    }

    fn what(gpus: &[(GpuInfo, u64)]) -> What {
        let memory = gpus.iter().map(|it| it.1).sum();
        What {
            host: "a".into(),
            driver_version: Some(13000),
            gpus: gpus.to_vec(),
            memory,
            other_driver: false,
            other_gpu: false,
            container: None,
            addresses: Vec::new(),
        }
    }

    #[test]
    fn a_host_must_have_what_the_processes_use() {
        let two = what(&[(gpu("H", 80), 70), (gpu("H", 80), 10)]);
        let has = |gpus: &[GpuInfo], free: &[u64]| differences(&two, &here(gpus), free).unwrap_or_default();
        assert_eq!(has(&[gpu("H", 80), gpu("H", 80)], &[10, 80]), "");
        assert_eq!(has(&[gpu("H", 80), gpu("H", 80)], &[]), "", "free memory is not known everywhere");
        assert!(has(&[gpu("H", 80)], &[80]).contains("1 GPUs"));
        assert!(has(&[gpu("H", 80), gpu("A", 80)], &[80, 80]).contains("--allow-other-gpu"));
        assert!(has(&[gpu("H", 80), gpu("H", 80)], &[60, 60]).contains("70 B"));
        let other = What { other_gpu: true, ..two.clone() };
        assert_eq!(differences(&other, &here(&[gpu("A", 40), gpu("A", 96)]), &[96, 40]), None);
        assert!(differences(&other, &here(&[gpu("A", 40)]), &[]).is_some());
        let older = What { driver_version: Some(12080), ..two };
        assert!(differences(&older, &here(&[gpu("H", 80), gpu("H", 80)]), &[]).unwrap().contains("12080"));
    }
}
