//! The gauges, and what workers count for their clients: read from the daemon's state at each scrape, so that they end with what they
//! are about.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use rekindle_wire::gpus;

use super::super::Daemon;
use super::super::clients::{Client, ClientState};
use super::super::process;
use super::super::worker::{Description, describe_at_a_glance};

/// The most characters of a label's value that comes from outside, such as a command's name.
const TEXT_MAX: usize = 64;

/// A gauge, or a counter if its name ends with `_total`: its name without the prefix, and its meaning. A counter has labels.
struct About {
    name: &'static str,
    help: &'static str,
}

macro_rules! gauges {
    ($($constant:ident = $name:literal, $help:literal;)*) => {
        $(const $constant: About = About { name: $name, help: $help };)*
        /// All of them, in the order in which a scrape has them.
        const ALL: &[&About] = &[$(&$constant),*];
    };
}

gauges! {
    BUILD_INFO = "build_info", "1; the label says which version of rekindled serves";
    START_TIME = "start_time_seconds", "When the daemon started, in seconds since 1970";
    CLIENTS = "clients", "Programs that use a GPU, by state, as in `rekindle ps`";
    CLIENTS_WAITING = "clients_waiting_for_room", "Suspended programs that are to go on and find no room or no worker";
    WORKERS_SILENT = "workers_not_answering", "Running programs whose worker did not answer at once: it is in a long call, is stopped, or hangs";
    GPU_SIZE = "gpu_memory_size_bytes", "The memory of each GPU";
    GPU_ALLOCATED = "gpu_memory_allocated_bytes", "Memory that programs have allocated on each GPU, suspended ones included";
    GPU_RESIDENT = "gpu_memory_resident_bytes", "Memory that programs have on each GPU now, without what is given back while they are suspended";
    CLIENT_MEMORY = "client_gpu_memory_bytes", "Memory that a program has allocated on a GPU, also while it is suspended";
    CLIENT_GPU_TIME = "client_gpu_seconds_total", "Time in which a program had unfinished work on a GPU, since its worker serves it (sampled)";
    CLIENT_SUSPENDED = "client_suspended_bytes", "GPU memory that a suspended program has given back";
    CLIENT_REFUSED = "client_refused_calls", "Driver calls of a program that were refused because Rekindle does not support them";
    SUSPENDED = "suspended_bytes", "GPU memory that all suspended programs have given back";
    DUMPS = "checkpoints_in_progress", "Dumps that go on, by phase; moment: the dump waits for its program's moment";
    DUMP_PHASE = "checkpoint_in_phase_seconds", "How long the dump that has been longest in this phase has been in it";
    DUMP_BYTES = "checkpoints_in_progress_bytes", "GPU memory of the programs that are being dumped";
    ORDERS = "checkpoint_orders", "Orders for dumps: `rekindle checkpoint` commands that wait";
    RESTORES = "restores_in_progress", "Restores whose processes do not run yet";
    POOL = "pool_workers", "Workers of the pool, by kind and state; kept: as many as the pool keeps ready";
    POOL_WAITING = "pool_waiting", "Programs and restores that wait for a worker, by kind";
    WARM_IMAGES = "warm_images", "Images that are kept ready for restores";
    WARM_BYTES = "warm_image_bytes", "Host memory that the files of warm images take";
    WARM_READY = "warm_image_copies", "Restores for which workers wait, ready, or are to wait, wanted, of all warm images";
    CONNECTIONS = "connections", "Open connections at the daemon's sockets, by the kind of peer";
}

/// Reads all this from a daemon.
#[derive(Debug)]
pub(super) struct Gauges {
    daemon: Weak<Daemon>,
    start_seconds: f64,
}

impl Gauges {
    /// The gauges of a daemon that starts now.
    pub(super) fn new(daemon: &Arc<Daemon>) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self { daemon: Arc::downgrade(daemon), start_seconds: now.map_or(0.0, |it| it.as_secs_f64()) }
    }
}

impl Collector for Gauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Some(daemon) = self.daemon.upgrade() else { return Ok(()) };
        let mut page = Page::default();
        page.add(&BUILD_INFO, [("version", env!("CARGO_PKG_VERSION"))], 1);
        page.at_least(&START_TIME, [], self.start_seconds);
        clients(&daemon, &mut page);
        dumps_and_restores(&daemon, &mut page);
        pool(&daemon, &mut page);
        page.encode(&mut encoder)
    }
}

/// Labels with values, and the gauge's value.
type Series = BTreeMap<Vec<(&'static str, String)>, f64>;

/// All gauges at one time. Equal labels add up, so no series is there twice.
#[derive(Default)]
struct Page(BTreeMap<&'static str, Series>);

impl Page {
    fn series<const N: usize>(&mut self, about: &About, labels: [(&'static str, &str); N]) -> &mut f64 {
        let labels = labels.map(|(name, value)| (name, value.chars().take(TEXT_MAX).collect())).to_vec();
        self.0.entry(about.name).or_default().entry(labels).or_default()
    }

    fn add<const N: usize>(&mut self, about: &About, labels: [(&'static str, &str); N], more: u64) {
        *self.series(about, labels) += more as f64;
    }

    /// Sets a value, unless there is a larger one.
    fn at_least<const N: usize>(&mut self, about: &About, labels: [(&'static str, &str); N], value: f64) {
        let series = self.series(about, labels);
        *series = series.max(value);
    }

    fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for about in ALL {
            let Some(series) = self.0.get(about.name) else { continue };
            // The registry adds the prefix, and the suffix of counters.
            let counter = about.name.strip_suffix("_total");
            let kind = if counter.is_some() { MetricType::Counter } else { MetricType::Gauge };
            let mut metric = encoder.encode_descriptor(counter.unwrap_or(about.name), about.help, None, kind)?;
            for (labels, value) in series {
                if labels.is_empty() {
                    metric.encode_gauge(value)?;
                } else if counter.is_some() {
                    metric.encode_family(labels)?.encode_counter::<NoLabelSet, _, f64>(value, None)?;
                } else {
                    metric.encode_family(labels)?.encode_gauge(value)?;
                }
            }
        }
        Ok(())
    }
}

fn clients(daemon: &Daemon, page: &mut Page) {
    const SUSPENDED_STATE: &str = "suspended";
    const LOST: &str = "lost";
    for state in ClientState::ALL.map(ClientState::as_str).into_iter().chain([SUSPENDED_STATE, LOST]) {
        page.add(&CLIENTS, [("state", state)], 0);
    }
    for device in daemon.pool.health().1.iter().flat_map(|it| &it.devices) {
        let labels = [("gpu", &*gpus::name(&device.uuid)), ("model", &*device.name)];
        // Several devices of the software GPU may have one name.
        page.at_least(&GPU_SIZE, labels, device.memory as f64);
        page.add(&GPU_ALLOCATED, [("gpu", &gpus::name(&device.uuid))], 0);
        page.add(&GPU_RESIDENT, [("gpu", &gpus::name(&device.uuid))], 0);
    }
    page.add(&SUSPENDED, [], 0);
    page.add(&CLIENTS_WAITING, [], 0);
    page.add(&WORKERS_SILENT, [], 0);
    page.add(&CLIENTS, [("state", LOST)], daemon.clients.lost.all().len() as u64);
    // The worker of one that has ended may still be ending, while another process has the pid.
    let all = daemon.clients.registry.clients();
    let all: BTreeMap<i32, Arc<Client>> =
        all.into_iter().filter(|it| it.process.is_alive()).map(|it| (it.process.pid, it)).collect();
    // The workers of the others have a dump or a restore to do.
    let (running, others): (Vec<_>, Vec<_>) = all.values().partition(|it| it.state() == ClientState::Running);
    let workers: Vec<_> = running.iter().map(|it| &*it.worker).collect();
    for (client, described) in running.iter().zip(describe_at_a_glance(&workers)) {
        page.add(&WORKERS_SILENT, [], u64::from(described.is_none()));
        if let Some(time) = client.worker.time_to_first_command() {
            daemon.metrics.first_command(time);
        }
        let described = described.or_else(|| client.worker.last_description());
        let suspended = described.as_ref().and_then(|it| it.suspended);
        page.add(&CLIENTS, [("state", suspended.map_or(ClientState::Running.as_str(), |_| SUSPENDED_STATE))], 1);
        memory(page, client, described);
    }
    for client in others {
        page.add(&CLIENTS, [("state", client.state().as_str())], 1);
        memory(page, client, client.worker.last_description());
    }
}

/// The memory of a client, if its worker has ever told it.
fn memory(page: &mut Page, client: &Client, described: Option<Description>) {
    let Some(description) = described else { return };
    let Description { device_memory, suspended, physical, refused_calls, gpu_time_ns, .. } = description;
    let user = process::user(client.process.pid).map(|it| it.to_string()).unwrap_or_default();
    let container = client.allowed.container.as_deref().map_or("", |it| &*it.id);
    let pid = client.process.pid.to_string();
    let labels = [("pid", &*pid), ("command", &*client.attach.command), ("user", &*user), ("container", container)];
    for (device, (place, bytes)) in client.worker.attached().devices.iter().zip(device_memory.iter().enumerate()) {
        let gpu = gpus::name(&device.uuid);
        let [pid, command, user, container] = labels;
        if *bytes > 0 {
            page.add(&CLIENT_MEMORY, [pid, command, user, container, ("gpu", &gpu)], *bytes);
        }
        if let Some(time) = gpu_time_ns.get(place).filter(|it| **it > 0) {
            let labels = [pid, command, user, container, ("gpu", &*gpu)];
            page.at_least(&CLIENT_GPU_TIME, labels, Duration::from_nanos(*time).as_secs_f64());
        }
        page.add(&GPU_ALLOCATED, [("gpu", &gpu)], *bytes);
        // Of older workers only this is known.
        let here = if suspended.is_some() { 0 } else { *bytes };
        page.add(&GPU_RESIDENT, [("gpu", &gpu)], physical.get(place).copied().unwrap_or(here));
    }
    if let Some(refused) = refused_calls.filter(|it| *it > 0) {
        page.add(&CLIENT_REFUSED, labels, refused);
    }
    if let Some(suspended) = suspended {
        page.add(&CLIENT_SUSPENDED, labels, suspended.bytes);
        page.add(&SUSPENDED, [], suspended.bytes);
        page.add(&CLIENTS_WAITING, [], u64::from(suspended.waits_for_room));
    }
}

fn dumps_and_restores(daemon: &Daemon, page: &mut Page) {
    page.add(&DUMP_BYTES, [], 0);
    for dump in daemon.checkpoints.in_progress() {
        page.add(&DUMPS, [("phase", dump.phase)], 1);
        page.at_least(&DUMP_PHASE, [("phase", dump.phase)], dump.in_phase.as_secs_f64());
        page.add(&DUMP_BYTES, [], dump.bytes);
    }
    page.add(&ORDERS, [], daemon.checkpoints.orders() as u64);
    page.add(&RESTORES, [], daemon.restores.count() as u64);
    let warm = daemon.warm.infos();
    page.add(&WARM_IMAGES, [], warm.len() as u64);
    page.add(&WARM_BYTES, [], warm.iter().fold(0, |sum, it| sum.saturating_add(it.bytes)));
    page.add(&WARM_READY, [("state", "ready")], warm.iter().map(|it| u64::from(it.ready)).sum());
    page.add(&WARM_READY, [("state", "wanted")], warm.iter().map(|it| u64::from(it.copies)).sum());
}

fn pool(daemon: &Daemon, page: &mut Page) {
    for (kind, workers) in daemon.pool.counts() {
        for (state, number) in [("ready", workers.ready), ("starting", workers.starting), ("kept", workers.kept)] {
            page.add(&POOL, [("kind", kind), ("state", state)], number as u64);
        }
        page.add(&POOL_WAITING, [("kind", kind)], workers.waiting as u64);
    }
    for (peer, number) in daemon.connections.counts() {
        page.add(&CONNECTIONS, [("peer", peer)], number as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use super::super::families::{Metrics, PREFIX};

    /// The first column of the table of metrics in docs/operating.md, whose names are in backquotes.
    fn documented() -> BTreeSet<String> {
        let text = include_str!("../../../../docs/operating.md");
        let (_, section) = text.split_once("\n## Metrics\n").unwrap();
        let section = section.split("\n## ").next().unwrap();
        let rows = section.lines().filter(|line| line.starts_with("| `rekindle_"));
        let columns = rows.map(|row| row.split('|').nth(1).unwrap());
        columns.flat_map(|it| it.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    }

    #[test]
    fn the_documented_metrics_are_those_that_there_are() {
        let gauges = ALL.iter().map(|it| format!("{PREFIX}_{}", it.name));
        let all: Vec<_> = gauges.chain(Metrics::names()).collect();
        let unique: BTreeSet<_> = all.iter().cloned().collect();
        assert_eq!(unique.len(), all.len(), "a name is there twice");
        assert_eq!(documented(), unique);
    }

    #[test]
    fn the_alerts_and_the_dashboard_ask_for_metrics_that_there_are() {
        let rules = include_str!("../../../../packaging/prometheus/rekindle.rules.yml");
        let dashboard = include_str!("../../../../packaging/grafana/rekindle.json");
        let known = documented();
        let is_known = |name: &str| {
            let parts = ["_bucket", "_sum", "_count"];
            known.contains(name)
                || parts.iter().any(|it| name.strip_suffix(it).is_some_and(|name| known.contains(name)))
        };
        for text in [rules, dashboard] {
            let words = text.split(|it: char| !it.is_ascii_alphanumeric() && it != '_');
            let asked: BTreeSet<_> = words.filter(|word| word.starts_with("rekindle_")).collect();
            assert!(asked.len() > 10, "{asked:?}");
            let unknown: Vec<_> = asked.into_iter().filter(|it| !is_known(it)).collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
    }

    #[test]
    fn equal_labels_add_up_and_long_ones_are_cut() {
        let mut page = Page::default();
        let long = "x".repeat(1000);
        page.add(&CLIENTS, [("state", &long)], 1);
        page.add(&CLIENTS, [("state", &long)], 2);
        let series = &page.0[CLIENTS.name];
        assert_eq!(series.iter().next().unwrap(), (&vec![("state", "x".repeat(TEXT_MAX))], &3.0));
        page.at_least(&DUMP_PHASE, [("phase", "copy")], 2.0);
        page.at_least(&DUMP_PHASE, [("phase", "copy")], 1.0);
        assert_eq!(page.0[DUMP_PHASE.name].values().collect::<Vec<_>>(), [&2.0]);
    }
}
