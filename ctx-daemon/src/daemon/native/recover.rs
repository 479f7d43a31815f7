//! What a daemon that was killed has left locked is given back by the next one.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::super::thread;
use super::driver::{Found, Native};
use super::held::wait_until_it_runs;
use super::records::Record;

/// The pause between two looks whether the former daemon's helper has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Gives back, in the background, what a daemon before this one has left locked.
pub(crate) fn recover(native: &Arc<Native>) -> std::io::Result<()> {
    for record in native.records.left() {
        let native = Arc::clone(native);
        thread("recover", move || recover_one(&native, &record))?;
    }
    Ok(())
}

fn recover_one(native: &Native, record: &Record) {
    warn!("{}: the daemon before this one has left it locked", record.name);
    let limits = native.limits();
    // A call that goes on ends by itself, and the helper after it, since its daemon is gone.
    if let Some(helper) = record.helper {
        let deadline = limits.long.begins();
        while helper.is_alive() && !deadline.is_over() {
            std::thread::sleep(POLL_INTERVAL);
        }
        helper.kill();
    }
    if wait_until_it_runs(record.process, limits.long.time) {
        let one = Found { process: record.process, tid: 0, name: record.name.clone() };
        if native.give_back(&one, None, &[], limits).is_ok() {
            info!("{}: it goes on", record.name);
        }
    } else if !record.process.is_alive() {
        native.records.forget(record.process);
    }
}
