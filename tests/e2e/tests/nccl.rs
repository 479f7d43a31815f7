//! Ranks of NCCL, with the library that frameworks use: a process and a GPU for each rank. They reach each other's memory in each of
//! NCCL's ways, and are dumped as one tree while collectives are under way. The program compares each step of each rank with what
//! the processor computes. NCCL's ranks keep TCP connections, which CRIU 4.1 cannot dump on Linux 6.16 and later.

use anyhow::Context;
use rekindle_e2e::network::Network;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::{App, Node, Result, process, stage};

const RANKS: usize = 2;
const STEPS: u64 = 60;

/// How ranks reach each other's memory: what is said to NCCL, and whether a step is a graph's.
const WAYS: [(&[(&str, &str)], &str); 5] = [
    // cuMemCreate's memory, whose descriptors ranks send to each other.
    (&[], "1"),
    // Files in /dev/shm without a name, which are registered.
    (&[("NCCL_P2P_DISABLE", "1")], "0"),
    // In soaks only: each takes half a minute, most of which NCCL's kernels are read.
    (&[("NCCL_CUMEM_ENABLE", "0")], "0"),
    (&[("NCCL_CUMEM_ENABLE", "0")], "1"),
    (&[("NCCL_PROTO", "Simple")], "1"),
];
const USUAL: usize = 2;

/// A host whose GPUs run the PTX that the library has.
fn node() -> Result<Node> {
    let node = Node::with_gpu(&[("SIMGPU_CC", "12.0")])?;
    node.dumps_connections();
    Ok(node)
}

fn run(node: &Node, (variables, graph): (&[(&str, &str)], &str), steps: u64) -> Result<App> {
    let mut command = node.command(&stage::app("ranks")?)?;
    command.env("NCCL_SOCKET_IFNAME", "lo").env("NCCL_RAS_ENABLE", "0").envs(variables.iter().copied());
    let library = stage::nccl()?.display().to_string();
    let (ranks, steps) = (RANKS.to_string(), steps.to_string());
    let arguments = ["--library", &library, "--ranks", &ranks, "--iterations", &steps, "--graph", graph];
    // Without pauses, so that a dump nearly always meets collectives under way.
    node.run_command("ranks", command, &arguments)
}

/// The lines of ranks, which end in any order.
fn sorted(output: &str) -> Vec<String> {
    let mut lines: Vec<_> = output.lines().filter(|line| line.starts_with("rank ")).map(str::to_owned).collect();
    lines.sort();
    lines
}

#[test]
fn ranks_agree_in_each_way_and_go_on_from_their_middle() -> Result {
    let network = Network::new()?;
    // A port on which a connection has ended is in use for a minute, and CRIU cannot make it again then.
    network.forgets_connections()?;
    let node = node()?;
    let mut expected = None;
    let ways = if repetitions() > 1 { WAYS.len() } else { USUAL };
    for (number, way) in WAYS.into_iter().take(ways).enumerate() {
        let app = run(&node, way, STEPS)?;
        app.reaches(STEPS / 4 + number as u64)?;
        assert_eq!(node.clients()?.len(), RANKS);
        let image = node.dump_and_kill(app)?;
        let app = node.restore(&image)?;
        assert_eq!(process::tree(app.pid()).len(), RANKS + 1);
        assert_eq!(node.clients()?.len(), RANKS);
        let printed = sorted(&app.finish()?);
        assert_eq!(printed.len(), RANKS, "{way:?}: {printed:?}");
        // What is computed does not depend on the way.
        assert_eq!(*expected.get_or_insert_with(|| printed.clone()), printed, "{way:?}");
    }
    node.finish()
}

/// NCCL refuses two ranks on one GPU. On virtual ones they agree, and are dumped at any moment, left running and killed.
#[test]
fn ranks_agree_on_virtual_gpus_of_one_gpu_whenever_they_are_dumped() -> Result {
    const DUMPS: u64 = 2;
    // Many: the ranks do not wait for the dumps.
    const STEPS: u64 = 400;
    let network = Network::new()?;
    network.forgets_connections()?;
    let node = Node::configured("[gpu]\nvirtual = 2\n", &[("SIMGPU_CC", "12.0"), ("SIMGPU_DEVICES", "1")])?;
    node.dumps_connections();
    let mut random = Random::new();
    let mut expected = None;
    // The test before this one goes through the ways.
    let ways = if repetitions() > 1 { USUAL } else { 1 };
    for round in 0..repetitions() {
        for way in WAYS.into_iter().take(ways) {
            let app = run(&node, way, STEPS)?;
            app.reaches(2)?;
            assert_eq!(node.clients()?.len(), RANKS);
            let mut left_running = None;
            for _ in 0..DUMPS {
                app.reaches(app.progress()? + random.below(20))?;
                println!("{way:?}: dumped at step {}", app.progress()?);
                left_running = Some(node.dump(&app)?);
            }
            let killed = node.dump_and_kill(app)?;
            for image in [killed, left_running.context("there were dumps")?] {
                let printed = sorted(&node.restore(&image)?.finish()?);
                assert_eq!(printed.len(), RANKS, "{round} {way:?}: {printed:?}");
                assert_eq!(*expected.get_or_insert_with(|| printed.clone()), printed, "{round} {way:?}");
            }
        }
    }
    node.finish()
}
