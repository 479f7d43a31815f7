//! Reading all that a store has, and comparing it with its hashes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::StoreError;
use crate::fetch;
use crate::hash::Hash;
use crate::manifest::{self, IMAGES};
use crate::pack::{self, PACKS, PIECES, Place};
use crate::parallel::{each, lock};
use crate::progress::{Meter, OnProgress};
use crate::store::Store;
use crate::transport::Found;

/// What was read, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Verified {
    /// Images.
    pub images: u64,
    /// Pieces.
    pub pieces: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// What is wrong.
    pub problems: Vec<Wrong>,
}

/// Something that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Wrong {
    /// The object.
    pub object: String,
    /// A description.
    pub what: String,
    /// The images that need it.
    pub images: Vec<String>,
}

/// A piece that there should be.
struct Expected {
    hash: Hash,
    /// Unknown where only the object's name speaks of it.
    length: Option<u64>,
    images: BTreeSet<String>,
}

impl Store {
    /// Reads an image, or all that is in the store, whether an image needs it or not, and compares every hash. What
    /// is wrong with the content is in the result.
    ///
    /// # Errors
    /// [`StoreError::NoImage`], and what the transport says.
    pub fn verify(&self, name: Option<&str>, tell: OnProgress<'_>) -> Result<Verified, StoreError> {
        let mut report = Verified::default();
        let mut expected: BTreeMap<(String, u64, u64), (Place, Vec<Expected>)> = BTreeMap::new();
        let mut expect = |place: Place, it: Expected| {
            let key = (place.object.to_string(), place.offset, place.stored);
            let (_, all) = expected.entry(key).or_insert_with(|| (place, Vec::new()));
            match all
                .iter_mut()
                .find(|known| known.hash == it.hash && (it.length.is_none() || known.length == it.length))
            {
                Some(known) => known.images.extend(it.images),
                None => all.push(it),
            }
        };

        let manifests = match name {
            Some(name) => vec![(self.object_of(name)?, Some(name))],
            None => self.transport.list(IMAGES)?.into_iter().map(|it| (it.name, None)).collect(),
        };
        for (object, name) in manifests {
            let Some(bytes) = self.transport.get(&object, None)? else {
                match name {
                    Some(name) => return Err(StoreError::NoImage { name: name.to_owned(), url: self.url.clone() }),
                    // Removed meanwhile.
                    None => continue,
                }
            };
            report.images += 1;
            report.bytes += bytes.len() as u64;
            match manifest::read(&self.coder, &object, bytes) {
                Ok((head, body)) => {
                    for piece in &body.pieces {
                        let images = BTreeSet::from([head.name.clone()]);
                        expect(body.place(piece)?, Expected { hash: piece.hash, length: Some(piece.length), images });
                    }
                }
                Err(error) if error.is_bad_image() || matches!(error, StoreError::Newer { .. }) => {
                    let images = name.map(str::to_owned).into_iter().collect();
                    report.problems.push(Wrong { object: object.to_string(), what: error.to_string(), images });
                }
                Err(error) => return Err(error),
            }
        }
        if name.is_none() {
            self.expect_all(&mut report, &mut expect)?;
        }
        self.read_all(&mut report, expected.into_values().collect(), tell)?;
        report.problems.sort();
        Ok(report)
    }

    /// What there is beside what images need.
    fn expect_all(&self, report: &mut Verified, expect: &mut dyn FnMut(Place, Expected)) -> Result<(), StoreError> {
        for Found { name, size, .. } in self.transport.list(PIECES)? {
            match pack::hash_in(&name) {
                Some(hash) => {
                    let place = Place { object: name, offset: 0, stored: size };
                    expect(place, Expected { hash, length: None, images: BTreeSet::new() });
                }
                None => {
                    let what = "its name is none of a piece".to_owned();
                    report.problems.push(Wrong { object: name.to_string(), what, images: Vec::new() });
                }
            }
        }
        for found in self.transport.list(PACKS)? {
            match pack::list(&*self.transport, &self.coder, &found) {
                Ok(pieces) => {
                    for it in pieces {
                        let place = Place { object: found.name.clone(), offset: it.offset, stored: it.stored };
                        let length = Some(it.length);
                        expect(place, Expected { hash: it.hash, length, images: BTreeSet::new() });
                    }
                }
                Err(error) if error.is_bad_image() => {
                    let (object, what) = (found.name.to_string(), error.to_string());
                    report.problems.push(Wrong { object, what, images: Vec::new() });
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read_all(
        &self,
        report: &mut Verified,
        expected: Vec<(Place, Vec<Expected>)>,
        tell: OnProgress<'_>,
    ) -> Result<(), StoreError> {
        let meter = Meter::new(expected.iter().map(|(place, _)| place.stored).fold(0, u64::saturating_add), tell);
        let wrong = Mutex::new(Vec::new());
        let (bytes, pieces) = (AtomicU64::new(0), AtomicU64::new(0));
        let note = |object: &str, what: &str, images: &BTreeSet<String>| {
            let images = images.iter().cloned().collect();
            lock(&wrong).push(Wrong { object: object.to_owned(), what: what.to_owned(), images });
        };
        let produce = |give: &mut dyn FnMut(fetch::Task<(u64, Vec<Expected>)>) -> bool| {
            let with_length = expected.into_iter().map(|(place, it)| {
                let stored = place.stored;
                (place, (stored, it))
            });
            fetch::tasks(with_length).into_iter().all(give);
            Ok(())
        };
        each(self.threads, produce, |task| {
            // If it is not there, all that should be in it is not.
            let images: BTreeSet<_> =
                task.pieces.iter().flat_map(|it| &it.what.1).flat_map(|it| it.images.iter().cloned()).collect();
            let object = task.object().to_string();
            let done = task.run(&*self.transport, |object, (stored, expected), content| {
                for it in expected {
                    pieces.fetch_add(1, Ordering::Relaxed);
                    if let Err(what) = self.check(&it, content.clone()) {
                        note(object.as_str(), what, &it.images);
                    }
                }
                meter.add(stored);
                Ok(())
            });
            match done {
                Ok(read) => {
                    bytes.fetch_add(read, Ordering::Relaxed);
                    Ok(())
                }
                Err(StoreError::Missing { .. }) => {
                    note(&object, "it is missing", &images);
                    Ok(())
                }
                Err(error) => Err(error),
            }
        })?;
        report.bytes += bytes.into_inner();
        report.pieces += pieces.into_inner();
        report.problems.extend(wrong.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner));
        Ok(())
    }

    fn check(&self, expected: &Expected, stored: Vec<u8>) -> Result<(), &'static str> {
        match expected.length {
            Some(length) => self.coder.decode(&expected.hash, length, stored).map(drop),
            // Its length is not known, but who has sealed it has hashed it.
            None => self.coder.check_seal(&expected.hash, stored),
        }
    }
}
