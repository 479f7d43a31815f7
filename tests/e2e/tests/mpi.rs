//! Processes of MPI, each with a context of its own, are dumped as one tree and go on together. CRIU 4.1 cannot dump the
//! connections among them on Linux 6.16 and later.

use std::process::Command;

use anyhow::ensure;
use rekindle_e2e::app::Hold;
use rekindle_e2e::{Node, Result, process, stage};

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
