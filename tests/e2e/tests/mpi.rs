//! Processes of MPI, each with a context of its own, are dumped as one tree and go on together. CRIU 4.1 cannot dump the
//! connections among them on Linux 6.16 and later.

use std::process::Command;

use anyhow::{Context, ensure};
use rekindle_e2e::app::Hold;
use rekindle_e2e::hosts::{HERE, Hosts, THERE};
use rekindle_e2e::{App, Node, Result, network, process, stage, until};

const RANKS: usize = 4;
const ROUNDS: u64 = 100;

/// Runs `mpirun` with the program, whose processes find the libraries there.
fn mpirun(command: &mut Command) -> Result<&mut Command> {
    // On one host messages go through shared memory. The test runs as root in a namespace, perhaps with fewer cores
    // than processes.
    let options =
        ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "pml", "ob1", "--mca", "btl"];
    let command = command.args(["-n", &RANKS.to_string()]).args(options).arg("self,sm");
    Ok(command.arg(stage::app("mpistencil")?))
}

fn directly() -> Result<String> {
    let mut command = Command::new("mpirun.openmpi");
    stage::clean_environment(&mut command);
    let output = mpirun(&mut command)?.env("LD_LIBRARY_PATH", stage::software_gpu()?).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn a_stencil_of_four_mpi_processes_goes_on() -> Result {
    let expected = directly()?;
    assert_eq!(expected.lines().count(), 5);
    let node = Node::start()?;
    node.dumps_connections();
    let hold = Hold::new(node.path("hold"), ROUNDS * 3 / 4)?;
    let mut command = node.command("mpirun.openmpi".as_ref())?;
    mpirun(&mut command)?.envs([hold.variable()]);
    let app = node.run_command("mpistencil", command, &["--iterations", &ROUNDS.to_string()])?.held(Some(hold));
    app.reaches(ROUNDS / 3)?;
    assert_eq!(node.clients()?.len(), RANKS);

    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    let app = node.restore(&image)?;
    assert_eq!(process::tree(app.pid()).len(), RANKS + 1);
    assert_eq!(node.clients()?.len(), RANKS);
    assert_eq!(app.finish()?, expected);
    node.finish()
}

/// What starts a program on the other host in the place of ssh. The program belongs to no process here, and has none of its files.
fn agent(hosts: &Hosts) -> Result<String> {
    let path = hosts.here.path("agent");
    let script = format!(
        "#!/bin/sh\nwhile [ \"${{1#-}}\" != \"$1\" ]; do shift; done\nshift\n\
         exec {} setsid --fork sh -c \"exec </dev/null >/dev/null 2>&1; $*\"\n",
        hosts.there.via()?
    );
    stage::write_script(&path, &script)?;
    Ok(path.display().to_string())
}

/// The lines, each once: a program that is restored says again what it has said since.
fn lines_once(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = Vec::new();
    text.lines().for_each(|line| {
        if !lines.contains(&line) {
            lines.push(line);
        }
    });
    lines
}

#[test]
fn a_job_of_mpi_on_two_hosts_goes_on_from_one_cut() -> Result {
    let expected = directly()?;
    let hosts = Hosts::start()?;
    let hold = Hold::new(hosts.here.path("hold"), ROUNDS * 3 / 4)?;
    let (agent, [one, other]) = (agent(&hosts)?, [network::HERE, network::ELSEWHERE].map(|it| it.to_string()));
    let mut command = hosts.here.command("mpirun.openmpi".as_ref())?;
    command.args(["-n", &RANKS.to_string(), "--allow-run-as-root", "--host", &format!("{one}:2,{other}:2")]);
    command.args(["--map-by", "ppr:2:node:oversubscribe", "--bind-to", "none"]);
    command.args(["--prtemca", "plm_ssh_agent", &agent, "--prtemca", "oob_tcp_if_include", "cable"]);
    command.args(["-x", "LD_LIBRARY_PATH", "-x", "REKINDLE_SOCKET"]);
    command.args(["--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "cable"]);
    // No files in memory by which ranks of a host talk: ranks that run on after the cut would change them.
    command.args(["--pmixmca", "gds", "hash"]);
    command.arg(stage::app("mpistencil")?).envs([hold.variable()]);
    let app = hosts.here.run_command("mpistencil", command, &["--iterations", &ROUNDS.to_string()])?.held(Some(hold));
    app.reaches(ROUNDS / 4)?;
    assert_eq!(hosts.here.clients()?.len(), RANKS / 2);

    // The other host's tree: a shell of the agent's, the daemon of Open MPI, and the ranks.
    let root = hosts.there.processes().into_iter().find(|it| process::command_line(*it).contains("prted"));
    let root = root.context("Open MPI has no daemon on the other host")?;
    let is_rank = |pid: &&i32| process::command_line(**pid).contains("/mpistencil");
    assert_eq!(
        process::tree(root).iter().filter(|it| is_rank(it) && process::tree(**it).len() == 1).count(),
        RANKS / 2
    );
    let (tree, number) = (process::tree(root), hosts.there.number(root)?);
    let dir = hosts.here.path("cut");
    let (here, there) = (format!("{HERE}={}", app.pid()), format!("{THERE}={number}"));
    let words = ["make", &dir.to_string_lossy(), &here, &there, "--ghost-limit", "64"];
    let (status, out, err) = hosts.cut(&words)?;
    ensure!(status.success(), "{status}: {out} {err}");
    ensure!(!err.contains("leads to no tree"), "{err}");
    app.advances()?;

    let identity = app.identity().clone();
    app.kill()?;
    process::kill_all(&tree)?;
    let (status, out, err) = hosts.restores(&dir)?;
    ensure!(status.success(), "{status}: {out} {err}");
    let app = App::adopt(identity);
    let root = hosts.there.process(number).context("the other host's tree is restored")?;
    let printed = app.finish()?;
    assert_eq!(lines_once(&printed), lines_once(&expected));
    until("the other host's tree ends", || Ok(process::is_gone(root).then_some(())))?;
    hosts.finish()
}
