//! The open connections, and their limits.
//!
//! ```text
//!   accepted ──► silent ──► speaking ──► over
//!                  │ room is needed for another
//!                  └────────► closed
//! ```
//!
//! Each connection takes a thread and descriptors of the daemon. Every connection counts for its party ([`Party`]), and no
//! party has more than its limit; some places are kept for operators, and workers have an endpoint with a limit of its own. So
//! a party that holds all that it can get holds up only itself. A silent connection is closed when another needs its place: a
//! peer that has something to say does so at once. Connections that were handed to workers are no longer the daemon's.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use thiserror::Error;
use tracing::{debug, warn};

use super::metrics::Metrics;
use super::party::Party;
use super::{lock, sys, wait_timeout};

/// The most connections at the socket for clients.
const MOST: usize = 1024;
/// The places of these that are kept for operators.
const KEPT: usize = 64;
/// The most connections at the workers' endpoint. After a restart of the daemon all workers connect, and those that find no
/// place connect again.
const MOST_WORKERS: usize = 256;
/// The most connections of one worker: one, and one whose end the daemon has not noticed yet.
const OF_WORKER: usize = 2;
/// How often the log says that there are too many.
const SAY: Duration = Duration::from_secs(1);

/// The open connections.
pub(crate) struct Connections {
    /// The most connections of one party at a time.
    limit: usize,
    open: Mutex<BTreeMap<u64, Connection>>,
    next: AtomicU64,
    /// When a refusal was last logged, and the number of refusals since.
    refused: Mutex<(Option<Instant>, u64)>,
    /// The connections that must be ended in order: dumps and restores.
    sessions: Mutex<HashMap<u64, UnixStream>>,
    ended: Condvar,
    metrics: Arc<Metrics>,
}

struct Connection {
    party: Party,
    /// The connection, as long as the peer has said nothing.
    silent: Option<UnixStream>,
}

/// Why there is no place for one more.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum NoPlace {
    #[error("{party} has {most} connections, and may have no more at a time (limits.connections)")]
    OfParty { party: Party, most: usize },
    #[error("there are {most} connections of all users and containers, and there may be no more at a time")]
    OfAll { most: usize },
}

impl Connections {
    /// No connections yet, with a limit for each user and container.
    pub(crate) fn new(limit: usize, metrics: Arc<Metrics>) -> Self {
        Self {
            limit,
            open: Mutex::default(),
            next: AtomicU64::new(0),
            refused: Mutex::default(),
            sessions: Mutex::default(),
            ended: Condvar::new(),
            metrics,
        }
    }

    /// The number of connections of each kind of party.
    pub(crate) fn counts(&self) -> [(&'static str, usize); 4] {
        let open = lock(&self.open);
        let count = |is: fn(&Party) -> bool| open.values().filter(|it| is(&it.party)).count();
        [
            ("operator", count(|it| matches!(it, Party::Operator))),
            ("user", count(|it| matches!(it, Party::User(_)))),
            ("container", count(|it| matches!(it, Party::Container(_)))),
            ("worker", count(|it| matches!(it, Party::Worker(_)))),
        ]
    }

    /// Adds a connection, which is silent as yet; it ends when the result is dropped. If there are too many already, the one
    /// among those that count that has been silent longest is closed.
    pub(crate) fn open(self: &Arc<Self>, party: Party, stream: UnixStream) -> Result<Place, NoPlace> {
        let mut open = lock(&self.open);
        let is_ordinary = |it: &Party| matches!(it, Party::User(_) | Party::Container(_));
        let is_worker = |it: &Party| matches!(it, Party::Worker(_));
        let own = |it: &Party| *it == party;
        let of_party = |most| NoPlace::OfParty { party, most };
        match party {
            Party::Operator => {}
            Party::Worker(_) => {
                make_place(&mut open, OF_WORKER, own).map_err(of_party)?;
                make_place(&mut open, MOST_WORKERS, is_worker).map_err(|most| NoPlace::OfAll { most })?;
            }
            Party::User(_) | Party::Container(_) => {
                make_place(&mut open, self.limit, own).map_err(of_party)?;
                make_place(&mut open, MOST - KEPT, is_ordinary).map_err(|most| NoPlace::OfAll { most })?;
            }
        }
        if !is_worker(&party) {
            make_place(&mut open, MOST, |it| !is_worker(it)).map_err(|most| NoPlace::OfAll { most })?;
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        open.insert(number, Connection { party, silent: Some(stream) });
        self.metrics.connection();
        Ok(Place { connections: Arc::clone(self), number })
    }

    /// Logs a refusal, at most once in a while: a peer that connects again and again must not fill the log.
    pub(crate) fn say_refused(&self, why: &NoPlace) {
        self.metrics.connection_refused();
        let mut refused = lock(&self.refused);
        refused.1 += 1;
        if refused.0.is_none_or(|it| it.elapsed() >= SAY) {
            warn!(refused = refused.1, "closing a connection that has just come: {why}");
            *refused = (Some(Instant::now()), 0);
        }
    }

    /// Closes the connection that has been silent longest, of any party. `false` if there is none.
    pub(crate) fn close_a_silent_one(&self) -> bool {
        close_silent(&mut lock(&self.open), |_| true)
    }

    /// Keeps a session's connection until the result is dropped.
    pub(crate) fn session<'a>(&'a self, stream: &UnixStream) -> std::io::Result<SessionGuard<'a>> {
        let copy = stream.try_clone()?;
        let number = sys::random()?;
        lock(&self.sessions).insert(number, copy);
        Ok(SessionGuard { connections: self, number })
    }

    /// Closes all sessions and waits until they have cleaned up.
    pub(crate) fn end_all(&self, grace: Duration) {
        let deadline = Instant::now() + grace;
        let mut sessions = lock(&self.sessions);
        for stream in sessions.values() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        while !sessions.is_empty() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                warn!("{} dumps or restores do not end", sessions.len());
                return;
            };
            sessions = wait_timeout(&self.ended, sessions, left);
        }
    }
}

/// Makes place, so that fewer than `most` of the connections that count remain. An error is the limit.
fn make_place(open: &mut BTreeMap<u64, Connection>, most: usize, counts: impl Fn(&Party) -> bool) -> Result<(), usize> {
    let count = open.values().filter(|it| counts(&it.party)).count();
    if count < most || close_silent(open, counts) { Ok(()) } else { Err(most) }
}

fn close_silent(open: &mut BTreeMap<u64, Connection>, counts: impl Fn(&Party) -> bool) -> bool {
    // The connections are in the order in which they came.
    let oldest = open.iter().find(|(_, it)| it.silent.is_some() && counts(&it.party)).map(|(number, _)| *number);
    let Some(closed) = oldest.and_then(|number| open.remove(&number)) else { return false };
    if let Some(Err(error)) = closed.silent.map(|it| it.shutdown(std::net::Shutdown::Both)) {
        debug!(%error, "its other end has closed it");
    }
    true
}

/// The place of one connection.
pub(crate) struct Place {
    connections: Arc<Connections>,
    number: u64,
}

impl Place {
    /// The peer has said what it wants, so its connection is not closed for others any more.
    pub(crate) fn speaks(&self) {
        if let Some(connection) = lock(&self.connections.open).get_mut(&self.number) {
            connection.silent = None;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.connections.open).remove(&self.number);
    }
}

/// A session that goes on.
pub(crate) struct SessionGuard<'a> {
    connections: &'a Connections,
    number: u64,
}

impl Drop for SessionGuard<'_> {
    fn drop(&mut self) {
        lock(&self.connections.sessions).remove(&self.number);
        self.connections.ended.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    const LIMIT: usize = 3;

    /// A place, the peer's end, and our end, which the serving thread would hold.
    struct Held(Place, UnixStream, #[expect(dead_code, reason = "keeps our end open")] UnixStream);

    impl Held {
        fn new(connections: &Arc<Connections>, party: Party) -> Result<Self, NoPlace> {
            let (ours, theirs) = UnixStream::pair().unwrap();
            theirs.set_nonblocking(true).unwrap();
            let served = ours.try_clone().unwrap();
            connections.open(party, ours).map(|place| Self(place, theirs, served))
        }

        fn speaking(connections: &Arc<Connections>, party: Party) -> Result<Self, NoPlace> {
            Self::new(connections, party).inspect(|it| it.0.speaks())
        }

        fn is_closed(&self) -> bool {
            (&self.1).read(&mut [0]).is_ok_and(|bytes| bytes == 0)
        }
    }

    #[test]
    fn a_party_at_its_limit_holds_up_nobody_else() {
        let connections = Arc::new(Connections::new(LIMIT, Arc::default()));
        for party in [Party::User(1), Party::Container((1, 1))] {
            let held: Vec<_> = (0..LIMIT).map(|_| Held::speaking(&connections, party).unwrap()).collect();
            assert_eq!(Held::new(&connections, party).err(), Some(NoPlace::OfParty { party, most: LIMIT }));
            Held::new(&connections, Party::User(2)).unwrap();
            Held::new(&connections, Party::Operator).unwrap();
            drop(held);
            Held::new(&connections, party).unwrap();
        }
    }

    #[test]
    fn a_party_at_its_limit_loses_its_own_silent_connections_only() {
        let connections = Arc::new(Connections::new(LIMIT, Arc::default()));
        let other = Held::new(&connections, Party::User(2)).unwrap();
        let mut held: Vec<_> = (0..LIMIT).map(|_| Held::new(&connections, Party::User(1)).unwrap()).collect();
        held[0].0.speaks();
        held.push(Held::new(&connections, Party::User(1)).unwrap());
        let closed: Vec<_> = held.iter().map(Held::is_closed).collect();
        assert_eq!((closed, other.is_closed()), (vec![false, true, false, false], false));
    }

    #[test]
    fn all_users_together_leave_places_for_operators_and_workers() {
        let connections = Arc::new(Connections::new(LIMIT, Arc::default()));
        let mut held = Vec::new();
        let refused = (0..).find_map(|uid| match Held::speaking(&connections, Party::User(uid)) {
            Ok(place) => {
                held.push(place);
                None
            }
            Err(why) => Some(why),
        });
        assert_eq!(refused, Some(NoPlace::OfAll { most: MOST - KEPT }));
        assert_eq!(held.len(), MOST - KEPT);
        held.extend((0..KEPT).map(|_| Held::speaking(&connections, Party::Operator).unwrap()));
        assert!(Held::new(&connections, Party::Operator).is_err());
        // Workers do not take each other's places.
        let mut workers: Vec<_> =
            (0..OF_WORKER).map(|_| Held::speaking(&connections, Party::Worker(1)).unwrap()).collect();
        assert!(Held::new(&connections, Party::Worker(1)).is_err());
        workers.extend((2..).map_while(|uid| Held::speaking(&connections, Party::Worker(uid)).ok()));
        assert_eq!(workers.len(), MOST_WORKERS);
        let counts = [("operator", KEPT), ("user", MOST - KEPT), ("container", 0), ("worker", MOST_WORKERS)];
        assert_eq!(connections.counts(), counts);
    }
}
