//! The guard of a tree that is dumped: a process that outlives the one that takes part in the cut.
//!
//! If that one is killed, the guard waits until CRIU has ended, undoes what a CRIU leaves behind that is killed as well, and lets the tree
//! go on if it stands still.

use std::io;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use serde::{Deserialize, Serialize};

use super::tree::{Held, Tree};
use crate::failure::Failure;
use crate::migrate::talk;
use crate::network::firewall;
use crate::process;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The options of the guard.
#[derive(Debug, Args)]
pub(crate) struct Guard {
    /// The root of the tree
    root: i32,
}

/// What the guard is told.
#[derive(Debug, Serialize, Deserialize)]
enum Said {
    /// CRIU has started: its process, and the tree as it was before.
    Criu(i32, Tree),
    /// The tree is about to stand still.
    Stands(Tree),
    /// Nobody needs the guard any more.
    Over,
}

/// The guard's process.
pub(super) struct Guarded {
    to: ChildStdin,
    child: Child,
}

impl Guarded {
    /// Starts it. The tree is its own until it ends.
    pub(super) fn start(root: i32, held: &Held) -> Result<Self, Failure> {
        let own = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(own);
        command.args(["cut-guard", &root.to_string()]);
        // Whoever reads this process's output is not to wait for the guard. What it has as output is a directory's lock: it writes nothing.
        command.stdin(Stdio::piped()).stdout(held.shared()?).stderr(Stdio::null());
        let mut child = command.spawn().context("cannot start the guard of a tree")?;
        let to = child.stdin.take().context("a process without its pipe")?;
        Ok(Self { to, child })
    }

    pub(super) fn knows_criu(&mut self, pid: i32, before: &Tree) -> Result<(), Failure> {
        self.say(&Said::Criu(pid, before.clone()))
    }

    /// The tree is about to stand still. An error means that it must not.
    pub(super) fn stands(&mut self, tree: &Tree) -> Result<(), Failure> {
        self.say(&Said::Stands(tree.clone()))
    }

    /// Ends the guard, which has nothing more to do.
    pub(super) fn over(mut self) {
        // If it was killed, it has nothing to do either.
        let _ = self.say(&Said::Over);
        drop(self.to);
        let _ = self.child.wait();
    }

    fn say(&mut self, said: &Said) -> Result<(), Failure> {
        talk::send(&mut self.to, said).map_err(|_| anyhow!("the guard of the tree has ended").into())
    }
}

/// Guards a tree until this is told that nothing more is to be done, or is not told anything any more.
pub(crate) fn guard(options: &Guard) -> Result<(), Failure> {
    // What ends the other by its group or its terminal does not end this one.
    let _ = rustix::process::setsid();
    let (mut criu, mut before, mut stands) = (None, Tree::default(), None);
    loop {
        match talk::receive(&mut io::stdin().lock()) {
            Ok(Said::Criu(pid, tree)) => {
                criu = process::start_of(pid).map(|start| (pid, start));
                before = tree;
            }
            Ok(Said::Stands(tree)) => stands = Some(tree),
            Ok(Said::Over) => return Ok(()),
            Err(_) => break,
        }
    }
    // CRIU's script fails by itself, since the other has ended, and then CRIU lets go of the tree. It waits for GPU memory before it ends.
    stands.iter().for_each(Tree::goes_on_when_left);
    while criu.is_some_and(|(pid, start)| process::start_of(pid) == Some(start)) {
        std::thread::sleep(POLL_INTERVAL);
    }
    mend(options.root, &before)
}

/// Undoes what a CRIU leaves behind that is killed while it dumps a tree: connections that are locked, and in repair mode.
/// `before` is the tree as it was before the dump.
pub(super) fn mend(root: i32, before: &Tree) -> Result<(), Failure> {
    let tree = before.now(root)?;
    let unlocked = firewall::remove_those_of_criu(&tree.connections()?);
    tree.unmute();
    unlocked
}
