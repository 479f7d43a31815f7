//! The guard of addresses that move, as the command that moves them sees it: a process that keeps packets from them, and that outlives the
//! command if that is killed (`guard.rs`).

use std::io::BufReader;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};

use super::talk;
use crate::failure::Failure;
use crate::network::address::Address;

/// The verb of the guard.
const VERB: &str = "migrate-guard";

/// What the guard is told. It answers each of these with [`Done`], except the last.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Say {
    /// These addresses are to move, with the tree of this process. Nothing is kept from them yet.
    Move {
        /// The root.
        root: i32,
        /// The addresses.
        addresses: Vec<Address>,
    },
    /// Nobody may begin a connection to them.
    BeginNone,
    /// No packet may come or go.
    StandStill,
    /// Nothing new: is the guard there still, and does it keep packets away?
    Stay,
    /// Nobody needs the guard any more.
    Over,
}

/// The guard's answer: why it has failed, if it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done(pub(super) Option<String>);

/// The guard's process.
#[derive(Debug)]
pub(super) struct Guarded {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// Whether the guard is to find out by itself what was decided.
    is_left: bool,
}

impl Guarded {
    /// Starts the guard of a migration's addresses.
    pub(super) fn start(migration: &str, socket: &Path, root: i32, addresses: &[Address]) -> Result<Self, Failure> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(own);
        command.args([VERB, migration, "--socket"]).arg(socket);
        // Whoever reads this process's output is not to wait for the guard.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start the guard of addresses")?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(anyhow!("a process without the pipes that it was given").into());
        };
        let mut guarded = Self { child, to, from: BufReader::new(from), is_left: false };
        guarded.ask(&Say::Move { root, addresses: addresses.to_vec() })?;
        Ok(guarded)
    }

    /// Nobody knows what was decided: the guard asks until it is known, and does what is to be done.
    pub(super) fn leave(mut self) {
        self.is_left = true;
    }

    /// Has the guard do something.
    pub(super) fn ask(&mut self, what: &Say) -> Result<(), Failure> {
        let answer = talk::send(&mut self.to, what).and_then(|()| talk::receive(&mut self.from));
        match answer.map_err(|_| anyhow!("the guard of addresses has ended"))? {
            Done(None) => Ok(()),
            Done(Some(why)) => Err(anyhow!("packets cannot be kept from addresses that move: {why}").into()),
        }
    }
}

impl Drop for Guarded {
    /// From now on packets come and go.
    fn drop(&mut self) {
        if !self.is_left {
            let _ = talk::send(&mut self.to, &Say::Over);
            let _ = self.child.wait();
        }
    }
}
