//! The levels that images travel to after the directory of the protection: stores, the nearest first.
//!
//! ```text
//!   directory ──► level 1 (a partner's disk) ──► level 2 (a bucket)      each gets the newest image when that is due there
//!       ▲               │                            │
//!       └───────────────┴────────────────────────────┘ the newest image that is whole anywhere comes back, from the nearest
//!                                                      level that has it
//! ```

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::copies::Copies;
use crate::shelf::{Shelf, Standing};

/// A store that gets images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Level {
    /// Its address.
    pub url: String,
    /// How many images it keeps; as many as the directory if nothing is said.
    #[serde(default)]
    pub keep: Option<usize>,
    /// Seconds from the checkpoint of one image that it gets to that of the next; every image if nothing is said.
    #[serde(default)]
    pub every: Option<f64>,
}

/// The number of the newest image, and the nearest level that is to get it now. A level that has failed to get it is left out until there
/// is a newer one, so that it does not hold up those behind it.
#[must_use]
pub fn due<'a>(
    levels: &'a [Level],
    copies: &Copies,
    shelf: &Shelf,
    failed: &BTreeSet<Copy>,
) -> Option<(u64, &'a Level)> {
    let newest = shelf.newest()?;
    let is_due = |level: &&Level| {
        let every = Duration::try_from_secs_f64(level.every.unwrap_or_default()).unwrap_or(Duration::MAX);
        let since = copies.newest_in(&level.url).map(|copied| newest.began_ms.saturating_sub(copied));
        let copy = Copy { number: newest.number, url: level.url.clone() };
        !copies.has(copy.number, &copy.url)
            && !failed.contains(&copy)
            && since.is_none_or(|ms| Duration::from_millis(ms) >= every)
    };
    levels.iter().find(is_due).map(|level| (newest.number, level))
}

/// An image in a store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Copy {
    /// The image's number.
    pub number: u64,
    /// The store's address.
    pub url: String,
}

/// The newest image that only stores have in good order, if it is newer than the good ones of the directory, in the nearest store that
/// has it; not those that were tried in vain. An image whose bytes are good and that cannot be restored is no better in a store. Where
/// nobody has a good image, that includes copies of which nobody has seen the end: the store may have all of them.
#[must_use]
pub fn source(levels: &[Level], copies: &Copies, shelf: &Shelf, in_vain: &BTreeSet<Copy>) -> Option<Copy> {
    let own = shelf.newest().map_or(0, |it| it.number);
    let is_wanted = |it: &Copy| {
        let standing = shelf.get(it.number).map(|image| &image.standing);
        it.number > own && matches!(standing, None | Some(Standing::Damaged(_))) && !in_vain.contains(it)
    };
    let newest_of = |numbers: &dyn Fn(&str) -> Vec<u64>| {
        let found = levels.iter().filter_map(|level| {
            let all = numbers(&level.url).into_iter().map(|number| Copy { number, url: level.url.clone() });
            all.filter(is_wanted).max_by_key(|it| it.number)
        });
        // Of equals the first is taken: the nearest.
        found.reduce(|best, it| if it.number > best.number { it } else { best })
    };
    let whole = newest_of(&|url| copies.whole_in(url).collect());
    whole.or_else(|| newest_of(&|url| copies.begun_in(url).collect()).filter(|_| own == 0))
}

/// The newest damaged image of the directory that a store can give back while the job runs, from the nearest store that has it; not
/// those that were tried in vain. It must be one of those that are to be kept, and no good image may build on it: those need it with its
/// own parent, and what comes from a store has none.
#[must_use]
pub fn to_mend(
    levels: &[Level],
    copies: &Copies,
    shelf: &Shelf,
    keep: usize,
    in_vain: &BTreeSet<Copy>,
) -> Option<Copy> {
    let is_wanted = |number: u64| is_wanted(shelf, keep, number) && shelf.built_on(number).next().is_none();
    let damaged = shelf.images().iter().rev().filter(|it| matches!(it.standing, Standing::Damaged(_)));
    damaged.map(|it| it.number).filter(|it| is_wanted(*it)).find_map(|number| {
        let mut copies = levels.iter().filter(|it| copies.has(number, &it.url));
        copies.find_map(|level| {
            let copy = Copy { number, url: level.url.clone() };
            (!in_vain.contains(&copy)).then_some(copy)
        })
    })
}

/// Whether an image, if it were good, would be one of those that are to be kept.
#[must_use]
pub fn is_wanted(shelf: &Shelf, keep: usize, number: u64) -> bool {
    shelf.good().filter(|it| it.number >= number).count() < keep.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shelf::Image;

    fn level(url: &str, every: Option<f64>) -> Level {
        Level { url: url.to_owned(), keep: None, every }
    }

    fn whole(copies: &mut Copies, number: u64, began_ms: u64, url: &str) {
        copies.begin(number, began_ms, "id", url);
        copies.whole(number, url);
    }

    /// Images that began at so many seconds, numbered from 1.
    fn shelf(seconds: &[u64]) -> Shelf {
        let mut shelf = Shelf::default();
        for (number, at) in (1..).zip(seconds) {
            shelf.add(Image {
                number,
                on: None,
                standing: Standing::Good,
                began_ms: at * 1000,
                cost: None,
                verified_ms: 0,
            });
        }
        shelf
    }

    #[test]
    fn a_level_gets_the_newest_image_when_its_interval_has_passed() {
        let levels = [level("/near", None), level("/far", Some(10.0))];
        let mut copies = Copies::default();
        let due_at = |copies: &Copies, seconds: &[u64]| {
            due(&levels, copies, &shelf(seconds), &BTreeSet::new()).map(|(number, level)| (number, level.url.clone()))
        };
        assert_eq!(due_at(&copies, &[]), None);
        assert_eq!(due_at(&copies, &[0]), Some((1, "/near".to_owned())));
        whole(&mut copies, 1, 0, "/near");
        assert_eq!(due_at(&copies, &[0]), Some((1, "/far".to_owned())), "it has none yet");
        whole(&mut copies, 1, 0, "/far");
        whole(&mut copies, 2, 9000, "/near");
        assert_eq!(due_at(&copies, &[0, 9]), None);
        assert_eq!(due_at(&copies, &[0, 9, 10]), Some((3, "/near".to_owned())));
        whole(&mut copies, 3, 10_000, "/near");
        assert_eq!(due_at(&copies, &[0, 9, 10]), Some((3, "/far".to_owned())));
        copies.begin(3, 10_000, "id", "/far");
        assert_eq!(due_at(&copies, &[0, 9, 10]), Some((3, "/far".to_owned())), "what was begun is not there");
        let failed = BTreeSet::from([Copy { number: 1, url: "/near".to_owned() }]);
        let due_after = |seconds: &[u64]| {
            due(&levels, &Copies::default(), &shelf(seconds), &failed)
                .map(|(number, level)| (number, level.url.clone()))
        };
        assert_eq!(due_after(&[0]), Some((1, "/far".to_owned())), "the farther one does not wait");
        assert_eq!(due_after(&[0, 1]), Some((2, "/near".to_owned())), "it is tried again with the next image");
    }

    #[test]
    fn the_newest_whole_image_comes_back_from_the_nearest_level() {
        let levels = [level("/near", None), level("/far", None)];
        let (mut copies, mut shelf, mut in_vain) = (Copies::default(), shelf(&[0, 1, 2]), BTreeSet::new());
        let copy = |number: u64, url: &str| Some(Copy { number, url: url.to_owned() });
        for (number, url) in [(1, "/near"), (2, "/near"), (3, "/far"), (2, "/far"), (9, "/unknown")] {
            whole(&mut copies, number, 0, url);
        }
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), None, "3 is good in the directory");
        shelf.damaged(3, "a byte has changed");
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), copy(3, "/far"));
        in_vain.extend(copy(3, "/far"));
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), None, "2 is good in the directory");
        shelf.damaged(2, "it is not there any more");
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), copy(2, "/near"));
        shelf.set_aside(2, "CRIU fails");
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), None, "it would fail again");
        shelf.damaged(1, "");
        shelf.removed(2);
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), copy(2, "/near"), "the directory has none of it");
        in_vain.extend([copy(2, "/near"), copy(2, "/far")].into_iter().flatten());
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), copy(1, "/near"));
        in_vain.extend(copy(1, "/near"));
        copies.begin(1, 0, "id", "/far");
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), copy(1, "/far"), "its upload may have come to its end");
        shelf.fetched(1, 0);
        assert_eq!(source(&levels, &copies, &shelf, &in_vain), None);
    }

    #[test]
    fn what_is_damaged_comes_back_while_the_job_runs() {
        let levels = [level("/near", None), level("/far", None)];
        let (mut copies, mut shelf, mut in_vain) = (Copies::default(), shelf(&[0, 1, 2, 3]), BTreeSet::new());
        let copy = |number: u64, url: &str| Some(Copy { number, url: url.to_owned() });
        for (number, url) in [(1, "/near"), (2, "/far"), (3, "/far"), (3, "/near")] {
            whole(&mut copies, number, 0, url);
        }
        let mend =
            |shelf: &Shelf, keep: usize, in_vain: &BTreeSet<Copy>| to_mend(&levels, &copies, shelf, keep, in_vain);
        assert_eq!(mend(&shelf, 3, &in_vain), None, "all are good");
        shelf.damaged(2, "a byte has changed");
        assert_eq!(mend(&shelf, 2, &in_vain), None, "3 and 4 are enough");
        assert_eq!(mend(&shelf, 3, &in_vain), copy(2, "/far"));
        shelf.damaged(3, "a byte has changed");
        assert_eq!(mend(&shelf, 2, &in_vain), copy(3, "/near"));
        in_vain.extend(copy(3, "/near"));
        assert_eq!(mend(&shelf, 2, &in_vain), copy(3, "/far"));
        in_vain.extend(copy(3, "/far"));
        assert_eq!(mend(&shelf, 3, &in_vain), copy(2, "/far"));
        assert_eq!(mend(&shelf, 1, &in_vain), None, "4 is enough");
        shelf.damaged(4, "a byte has changed");
        assert_eq!(mend(&shelf, 1, &BTreeSet::new()), copy(3, "/near"), "no store has 4");
        shelf.add(Image { number: 5, on: Some(3), ..shelf.images()[0].clone() });
        assert_eq!(mend(&shelf, 9, &BTreeSet::new()), copy(2, "/far"), "5 builds on 3");
        shelf.set_aside(2, "CRIU fails");
        assert_eq!(mend(&shelf, 9, &BTreeSet::new()), None, "it would fail again");
    }
}
