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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Copy {
    copied: Copied,
    /// Milliseconds since 1970 when the image's checkpoint began.
    began_ms: u64,
    /// The checkpoint's own name, by which the image is told from that of another host under the same name.
    checkpoint: String,
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

    /// The images of which the store may have more or less: nobody has seen the end of their upload.
    pub fn begun_in(&self, url: &str) -> impl Iterator<Item = u64> {
        let images = self.stores.get(url).into_iter().flatten();
        images.filter(|(_, it)| it.copied == Copied::Begun).map(|(number, _)| *number)
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

    /// An upload of the image begins, whose checkpoint has this name and began at this time. The record must have this before the store
    /// has anything, so that nothing is left there.
    pub fn begin(&mut self, number: u64, began_ms: u64, checkpoint: &str, url: &str) {
        let new = Copy { copied: Copied::Begun, began_ms, checkpoint: checkpoint.to_owned() };
        let images = self.stores.entry(url.to_owned()).or_default();
        // An upload that is begun again does not make a whole copy less.
        if images.get(&number).is_none_or(|it| it.copied == Copied::Begun) {
            images.insert(number, new);
        }
    }

    /// The store has all of the image, whose upload was begun.
    pub fn whole(&mut self, number: u64, url: &str) {
        if let Some(copy) = self.stores.get_mut(url).and_then(|it| it.get_mut(&number)) {
            copy.copied = Copied::Whole;
        }
    }

    /// The store does not have the image any more.
    pub fn removed(&mut self, number: u64, url: &str) {
        if let Some(images) = self.stores.get_mut(url) {
            images.remove(&number);
        }
    }

    /// What the store need not keep once it has this image, so that it has the newest `keep` then, with the names of the checkpoints:
    /// older images, and those whose upload was begun and not ended.
    #[must_use]
    pub fn dispensable(&self, number: u64, url: &str, keep: usize) -> Vec<(u64, String)> {
        let Some(images) = self.stores.get(url) else { return Vec::new() };
        let others = images.iter().rev().filter(|(other, _)| **other != number);
        let (whole, begun): (Vec<_>, Vec<_>) = others.partition(|(_, it)| it.copied == Copied::Whole);
        let old = whole.into_iter().skip(keep.max(1) - 1);
        old.chain(begun).map(|(number, copy)| (*number, copy.checkpoint.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_keeps_the_newest_and_nothing_that_was_left_unfinished() {
        let mut copies = Copies::default();
        for number in 1..=4 {
            copies.begin(number, number * 10, "id", "/a");
            assert!(!copies.has(number, "/a"));
            if number != 2 {
                copies.whole(number, "/a");
            }
        }
        copies.begin(1, 10, "id", "/b");
        copies.whole(1, "/b");
        let numbers = |copies: &Copies, number: u64, url: &str, keep: usize| -> Vec<u64> {
            copies.dispensable(number, url, keep).into_iter().map(|(number, _)| number).collect()
        };
        assert_eq!(copies.of(1).collect::<Vec<_>>(), ["/a", "/b"]);
        assert_eq!(copies.of(2).count(), 0);
        assert_eq!(numbers(&copies, 5, "/a", 2), [3, 1, 2], "4 and 5 stay");
        assert_eq!(numbers(&copies, 4, "/a", 2), [1, 2], "3 and 4 stay");
        assert_eq!(numbers(&copies, 5, "/a", 0), numbers(&copies, 5, "/a", 1), "one is kept always");
        assert_eq!((numbers(&copies, 5, "/b", 2), numbers(&copies, 5, "/c", 1)), (vec![], vec![]));
        assert_eq!(copies.dispensable(3, "/a", 2).first(), Some(&(1, "id".to_owned())));
        assert_eq!(copies.begun_in("/a").collect::<Vec<_>>(), [2]);
        assert_eq!((copies.whole_in("/a").collect::<Vec<_>>(), copies.newest_in("/a")), (vec![1, 3, 4], Some(40)));
        assert_eq!((copies.newest_in("/c"), copies.began_ms(2, "/a")), (None, Some(20)));
        copies.begin(1, 10, "id", "/a");
        copies.removed(3, "/a");
        assert_eq!((copies.has(1, "/a"), numbers(&copies, 5, "/a", 2)), (true, vec![1, 2]));
    }
}
