//! On which GPUs a deeply suspended client resumes: on those that it had, or, where one has no room, on another of the same kind.

use super::super::grants::Uuid;

/// A GPU of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) uuid: Uuid,
    /// Bytes that are free.
    pub(super) free: u64,
}

/// The GPU for each place of a client, which had `had` there and needs that many bytes. `None`: there is no room now. A GPU on
/// which the client has nothing may be any like the one that it had.
pub(super) fn choose(
    had: &[Uuid],
    needs: &[u64],
    spots: &[Spot],
    is_like: impl Fn(Uuid, Uuid) -> bool,
) -> Option<Vec<Uuid>> {
    let need = |place: usize| needs.get(place).copied().unwrap_or(0);
    let spot = |uuid: Uuid| spots.iter().find(|it| it.uuid == uuid);
    let mut chosen: Vec<Option<Uuid>> = had
        .iter()
        .enumerate()
        .map(|(place, uuid)| {
            Some(*uuid).filter(|_| need(place) > 0 && spot(*uuid).is_some_and(|it| it.free >= need(place)))
        })
        .collect();
    // Those that need most come first, and those that need nothing take what is left.
    let mut others: Vec<usize> = (0..had.len()).filter(|place| chosen[*place].is_none()).collect();
    others.sort_by_key(|place| std::cmp::Reverse(need(*place)));
    for place in others {
        let own = had[place];
        let is_free = |it: &&Spot| !chosen.contains(&Some(it.uuid)) && (it.uuid == own || is_like(own, it.uuid));
        let with_room = spots.iter().filter(is_free).filter(|it| it.free >= need(place));
        let kept = spot(own).filter(|it| is_free(it) && need(place) == 0);
        let best = kept.or_else(|| with_room.max_by_key(|it| it.free));
        chosen[place] = Some(best?.uuid);
    }
    chosen.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(had: &[u8], needs: &[u64], free: &[(u8, u64)]) -> Option<Vec<u8>> {
        let had: Vec<Uuid> = had.iter().map(|it| [*it; 16]).collect();
        let spots: Vec<_> = free.iter().map(|(it, free)| Spot { uuid: [*it; 16], free: *free }).collect();
        // GPUs from 10 on are of another kind.
        let found = choose(&had, needs, &spots, |one, other| (one[0] < 10) == (other[0] < 10));
        found.map(|it| it.iter().map(|uuid| uuid[0]).collect())
    }

    #[test]
    fn a_client_resumes_on_its_own_gpus_where_they_have_room() {
        assert_eq!(chosen(&[1, 2], &[5, 0], &[(1, 5), (2, 9)]), Some(vec![1, 2]));
        assert_eq!(chosen(&[1, 2], &[5, 5], &[(2, 5), (1, 5)]), Some(vec![1, 2]));
        assert_eq!(chosen(&[1], &[0], &[(1, 0), (2, 9)]), Some(vec![1]), "it needs nothing");
    }

    #[test]
    fn or_on_others_of_the_same_kind() {
        assert_eq!(chosen(&[1], &[5], &[(1, 4), (2, 5), (3, 9), (11, 99)]), Some(vec![3]));
        assert_eq!(chosen(&[1, 2], &[5, 0], &[(1, 4), (2, 9)]), Some(vec![2, 1]), "in exchange for one without memory");
        assert_eq!(chosen(&[1, 2], &[5, 5], &[(1, 4), (2, 9), (3, 5)]), Some(vec![3, 2]), "and takes none away");
    }

    #[test]
    fn and_waits_where_there_is_none() {
        assert_eq!(chosen(&[1], &[5], &[(1, 4), (2, 4), (11, 99)]), None);
        assert_eq!(chosen(&[1, 2], &[5, 5], &[(1, 9), (2, 4)]), None);
        assert_eq!(chosen(&[1], &[5], &[]), None);
    }
}
