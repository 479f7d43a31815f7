//! What the daemon tells Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use rekindle_wire::control::{Reply, Request, Resident};
use tempfile::TempDir;

use crate::dump::{dump, pause};
use crate::restore::{OPEN, Restored, begin, change, dumped};
use crate::support::{Client, Daemon, Session, ask, eventually};
use crate::warm::warm;
use crate::worker::MEMORY;

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";

/// Names and values of labels.
type Labels = Vec<(String, String)>;

/// The numbers of one scrape, by series as they are written.
pub(crate) struct Scrape(BTreeMap<String, f64>);

impl Scrape {
    pub(crate) fn of(daemon: &Daemon) -> Self {
        Self::parse(&answer(UnixStream::connect(daemon.metrics()).unwrap(), GET.as_bytes()))
    }

    /// Parses an answer, every line of which must be as Prometheus's text format has it.
    fn parse(answer: &str) -> Self {
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("\r\nContent-Type: text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
        assert!(body.ends_with('\n'));
        let mut all = BTreeMap::new();
        let mut families = BTreeSet::new();
        let mut lines = body.lines().peekable();
        while let Some(line) = lines.next() {
            let (family, help) =
                line.strip_prefix("# HELP ").unwrap_or_else(|| panic!("{line}")).split_once(' ').unwrap();
            assert!(is_name(family) && family.starts_with("rekindle_") && !help.is_empty(), "{line}");
            assert!(families.insert(family.to_owned()), "{family} is there twice");
            let kind = lines.next().unwrap().strip_prefix(&format!("# TYPE {family} ")).unwrap().to_owned();
            assert_eq!(family.ends_with("_total"), kind == "counter", "{family}");
            let mut samples = Vec::new();
            while let Some(line) = lines.next_if(|it| !it.starts_with('#')) {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
                let (name, labels) = labels_of(series);
                match kind.as_str() {
                    "counter" => assert!(name == family && value >= 0.0, "{line}"),
                    "gauge" => assert_eq!(name, family, "{line}"),
                    "histogram" => {
                        let part = name.strip_prefix(family).unwrap();
                        assert!(["_bucket", "_sum", "_count"].contains(&part), "{line}");
                        assert_eq!(part == "_bucket", labels.iter().any(|(name, _)| name == "le"), "{line}");
                    }
                    _ => panic!("{line}: {kind}"),
                }
                assert!(all.insert(series.to_owned(), value).is_none(), "{series} is there twice");
                samples.push((name, labels, value));
            }
            assert!(!samples.is_empty(), "{family}");
            if kind == "histogram" {
                buckets_add_up(&samples);
            }
        }
        Self(all)
    }

    fn find(&self, series: &str) -> Option<f64> {
        self.0.get(series).copied()
    }

    pub(crate) fn get(&self, series: &str) -> f64 {
        let of_name = || {
            let name = series.split('{').next().unwrap();
            self.0.iter().filter(|(it, _)| it.starts_with(name)).collect::<Vec<_>>()
        };
        self.find(series).unwrap_or_else(|| panic!("no {series}, but {:#?}", of_name()))
    }

    /// The numbers of a family that differ from another scrape's.
    fn changes(&self, before: &Self, family: &str) -> Vec<(String, f64)> {
        let of_family = self.0.iter().filter(|(series, _)| series.starts_with(family));
        let changes = of_family.map(|(series, value)| (series.clone(), value - before.find(series).unwrap_or(0.0)));
        changes.filter(|(_, change)| *change != 0.0).collect()
    }
}

fn is_name(name: &str) -> bool {
    name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// The name and the labels of a series.
fn labels_of(series: &str) -> (String, Labels) {
    let Some((name, rest)) = series.split_once('{') else {
        assert!(is_name(series), "{series}");
        return (series.to_owned(), Vec::new());
    };
    let mut rest = rest.strip_suffix('}').unwrap_or_else(|| panic!("{series}"));
    let mut labels = Vec::new();
    loop {
        let (label, after) = rest.split_once("=\"").unwrap_or_else(|| panic!("{series}"));
        assert!(is_name(label) && !label.is_empty(), "{series}");
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next().unwrap_or_else(|| panic!("{series}")) {
                (at, '"') => break at,
                (_, '\\') => match characters.next().unwrap().1 {
                    'n' => value.push('\n'),
                    it @ ('"' | '\\') => value.push(it),
                    other => panic!("{series}: {other}"),
                },
                (_, it) => value.push(it),
            }
        };
        labels.push((label.to_owned(), value));
        match &after[end + 1..] {
            "" => break,
            more => rest = more.strip_prefix(',').unwrap_or_else(|| panic!("{series}")),
        }
    }
    let names: BTreeSet<_> = labels.iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), labels.len(), "{series}");
    (name.to_owned(), labels)
}

/// Buckets are in ascending order and cumulative, and the last one has all.
fn buckets_add_up(samples: &[(String, Labels, f64)]) {
    let mut counts = BTreeMap::<_, Vec<(f64, f64)>>::new();
    for (name, labels, value) in samples {
        let (bound, others): (Vec<_>, Vec<_>) = labels.iter().cloned().partition(|(name, _)| name == "le");
        let buckets = counts.entry(others).or_default();
        if let Some((_, bound)) = bound.first() {
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
            let last = buckets.last().copied().unwrap_or((f64::NEG_INFINITY, 0.0));
            assert!(bound > last.0 && *value >= last.1, "{samples:?}");
            buckets.push((bound, *value));
        } else if name.ends_with("_count") {
            assert_eq!(buckets.last(), Some(&(f64::INFINITY, *value)), "{samples:?}");
        }
    }
}

/// Sends a request and reads the whole answer.
fn answer(mut stream: impl Read + Write, request: &[u8]) -> String {
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn checkpoints(outcome: &str, kind: &str, protocol: &str) -> String {
    format!("rekindle_checkpoint_operations_total{{outcome=\"{outcome}\",kind=\"{kind}\",protocol=\"{protocol}\"}}")
}

fn restores(outcome: &str, kind: &str, image: &str) -> String {
    format!("rekindle_restore_operations_total{{outcome=\"{outcome}\",kind=\"{kind}\",image=\"{image}\"}}")
}

fn clients(state: &str) -> String {
    format!("rekindle_clients{{state=\"{state}\"}}")
}

/// The series of one client of a gauge.
fn of_client(scrape: &Scrape, gauge: &str, client: &Client) -> Option<f64> {
    let pid = ("pid".to_owned(), client.pid.to_string());
    let mut found = scrape.0.iter().filter(|(series, _)| {
        let (name, labels) = labels_of(series);
        name == gauge && labels.contains(&pid)
    });
    let value = found.next().map(|(_, value)| *value);
    assert!(found.next().is_none());
    value
}

/// Scrapes until what is shown is so: a worker on a busy machine may not answer a scrape in time.
fn shows(daemon: &Daemon, what: &str, is_so: impl Fn(&Scrape) -> bool) -> Scrape {
    eventually(what, || Some(Scrape::of(daemon)).filter(&is_so))
}

#[test]
fn a_dump_is_counted_with_its_phases_and_bytes_when_it_is_durable() {
    let daemon = Daemon::start();
    let mode = std::fs::metadata(daemon.metrics()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660, "{mode:o}");
    let before = Scrape::of(&daemon);
    assert_eq!(before.get(&format!("rekindle_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))), 1.0);
    assert!(before.get("rekindle_start_time_seconds") > 1e9);
    assert_eq!(before.get(&checkpoints("done", "none", "stop")), 0.0);

    let mut client = Client::attached(&daemon, "app");
    let dir = TempDir::new().unwrap();
    dump(&daemon, dir.path(), &mut client);
    let after = Scrape::of(&daemon);
    let counted = after.changes(&before, "rekindle_checkpoint_operations_total");
    assert_eq!(counted, [(checkpoints("done", "none", "stop"), 1.0)]);
    assert_eq!(after.get("rekindle_checkpoint_duration_seconds_count{protocol=\"stop\"}"), 1.0);
    assert!(after.get("rekindle_checkpoint_duration_seconds_sum{protocol=\"stop\"}") > 0.0);
    for phase in ["quiesce", "freeze", "copy", "write"] {
        let name = "rekindle_checkpoint_phase_duration_seconds_count";
        assert_eq!(after.get(&format!("{name}{{phase=\"{phase}\",protocol=\"stop\"}}")), 1.0);
    }
    let copied = "rekindle_checkpoint_phase_bytes_total{phase=\"copy\",protocol=\"stop\"}";
    assert_eq!(after.get(copied), MEMORY as f64);
    let content = |source| after.get(&format!("rekindle_checkpoint_content_bytes_total{{source=\"{source}\"}}"));
    assert_eq!([content("stored"), content("zero"), content("base")], [MEMORY as f64, 0.0, 0.0]);
    assert_eq!(after.get("rekindle_checkpoint_stored_bytes_total"), MEMORY as f64);
    assert!(after.get("rekindle_checkpoint_written_bytes_total") > MEMORY as f64);
    assert_eq!(after.get("rekindle_checkpoint_sink_bytes_per_second_count"), 1.0);
    assert_eq!(after.get("rekindle_attach_operations_total{outcome=\"attached\"}"), 1.0);
    assert_eq!(after.get("rekindle_attach_duration_seconds_count"), 1.0);
    let requests = after.changes(&before, "rekindle_requests_total{request=\"pause\"}");
    assert_eq!(requests, [("rekindle_requests_total{request=\"pause\"}".to_owned(), 1.0)]);
}

#[test]
fn a_dump_that_fails_is_counted_by_its_kind_and_one_that_goes_on_is_shown() {
    let daemon = Daemon::start();
    let dir = TempDir::new().unwrap();
    for (command, kind) in [("fails-save", "internal"), ("mispredicts", "mispredicted")] {
        let before = Scrape::of(&daemon);
        let client = Client::attached(&daemon, command);
        let (session, reply) = Session::open(&daemon, &pause(client.pid, true), dir.path());
        assert!(matches!(reply, Reply::Paused { .. }), "{reply:?}");
        let pid = client.pid;
        // The failure is told to the first request after it.
        eventually("the dump has failed", || {
            matches!(session.ask(&Request::Frozen { pid }), Reply::Failed(_)).then_some(())
        });
        let after = Scrape::of(&daemon);
        let counted = after.changes(&before, "rekindle_checkpoint_operations_total");
        assert_eq!(counted, [(checkpoints("failed", kind, "stop"), 1.0)]);
        drop(session);
        daemon.wait_for_state(&client, Some("running"));
    }
    // A dump of a tree that has none is refused before there is a plan.
    let before = Scrape::of(&daemon);
    let client = Client::attached(&daemon, "slow-save");
    let (session, _) = Session::open(&daemon, &pause(client.pid, true), dir.path());
    let pid = client.pid;
    assert_eq!(session.ask(&Request::Frozen { pid }), Reply::Frozen { ours: true });
    let during = Scrape::of(&daemon);
    assert_eq!(during.get("rekindle_checkpoints_in_progress{phase=\"copy\"}"), 1.0);
    assert!(during.get("rekindle_checkpoint_in_phase_seconds{phase=\"copy\"}") >= 0.0);
    assert_eq!(during.get("rekindle_checkpoints_in_progress_bytes"), 4096.0);
    assert_eq!(during.get(&clients("saving")), 1.0);
    let (_other, refused) = Session::open(&daemon, &pause(client.pid, true), dir.path());
    assert!(matches!(refused, Reply::Failed(_)), "{refused:?}");
    drop(session);
    let counted = eventually("the dump is over", || {
        let after = Scrape::of(&daemon);
        let counted = after.changes(&before, "rekindle_checkpoint_operations_total");
        (counted.len() == 2 && after.find("rekindle_checkpoints_in_progress{phase=\"copy\"}").is_none())
            .then_some(counted)
    });
    let expected = [checkpoints("failed", "given_up", "stop"), checkpoints("refused", "refused", "none")];
    assert_eq!(counted, expected.map(|series| (series, 1.0)));
}

#[test]
fn a_dump_of_another_tree_is_none_of_ours() {
    let daemon = Daemon::start();
    let before = Scrape::of(&daemon);
    let dir = TempDir::new().unwrap();
    let other = Client::start(&daemon);
    let (session, _) = Session::open(&daemon, &pause(other.pid, true), dir.path());
    assert_eq!(session.ask(&Request::Finish), Reply::Durable);
    drop(session);
    let (session, reply) = Session::open(&daemon, &Request::Restore, dir.path());
    assert_eq!(reply, Reply::NotOurs);
    drop(session);
    eventually("both connections are over", || {
        let now = Scrape::of(&daemon);
        (now.get("rekindle_connections{peer=\"operator\"}") == 0.0).then_some(())
    });
    let after = Scrape::of(&daemon);
    for family in ["rekindle_checkpoint_operations_total", "rekindle_restore_operations_total"] {
        assert_eq!(after.changes(&before, family), []);
    }
}

/// Restores a process that was dumped, and returns when it runs.
fn restore(daemon: &Daemon, dir: &TempDir, process: &mut Client) {
    let (session, restore) = begin(daemon, dir.path());
    process.ask("map");
    process.ask(&format!("reattach {restore} 5"));
    let pid = process.pid;
    let not_yet = Reply::Resumed { ours: false, open: false };
    let resume = || Some(session.ask(&Request::Resume { pid })).filter(|reply| *reply != not_yet);
    assert_eq!(eventually("it has connected", resume), OPEN);
}

#[test]
fn a_restore_is_counted_when_it_is_loaded_and_by_what_was_ready() {
    let daemon = Daemon::start();
    let Restored { dir, mut process } = dumped(&daemon, "app");
    let before = Scrape::of(&daemon);
    restore(&daemon, &dir, &mut process);
    let done = |image| {
        let series = restores("done", "none", image);
        eventually(&series, || {
            let now = Scrape::of(&daemon);
            (now.get(&series) == 1.0).then_some(now)
        })
    };
    let after = done("cold");
    assert_eq!(after.changes(&before, "rekindle_restore_operations_total").len(), 1);
    assert_eq!(after.get("rekindle_restore_running_duration_seconds_count{image=\"cold\"}"), 1.0);
    assert_eq!(after.get("rekindle_restore_loaded_duration_seconds_count{image=\"cold\"}"), 1.0);
    for phase in ["check", "workers", "prepare", "criu", "open"] {
        assert_eq!(after.get(&format!("rekindle_restore_phase_duration_seconds_count{{phase=\"{phase}\"}}")), 1.0);
    }
    assert_eq!(after.get("rekindle_restore_load_step_duration_seconds_count{step=\"content\"}"), 1.0);
    // The worker tells it when it is asked.
    let first = shows(&daemon, "the first command", |it| {
        it.find("rekindle_restore_first_command_duration_seconds_count") == Some(1.0)
    });
    assert!(first.get("rekindle_restore_first_command_duration_seconds_sum") > 0.0);
    assert_eq!(of_client(&first, "rekindle_client_refused_calls", &process), Some(3.0));
    process.kill();

    let info = warm(&daemon, dir.path(), 1, Some(Resident::Each)).unwrap();
    let warm = Scrape::of(&daemon);
    assert_eq!(warm.get("rekindle_warm_images"), 1.0);
    assert_eq!(warm.get("rekindle_warm_image_bytes"), info.bytes as f64);
    let copies = |state| warm.get(&format!("rekindle_warm_image_copies{{state=\"{state}\"}}"));
    assert_eq!([copies("ready"), copies("wanted")], [1.0, 1.0]);
    let mut process = Client::start(&daemon);
    restore(&daemon, &dir, &mut process);
    done("resident");

    change(&dir, |client| client.wire_version += 1);
    let (_session, reply) = Session::open(&daemon, &Request::Restore, dir.path());
    let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
    let now = Scrape::of(&daemon);
    assert_eq!(now.get(&restores("refused", failure.kind.as_str(), "none")), 1.0, "{failure}");
    // A restore that CRIU gives up.
    let Restored { dir, process: _ } = dumped(&daemon, "other");
    let (session, _) = begin(&daemon, dir.path());
    assert_eq!(Scrape::of(&daemon).get("rekindle_restores_in_progress"), 1.0);
    drop(session);
    let given_up = restores("failed", "given_up", "cold");
    eventually(&given_up, || (Scrape::of(&daemon).get(&given_up) == 1.0).then_some(()));
}

#[test]
fn a_suspended_client_is_shown_and_all_of_a_client_ends_with_it() {
    let daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "odd\"name\\");
    let other = Client::attached(&daemon, "other");
    let all_told = |it: &Scrape| it.get("rekindle_workers_not_answering") == 0.0;
    let running = shows(&daemon, "all workers answer", all_told);
    assert_eq!((running.get(&clients("running")), running.get(&clients("suspended"))), (2.0, 0.0));
    assert_eq!(of_client(&running, "rekindle_client_gpu_memory_bytes", &client), Some(4096.0));
    assert_eq!(of_client(&running, "rekindle_client_suspended_bytes", &client), None);
    let gpu = "gpu=\"GPU-01010101-0101-0101-0101-010101010101\"";
    assert_eq!(running.get(&format!("rekindle_gpu_memory_size_bytes{{{gpu},model=\"Fake\"}}")), f64::from(1 << 30));
    assert_eq!(running.get(&format!("rekindle_gpu_memory_allocated_bytes{{{gpu}}}")), 2.0 * 4096.0);
    assert_eq!(running.get(&format!("rekindle_gpu_memory_resident_bytes{{{gpu}}}")), 2.0 * MEMORY as f64);

    let request = Request::Suspend { pid: client.pid, hold: true, deep: false };
    let Reply::Suspended(all) = ask(&daemon.socket(), &request, &[]) else { panic!("not suspended") };
    // The scrape waits but a moment for a worker, and shows what it said before.
    let suspended = shows(&daemon, "it is suspended", |it| all_told(it) && it.get(&clients("suspended")) == 1.0);
    assert_eq!((suspended.get(&clients("running")), suspended.get(&clients("suspended"))), (1.0, 1.0));
    assert_eq!(of_client(&suspended, "rekindle_client_suspended_bytes", &client), Some(all[0].bytes as f64));
    assert_eq!(suspended.get("rekindle_suspended_bytes"), all[0].bytes as f64);
    assert_eq!(suspended.get(&format!("rekindle_gpu_memory_resident_bytes{{{gpu}}}")), MEMORY as f64);
    let counted = suspended.changes(&running, "rekindle_suspend_operations_total");
    let labels = "outcome=\"done\",kind=\"none\",depth=\"shallow\",cause=\"request\"";
    assert_eq!(counted, [(format!("rekindle_suspend_operations_total{{{labels}}}"), 1.0)]);
    assert_eq!(suspended.get("rekindle_suspend_bytes_total{depth=\"shallow\"}"), all[0].bytes as f64);

    let resumed = ask(&daemon.socket(), &Request::ResumeSuspended { pid: client.pid }, &[]);
    assert!(matches!(resumed, Reply::WereResumed(_)), "{resumed:?}");
    let after = shows(&daemon, "all workers answer again", all_told);
    assert_eq!((after.get(&clients("running")), after.get("rekindle_suspended_bytes")), (2.0, 0.0));
    assert_eq!(after.get("rekindle_resume_operations_total{outcome=\"done\",kind=\"none\"}"), 1.0);

    client.kill();
    let gone = shows(&daemon, "it is gone", |it| of_client(it, "rekindle_client_gpu_memory_bytes", &client).is_none());
    assert_eq!(of_client(&gone, "rekindle_client_gpu_memory_bytes", &other), Some(4096.0));
    assert!(!gone.0.keys().any(|series| series.contains(&format!("pid=\"{}\"", client.pid))));
    assert_eq!(gone.get(&clients("running")), 1.0);
}

#[test]
fn a_worker_that_is_stopped_or_dies_is_shown_and_delays_nothing() {
    let daemon = Daemon::start();
    let mut client = Client::attached(&daemon, "client");
    assert_eq!(client.ask("map"), "mapped");
    let other = Client::attached(&daemon, "other");
    let answers = |it: &Scrape| it.get("rekindle_workers_not_answering") == 0.0;
    shows(&daemon, "both answer", answers);
    let worker = daemon.clients().into_iter().find(|it| it.pid == client.pid).unwrap().worker;
    let signal = |signal| {
        // SAFETY: a process that this test has caused to be.
        assert_eq!(unsafe { libc::kill(worker, signal) }, 0);
    };
    signal(libc::SIGSTOP);
    // The kernel stops one thread, which then stops the others.
    let is_stopped = |it: &std::path::Path| std::fs::read_to_string(it.join("status")).unwrap().contains("State:\tT");
    let threads = || std::fs::read_dir(format!("/proc/{worker}/task")).unwrap().map(|it| it.unwrap().path());
    eventually("the worker stands still", || threads().all(|it| is_stopped(&it)).then_some(()));
    // Each answer comes while the worker stands still.
    for _ in 0..3 {
        let now = Scrape::of(&daemon);
        assert!(now.get("rekindle_workers_not_answering") >= 1.0);
        assert_eq!(of_client(&now, "rekindle_client_gpu_memory_bytes", &other), Some(4096.0));
        // As it was last known.
        assert_eq!(of_client(&now, "rekindle_client_gpu_memory_bytes", &client), Some(4096.0));
    }
    signal(libc::SIGCONT);
    shows(&daemon, "it answers", answers);
    signal(libc::SIGKILL);
    let lost = shows(&daemon, "it is lost", |it| it.get("rekindle_workers_lost_total") == 1.0);
    assert_eq!(lost.get(&clients("lost")), 1.0);
    assert_eq!(of_client(&lost, "rekindle_client_gpu_memory_bytes", &client), None);
}

#[test]
fn the_pool_tells_its_workers_and_who_waited_for_one() {
    let daemon = Daemon::start_with(&[("config.toml", "[pool]\nspare = 0\n")]);
    let before = Scrape::of(&daemon);
    assert_eq!(before.get("rekindle_pool_workers{kind=\"usual\",state=\"kept\"}"), 0.0);
    let _client = Client::attached(&daemon, "client");
    let after = Scrape::of(&daemon);
    assert_eq!(after.get("rekindle_pool_take_operations_total{kind=\"usual\",outcome=\"waited\"}"), 1.0);
    assert_eq!(after.get("rekindle_pool_take_wait_duration_seconds_count{kind=\"usual\"}"), 1.0);
    let daemon = Daemon::start();
    eventually("one is ready", || {
        let now = Scrape::of(&daemon);
        (now.get("rekindle_pool_workers{kind=\"usual\",state=\"ready\"}") == 1.0).then_some(())
    });
    let _client = Client::attached(&daemon, "client");
    let after = Scrape::of(&daemon);
    assert_eq!(after.get("rekindle_pool_take_operations_total{kind=\"usual\",outcome=\"ready\"}"), 1.0);
    assert!(after.get("rekindle_pool_worker_start_operations_total{kind=\"usual\",outcome=\"ready\"}") >= 1.0);
    std::fs::write(daemon.dir.path().join("no-gpu"), "").unwrap();
    let mut none = Client::start(&daemon);
    // Workers that were started before may be ready still.
    let said = eventually("no worker starts", || {
        let said = none.ask("attach none");
        none = Client::start(&daemon);
        said.starts_with("refused").then_some(said)
    });
    let after = Scrape::of(&daemon);
    assert!(after.get("rekindle_attach_operations_total{outcome=\"failed\"}") >= 1.0, "{said}");
    assert!(after.get("rekindle_pool_take_operations_total{kind=\"usual\",outcome=\"failed\"}") >= 1.0);
}

#[test]
fn scrapes_at_the_same_time_are_all_whole() {
    let daemon = Daemon::start();
    let clients: Vec<_> = (0..3).map(|number| Client::attached(&daemon, &format!("client{number}"))).collect();
    let memory = |it: &Scrape, client| of_client(it, "rekindle_client_gpu_memory_bytes", client);
    shows(&daemon, "all are known", |it| clients.iter().all(|client| memory(it, client).is_some()));
    std::thread::scope(|scope| {
        let scrapes: Vec<_> = (0..8).map(|_| scope.spawn(|| Scrape::of(&daemon))).collect();
        for scrape in scrapes {
            let scrape = scrape.join().unwrap();
            for client in &clients {
                assert_eq!(memory(&scrape, client), Some(4096.0));
            }
        }
    });
}

#[test]
fn peers_that_say_nothing_or_too_much_or_do_not_listen_hold_up_nobody() {
    let daemon = Daemon::start();
    let connect = || UnixStream::connect(daemon.metrics()).unwrap();
    Scrape::of(&daemon);
    let descriptors = daemon.descriptors();
    let mut peers = Vec::new();
    for number in 0..100 {
        let mut peer = connect();
        // An error: it has been closed for another.
        let _ = match number % 4 {
            0 => Ok(()),
            1 => peer.write_all(b"GET /metr"),
            2 => peer.write_all(b"GET /metrics HTTP/1.1\r\nX-Slow: "),
            // Reads no answer.
            _ => peer.write_all(GET.as_bytes()),
        };
        peers.push(peer);
        if number % 10 == 0 {
            Scrape::of(&daemon);
        }
    }
    Scrape::of(&daemon);
    // Two for each of those that are left.
    assert!(daemon.descriptors() <= descriptors + 2 * 16, "{} {descriptors}", daemon.descriptors());
    // Byte by byte, on and on.
    let mut slow = connect();
    let sending = std::thread::spawn(move || {
        while slow.write_all(b"x").is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    Scrape::of(&daemon);
    // It ends when the daemon closes the connection, which it does however busy the peer is.
    sending.join().unwrap();
    // A head without an end, and other things than HTTP.
    for (request, status) in [
        ([b"GET /metrics HTTP/1.1\r\nX: ".as_slice(), &[b'x'; 100_000]].concat(), "431"),
        (b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03".to_vec(), "400"),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), "404"),
        (b"DELETE /metrics HTTP/1.1\r\n\r\n".to_vec(), "405"),
    ] {
        let mut peer = connect();
        // The daemon closes without having read all.
        let sent = peer.write_all(&request);
        assert!(sent.is_ok() || request.len() > 8192, "{sent:?}");
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match peer.read(&mut buffer) {
                Ok(0) => break,
                Ok(read) => answer.extend(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                Err(error) => panic!("{error}"),
            }
        }
        let answer = String::from_utf8(answer).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    let counted = Scrape::of(&daemon);
    assert_eq!(counted.get("rekindle_metrics_requests_total{code=\"431\"}"), 1.0);
    drop(peers);
    assert!(Client::attached(&daemon, "app").pid > 0);
}

#[test]
fn metrics_are_served_over_tcp_where_that_is_asked_for() {
    let daemon = Daemon::start_with(&[("config.toml", "[metrics]\nsocket = \"\"\nlisten = \"127.0.0.1:0\"\n")]);
    assert!(!daemon.metrics().exists());
    let log = std::fs::read_to_string(daemon.dir.path().join("log")).unwrap();
    let (_, after) = log.split_once("127.0.0.1:").unwrap();
    let port: String = after.chars().take_while(char::is_ascii_digit).collect();
    let address = format!("127.0.0.1:{port}");
    let scrape = Scrape::parse(&answer(TcpStream::connect(&address).unwrap(), GET.as_bytes()));
    assert_eq!(scrape.get("rekindle_warm_images"), 0.0);

    // Another daemon that is told the same place does not start, and says why.
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("config.toml");
    let state = dir.path().join("state");
    std::fs::write(&config, format!("state_dir = {state:?}\n[metrics]\nsocket = \"\"\nlisten = {address:?}\n"))
        .unwrap();
    let mut second = Command::new(env!("CARGO_BIN_EXE_rekindled"));
    let output = second.arg("--socket").arg(dir.path().join("s")).arg("--config").arg(&config).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("metrics.listen: cannot listen on {address}")), "{said}");
}
