//! What an upload says of itself, so that garbage collection beside it removes nothing that it needs.
//!
//! ```text
//!   leases/ID.began    written once                   gc keeps what was written after it
//!   leases/ID.live     written again and again        too old: the upload is dead, and its lease counts for nothing
//!   leases/ID.uses     the objects that it needs      gc keeps them
//!   gc/ID              what a collection will remove  an upload does not rely on them
//! ```
//!
//! Nobody waits for anybody. An upload writes `uses` and then reads what is in `gc/`; a collection writes into `gc/`
//! and then reads `uses`. So of the two at least one sees the other: the collection keeps the object, or the upload
//! stores it again, under another name. No name is used twice.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::StoreError;
use crate::parallel::lock;
use crate::piece::Coder;
use crate::random;
use crate::transport::{Found, ObjectName, Transport};

/// The folder of leases.
pub(crate) const LEASES: &str = "leases";
/// The folder in which a collection says what it will remove.
pub(crate) const CONDEMNED: &str = "gc";

/// How long leases last.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// For so long after its renewal an upload relies on its lease, and a collection on what it has announced.
    pub lifetime: Duration,
    /// Others take either for dead only after so long, by the store's clock.
    pub dead_after: Duration,
    /// An upload renews its lease so often.
    pub renewal: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        Self { lifetime: minutes(10), dead_after: minutes(20), renewal: minutes(1) }
    }
}

/// Time that goes on while the machine sleeps, in milliseconds.
pub(crate) fn boot_time() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Writes a sealed list.
pub(crate) fn put_sealed(
    transport: &dyn Transport,
    coder: &Coder,
    name: &ObjectName,
    content: &impl Serialize,
) -> Result<(), StoreError> {
    let content = serde_json::to_vec(content).map_err(|error| StoreError::refused(error.to_string()))?;
    let compressed = zstd::bulk::compress(&content, 1).map_err(|error| StoreError::refused(error.to_string()))?;
    let length = (content.len() as u64).to_le_bytes();
    let sealed = coder.sealer().seal(&[b"list", name.as_str().as_bytes()], &[&length, &compressed])?;
    transport.put(name, &sealed)
}

/// Reads a sealed list; `None` if it is not there.
pub(crate) fn get_sealed<T: DeserializeOwned>(
    transport: &dyn Transport,
    coder: &Coder,
    name: &ObjectName,
) -> Result<Option<T>, StoreError> {
    let bad = |what: &str| StoreError::damaged(name.as_str(), what);
    let Some(sealed) = transport.get(name, None)? else { return Ok(None) };
    let opened = coder.sealer().open(&[b"list", name.as_str().as_bytes()], sealed);
    let opened = opened.map_err(|_| bad("it was changed, or made with another key"))?;
    let (length, compressed) = opened.split_first_chunk().ok_or_else(|| bad("it is too short"))?;
    let length = u64::from_le_bytes(*length).min(1 << 30);
    let content = zstd::bulk::decompress(compressed, length as usize).map_err(|_| bad("it cannot be decompressed"))?;
    serde_json::from_slice(&content).map(Some).map_err(|_| bad("it cannot be read"))
}

/// The lease of an upload that is running. When it is dropped, the lease ends, unless nothing reaches the store any
/// more.
pub(crate) struct Lease {
    shared: Arc<Shared>,
    timing: Timing,
    renewing: Option<JoinHandle<()>>,
}

struct Shared {
    transport: Arc<dyn Transport>,
    names: Names,
    /// When it was renewed, by [`boot_time`].
    renewed: AtomicU64,
    ended: Mutex<bool>,
    end: Condvar,
    has_uses: AtomicBool,
}

struct Names {
    began: ObjectName,
    live: ObjectName,
    uses: ObjectName,
}

impl Lease {
    pub(crate) fn begin(transport: &Arc<dyn Transport>, timing: Timing) -> Result<Self, StoreError> {
        let id = random::hex()?;
        let name = |what| ObjectName::made(format!("{LEASES}/{id}.{what}"));
        let names = Names { began: name("began")?, live: name("live")?, uses: name("uses")? };
        let at = boot_time();
        transport.put(&names.live, b"")?;
        transport.put(&names.began, b"")?;
        let shared = Arc::new(Shared {
            transport: Arc::clone(transport),
            names,
            renewed: AtomicU64::new(at),
            ended: Mutex::new(false),
            end: Condvar::new(),
            has_uses: AtomicBool::new(false),
        });
        let renewing = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.renew(timing.renewal))
        };
        Ok(Self { shared, timing, renewing: Some(renewing) })
    }

    /// Says which objects the upload needs.
    pub(crate) fn uses(&self, coder: &Coder, objects: &BTreeSet<ObjectName>) -> Result<Found, StoreError> {
        let Shared { transport, names, has_uses, .. } = &*self.shared;
        has_uses.store(true, Ordering::Relaxed);
        put_sealed(&**transport, coder, &names.uses, objects)?;
        let written = transport.head(&names.uses)?;
        written.ok_or_else(|| StoreError::remote("keep", names.uses.as_str(), "it is gone right after it was written"))
    }

    /// Whether it has been renewed so recently that nobody takes it for dead.
    pub(crate) fn is_valid(&self) -> bool {
        let age = boot_time().saturating_sub(self.shared.renewed.load(Ordering::Acquire));
        u128::from(age) < self.timing.lifetime.as_millis()
    }

    /// Renews it now.
    pub(crate) fn renew(&self) -> Result<(), StoreError> {
        self.shared.renew_once()
    }
}

impl Shared {
    fn renew_once(&self) -> Result<(), StoreError> {
        // When it was asked for, not when it was done: the store's clock says something in between.
        let at = boot_time();
        self.transport.put(&self.names.live, b"")?;
        self.renewed.store(at, Ordering::Release);
        Ok(())
    }

    fn renew(&self, pause: Duration) {
        let mut ended = lock(&self.ended);
        while !*ended {
            let (guard, _) = self.end.wait_timeout(ended, pause).unwrap_or_else(std::sync::PoisonError::into_inner);
            ended = guard;
            if !*ended {
                drop(ended);
                // The upload looks at the time before it relies on the lease.
                let _ = self.renew_once();
                ended = lock(&self.ended);
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        *lock(&self.shared.ended) = true;
        self.shared.end.notify_all();
        if let Some(thread) = self.renewing.take() {
            let _ = thread.join();
        }
        let Shared { transport, names, has_uses, .. } = &*self.shared;
        // What cannot be removed expires. `live` last: without it, the others count for nothing.
        if has_uses.load(Ordering::Relaxed) {
            let _ = transport.delete(&names.uses);
        }
        let _ = transport.delete(&names.began);
        let _ = transport.delete(&names.live);
    }
}

/// The leases that a store has.
#[derive(Default)]
pub(crate) struct Leases {
    /// Lists of those that are alive.
    pub(crate) uses: Vec<ObjectName>,
    /// When the oldest of these began, by the store's clock.
    pub(crate) oldest: Option<u64>,
    /// What dead ones have left.
    pub(crate) dead: Vec<ObjectName>,
    /// The number of those that are alive.
    pub(crate) alive: usize,
}

/// Finds the leases of a store, at this time by its clock.
pub(crate) fn find(transport: &dyn Transport, now: u64, timing: Timing) -> Result<Leases, StoreError> {
    let found = transport.list(LEASES)?;
    let id = |it: &Found| it.name.last().split_once('.').map(|(id, what)| (id.to_owned(), what.to_owned()));
    let is_recent = |it: &&Found| u128::from(now.saturating_sub(it.modified)) < timing.dead_after.as_millis();
    // All of a lease's objects count: between the first and the second there is no `live`, or no `began`.
    let alive: BTreeSet<_> = found.iter().filter(is_recent).filter_map(|it| Some(id(it)?.0)).collect();
    let mut leases = Leases { alive: alive.len(), ..Leases::default() };
    for it in &found {
        match id(it) {
            Some((id, what)) if alive.contains(&id) => {
                leases.oldest = Some(leases.oldest.map_or(it.modified, |oldest: u64| oldest.min(it.modified)));
                if what == "uses" {
                    leases.uses.push(it.name.clone());
                }
            }
            _ => leases.dead.push(it.name.clone()),
        }
    }
    Ok(leases)
}
