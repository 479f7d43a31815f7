//! On which GPUs a restored process gets its memory back.
//!
//! The driver wants no map where the GPUs are the same. Otherwise it wants a pair for every GPU that the process saw, those that are
//! the same among them.

use rekindle_images::NativeGpu;
use rekindle_wire::native::{Gpu, GpuPair};

/// The GPUs of the dump and those that take their places; none where nothing changes. `None` if there is no such GPU for one.
pub(crate) fn pairs(were: &[NativeGpu], are: &[Gpu]) -> Option<Vec<GpuPair>> {
    let is_here = |uuid: &[u8; 16]| are.iter().any(|it| it.uuid == *uuid);
    if were.iter().all(|it| is_here(&it.uuid)) {
        return Some(Vec::new());
    }
    let mut free: Vec<_> = are.iter().filter(|it| !were.iter().any(|was| was.uuid == it.uuid)).collect();
    let mut found = Vec::new();
    for was in were {
        let now = if is_here(&was.uuid) {
            was.uuid
        } else {
            let at = free.iter().position(|it| it.name == was.name)?;
            free.remove(at).uuid
        };
        found.push((was.uuid, now));
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn were(gpus: &[(u8, &str)]) -> Vec<NativeGpu> {
        gpus.iter().map(|(byte, name)| NativeGpu { uuid: [*byte; 16], name: (*name).to_owned() }).collect()
    }

    fn are(gpus: &[(u8, &str)]) -> Vec<Gpu> {
        gpus.iter().map(|(byte, name)| Gpu { uuid: [*byte; 16], name: (*name).to_owned() }).collect()
    }

    fn map(was: &[(u8, &str)], is: &[(u8, &str)]) -> Option<Vec<(u8, u8)>> {
        let pairs = pairs(&were(was), &are(is))?;
        Some(pairs.iter().map(|(old, new)| (old[0], new[0])).collect())
    }

    #[test]
    fn the_same_gpus_need_no_map_whatever_their_order() {
        assert_eq!(map(&[(1, "H200"), (2, "H200")], &[(2, "H200"), (3, "H200"), (1, "H200")]), Some(vec![]));
    }

    #[test]
    fn every_gpu_is_in_the_map_when_one_is_another() {
        let map = map(&[(1, "H200"), (2, "H200")], &[(4, "H100"), (2, "H200"), (5, "H200")]);
        assert_eq!(map, Some(vec![(1, 5), (2, 2)]));
    }

    #[test]
    fn another_model_or_too_few_gpus_are_no_place() {
        assert_eq!(map(&[(1, "H200")], &[(4, "H100")]), None);
        assert_eq!(map(&[(1, "H200"), (2, "H200")], &[(4, "H200")]), None);
    }
}
