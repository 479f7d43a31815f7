//! What the two hosts of a migration say to each other.
//!
//! ```text
//!   source                                             target
//!   Begin ────────────────────────────────────────────► compares the hosts
//!         ◄──────────────────────────────── Ready, or Failed
//!   Directory ─────────────────────────────────────────► makes the files of an image, without content
//!         ◄──────────────────────────────────────── Made           (once for each round, for podman's archive, and for the processes'
//!                                                                   own memory: Failed if there is no room for that; for the last
//!                                                                   dump once, or first for pages and then for its other files)
//!   content on the streams ────────────────────────────► writes it, and says so there
//!   Preload ──────────────────────────────────────────► begins to load a round
//!         ◄──────────────────────────────────────── Ready
//!   Restore ──────────────────────────────────────────► restores, and holds the processes
//!         ◄──────────────────────────────────────── Held
//!   Own ──────────────────────────────────────────────► the processes run        Abandon: they are killed
//!         ◄───────────────────────────────────── Running           ◄───────── Abandoned
//! ```
//!
//! Messages are a length (four bytes, little endian) and JSON. Content has streams of its own (`stream.rs`).

use std::io::{self, Read, Write};
use std::path::PathBuf;

use rekindle_wire::control::{FailureKind, GpuInfo};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::network::address::Address;

/// The version of these messages and of the streams. Both hosts must have the same.
pub(super) const VERSION: u32 = 9;
/// The directory of podman's archive of a container among a migration's, and the archive's name there.
pub(super) const ARCHIVE: &str = "archive";
/// The directory, among a migration's, of memory that was sent while its processes ran: what CRIU calls the parent of the last image. No
/// image has this name.
pub(super) const MEMORY: &str = "memory";
/// The longest message: the list of the files of an image.
const LONGEST: usize = 64 << 20;

/// From the source to the target.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToTarget {
    /// A migration begins.
    Begin(Begin),
    /// The content of these files will follow on the streams.
    Directory(Directory),
    /// Load the GPU memory of this directory meanwhile, which has a round. Answered at once.
    Preload {
        /// Its name.
        name: String,
    },
    /// Restore the last directory, and hold the processes.
    Restore(Restore),
    /// The source has decided that the processes go on at the target.
    Own,
    /// The source has decided that they do not.
    Abandon,
    /// On a connection of its own: what the source has decided about a migration whose connection is lost.
    Settle(Settle),
    /// On a connection of its own: do the processes of this migration run there, or have they? That changes nothing.
    Runs {
        /// The migration.
        migration: String,
    },
    /// On a connection of its own: the processes have been let run there, have ended, and are not to be restored once more.
    Ended {
        /// The migration.
        migration: String,
    },
    /// On a connection of its own: content for a migration's directories follows, in the form of `stream.rs`.
    Stream {
        /// The migration.
        migration: String,
    },
}

/// The first message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Begin {
    /// [`VERSION`].
    pub(super) version: u32,
    /// The migration's name.
    pub(super) migration: String,
    /// What moves.
    pub(super) what: What,
}

/// What moves, for the comparison of the two hosts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct What {
    /// The source's name.
    pub(super) host: String,
    /// `cuDriverGetVersion`.
    pub(super) driver_version: Option<i32>,
    /// The GPUs that the processes use, and bytes of memory on each.
    pub(super) gpus: Vec<(GpuInfo, u64)>,
    /// Bytes of GPU memory.
    pub(super) memory: u64,
    /// Whether the driver may be another.
    pub(super) other_driver: bool,
    /// Whether the GPUs may be of another kind.
    pub(super) other_gpu: bool,
    /// What podman must have, if a container moves.
    #[serde(default)]
    pub(super) container: Option<Box<Needs>>,
    /// The addresses that move.
    #[serde(default)]
    pub(super) addresses: Vec<Address>,
}

/// What the other host's podman must have for a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Needs {
    /// The container's id, which it keeps.
    pub(super) id: String,
    /// Its name, which it keeps.
    pub(super) name: String,
    /// podman's version.
    pub(super) podman: String,
    /// The name of its image.
    pub(super) image: String,
    /// The id of its image.
    pub(super) image_id: String,
    /// The names of its volumes.
    pub(super) volumes: Vec<String>,
    /// The files and directories of the host that it has.
    pub(super) paths: Vec<PathBuf>,
    /// The names of its networks.
    pub(super) networks: Vec<String>,
}

/// The files of an image, or some of them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Directory {
    /// Its name among the migration's directories.
    pub(super) name: String,
    /// Its files, and their sizes.
    pub(super) files: Vec<(String, u64)>,
    /// Its links, and where they lead.
    pub(super) links: Vec<(String, String)>,
}

/// What the source has decided about a migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Settle {
    /// The migration.
    pub(super) migration: String,
    /// Whether the processes go on at the target.
    pub(super) own: bool,
    /// Whether they may be let run there once more, since somebody knows that they have not run.
    #[serde(default)]
    pub(super) again: bool,
    /// The id of the container, if it is one and the source knows it still. The target forgets it with its own start.
    #[serde(default)]
    pub(super) container: Option<String>,
}

/// How the processes are restored.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Restore {
    /// The directory.
    pub(super) name: String,
    /// Options for `criu restore`, or for podman.
    pub(super) options: Vec<String>,
    /// The id of the container, if it is one.
    #[serde(default)]
    pub(super) container: Option<String>,
    /// The container's restart policy, if podman's archive has `no` in its place: as long as it waits, nobody is to start it.
    #[serde(default)]
    pub(super) restart: Option<String>,
    /// The addresses that move.
    #[serde(default)]
    pub(super) addresses: Vec<Address>,
    /// Whether the driver may be another.
    pub(super) other_driver: bool,
    /// Whether the GPUs may be of another kind.
    pub(super) other_gpu: bool,
    /// Whether the processes run before they have all pages of their own.
    #[serde(default)]
    pub(super) lazy: bool,
}

impl Restore {
    /// Whether it is this container's.
    pub(super) fn has_container(&self, id: &str) -> bool {
        self.container.as_deref() == Some(id)
    }

    /// Whether one of these addresses moves with the processes.
    pub(super) fn has_one_of(&self, addresses: &[Address]) -> bool {
        self.addresses.iter().any(|it| addresses.iter().any(|other| other.ip == it.ip))
    }
}

/// From the target to the source.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(super) enum ToSource {
    /// To `Begin`, `Preload` and `Stream`: go on.
    Ready,
    /// To `Directory`: its files are made, all of zeros.
    Made,
    /// To `Restore`: the processes are complete, and wait.
    Held,
    /// To `Own`, `Runs` and `Ended`: the processes run, or have run to their end.
    Running,
    /// To `Abandon`: nothing is left of the migration.
    Abandoned,
    /// To anything.
    Failed {
        /// For programs.
        kind: FailureKind,
        /// For people: a whole sentence that names the target's part in it.
        reason: String,
        /// Whether the target has all that is needed to try the restore again: the images, and the right to.
        kept: bool,
        /// What to do at the source.
        #[serde(default)]
        remedy: Remedy,
    },
}

/// What to do at the source about processes that are the target's, and do not run there.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub(super) enum Remedy {
    /// Nothing helps, or the reason says what does.
    #[default]
    None,
    /// To settle the migration once more.
    Settle,
    /// The same with `--again`, if they have done nothing.
    Again,
    /// To have a container go on at the source (`--keep`), if it has not run: the target has lost it.
    Keep,
}

/// Why the other host cannot be heard.
#[derive(Debug, Error)]
pub(crate) enum TalkError {
    #[error("the connection to the other host has closed")]
    Closed,
    #[error("the connection to the other host has failed: {0}")]
    Io(#[from] io::Error),
    #[error(
        "the other host says something that this version does not understand ({0}): install one version of Rekindle on both"
    )]
    Json(#[from] serde_json::Error),
    #[error("the other host says something of {0} bytes, more than any message has: is its `rekindle` one?")]
    TooLong(usize),
}

/// Says something.
pub(crate) fn send(to: &mut impl Write, message: &impl Serialize) -> Result<(), TalkError> {
    let json = serde_json::to_vec(message)?;
    let length = u32::try_from(json.len()).map_err(|_| TalkError::TooLong(json.len()))?;
    to.write_all(&length.to_le_bytes())?;
    to.write_all(&json)?;
    Ok(to.flush()?)
}

/// Waits for a message.
pub(crate) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<T, TalkError> {
    let mut length = [0; 4];
    from.read_exact(&mut length).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => TalkError::Closed,
        _ => error.into(),
    })?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(TalkError::TooLong(length));
    }
    let mut json = Vec::new();
    from.take(length as u64).read_to_end(&mut json)?;
    if json.len() < length {
        return Err(TalkError::Closed);
    }
    Ok(serde_json::from_slice(&json)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard_and_a_connection_that_ends_early_is_closed() {
        let mut said = Vec::new();
        let message =
            ToSource::Failed { kind: FailureKind::NoSpace, reason: "no".into(), kept: true, remedy: Remedy::Again };
        send(&mut said, &message).unwrap();
        assert_eq!(receive::<ToSource>(&mut said.as_slice()).unwrap(), message);
        for end in 0..said.len() {
            assert!(matches!(receive::<ToSource>(&mut &said[..end]), Err(TalkError::Closed)), "{end}");
        }
    }

    #[test]
    fn what_no_rekindle_says_is_refused() {
        let shell = b"sh: rekindle: not found\n";
        assert!(matches!(receive::<ToSource>(&mut shell.as_slice()), Err(TalkError::TooLong(_))));
        let other = [&5_u32.to_le_bytes()[..], b"hello"].concat();
        assert!(matches!(receive::<ToSource>(&mut other.as_slice()), Err(TalkError::Json(_))));
    }
}
