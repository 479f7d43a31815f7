//! The guard of addresses that move: a process that outlives the command that moves them.
//!
//! It keeps packets from them (`network/block.rs`). If the command is killed, the guard asks the daemon what was decided, as `--settle`
//! does: if the processes were handed over, it removes the addresses before packets come and go again. The kernel would answer them by
//! resets, which end the connections.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use rekindle_wire::control::MigrationState;

use super::guarded::{Done, Say};
use super::{leaving, settle, talk};
use crate::daemon;
use crate::failure::Failure;
use crate::network::address::Address;
use crate::network::block::Block;
use crate::process::{self, Process};

/// How long the daemon may take to say what was decided, if the processes run here: they hear nothing until then. As long as they stand still
/// or are gone, nobody waits for packets, and a packet would do harm.
const PATIENCE: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// The pause after an address could not be removed, and between two questions when nobody has decided for long.
const AGAIN: Duration = Duration::from_secs(1);

/// The options of the guard.
#[derive(Debug, Args)]
pub(crate) struct Guard {
    /// The migration
    migration: String,
    #[command(flatten)]
    daemon: daemon::At,
}

/// Guards addresses until this is told that nothing more is to be done, or is not told anything any more.
pub(crate) fn guard(options: &Guard) -> Result<(), Failure> {
    // What ends the other by its group or its terminal does not end this one.
    let _ = rustix::process::setsid();
    let mut rules = Rules { name: format!("rekindle-migration-{}", options.migration), ..Rules::default() };
    loop {
        match talk::receive(&mut io::stdin().lock()) {
            Ok(Say::Over) => return Ok(()),
            Ok(said) => {
                let done = Done(rules.obey(said).err().map(|failure| failure.to_string()));
                if talk::send(&mut io::stdout().lock(), &done).is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    if rules.stands_still { end(&options.migration, &rules, &options.daemon.socket()?) } else { Ok(()) }
}

/// What is kept away.
#[derive(Default)]
struct Rules {
    name: String,
    root: i32,
    /// When it started: a later process with its number is another.
    start: Option<u64>,
    block: Option<Block>,
    stands_still: bool,
}

impl Rules {
    fn obey(&mut self, said: Say) -> Result<(), Failure> {
        if let Say::Move { root, addresses } = &said {
            self.root = *root;
            self.start = process::start_of(*root);
            let ips: Vec<_> = addresses.iter().map(|Address { ip, .. }| *ip).collect();
            self.block = Some(Block::new(&self.name, &ips)?);
        }
        match (&mut self.block, said) {
            (Some(block), Say::BeginNone) => block.connections_that_begin(),
            (Some(block), Say::StandStill) => {
                self.stands_still = true;
                block.all()
            }
            (Some(block), Say::Stay) => block.is_there(),
            _ => Ok(()),
        }
    }

    /// Whether the root of the tree runs here, and does not stand still.
    fn root_runs(&self) -> bool {
        process::start_of(self.root) == self.start && Process::find(self.root).is_some_and(|it| !it.is_stopped())
    }
}

/// The command has been killed: does what it would have done.
fn end(migration: &str, rules: &Rules, socket: &Path) -> Result<(), Failure> {
    let began = Instant::now();
    loop {
        let pause = match settle::decision(socket, migration) {
            // What cannot be removed now is tried again.
            Ok(MigrationState::HandedOver) if leaving::settle(migration, true).is_err() => AGAIN,
            Ok(MigrationState::HandedOver) => return Ok(()),
            Ok(MigrationState::Kept) => return leaving::settle(migration, false),
            // The daemon has not noticed yet that its command has ended, or starts.
            Ok(MigrationState::Undecided) | Err(_) if began.elapsed() < PATIENCE => POLL_INTERVAL,
            Ok(MigrationState::Undecided) | Err(_) if !rules.root_runs() => AGAIN,
            Ok(_) | Err(_) => return Ok(()),
        };
        std::thread::sleep(pause);
    }
}
