//! The copies of images in stores. They outlive the images of which they were made.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Whether a store has all of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Copied {
    /// An upload was begun. Whoever began it may have been killed before or after the store had all of it.
    Begun,
    /// The store has it.
    Whole,
}

/// A copy of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Copy {
    copied: Copied,
    /// Milliseconds since 1970 when the image's checkpoint began.
    began_ms: u64,
}

/// The images that stores have, by the stores' addresses and the images' numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Copies {
    stores: BTreeMap<String, BTreeMap<u64, Copy>>,
}

impl Copies {
    /// Whether the store has the image.
    #[must_use]
    pub fn has(&self, number: u64, url: &str) -> bool {
        self.stores.get(url).and_then(|it| it.get(&number)).is_some_and(|it| it.copied == Copied::Whole)
    }

    /// The images that the store has, oldest first.
    pub fn whole_in(&self, url: &str) -> impl Iterator<Item = u64> {
        let images = self.stores.get(url).into_iter().flatten();
        images.filter(|(_, it)| it.copied == Copied::Whole).map(|(number, _)| *number)
    }

    /// When the checkpoint of the newest image that the store has began, in milliseconds since 1970.
    #[must_use]
    pub fn newest_in(&self, url: &str) -> Option<u64> {
        self.began_ms(self.whole_in(url).last()?, url)
    }

    /// When the checkpoint of an image of the store began, in milliseconds since 1970.
    #[must_use]
    pub fn began_ms(&self, number: u64, url: &str) -> Option<u64> {
        Some(self.stores.get(url)?.get(&number)?.began_ms)
    }

    /// The stores that have the image.
    pub fn of(&self, number: u64) -> impl Iterator<Item = &str> {
        self.stores.keys().map(String::as_str).filter(move |url| self.has(number, url))
    }

    /// An upload of the image begins, whose checkpoint began at this time. The record must have this before the store has anything, so
    /// that nothing is left there.
    pub fn begin(&mut self, number: u64, began_ms: u64, url: &str) {
        let images = self.stores.entry(url.to_owned()).or_default();
        images.entry(number).or_insert(Copy { copied: Copied::Begun, began_ms });
    }

    /// The store has the image, whose checkpoint began at this time.
    pub fn whole(&mut self, number: u64, began_ms: u64, url: &str) {
        self.stores.entry(url.to_owned()).or_default().insert(number, Copy { copied: Copied::Whole, began_ms });
    }

    /// The store does not have the image any more.
    pub fn removed(&mut self, number: u64, url: &str) {
        if let Some(images) = self.stores.get_mut(url) {
            images.remove(&number);
        }
    }

    /// What the store need not keep once it has this image, so that it has the newest `keep` then: older images, and those whose
    /// upload was begun and not ended.
    #[must_use]
    pub fn dispensable(&self, number: u64, url: &str, keep: usize) -> Vec<u64> {
        let Some(images) = self.stores.get(url) else { return Vec::new() };
        let others = images.iter().rev().filter(|(other, _)| **other != number);
        let (whole, begun): (Vec<_>, Vec<_>) = others.partition(|(_, it)| it.copied == Copied::Whole);
        let old = whole.into_iter().skip(keep.max(1) - 1);
        old.chain(begun).map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_keeps_the_newest_and_nothing_that_was_left_unfinished() {
        let mut copies = Copies::default();
        for number in 1..=4 {
            copies.begin(number, number * 10, "/a");
            assert!(!copies.has(number, "/a"));
            if number != 2 {
                copies.whole(number, number * 10, "/a");
            }
        }
        copies.whole(1, 10, "/b");
        assert_eq!(copies.of(1).collect::<Vec<_>>(), ["/a", "/b"]);
        assert_eq!(copies.of(2).count(), 0);
        assert_eq!(copies.dispensable(5, "/a", 2), [3, 1, 2], "4 and 5 stay");
        assert_eq!(copies.dispensable(4, "/a", 2), [1, 2], "3 and 4 stay");
        assert_eq!(copies.dispensable(5, "/a", 0), copies.dispensable(5, "/a", 1), "one is kept always");
        assert_eq!((copies.dispensable(5, "/b", 2), copies.dispensable(5, "/c", 1)), (vec![], vec![]));
        assert_eq!((copies.whole_in("/a").collect::<Vec<_>>(), copies.newest_in("/a")), (vec![1, 3, 4], Some(40)));
        assert_eq!((copies.newest_in("/c"), copies.began_ms(2, "/a")), (None, Some(20)));
        // An upload that is begun again does not make a whole copy less.
        copies.begin(1, 10, "/a");
        copies.removed(3, "/a");
        assert_eq!((copies.has(1, "/a"), copies.dispensable(5, "/a", 2)), (true, vec![1, 2]));
    }
}
