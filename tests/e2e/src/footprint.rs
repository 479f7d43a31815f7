//! The resources that a running program, its worker and the daemon hold. After a failure these must be the same as
//! before.

use std::fs;

use anyhow::Context;

use crate::wait::until_true;
use crate::{App, Node, Result, process};

/// Host memory that the daemon lends to workers for dumps. Workers keep it for the next dump until others need it.
const STAGE: &str = "/memfd:rekindle-stage";

/// The resources in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    daemon: Vec<String>,
    worker: Vec<String>,
    application: Vec<String>,
    /// The number of mapped memfds of the worker and of the application.
    memfds: [usize; 2],
    /// Device memory of each device in MiB, rounded down: a program may allocate a little from step to step.
    device_memory: Vec<u64>,
    pinned_memory: u64,
    state: String,
    processes: usize,
    /// The number of workers in the pool, each of which has descriptors in the daemon.
    spare: u32,
}

impl Footprint {
    /// Takes the footprint when the pool is full and no worker is being started.
    pub fn of(node: &Node, app: &App) -> Result<Self> {
        node.wait_for_spare()?;
        process::settled_descriptors(node.daemon_pid()?)?;
        Self::now(node, app)
    }

    fn now(node: &Node, app: &App) -> Result<Self> {
        let client = node.client(app.pid())?;
        let mut application = process::descriptors(app.pid())?;
        // The program rewrites its progress file all the time.
        let progress = app.identity().progress.as_deref().unwrap_or(std::path::Path::new("")).display().to_string();
        application.retain(|it| *it != progress);
        let mut daemon = process::descriptors(node.daemon_pid()?)?;
        daemon.retain(|it| !it.contains(STAGE));
        Ok(Self {
            daemon,
            worker: process::descriptors(client.worker)?,
            application,
            memfds: [memfds(client.worker)?, memfds(app.pid())?],
            device_memory: client.device_memory.iter().map(|it| it >> 20).collect(),
            pinned_memory: client.pinned_memory,
            state: client.state,
            processes: node.processes().len(),
            spare: node.status()?.spare,
        })
    }

    /// Waits until the present footprint equals this one.
    pub fn is_back(&self, node: &Node, app: &App) -> Result {
        let mut last = None;
        let waited = until_true("nothing is held that was not held before", || {
            let now = Self::now(node, app)?;
            let same = now == *self;
            last = Some(now);
            Ok(same)
        });
        waited.with_context(|| format!("before: {self:#?}\nnow: {last:#?}"))
    }
}

fn memfds(pid: i32) -> Result<usize> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(maps.lines().filter(|line| line.contains("/memfd:") && !line.contains(STAGE)).count())
}
