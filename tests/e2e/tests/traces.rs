//! Spans of OpenTelemetry's: one trace shows a checkpoint, or a restore, in the command, the daemon and the workers.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, ensure};
use rekindle_e2e::{App, Node, Result, process, stage, until};
use serde_json::Value;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";

/// A collector that keeps what it is sent.
struct Collector {
    port: u16,
    got: Arc<Mutex<Vec<Value>>>,
}

/// A span, as a collector is told of it.
#[derive(Clone, Debug)]
struct Span {
    service: String,
    name: String,
    trace: String,
    id: String,
    parent: String,
    start: u64,
    end: u64,
    attributes: BTreeMap<String, String>,
    failed: bool,
}

impl Collector {
    fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let got = Arc::<Mutex<Vec<Value>>>::default();
        let kept = Arc::clone(&got);
        // Ends with the process of the tests.
        thread::spawn(move || {
            for peer in listener.incoming().flatten() {
                match take(peer) {
                    Ok(json) => lock(&kept).push(json),
                    Err(error) => eprintln!("the collector has not understood a request: {error}"),
                }
            }
        });
        Ok(Self { port, got })
    }

    /// The setting by which a daemon finds it.
    fn setting(&self) -> String {
        format!("[tracing]\notlp = \"http://127.0.0.1:{}\"\n", self.port)
    }

    fn spans(&self) -> Result<Vec<Span>> {
        let mut spans = Vec::new();
        for json in lock(&self.got).iter() {
            for program in list(&json["resourceSpans"]) {
                let service = attributes(&program["resource"])["service.name"].clone();
                for scope in list(&program["scopeSpans"]) {
                    for span in list(&scope["spans"]) {
                        spans.push(Span::of(&service, span).with_context(|| format!("no span: {span}"))?);
                    }
                }
            }
        }
        Ok(spans)
    }

    /// Waits for the span of that name.
    fn wait_for(&self, name: &str) -> Result<Span> {
        until(&format!("the collector has the span {name}"), || {
            Ok(self.spans()?.into_iter().find(|it| it.name == name))
        })
    }
}

fn lock(got: &Mutex<Vec<Value>>) -> MutexGuard<'_, Vec<Value>> {
    got.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads one request, and says that it is taken.
fn take(mut peer: TcpStream) -> Result<Value> {
    let mut got = Vec::new();
    let mut buffer = [0; 8192];
    let (head, body) = loop {
        let read = peer.read(&mut buffer)?;
        ensure!(read > 0, "the request has ended too early");
        got.extend(&buffer[..read]);
        let Some(at) = got.windows(4).position(|it| it == b"\r\n\r\n") else { continue };
        let head = String::from_utf8(got[..at].to_vec())?;
        let length = head.lines().find_map(|it| it.strip_prefix("Content-Length: ")).context("no length")?;
        if got.len() >= at + 4 + length.parse::<usize>()? {
            break (head, got.split_off(at + 4));
        }
    };
    peer.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")?;
    ensure!(head.starts_with("POST /v1/traces HTTP/1.1\r\n"), "{head}");
    ensure!(head.contains("Content-Type: application/json"), "{head}");
    Ok(serde_json::from_slice(&body)?)
}

fn list(json: &Value) -> &[Value] {
    json.as_array().map_or(&[], Vec::as_slice)
}

fn attributes(json: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value["stringValue"].as_str().or(value["intValue"].as_str()).unwrap_or("").to_owned();
    let pair = |it: &Value| Some((it["key"].as_str()?.to_owned(), text(&it["value"])));
    list(&json["attributes"]).iter().filter_map(pair).collect()
}

impl Span {
    fn of(service: &str, json: &Value) -> Option<Self> {
        let text = |name: &str| json[name].as_str().unwrap_or("").to_owned();
        Some(Self {
            service: service.to_owned(),
            name: text("name"),
            trace: text("traceId"),
            id: text("spanId"),
            parent: text("parentSpanId"),
            start: text("startTimeUnixNano").parse().ok()?,
            end: text("endTimeUnixNano").parse().ok()?,
            attributes: attributes(json),
            failed: json["status"]["code"] == 2,
        })
    }
}

/// The spans right below another one, by their names; all lie within it.
fn below<'a>(all: &'a [Span], parent: &Span) -> Result<BTreeMap<&'a str, &'a Span>> {
    let children: Vec<_> = all.iter().filter(|it| it.parent == parent.id).collect();
    for it in &children {
        ensure!(it.trace == parent.trace, "{it:?} is of another trace than {parent:?}");
        let lies_within = parent.start <= it.start && it.start <= it.end && it.end <= parent.end;
        ensure!(lies_within, "{it:?} does not lie within {parent:?}");
    }
    Ok(children.into_iter().map(|it| (it.name.as_str(), it)).collect())
}

/// Runs `rekindle` for a caller that is part of a trace.
fn traced(node: &Node, flags: &str, arguments: &[&OsStr]) -> Result {
    let mut command = node.command(&stage::program("rekindle")?)?;
    command.env_remove("LD_LIBRARY_PATH");
    let output = command.args(arguments).env("TRACEPARENT", format!("00-{TRACE}-{CALLER}-{flags}")).output()?;
    ensure!(output.status.success(), "{output:?}");
    Ok(())
}

#[test]
fn one_trace_shows_the_phases_of_a_checkpoint_and_another_those_of_a_restore() -> Result {
    let collector = Collector::start()?;
    let node = Node::configured(&collector.setting(), &[])?;
    let end = node.path("end");
    let app = node.run("steady", &["--until", &end.display().to_string(), "--ballast-kib", "49152"])?;
    app.reaches(1)?;
    let (pid, dir, worker) = (app.pid().to_string(), node.path("image"), node.client(app.pid())?.worker);
    let arguments = [OsStr::new("checkpoint"), "--kill".as_ref(), "--protocol".as_ref(), "recopy".as_ref()];
    let tree = process::tree(app.pid());
    traced(&node, "01", &[&arguments[..], &[pid.as_ref(), dir.as_os_str()]].concat())?;
    let identity = app.was_killed(&tree)?;

    let root = collector.wait_for("rekindle checkpoint")?;
    let all = collector.spans()?;
    assert_eq!((&*root.service, &*root.trace, &*root.parent), ("rekindle", TRACE, CALLER));
    ensure!(all.iter().all(|it| it.trace == TRACE && !it.failed), "{all:?}");
    let dump = below(&all, &root)?["checkpoint"];
    assert_eq!((&*dump.service, &*dump.attributes["rekindle.protocol"]), ("rekindled", "recopy"));
    let parts = below(&all, dump)?;
    for (name, service) in [
        ("pre-copy", "rekindled"),
        ("quiesce", "rekindled"),
        ("freeze", "rekindled"),
        ("copy", "rekindled"),
        ("write", "rekindled"),
        ("commit", "rekindled"),
        ("pre-copy round", "rekindle-worker"),
        ("secure", "rekindle-worker"),
        ("save", "rekindle-worker"),
    ] {
        let part = parts.get(name).with_context(|| format!("no {name} in {parts:?}"))?;
        assert_eq!(part.service, service, "{name}");
        if service == "rekindle-worker" {
            assert_eq!(part.attributes["rekindle.client.pid"], pid);
        }
    }
    ensure!(below(&all, parts["quiesce"])?.is_empty());
    let inspected = node.rekindle(&["inspect".as_ref(), "--json".as_ref(), dir.as_os_str()])?;
    let inspected: Value = serde_json::from_slice(&inspected.stdout)?;
    assert_eq!(inspected["id"], dump.attributes["rekindle.image.id"]);
    ensure!(worker > 0 && lock(&collector.got).iter().any(|it| it.to_string().contains(&worker.to_string())));

    // Without a caller, the command begins a trace.
    let output = until("the numbers of the killed threads are free", || {
        let output = node.rekindle(&["restore".as_ref(), "-d".as_ref(), dir.as_os_str()])?;
        let log = std::fs::read_to_string(dir.join("restore.log"))?;
        let too_early = !output.status.success() && log.contains("Unable to create a thread: -17");
        Ok((!too_early).then_some(output))
    })?;
    ensure!(output.status.success(), "{output:?}");
    let root = until("the collector has the spans of the restore that succeeded", || {
        let spans = collector.spans()?;
        Ok(spans.into_iter().find(|it| it.name == "rekindle restore" && it.parent.is_empty() && !it.failed))
    })?;
    ensure!(root.trace != TRACE, "{root:?}");
    let all = collector.spans()?;
    let mut children = all.iter().filter(|it| it.parent == root.id && it.name == "restore" && !it.failed);
    let restore = children.next_back().context("no span of the daemon's")?;
    ensure!(restore.trace == root.trace && restore.end <= root.end, "{restore:?} {root:?}");
    let parts = below(&all, restore)?;
    for name in ["check", "workers", "prepare", "criu", "connect", "open", "load"] {
        ensure!(parts.contains_key(name), "no {name} in {parts:?}");
    }
    let steps = below(&all, parts["load"])?;
    let mut steps: Vec<_> = steps.values().collect();
    steps.sort_by_key(|it| it.start);
    assert_eq!(steps.iter().map(|it| &*it.name).collect::<Vec<_>>(), ["code", "replay", "map", "content"]);
    ensure!(steps.iter().all(|it| it.service == "rekindle-worker"), "{steps:?}");
    std::fs::write(&end, "")?;
    assert_eq!(App::adopt(identity).finish()?, "steady ok\n");
    node.finish()
}

#[test]
fn a_dump_by_criu_alone_begins_a_trace_and_what_nobody_samples_is_not_exported() -> Result {
    let collector = Collector::start()?;
    let node = Node::configured(&collector.setting(), &[])?;
    let end = node.path("end");
    let app = node.run("steady", &["--until", &end.display().to_string()])?;
    app.reaches(1)?;
    let (pid, dir) = (app.pid().to_string(), node.path("image"));
    traced(&node, "00", &["checkpoint".as_ref(), pid.as_ref(), dir.as_os_str()])?;
    node.dump(&app)?;
    let dump = collector.wait_for("checkpoint")?;
    ensure!(dump.parent.is_empty() && dump.trace != TRACE, "{dump:?}");
    let all = collector.spans()?;
    ensure!(all.iter().all(|it| it.trace == dump.trace), "{all:?}");
    let parts = below(&all, &dump)?;
    ensure!(parts.contains_key("resume") && parts.contains_key("copy"), "{parts:?}");
    ensure!(dump.attributes.contains_key("rekindle.stall.ns"), "{dump:?}");
    std::fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}

#[test]
fn a_collector_that_is_away_holds_no_dump_up_and_by_default_there_is_none() -> Result {
    let mut node = Node::start()?;
    let end = node.path("end");
    let app = node.run("steady", &["--until", &end.display().to_string()])?;
    app.reaches(1)?;
    node.dump(&app)?;
    node.stop_daemon()?;
    ensure!(!std::fs::read_to_string(node.path("daemon.log"))?.contains("spans are exported"));
    // A port that nobody accepts at, as long as this lives.
    let place = TcpListener::bind("127.0.0.1:0")?;
    let port = place.local_addr()?.port();
    node.configure(&format!("[tracing]\notlp = \"http://127.0.0.1:{port}\"\n"));
    node.start_daemon(&[])?;
    until("the worker has the new daemon", || Ok(node.clients()?.iter().any(|it| it.pid == app.pid()).then_some(())))?;
    node.dump(&app)?;
    ensure!(std::fs::read_to_string(node.path("daemon.log"))?.contains("spans are exported"));
    std::fs::write(&end, "")?;
    app.finish()?;
    node.finish()
}
