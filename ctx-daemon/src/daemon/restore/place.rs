//! The GPUs that a restored process gets: by UUID those that it had, and for each missing one another of the same model.

use rekindle_images::{Client as Record, Gpu, Host};
use rekindle_wire::attach::Device;
use rekindle_wire::gpus;

use super::super::dump::gpu;
use super::super::grants::Uuid;

/// The setting by which the driver numbers devices, where GPUs are not named one by one.
const ORDER: &str = "CUDA_DEVICE_ORDER";

/// The GPUs for a client, in its order, among those that exist here and that it may use; none where a worker that sees all GPUs
/// has them in that order. If there are too few, the result is shorter: the later comparison with the worker's GPUs reports it.
pub(in crate::daemon) fn choose(
    record: &Record,
    host: &Host,
    devices: &[Device],
    may: Option<&[Uuid]>,
) -> Option<Vec<Uuid>> {
    let here: Vec<&Device> = devices.iter().filter(|it| may.is_none_or(|may| may.contains(&it.uuid))).collect();
    let given_few = record.grant.as_ref().is_some_and(|it| !it.all_gpus) || may.is_some();
    let mut recorded: Vec<_> = record.gpus.iter().collect();
    recorded.sort_by_key(|it| it.ordinal);
    let mut chosen: Vec<Option<Uuid>> =
        recorded.iter().map(|used| here.iter().any(|it| it.uuid == used.uuid).then_some(used.uuid)).collect();
    for at in 0..chosen.len() {
        if chosen[at].is_some() {
            continue;
        }
        let was = host.gpus.iter().find(|it| it.uuid == recorded[at].uuid);
        let free =
            here.iter().filter(|it| !chosen.contains(&Some(it.uuid)) && was.is_some_and(|was| is_like(was, &gpu(it))));
        let are_cut_alike = |it: &Device| {
            let others = recorded.iter().zip(&chosen).filter_map(|(had, has)| Some((had.uuid, (*has)?)));
            gpus::are_cut_alike(&others.chain([(recorded[at].uuid, it.uuid)]).collect::<Vec<_>>())
        };
        // A GPU of the same model, and in the same slot if there is a choice: machines of one kind are built alike.
        let best = free.rev().max_by_key(|it| {
            let like = was.map(|was| (it.name == was.name, it.pci_bus_id == was.pci, it.memory >= was.total_memory));
            (are_cut_alike(it), like)
        });
        let Some(replacement) = best else {
            return given_few.then(|| here.iter().map(|it| it.uuid).collect());
        };
        chosen[at] = Some(replacement.uuid);
    }
    let chosen: Vec<Uuid> = chosen.into_iter().flatten().collect();
    let in_order = devices.iter().map(|it| it.uuid).take(chosen.len()).eq(chosen.iter().copied());
    let renumbered = record.settings.iter().any(|it| it.name == ORDER);
    let sees_all = in_order && !renumbered && (!given_few || chosen.len() == devices.len());
    (!sees_all).then_some(chosen)
}

fn is_like(was: &Gpu, is: &Gpu) -> bool {
    (was.compute_major, was.compute_minor) == (is.compute_major, is.compute_minor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::{ClientGpu, Grant, Setting};

    fn device(number: u8) -> Device {
        Device {
            name: "GPU".to_owned(),
            uuid: [number; 16],
            memory: 1,
            pci_bus_id: format!("0000:{number:02x}:00.0"),
            attributes: vec![(0, 9); 77],
            stream_priorities: (0, 0),
            peers: Vec::new(),
            part_of: None,
        }
    }

    /// The choice for a client that saw `had` on a host with GPUs 1 to 3, on a host that has `here`.
    fn chosen(had: &[u8], grant: Option<bool>, here: &[u8], may: Option<&[u8]>) -> Option<Vec<u8>> {
        let all: Vec<_> = had.iter().map(|it| device(*it)).collect();
        let host = Host { gpus: all.iter().map(gpu).collect(), ..Host::default() };
        let gpus = (0..).zip(&all).map(|(ordinal, it)| ClientGpu { ordinal, uuid: it.uuid });
        let record = Record {
            gpus: gpus.collect(),
            grant: grant.map(|all_gpus| Grant { all_gpus, ..Grant::default() }),
            ..Record::default()
        };
        let devices: Vec<_> = here.iter().map(|it| device(*it)).collect();
        let may: Option<Vec<Uuid>> = may.map(|may| may.iter().map(|it| [*it; 16]).collect());
        let found = choose(&record, &host, &devices, may.as_deref());
        found.map(|it| it.iter().map(|uuid| uuid[0]).collect())
    }

    #[test]
    fn a_process_gets_the_gpus_that_it_had() {
        assert_eq!(chosen(&[1, 2], None, &[1, 2], None), None, "as every worker sees them");
        assert_eq!(chosen(&[1, 2], None, &[2, 1], None), Some(vec![1, 2]));
        assert_eq!(chosen(&[2], Some(false), &[1, 2], None), Some(vec![2]));
        assert_eq!(chosen(&[1], Some(false), &[1, 2], None), Some(vec![1]), "and no more");
        assert_eq!(chosen(&[1, 2], Some(true), &[1, 2, 3], None), None);
    }

    #[test]
    fn where_one_is_not_there_it_is_another_of_its_kind() {
        assert_eq!(chosen(&[1, 2], None, &[3, 2], None), None, "as every worker sees them");
        assert_eq!(chosen(&[1, 2], None, &[2, 3], None), Some(vec![3, 2]));
        assert_eq!(chosen(&[9], Some(false), &[1, 2], None), Some(vec![1]));
        assert_eq!(chosen(&[1, 2], None, &[1], None), None, "there are too few");
        // A restore from within a container has the container's GPUs.
        assert_eq!(chosen(&[1], Some(false), &[1, 2], Some(&[2])), Some(vec![2]));
        assert_eq!(chosen(&[1, 2], None, &[1, 2], Some(&[2])), Some(vec![2]), "and no more");
    }

    #[test]
    fn virtual_gpus_of_one_gpu_are_again_of_one() {
        let part = |gpu: u8, part: u8| Device {
            uuid: [[part; 8], [gpu; 8]].concat().try_into().unwrap(),
            part_of: Some([gpu; 16]),
            ..device(gpu)
        };
        let here: Vec<_> = [(3, 1), (4, 1), (3, 2), (4, 2)].map(|(gpu, number)| part(gpu, number)).into();
        for (had, expected) in [([(1, 1), (1, 2)], [0, 2]), ([(1, 1), (2, 1)], [0, 1]), ([(1, 2), (4, 2)], [0, 3])] {
            let had = had.map(|(gpu, number)| part(gpu, number));
            let host = Host { gpus: had.iter().map(gpu).collect(), ..Host::default() };
            let gpus = (0..).zip(&had).map(|(ordinal, it)| ClientGpu { ordinal, uuid: it.uuid }).collect();
            let chosen = choose(&Record { gpus, ..Record::default() }, &host, &here, None);
            let in_order = here.iter().map(|it| it.uuid).take(2).eq(expected.map(|at| here[at].uuid));
            assert_eq!(chosen, (!in_order).then(|| expected.map(|at| here[at].uuid).to_vec()), "{expected:?}");
        }
    }

    #[test]
    fn a_setting_that_renumbers_gpus_is_no_matter_where_they_are_named() {
        let host = Host { gpus: vec![gpu(&device(1))], ..Host::default() };
        let record = Record {
            gpus: vec![ClientGpu { ordinal: 0, uuid: [1; 16] }],
            settings: vec![Setting { name: ORDER.to_owned(), value: "PCI_BUS_ID".to_owned() }],
            ..Record::default()
        };
        assert_eq!(choose(&record, &host, &[device(1)], None), Some(vec![[1; 16]]));
    }
}
