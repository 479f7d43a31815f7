//! The worker's state in an image: messages that later releases read (`proto/state.proto`), and their version.

use protobuf::Message;
use rekindle_images::limits::MAX_OPAQUE;
use rekindle_wire::codec::Malformed;
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

/// Generated from `proto/state.proto`.
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    dead_code,
    clippy::all,
    clippy::pedantic,
    reason = "generated"
)]
mod proto {
    include!(concat!(env!("OUT_DIR"), "/proto/mod.rs"));
}

pub(crate) use proto::state::{
    Access, Cut, DeferredCommand, DeferredCommands, DeferredProgress, Device, EventCount, EventPage, FormerAttribute,
    Graph, Graphs, KernelHeap, ManagedMemory, ManagedVariable, Mapped, Mapping, Named, Piece, PinnedMemory, Pool,
    RecordedEvent, Reservation, Segment, SharedEvent, SharedEvents, SharedPiece, SharedRecord, Sharing, State,
    WaitingForRoom,
};

/// The version in which this worker writes [`rekindle_images::Client::worker_state`], the content of the worker's blobs,
/// and the object log.
pub(crate) const STATE_VERSION: u32 = 19;

/// The oldest version that this worker reads. Images stay readable, so this number never rises.
pub(crate) const OLDEST_STATE: u32 = 9;

/// The [`STATE_VERSION`] of the release that this process pretends to be.
pub(crate) fn version() -> u32 {
    STATE_VERSION + rekindle_wire::version::ahead()
}

/// Why state cannot be written or read.
#[derive(Debug, Error)]
pub enum StateError {
    /// Another release wrote the state, and this one does not read its version.
    #[error(
        "the image's client has state of version {found}, and this rekindled {} reads {OLDEST_STATE} to {newest}: restore it with {with}",
        env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// The state's version.
        found: u32,
        /// The newest version that this release reads.
        newest: u32,
        /// The release to restore with.
        with: &'static str,
    },
    /// The state cannot be encoded.
    #[error("the state cannot be written: {0}")]
    Write(protobuf::Error),
    /// The state takes this many bytes, which is more than an image holds.
    #[error(
        "it cannot be checkpointed now: its state takes {0} bytes besides memory, and an image holds {MAX_OPAQUE}; it can be \
        when it has fewer recorded events, exported allocations or blocks of pinned and pooled memory"
    )]
    TooLong(u64),
}

impl Failing for StateError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Version { .. } => FailureKind::Version,
            Self::TooLong(_) => FailureKind::Refused,
            Self::Write(_) => FailureKind::Internal,
        }
    }
}

/// Whether this worker can read state of that version.
pub fn check(found: u32) -> Result<(), StateError> {
    let newest = version();
    if (OLDEST_STATE..=newest).contains(&found) {
        return Ok(());
    }
    let with = if found > newest { "a newer one" } else { "the one that made it" };
    Err(StateError::Version { found, newest, with })
}

/// Whether a rehearsal must prove that a client's log can be replayed, by its [`rekindle_images::Client::worker_state`]: the log was
/// cut, code lies where more than the log may have decided, or kernels may have called `malloc`.
pub fn needs_rehearsal(worker_state: &[u8]) -> bool {
    parse::<State>(worker_state).is_ok_and(|state| state.cut.is_some() || state.beyond_reserve)
}

/// A message as bytes.
pub(crate) fn bytes(message: &impl Message) -> Result<Vec<u8>, StateError> {
    message.write_to_bytes().map_err(StateError::Write)
}

/// [`rekindle_images::Client::worker_state`]: state that is too long for an image is an error now, before memory is copied.
pub(crate) fn opaque(state: &State) -> Result<Vec<u8>, StateError> {
    let bytes = bytes(state)?;
    if bytes.len() as u64 > MAX_OPAQUE { Err(StateError::TooLong(bytes.len() as u64)) } else { Ok(bytes) }
}

/// The client's own mappings. An image has a blob of them if there are any; older images have them in the worker's state.
pub(crate) fn mapped(state: &State, blob: Option<&[u8]>) -> Result<Mapped, Malformed> {
    let State { reservations, pieces, exported_pieces, mappings, .. } = state.clone();
    let of_state = Mapped { reservations, pieces, exported_pieces, mappings, ..Mapped::default() };
    match blob {
        None => Ok(of_state),
        Some(bytes) if of_state == Mapped::default() => parse(bytes),
        Some(_) => Err(Malformed("memory of the client's own mapping in two places")),
    }
}

/// Parses a message of an image. Its bytes are untrusted.
pub(crate) fn parse<M: Message>(bytes: &[u8]) -> Result<M, Malformed> {
    M::parse_from_bytes(bytes).map_err(|_| Malformed("no message of the worker's state"))
}

/// A name, and the object that it names.
pub(crate) fn named(name: &[u8; 16], of: u64) -> Named {
    Named { name: name.to_vec(), of, ..Named::default() }
}

/// A name out of a message.
pub(crate) fn name(bytes: &[u8]) -> Result<[u8; 16], Malformed> {
    bytes.try_into().map_err(|_| Malformed("a name that is not as long as names are"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn state_of_an_unknown_version_is_refused_with_what_to_do() {
        assert!((OLDEST_STATE..=STATE_VERSION).all(|version| check(version).is_ok()));
        assert!(check(STATE_VERSION + 1).unwrap_err().to_string().contains("restore it with a newer one"));
        assert!(check(OLDEST_STATE - 1).unwrap_err().to_string().contains("restore it with the one that made it"));
    }

    #[test]
    fn state_that_is_too_long_for_an_image_is_refused_when_it_is_written() {
        let event = RecordedEvent { handle: 1 << 60, ..RecordedEvent::default() };
        let mut state = State { recorded: vec![event; 400_000], ..State::default() };
        let error = opaque(&state).unwrap_err();
        assert!(matches!(error, StateError::TooLong(bytes) if bytes > MAX_OPAQUE), "{error}");
        assert_eq!(error.kind(), FailureKind::Refused);
        state.recorded.truncate(100_000);
        assert!(opaque(&state).is_ok());
    }

    #[test]
    fn what_is_mapped_is_read_out_of_the_state_of_earlier_images_and_not_out_of_two_places() {
        let reservations = vec![Reservation { address: 4096, size: 1, ..Reservation::default() }];
        let earlier = State { reservations: reservations.clone(), ..State::default() };
        assert_eq!(mapped(&earlier, None).unwrap().reservations, reservations);
        let blob = bytes(&Mapped { reservations: reservations.clone(), ..Mapped::default() }).unwrap();
        assert_eq!(mapped(&State::default(), Some(&blob)).unwrap().reservations, reservations);
        assert!(mapped(&earlier, Some(&blob)).is_err());
        assert_eq!(mapped(&State::default(), None).unwrap(), Mapped::default());
    }

    #[test]
    fn what_a_later_release_adds_is_read_past() {
        let state = State { current_pools: vec![3], ..State::default() };
        let mut written = bytes(&state).unwrap();
        // Field 900, a length, and its bytes.
        written.extend([0xa2, 0x38, 3, 1, 2, 3]);
        assert_eq!(parse::<State>(&written).unwrap().current_pools, [3]);
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_an_error_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse::<State>(&bytes);
            let _ = parse::<DeferredCommands>(&bytes);
            let _ = parse::<Graphs>(&bytes);
            let _ = mapped(&State::default(), Some(&bytes));
        }
    }
}
