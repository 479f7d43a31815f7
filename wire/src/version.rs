//! The versions of what the parts say to each other, and who serves whom.
//!
//! There are several, because parts of several releases meet: a restored process maps the interposer that it was saved
//! with, workers run on when their daemon is replaced, and images outlive all of them. `docs/compatibility.md` says which
//! version covers what, and what to do when an encoding changes.

use serde::{Deserialize, Serialize};
use thiserror::Error;

include!(concat!(env!("OUT_DIR"), "/encodings.rs"));

/// The version of what an interposer and its worker say to each other: the layout of the shared memory, the ring, the
/// commands and the answers to them.
pub const CLIENT_VERSION: u32 = 14;

/// The oldest interposer that workers serve. Images hold processes with such interposers, so this number never rises.
pub const OLDEST_CLIENT: u32 = 9;

/// The client version from which on an interposer gives the process pages for managed variables.
pub const VARIABLES: u32 = 14;

/// The version of the messages that daemon, workers, plugin, hook, command line and the libraries in applications exchange on
/// sockets.
pub const CONTROL_VERSION: u32 = 21;

/// The control version from which on a plugin can let threads of native processes run.
pub const NATIVES: u32 = 16;

/// The control version from which on a plugin can keep tasks that it leaves running stopped until their image is durable.
pub const STANDSTILL: u32 = 18;

/// The oldest control version that this build still speaks. Images hold processes whose libraries speak it.
pub const OLDEST_CONTROL: u32 = 9;

/// Whether this build and a peer understand each other, who speaks `newest` and whatever is not older than `oldest`.
pub fn is_spoken(oldest: u32, newest: u32) -> bool {
    newest >= OLDEST_CONTROL && oldest <= control_version()
}

/// With this variable a build with debug assertions pretends to be so many releases ahead of itself: all its versions are
/// higher, and each message that it sends has a field that nobody knows. That is how tests have parts of several releases.
#[cfg(debug_assertions)]
pub const AHEAD: &str = "REKINDLE_RELEASES_AHEAD";

/// How many releases ahead of itself this process pretends to be.
#[cfg(debug_assertions)]
pub fn ahead() -> u32 {
    std::env::var(AHEAD).ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// How many releases ahead of itself this process pretends to be.
#[cfg(not(debug_assertions))]
pub const fn ahead() -> u32 {
    0
}

/// [`CLIENT_VERSION`], of what this process pretends to be.
pub fn client_version() -> u32 {
    CLIENT_VERSION + ahead()
}

/// [`CONTROL_VERSION`], of what this process pretends to be.
pub fn control_version() -> u32 {
    CONTROL_VERSION + ahead()
}

/// Has every structure in a message say more than this release knows.
#[cfg(debug_assertions)]
pub(crate) fn grown(message: serde_json::Value) -> serde_json::Value {
    use serde_json::Value;
    match message {
        Value::Array(list) => Value::Array(list.into_iter().map(grown).collect()),
        Value::Object(fields) => {
            // A variant's name is no field.
            let is_variant =
                fields.len() == 1 && fields.keys().all(|name| name.starts_with(|c: char| c.is_uppercase()));
            let mut fields: serde_json::Map<_, _> = fields.into_iter().map(|(name, it)| (name, grown(it))).collect();
            if !is_variant {
                fields.insert("unheard_of".to_owned(), serde_json::json!([1, { "of": 2 }]));
            }
            Value::Object(fields)
        }
        other => other,
    }
}

/// The meaning of a client's commands: the version that its interposer was built for, and the form that the interposer
/// expects of each driver call.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Dialect {
    /// [`CLIENT_VERSION`] of the interposer.
    pub version: u32,
    /// For each line of the interposer's driver table the encoding of its call, 0 for one that never comes. The lines' places
    /// are the call numbers.
    pub calls: Vec<u32>,
}

/// Why a worker cannot serve a client.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum NotServed {
    /// The client may send what this build has never heard of.
    #[error("it speaks client version {found}, and this rekindled {} serves {OLDEST_CLIENT} to {}: install a newer Rekindle", env!("CARGO_PKG_VERSION"), client_version())]
    Newer {
        /// The version that the client speaks.
        found: u32,
    },
    /// The client is older than the oldest release that is still served.
    #[error("it speaks client version {found}, and this rekindled {} serves {OLDEST_CLIENT} to {}: use the version of Rekindle that it was built for", env!("CARGO_PKG_VERSION"), client_version())]
    Older {
        /// The version that the client speaks.
        found: u32,
    },
    /// A call number stands for another call here, or for the same with other parameters.
    #[error(
        "its driver call number {number} is not {name} as this rekindled {} knows it: use one build of Rekindle for all parts",
        env!("CARGO_PKG_VERSION")
    )]
    Call {
        /// The number.
        number: usize,
        /// The call that has this number here.
        name: String,
    },
}

impl Dialect {
    /// This build's own.
    pub fn own() -> Self {
        Self { version: client_version(), calls: ENCODINGS.to_vec() }
    }

    /// As an image keeps it: the version, and what [`Dialect::call_bytes`] gave.
    pub fn from_parts(version: u32, calls: &[u8]) -> Self {
        let word = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
        Self { version, calls: calls.chunks(4).map(word).collect() }
    }

    /// The calls' encodings as bytes, little endian.
    pub fn call_bytes(&self) -> Vec<u8> {
        self.calls.iter().flat_map(|encoding| encoding.to_le_bytes()).collect()
    }

    /// Whether a worker of this build understands all that such a client may send.
    ///
    /// # Errors
    /// Where it does not, and what to do.
    pub fn is_served(&self) -> Result<(), NotServed> {
        let found = self.version;
        if found > client_version() {
            return Err(NotServed::Newer { found });
        }
        if found < OLDEST_CLIENT {
            return Err(NotServed::Older { found });
        }
        let known = ENCODINGS.iter().copied().chain(std::iter::repeat(0));
        // A line that never comes from this client may be anything here.
        let mut calls = self.calls.iter().copied().zip(known).enumerate();
        match calls.find(|(_, (theirs, ours))| *theirs != 0 && theirs != ours) {
            None => Ok(()),
            Some((number, _)) => Err(NotServed::Call { number, name: name_of(number) }),
        }
    }
}

fn name_of(number: usize) -> String {
    let table = rekindle_cuda_abi::table::parse(rekindle_cuda_abi::table::TEXT).unwrap_or_default();
    table.get(number).map_or_else(|| "a call".to_owned(), |f| f.symbol.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn travelling(dialect: &Dialect) -> usize {
        dialect.calls.iter().position(|encoding| *encoding != 0).unwrap()
    }

    #[test]
    fn a_client_whose_calls_are_some_of_ours_is_served() {
        let own = Dialect::own();
        assert_eq!(own.is_served(), Ok(()));
        // An older table ends earlier, and does not send all of what travels now.
        let mut subset = own.clone();
        subset.calls.truncate(600);
        let first = travelling(&subset);
        subset.calls[first] = 0;
        assert_eq!(subset.is_served(), Ok(()));
    }

    #[test]
    fn a_client_that_sends_what_we_read_otherwise_is_refused_by_name() {
        let mut other = Dialect::own();
        let first = travelling(&other);
        other.calls[first] ^= 1;
        let refused = other.is_served().unwrap_err();
        assert_eq!(refused, NotServed::Call { number: first, name: name_of(first) });
        assert!(refused.to_string().contains("cu"), "{refused}");
        let mut longer = Dialect::own();
        longer.calls.push(7);
        assert!(matches!(longer.is_served(), Err(NotServed::Call { .. })));
        let newer = Dialect { version: CLIENT_VERSION + 1, ..Dialect::own() };
        assert_eq!(newer.is_served(), Err(NotServed::Newer { found: CLIENT_VERSION + 1 }));
        assert_eq!(Dialect::default().is_served(), Err(NotServed::Older { found: 0 }));
    }

    #[test]
    fn a_dialect_is_what_it_was_after_its_time_in_an_image() {
        let own = Dialect::own();
        assert_eq!(Dialect::from_parts(own.version, &own.call_bytes()), own);
    }
}
