//! Managed memory that moves between the process and the device, beyond what every program shows (`programs.rs`: `managed`, `moving`).

use std::os::unix::process::{CommandExt, ExitStatusExt};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::{App, Node, Result, process, stage, until};

/// A program whose managed memory the GPU has, and which waits before it touches that.
fn with_memory_on_the_gpu(node: &Node) -> Result<(App, i32)> {
    let app = node.run_held("moved", &[], Some(1))?;
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
    let (app, _) = with_memory_on_the_gpu(&node)?;
    app.lift();
    assert_eq!(app.finish()?, "2098176\n");
    node.finish()
}

/// It must not take zeros for its memory.
#[test]
fn a_process_whose_worker_has_died_gets_sigbus_where_the_gpu_had_its_memory() -> Result {
    let node = Node::start()?;
    let (app, worker) = with_memory_on_the_gpu(&node)?;
    process::signal(worker, libc::SIGKILL)?;
    is_lost(&node, app.pid())?;
    app.lift();
    got_sigbus(app)?;
    node.finish()
}

#[test]
fn a_thread_that_waits_for_a_page_gets_sigbus_when_the_worker_dies() -> Result {
    let node = Node::start()?;
    let (app, worker) = with_memory_on_the_gpu(&node)?;
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
    let (app, _) = with_memory_on_the_gpu(&node)?;
    let image = node.dump_and_kill(app)?;
    let app = node.restore(&image)?;
    app.lift();
    assert_eq!(app.finish()?, "2098176\n");
    node.finish()
}

#[test]
fn a_program_that_moves_memory_is_dumped_again_and_again_while_it_runs() -> Result {
    let arguments = ["--iterations", "60"];
    let expected = undisturbed("moving", &arguments)?;
    for protocol in ["stop", "cow", "recopy"] {
        let node = Node::configured(&format!("[checkpoint]\nprotocol = \"{protocol}\"\n"), &[])?;
        let app = node.run("moving", &arguments)?;
        let mut images = Vec::new();
        for middle in [5, 20, 40] {
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

/// As on kernels that let no memory move.
#[test]
fn memory_that_may_not_move_stays_in_host_memory() -> Result {
    let expected = undisturbed("moving", &[])?;
    let node = Node::start()?;
    let mut command = node.command(&stage::app("moving")?)?;
    command.env("REKINDLE_MANAGED", "host");
    let app = node.run_command("moving", command, &[])?;
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
