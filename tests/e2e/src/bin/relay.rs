//! A connection between two hosts that fails: passes bytes to a command and back, and does something at one moment.
//!
//! ```text
//!   relay FILE COMMAND [ARGUMENT...]
//! ```
//!
//! FILE says what is done, and when:
//!
//! ```text
//!   before TEXT ACTION     bytes come that have this text in them: before they go on
//!   after TEXT ACTION      the same: after they went on
//!   at N ACTION            so many bytes have come
//! ```
//!
//! The action is `cut`, which ends this connection while the command lives on, or a shell command. It is done once; several relays
//! may have the same FILE, which has "over" when it is done, and how the shell command has ended unless with success. Each relay adds the bytes that it has passed to FILE with `.passed` behind it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result};

fn main() -> ExitCode {
    match relay() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("relay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn relay() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let plan = Arc::new(Plan(arguments.next().context("no file")?.into()));
    let mut command = Command::new(arguments.next().context("no command")?);
    let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let (mut to, mut from) = (child.stdin.take().context("no pipe")?, child.stdout.take().context("no pipe")?);
    let (there, turn) = (Arc::clone(&plan), Arc::new(Mutex::new(())));
    let its = Arc::clone(&turn);
    std::thread::spawn(move || pass(&mut io::stdin().lock(), &mut to, &there, &its));
    pass(&mut from, &mut io::stdout().lock(), &plan, &Mutex::new(()));
    // The other direction ends with this process, but not in the midst of what is done after some bytes.
    let _turn = turn.lock();
    Ok(())
}

/// Passes bytes until they end, each with `turn` locked. A connection that is cut ends in both directions, with this process.
fn pass(from: &mut impl Read, to: &mut impl Write, plan: &Plan, turn: &Mutex<()>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(read) => read,
        };
        let _turn = turn.lock();
        let bytes = &buffer[..read];
        let passed = plan
            .act("before", bytes)
            .and_then(|()| Ok(to.write_all(bytes).and_then(|()| to.flush())?))
            .and_then(|()| plan.act("after", bytes));
        if passed.is_err() {
            plan.wait();
            std::process::exit(1);
        }
    }
}

/// The file that says what is done.
struct Plan(PathBuf);

impl Plan {
    /// Does it, if this is the moment.
    fn act(&self, when: &str, bytes: &[u8]) -> Result<()> {
        let file = File::open(&self.0)?;
        // Of all relays, one at a time.
        file.lock()?;
        let passed = self.passed(if when == "before" { bytes.len() as u64 } else { 0 })?;
        let text = fs::read_to_string(&self.0)?;
        let mut words = text.trim_end().splitn(3, ' ');
        let (Some(moment), Some(what), Some(action)) = (words.next(), words.next(), words.next()) else {
            return Ok(());
        };
        let has_come = match moment {
            "at" => passed >= what.parse()?,
            moment => moment == when && bytes.windows(what.len()).any(|it| it == what.as_bytes()),
        };
        if !has_come {
            return Ok(());
        }
        if action == "cut" {
            fs::write(&self.0, "over")?;
            std::process::exit(1);
        }
        let status = Command::new("sh").arg("-c").arg(action).stdin(Stdio::null()).stdout(Stdio::null()).status()?;
        let over = if status.success() { "over".to_owned() } else { format!("over: {status}") };
        Ok(fs::write(&self.0, over)?)
    }

    /// Waits until what is being done is done. It may end the connection, and with that this process.
    fn wait(&self) {
        let _ = File::open(&self.0).and_then(|it| it.lock());
    }

    /// Adds bytes to those that have passed.
    fn passed(&self, more: u64) -> Result<u64> {
        let path = self.0.with_extension("passed");
        let before = fs::read_to_string(&path).ok().and_then(|it| it.trim().parse::<u64>().ok()).unwrap_or(0);
        fs::write::<&Path, _>(&path, (before + more).to_string())?;
        Ok(before + more)
    }
}
