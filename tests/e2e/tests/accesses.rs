//! The reporting mode: the memory that commands are expected to write, and the memory that they write. Each way in
//! which a kernel may reach memory is a case of the program `accesses`.

use std::ffi::OsStr;
use std::process::Command;

use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, stage, until};
use rekindle_wire::access::AccessReport;

const REPORT: &str = "[access]\nreport = true\n";

/// Runs `rekindle ps --access PID --json`.
fn report(node: &Node, app: &App) -> Result<AccessReport> {
    let pid = app.pid().to_string();
    let arguments = ["ps", "--access", pid.as_str(), "--json"].map(OsStr::new);
    let output = node.rekindle(&arguments)?;
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs one case to its end, and checks its output. A case in which the machine was too slow to watch a command is
/// repeated, up to five times.
fn case(node: &Node, name: &str) -> Result<AccessReport> {
    let mut report = watched(node, name)?;
    for _ in 0..5 {
        if report.unwatched == 0 {
            break;
        }
        report = watched(node, name)?;
    }
    assert_eq!((report.unwatched, &report.stopped), (0, &None), "{name}: {report:?}");
    Ok(report)
}

fn watched(node: &Node, name: &str) -> Result<AccessReport> {
    let until = node.fresh("until");
    let arguments = ["--case", name, "--until", &until.display().to_string()];
    let app = node.run("accesses", &arguments)?;
    app.reaches(1)?;
    let report = report(node, &app)?;
    std::fs::write(&until, "")?;
    assert_eq!(app.finish()?, undisturbed("accesses", &["--case", name])?, "{name}");
    Ok(report)
}

/// The kernels that wrote outside their expected memory, by unmangled name, and the size of each unit that they wrote.
fn outside(report: &AccessReport) -> Vec<(&str, u64)> {
    let kernels = ["through_global", "through_table", "beyond", "against_its_word"];
    let short = |by: &str| kernels.into_iter().find(|kernel| by.contains(kernel)).unwrap_or("?");
    report.outside.iter().map(|it| (short(&it.by), it.size)).collect()
}

/// A case's name, the number of launches in each of the classes (a), (b) and (c), and the kernels that wrote memory
/// that they had not named, with the size of the unit.
type Case = (&'static str, [u64; 3], &'static [(&'static str, u64)]);

#[test]
fn every_way_to_reach_memory_is_named_or_caught() -> Result {
    let node = Node::configured(REPORT, &[])?;
    let cases: [Case; 11] = [
        ("const", [0, 1, 0], &[]),
        ("struct", [0, 1, 0], &[]),
        ("extern", [1, 0, 0], &[]),
        ("atomic", [0, 1, 0], &[]),
        ("late", [0, 2, 0], &[]),
        // A kernel whose write was mispredicted names all memory from then on.
        ("global", [0, 3, 1], &[("through_global", 4096)]),
        ("hidden", [0, 2, 0], &[("through_table", 4096)]),
        ("neighbour", [0, 1, 0], &[("beyond", 4096)]),
        ("const_cast", [0, 1, 0], &[("against_its_word", 4096)]),
        ("graph", [3, 3, 0], &[]),
        ("graph_hidden", [0, 2, 1], &[("through_table", 4096)]),
    ];
    for (name, [values, signature, everything], wrong) in cases {
        let report = case(&node, name)?;
        let launches = report.launches;
        let found = [launches.values, launches.signature, launches.everything];
        assert_eq!(found, [values, signature, everything], "{name}: {report:?}");
        assert_eq!(outside(&report), wrong, "{name}: {report:?}");
        let named = match name {
            "const" => Some(&[0, 0, 0, 1]),
            "struct" | "extern" | "atomic" => Some(&[0, 0, 1, 0]),
            "late" => Some(&[1, 1, 0, 0]),
            _ => None,
        };
        assert!(named.is_none_or(|named| report.named[..4] == named[..]), "{name}: {report:?}");
    }
    node.finish()
}

#[test]
fn programs_print_the_same_and_write_what_they_name() -> Result {
    let node = Node::configured(REPORT, &[])?;
    let programs = [
        ("structs", ["--iterations", "6"]),
        ("graphnodes", ["--iterations", "9"]),
        ("segments", ["--iterations", "1"]),
        ("pools", ["--iterations", "2"]),
    ];
    for (name, arguments) in programs {
        let before = lines(&node)?.len();
        assert_eq!(node.run(name, &arguments)?.finish()?, undisturbed(name, &arguments)?, "{name}");
        // The daemon logs the counts when a client has ended.
        let line = until("the counts of a client that is gone", || Ok(lines(&node)?.get(before).cloned()))?;
        let report: AccessReport = serde_json::from_str(&line)?;
        assert!(report.launches.all() > 0 && report.watched > 0, "{name}: {report:?}");
        assert_eq!((&report.outside, &report.stopped), (&Vec::new(), &None), "{name}: {report:?}");
    }
    node.finish()
}

#[test]
fn a_restored_program_is_watched_too() -> Result {
    let node = Node::configured(REPORT, &[])?;
    let arguments = ["--iterations", "10", "--sleep-us", "1000"];
    let expected = undisturbed("graphnodes", &arguments)?;
    let app = node.run_held("graphnodes", &arguments, Some(5))?;
    app.reaches(5)?;
    let image = node.dump_and_kill(app)?;
    let before = lines(&node)?.len();
    assert_eq!(node.restore(&image)?.finish()?, expected);
    let line = until("the counts of the restored one", || Ok(lines(&node)?.get(before).cloned()))?;
    let report: AccessReport = serde_json::from_str(&line)?;
    assert!(report.graphs > 0 && report.watched > 0, "{report:?}");
    assert_eq!((&report.outside, &report.stopped), (&Vec::new(), &None), "{report:?}");
    node.finish()
}

/// The size is too small to measure speed. The program first compares the device's hashes with the host's.
#[test]
fn the_benchmark_of_the_hashing_kernels_runs() -> Result {
    let mut command = Command::new(stage::program("rekindle-bench")?);
    stage::clean_environment(&mut command);
    command.args(["hash", "--kib", "64", "--kib", "300", "--piece-kib", "128", "--repeats", "2"]);
    let output = command.arg("--cuda-driver").arg(stage::software_gpu()?.join("libcuda.so.1")).output()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let pieces: Vec<_> = report["figures"].as_array().into_iter().flatten().map(|it| it["pieces"].as_u64()).collect();
    assert_eq!(pieces, [Some(1), Some(3)], "{report}");
    Ok(())
}

/// The log lines with the counts of all clients that have ended.
fn lines(node: &Node) -> Result<Vec<String>> {
    let log = std::fs::read_to_string(node.path("daemon.log"))?;
    Ok(log.lines().filter_map(|line| Some(line.split_once("accesses: ")?.1.to_owned())).collect())
}

const READS: &str = "[access]\nreport = true\nreads = true\n";

#[test]
fn a_kernel_that_uses_what_it_does_not_name_faults() -> Result {
    let node = Node::configured(READS, &[])?;
    for name in ["const", "struct", "extern", "atomic", "late", "const_cast", "graph"] {
        let arguments = ["--case", name, "--apart", "1"];
        let before = lines(&node)?.len();
        assert_eq!(node.run("accesses", &arguments)?.finish()?, undisturbed("accesses", &arguments)?, "{name}");
        let report = counts(&node, before)?;
        let faults = report.first_uses.as_ref().map(|uses| &uses.fault);
        assert_eq!((faults, &report.stopped), (Some(&None), &None), "{name}: {report:?}");
        assert!(report.watched > 0, "{name}: {report:?}");
    }
    for (name, kernel) in [("hidden", "through_table"), ("graph_hidden", "through_table"), ("global", "through_global")]
    {
        let before = lines(&node)?.len();
        let app = node.run("accesses", &["--case", name, "--apart", "1"])?;
        assert!(!app.end()?.success(), "{name}");
        let report = counts(&node, before)?;
        let fault = report.first_uses.as_ref().and_then(|uses| uses.fault.as_deref());
        assert!(fault.is_some_and(|by| by.contains(kernel)) && report.stopped.is_some(), "{name}: {report:?}");
        app.kill()?;
    }
    node.finish()
}

#[test]
fn a_restored_program_shows_what_its_first_steps_use() -> Result {
    let node = Node::configured(READS, &[])?;
    let arguments = ["--iterations", "10", "--sleep-us", "1000"];
    for name in ["graphnodes", "segments"] {
        let expected = undisturbed(name, &arguments)?;
        let app = node.run_held(name, &arguments, Some(5))?;
        app.reaches(5)?;
        let image = node.dump_and_kill(app)?;
        let before = lines(&node)?.len();
        assert_eq!(node.restore(&image)?.finish()?, expected, "{name}");
        let report = counts(&node, before)?;
        let uses = report.first_uses.as_ref().expect("the mode is on");
        let sum: u64 = uses.order.iter().map(|(_, bytes)| bytes).sum();
        assert!(uses.used > 0 && uses.used <= uses.content && sum == uses.used, "{name}: {report:?}");
        assert!(uses.order.is_sorted() && uses.order.last().is_some_and(|it| it.0 <= uses.commands), "{report:?}");
        assert_eq!((&uses.fault, &report.stopped), (&None, &None), "{name}: {report:?}");
    }
    node.finish()
}

/// The counts of the next client that ends, of which `before` have ended.
fn counts(node: &Node, before: usize) -> Result<AccessReport> {
    let line = until("the counts of a client that is gone", || Ok(lines(node)?.get(before).cloned()))?;
    Ok(serde_json::from_str(&line)?)
}

#[test]
fn without_the_switch_nothing_is_counted() -> Result {
    let node = Node::start()?;
    let until = node.fresh("until");
    let app = node.run("accesses", &["--case", "const", "--until", &until.display().to_string()])?;
    app.reaches(1)?;
    let output = node.rekindle(&["ps", "--access", &app.pid().to_string()].map(OsStr::new))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() != Some(0) && said.contains("access.report"), "{said}");
    app.kill()?;
    node.finish()
}
