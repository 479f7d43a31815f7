//! Managed memory that moves between the process and the device, beyond what every program shows (`programs.rs`: `managed`, `moving`).

use std::os::unix::process::{CommandExt, ExitStatusExt};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, process, stage, until};

/// Programs that print a sum of managed memory, which the GPU has while they wait: of an allocation, and of a variable.
const PROGRAMS: [(&str, &str); 2] = [("moved", "2098176\n"), ("touched", "2098179\n")];

/// A program whose managed memory the GPU has, and which waits before it touches that.
fn with_memory_on_the_gpu(node: &Node, name: &str) -> Result<(App, i32)> {
    let app = node.run_held(name, &[], Some(1))?;
    app.reaches(1)?;
    let worker = node.client(app.pid())?.worker;
    Ok((app, worker))
}

fn is_lost(node: &Node, pid: i32) -> Result {
    until("the daemon has noticed the worker's death", || {
        Ok(node.clients()?.iter().any(|it| it.pid == pid && it.state == "lost").then_some(()))
    })
}

fn got_sigbus(app: App) -> Result {
    let status = app.end()?;
    ensure!(status.signal() == Some(libc::SIGBUS), "{status}: {:?} {:?}", app.output()?, app.errors()?);
    Ok(())
}

#[test]
fn a_process_touches_what_the_gpu_has_and_gets_it() -> Result {
    let node = Node::start()?;
    for (name, expected) in PROGRAMS {
        let (app, _) = with_memory_on_the_gpu(&node, name)?;
        app.lift();
        assert_eq!(app.finish()?, expected);
    }
    node.finish()
}

/// It must not take zeros for its memory.
#[test]
fn a_process_whose_worker_has_died_gets_sigbus_where_the_gpu_had_its_memory() -> Result {
    let node = Node::start()?;
    for (name, _) in PROGRAMS {
        let (app, worker) = with_memory_on_the_gpu(&node, name)?;
        process::signal(worker, libc::SIGKILL)?;
        is_lost(&node, app.pid())?;
        app.lift();
        got_sigbus(app)?;
    }
    node.finish()
}

#[test]
fn a_thread_that_waits_for_a_page_gets_sigbus_when_the_worker_dies() -> Result {
    let node = Node::start()?;
    let (app, worker) = with_memory_on_the_gpu(&node, "moved")?;
    process::signal(worker, libc::SIGSTOP)?;
    app.lift();
    let pid = app.pid();
    until("the program waits for a page", || {
        let channel = std::fs::read_to_string(format!("/proc/{pid}/wchan"))?;
        Ok(channel.contains("userfault").then_some(()))
    })?;
    process::signal(worker, libc::SIGKILL)?;
    got_sigbus(app)?;
    node.finish()
}

/// The content of a dumped process comes back in the process's own pages, and the GPU's comes again when it is asked for.
#[test]
fn a_program_that_stands_still_with_memory_on_the_gpu_is_restored_with_it() -> Result {
    let node = Node::start()?;
    for (name, expected) in PROGRAMS {
        let (app, _) = with_memory_on_the_gpu(&node, name)?;
        let image = node.dump_and_kill(app)?;
        let app = node.restore(&image)?;
        app.lift();
        assert_eq!(app.finish()?, expected);
    }
    node.finish()
}

#[test]
fn a_program_that_moves_memory_is_dumped_again_and_again_while_it_runs() -> Result {
    dumped_again_and_again("moving", &["--iterations", "24"], [3, 9, 16])
}

#[test]
fn a_program_with_managed_variables_is_dumped_again_and_again_while_it_runs() -> Result {
    dumped_again_and_again("variables", &["--iterations", "36"], [3, 12, 24])
}

/// Dumps a program in these steps under each protocol, and restores each image.
fn dumped_again_and_again(name: &str, arguments: &[&str], steps: [u64; 3]) -> Result {
    let expected = undisturbed(name, arguments)?;
    for protocol in ["stop", "clone", "cow", "recopy"] {
        let node = Node::configured(&format!("[checkpoint]\nprotocol = \"{protocol}\"\n"), &[])?;
        let app = node.run(name, arguments)?;
        let mut images = Vec::new();
        for middle in steps {
            app.reaches(middle)?;
            images.push(node.dump(&app)?);
        }
        assert_eq!(app.finish()?, expected, "{protocol}");
        for image in images {
            image.must_be_of_the_middle(&expected)?;
            let printed = node.restore(&image)?.finish();
            assert_eq!(printed.with_context(|| protocol.to_owned())?, expected, "{protocol}");
        }
        node.finish()?;
    }
    Ok(())
}

/// Nothing is printed: the program stops at its first variable.
#[test]
fn managed_variables_are_refused_where_no_memory_may_move() -> Result {
    let node = Node::start()?;
    let mut command = node.command(&stage::app("touched")?)?;
    let output = command.env("REKINDLE_MANAGED", "host").output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
    ensure!(errors.contains("the program has __managed__ variables, whose pages must move"), "{errors}");
    node.finish()
}

/// Each GPU would have a variable of its own.
#[test]
fn managed_variables_are_refused_on_a_second_gpu() -> Result {
    assert_eq!(undisturbed("touched", &["--second", "1"])?, "cudaSuccess\n2098179\n");
    let node = Node::start()?;
    assert_eq!(node.run("touched", &["--second", "1"])?.finish()?, "cudaErrorNotSupported\n2098179\n");
    node.finish()
}

/// As on kernels that let no memory move.
#[test]
fn memory_that_may_not_move_stays_in_host_memory() -> Result {
    let expected = undisturbed("moving", &[])?;
    let node = Node::start()?;
    let app = node.run_with("moving", &[], &[("REKINDLE_MANAGED", "host")])?;
    app.reaches(3)?;
    let moves = std::fs::read_to_string(format!("/proc/{}/maps", app.pid()))?.contains("rekindle-managed");
    let image = node.dump_and_kill(app)?;
    assert!(!moves);
    image.must_be_of_the_middle(&expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

/// The kernel gives an ordinary user no userfaultfd that its own accesses wait for. The daemon does, if it may.
#[test]
fn an_ordinary_users_memory_moves_if_the_configuration_says_so() -> Result {
    let expected = undisturbed("moving", &[])?;
    for gives in [false, true] {
        let node = Node::configured(&format!("socket_mode = \"0666\"\n[limits]\nuserfaultfd = {gives}\n"), &[])?;
        let mut command = node.command(&stage::app("moving")?)?;
        let output = command.uid(65534).gid(65534).env("REKINDLE_LOG", "1").output()?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{errors}");
        assert_eq!(errors.contains("managed memory stays in host memory"), !gives, "{errors}");
        node.finish()?;
    }
    Ok(())
}
