//! The gate at which CRIU waits for the other hosts: its action script.
//!
//! ```text
//!   criu ─► SCRIPT ─► rekindle cut-gate SOCKET ROOT ── the moment's name ──► the process that takes part
//!                                                      ◄───── one byte: go on
//! ```
//!
//! | moment | what CRIU has done | if the process that takes part ends |
//! |---|---|---|
//! | `post-dump` | written its image; the tree stands still, its network is locked | the script fails: CRIU unlocks, and the tree goes on |
//! | `post-restore` | made all processes and sockets | the script fails: CRIU ends them |
//! | `pre-resume` | completed the tree, whose network is open | CRIU would let it run: the script kills it first |

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;

use super::tree::Tree;
use crate::failure::Failure;

/// CRIU's variable with the moment's name.
const MOMENT: &str = "CRTOOLS_SCRIPT_ACTION";
/// The moments at which the script waits.
pub(super) const DUMPED: &str = "post-dump";
pub(super) const PLACED: &str = "post-restore";
pub(super) const COMPLETE: &str = "pre-resume";
/// What lets CRIU go on.
const GO: u8 = b'+';

/// The options of the gate.
#[derive(Debug, Args)]
pub(crate) struct Gate {
    /// The socket of the process that takes part
    socket: PathBuf,
    /// The root of the tree
    root: i32,
}

/// CRIU's script: waits until CRIU may go on.
pub(crate) fn gate(options: &Gate) -> Result<(), Failure> {
    let moment = std::env::var(MOMENT).with_context(|| format!("{MOMENT} is not set: CRIU runs this"))?;
    let asked = || -> anyhow::Result<u8> {
        let mut stream = UnixStream::connect(&options.socket)?;
        stream.write_all(format!("{moment}\n").as_bytes())?;
        let mut answer = [0];
        stream.read_exact(&mut answer)?;
        Ok(answer[0])
    };
    match asked() {
        Ok(GO) => Ok(()),
        answer => {
            if moment == COMPLETE {
                // CRIU goes on whatever a script says at this moment.
                Tree::of(options.root)?.end()?;
            }
            Err(anyhow!("the process that takes part in the cut has ended: {answer:?}").into())
        }
    }
}

/// CRIU, which waits at a gate. It fails when this is dropped.
pub(super) struct Waiting {
    stream: UnixStream,
    /// The moment's name.
    pub(super) moment: String,
}

impl Waiting {
    /// Hears where CRIU waits.
    pub(super) fn hear(mut stream: UnixStream) -> Option<Self> {
        let mut moment = Vec::new();
        let mut byte = [0];
        while byte != *b"\n" && moment.len() < 64 {
            stream.read_exact(&mut byte).ok()?;
            moment.extend(byte);
        }
        let moment = String::from_utf8(moment).ok()?.trim_end().to_owned();
        Some(Self { stream, moment })
    }

    /// CRIU goes on.
    pub(super) fn pass(mut self) {
        // If the script has ended, so has CRIU.
        let _ = self.stream.write_all(&[GO]);
    }
}

/// The script, which runs this program at the moments that matter.
pub(super) fn script(program: &str, socket: &str, root: i32) -> String {
    format!(
        "#!/bin/sh\ncase $CRTOOLS_SCRIPT_ACTION in\n{DUMPED} | {PLACED} | {COMPLETE}) exec {program} cut-gate {socket} {root} ;;\nesac\n"
    )
}
