//! Removing what no image needs.
//!
//! Uploads may run meanwhile ([`crate::lease`]), and other collections too.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::StoreError;
use crate::directory::TEMPORARY;
use crate::lease::{self, CONDEMNED, boot_time, get_sealed, put_sealed};
use crate::manifest::{self, IMAGES};
use crate::pack::{PACKS, PIECES};
use crate::parallel::each;
use crate::random;
use crate::store::Store;
use crate::transport::{Found, ObjectName};

/// Clocks of stores are no finer than this, in milliseconds.
const GRAIN: u64 = 2000;
/// What was not finished for so long never will be, in milliseconds.
const ABANDONED: u64 = 24 * 60 * 60 * 1000;

/// What a collection did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Collected {
    /// Images in the store.
    pub images: u64,
    /// Uploads that were running.
    pub uploads: u64,
    /// Objects that were removed.
    pub removed_objects: u64,
    /// Their bytes.
    pub removed_bytes: u64,
    /// Objects that no image needs yet, and an upload may.
    pub kept_objects: u64,
    /// Objects that are left.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl Store {
    /// Removes what no image needs, but for what a running upload may. `dry_run`: only says what that would be.
    ///
    /// # Errors
    /// [`StoreError::Damaged`] for a manifest that cannot be read: nothing is removed then, since nobody knows what
    /// it needs. What the transport says.
    pub fn collect(&self, dry_run: bool) -> Result<Collected, StoreError> {
        let transport = &*self.transport;
        // An empty list condemns nothing, and says what time it is there.
        let list = ObjectName::made(format!("{CONDEMNED}/{}", random::hex()?))?;
        let nothing: [ObjectName; 0] = [];
        put_sealed(transport, &self.coder, &list, &nothing)?;
        let result = self.collect_announced(&list, dry_run);
        // An upload need not avoid any more what is still there.
        let ended = transport.delete(&list);
        let collected = result?;
        ended?;
        Ok(collected)
    }

    fn collect_announced(&self, list: &ObjectName, dry_run: bool) -> Result<Collected, StoreError> {
        let transport = &*self.transport;
        let mut live = Live { began: self.time_of(list)?, ..Live::default() };
        let mut objects = transport.list(PIECES)?;
        objects.extend(transport.list(PACKS)?);
        self.add_live(&mut live)?;
        let unneeded: BTreeMap<ObjectName, Found> =
            objects.iter().filter(|it| !live.needs(&it.name)).map(|it| (it.name.clone(), it.clone())).collect();

        let announced = boot_time();
        if !dry_run {
            let names: Vec<_> = unneeded.keys().cloned().collect();
            put_sealed(transport, &self.coder, list, &names)?;
        }
        let mut collected = self.remove_unneeded(list, announced, unneeded, live, dry_run)?;
        collected.objects = objects.len() as u64 - collected.removed_objects;
        let bytes: u64 = objects.iter().map(|it| it.size).sum();
        collected.bytes = bytes.saturating_sub(collected.removed_bytes);
        Ok(collected)
    }

    fn remove_unneeded(
        &self,
        list: &ObjectName,
        announced: u64,
        mut unneeded: BTreeMap<ObjectName, Found>,
        mut live: Live,
        dry_run: bool,
    ) -> Result<Collected, StoreError> {
        let transport = &*self.transport;
        let now = self.time_of(list)?;
        // The order matters: the list is written, then leases are read, then manifests. An upload that ends meanwhile
        // has its manifest before its lease is gone.
        let leases = lease::find(transport, now, self.timing)?;
        let before = unneeded.len();
        if let Some(oldest) = leases.oldest {
            unneeded.retain(|_, it| it.modified + GRAIN < oldest);
        }
        for uses in &leases.uses {
            let names: Option<BTreeSet<ObjectName>> = get_sealed(transport, &self.coder, uses)?;
            names.unwrap_or_default().iter().for_each(|name| drop(unneeded.remove(name)));
        }
        self.add_live(&mut live)?;
        unneeded.retain(|name, _| !live.needs(name));

        let mut collected = Collected {
            images: live.manifests.len() as u64,
            uploads: leases.alive as u64,
            kept_objects: (before - unneeded.len()) as u64,
            ..Collected::default()
        };
        if dry_run {
            collected.removed_objects = unneeded.len() as u64;
            collected.removed_bytes = unneeded.values().map(|it| it.size).sum();
            return Ok(collected);
        }
        let (removed, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        let produce = |give: &mut dyn FnMut(Found) -> bool| {
            unneeded.into_values().all(give);
            Ok(())
        };
        each(self.threads, produce, |found| {
            // Uploads take a list for a dead collection's later than this, and then rely on what is in it.
            if u128::from(boot_time().saturating_sub(announced)) >= self.timing.lifetime.as_millis() {
                return Err(StoreError::refused("there is more to remove than one collection may; collect again"));
            }
            transport.delete(&found.name)?;
            removed.fetch_add(1, Ordering::Relaxed);
            bytes.fetch_add(found.size, Ordering::Relaxed);
            Ok(())
        })?;
        self.tidy(now, &leases.dead)?;
        collected.removed_objects = removed.into_inner();
        collected.removed_bytes = bytes.into_inner();
        Ok(collected)
    }

    /// When an object was written, by the store's clock.
    fn time_of(&self, name: &ObjectName) -> Result<u64, StoreError> {
        let gone = || StoreError::remote("keep", name.as_str(), "it was removed meanwhile");
        Ok(self.transport.head(name)?.ok_or_else(gone)?.modified)
    }

    /// Removes what dead uploads, collections and writers have left.
    fn tidy(&self, now: u64, dead: &[ObjectName]) -> Result<(), StoreError> {
        let transport = &*self.transport;
        dead.iter().try_for_each(|name| transport.delete(name))?;
        let older = |folder, age: u128| -> Result<Vec<ObjectName>, StoreError> {
            let found = transport.list(folder)?.into_iter();
            Ok(found.filter(|it| u128::from(now.saturating_sub(it.modified)) >= age).map(|it| it.name).collect())
        };
        let mut left = older(CONDEMNED, self.timing.dead_after.as_millis())?;
        left.extend(older(TEMPORARY, ABANDONED.into())?);
        left.iter().try_for_each(|name| transport.delete(name))
    }

    /// Reads the manifests that were not read yet.
    fn add_live(&self, live: &mut Live) -> Result<(), StoreError> {
        for found in self.transport.list(IMAGES)? {
            let version = (found.size, found.modified);
            // Written again since it was read, it would have a later time.
            if live.manifests.get(&found.name) == Some(&version) && found.modified + GRAIN < live.began {
                continue;
            }
            // It was removed meanwhile.
            let Some(bytes) = self.transport.get(&found.name, None)? else { continue };
            let (_, body) = manifest::read(&self.coder, &found.name, bytes).map_err(|error| match error {
                StoreError::Damaged { object, what } => {
                    let what = format!(
                        "{what}; nothing is removed, since nobody knows what this image needs (remove it by \
                         `rekindle images rm`, or that object by hand)"
                    );
                    StoreError::Damaged { object, what }
                }
                error => error,
            })?;
            live.objects.extend(body.objects);
            live.manifests.insert(found.name, version);
        }
        Ok(())
    }
}

/// What images need.
#[derive(Default)]
struct Live {
    objects: BTreeSet<ObjectName>,
    /// Manifests that were read, with their sizes and times.
    manifests: BTreeMap<ObjectName, (u64, u64)>,
    /// When the first was read, by the store's clock.
    began: u64,
}

impl Live {
    fn needs(&self, name: &ObjectName) -> bool {
        self.objects.contains(name)
    }
}
