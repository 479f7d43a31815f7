//! The images of a job: which are good, which must stay, which may go.
//!
//! ```text
//!   1 ◄── 2 ◄── 3 ◄── 4     5 ◄── 6        each builds on the one before; 5 was flattened
//!   └ may go, with 2 and 3, when the     └ the newest
//!     kept ones do not build on them
//! ```

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::interval::Cost;

/// Whether an image can be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It was verified.
    Good,
    /// It is set aside, for this reason: it was not restored, though its bytes are right as far as is known.
    Aside(String),
    /// Its bytes are not those that were written, or are gone: a copy would be good.
    Damaged(String),
}

/// An image of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Its number. A later image has a higher one, and no number is used twice.
    pub number: u64,
    /// The number of the image that it builds on.
    pub on: Option<u64>,
    /// Whether it can be used.
    pub standing: Standing,
    /// Milliseconds since 1970 when its checkpoint began.
    pub began_ms: u64,
    /// What it has cost; none where nobody saw its checkpoint.
    #[serde(default)]
    pub cost: Option<Cost>,
    /// Milliseconds since 1970 when it was last verified again; 0 if it was only when it was made.
    #[serde(default)]
    pub verified_ms: u64,
}

/// The images of a job, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Shelf {
    images: Vec<Image>,
}

impl Shelf {
    /// All images, oldest first.
    #[must_use]
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// Those that can be used, newest first.
    pub fn good(&self) -> impl Iterator<Item = &Image> {
        self.images.iter().rev().filter(|it| it.standing == Standing::Good)
    }

    /// The newest that can be used.
    #[must_use]
    pub fn newest(&self) -> Option<&Image> {
        self.good().next()
    }

    /// The image with this number.
    #[must_use]
    pub fn get(&self, number: u64) -> Option<&Image> {
        self.images.iter().find(|it| it.number == number)
    }

    /// A number that no image has had.
    #[must_use]
    pub fn next_number(&self) -> u64 {
        self.images.last().map_or(1, |it| it.number + 1)
    }

    /// Adds an image, which is newer than all others.
    pub fn add(&mut self, image: Image) {
        debug_assert!(image.number >= self.next_number());
        self.images.push(image);
    }

    /// Sets an image aside.
    pub fn set_aside(&mut self, number: u64, why: &str) {
        self.change(number, |it| it.standing = Standing::Aside(why.to_owned()));
    }

    /// An image is found to be damaged.
    pub fn damaged(&mut self, number: u64, why: &str) {
        self.change(number, |it| it.standing = Standing::Damaged(why.to_owned()));
    }

    /// An image was verified again.
    pub fn verified(&mut self, number: u64, now_ms: u64) {
        self.change(number, |it| it.verified_ms = now_ms);
    }

    /// The good images that build on this one, directly and indirectly.
    pub fn built_on(&self, number: u64) -> impl Iterator<Item = u64> {
        let all = self.good().map(|it| it.number);
        all.filter(move |it| *it != number && self.chain(*it).contains(&number))
    }

    /// An image has come back from a store, where it builds on no other. Its checkpoint began at this time.
    pub fn fetched(&mut self, number: u64, began_ms: u64) {
        self.removed(number);
        let at = self.images.partition_point(|it| it.number < number);
        let standing = Standing::Good;
        self.images.insert(at, Image { number, on: None, standing, began_ms, cost: None, verified_ms: 0 });
    }

    /// An image builds on no other any more.
    pub fn flattened(&mut self, number: u64) {
        self.change(number, |it| it.on = None);
    }

    /// An image is gone from the disk.
    pub fn removed(&mut self, number: u64) {
        self.images.retain(|it| it.number != number);
    }

    /// How many images an image builds on, directly and indirectly.
    #[must_use]
    pub fn depth(&self, number: u64) -> usize {
        self.chain(number).len() - 1
    }

    /// The newest `keep` good images.
    #[must_use]
    pub fn kept(&self, keep: usize) -> Vec<u64> {
        self.good().take(keep.max(1)).map(|it| it.number).collect()
    }

    /// The images that may go if the newest `keep` good ones are kept: not those that a kept one builds on. An image that was set
    /// aside stays as long as a kept one is older, so that somebody can look at it. Nothing goes before there is a good image.
    #[must_use]
    pub fn dispensable(&self, keep: usize) -> Vec<u64> {
        let kept = self.kept(keep);
        let Some(oldest) = kept.last().copied() else { return Vec::new() };
        let needed: BTreeSet<u64> = kept.iter().flat_map(|number| self.chain(*number)).collect();
        let goes = |it: &&Image| it.number < oldest && !needed.contains(&it.number);
        self.images.iter().filter(goes).map(|it| it.number).collect()
    }

    /// An image and those that it builds on.
    fn chain(&self, number: u64) -> Vec<u64> {
        let mut chain = vec![number];
        // An image builds on older ones only, so this ends also for a record that somebody has changed.
        while let Some(on) = chain.last().and_then(|last| self.get(*last)?.on.filter(|on| on < last)) {
            chain.push(on);
        }
        chain
    }

    fn change(&mut self, number: u64, change: impl FnOnce(&mut Image)) {
        if let Some(image) = self.images.iter_mut().find(|it| it.number == number) {
            change(image);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shelf(images: &[(u64, Option<u64>)]) -> Shelf {
        let mut shelf = Shelf::default();
        for (number, on) in images {
            let standing = Standing::Good;
            shelf.add(Image { number: *number, on: *on, standing, began_ms: 0, cost: None, verified_ms: 0 });
        }
        shelf
    }

    #[test]
    fn the_newest_are_kept_and_what_they_build_on() {
        let mut shelf = shelf(&[(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, None), (6, Some(5))]);
        assert!(shelf.dispensable(3).is_empty(), "4 builds on all before it");
        assert_eq!(shelf.dispensable(2), [1, 2, 3, 4]);
        assert_eq!(shelf.dispensable(1), [1, 2, 3, 4], "6 builds on 5");
        assert_eq!(shelf.dispensable(0), shelf.dispensable(1), "one is kept always");
        assert_eq!((shelf.depth(4), shelf.depth(5), shelf.next_number()), (3, 0, 7));
        shelf.flattened(4);
        assert_eq!(shelf.dispensable(3), [1, 2, 3]);
        shelf.removed(1);
        assert_eq!(shelf.images().len(), 5);
    }

    #[test]
    fn what_was_set_aside_is_no_image_and_stays_for_a_while() {
        let mut shelf = shelf(&[(1, None), (2, None), (3, None)]);
        shelf.set_aside(3, "a byte has changed");
        assert_eq!(shelf.newest().map(|it| it.number), Some(2));
        assert_eq!(shelf.dispensable(1), [1], "3 is newer than the one that is kept");
        shelf.add(Image { number: 4, ..shelf.images()[0].clone() });
        assert_eq!(shelf.dispensable(1), [1, 2, 3]);
        for number in [1, 2, 4] {
            shelf.set_aside(number, "");
        }
        assert!(shelf.dispensable(1).is_empty(), "without a good image nothing goes");
    }

    #[test]
    fn an_image_that_comes_back_has_its_place_again() {
        let mut shelf = shelf(&[(1, None), (3, Some(1)), (4, Some(3))]);
        shelf.damaged(4, "a byte has changed");
        shelf.fetched(4, 7);
        shelf.fetched(2, 5);
        assert_eq!(
            shelf.images().iter().map(|it| (it.number, it.on)).collect::<Vec<_>>(),
            [(1, None), (2, None), (3, Some(1)), (4, None)]
        );
        assert_eq!((shelf.newest().map(|it| (it.number, it.began_ms)), shelf.next_number()), (Some((4, 7)), 5));
    }

    #[test]
    fn a_circle_in_a_record_ends() {
        let shelf = shelf(&[(1, Some(2)), (2, Some(1))]);
        assert_eq!((shelf.depth(2), shelf.dispensable(1)), (1, Vec::new()));
    }
}
