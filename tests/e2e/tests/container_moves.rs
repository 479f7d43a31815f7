//! A container keeps the GPUs that it was given when the daemon restarts, when the container is stopped and restored,
//! and when it is imported under other names.

use std::fs;

use rekindle_e2e::podman::Podman;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result};

const FIRST: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707500";
const SECOND: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707501";

#[test]
fn a_container_keeps_its_gpu_over_checkpoints_imports_and_daemons() -> Result {
    let mut node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let export = node.path("export.tar");
    let export = export.to_string_lossy();
    let sees = format!("count 1\n0 {SECOND} ok\n");
    // Another process of the container, which did not exist when the container was given its GPU.
    let exec_sees = |name: &str| -> Result {
        let said = podman.call(&["exec", name, "/apps/visible", "--use", "1"])?;
        assert_eq!(said, format!("{sees}use 1: cudaErrorInvalidDevice\n"), "{name}");
        Ok(())
    };
    let options = ["--device", "rekindle.dev/gpu=1", "--volume", &volume];
    podman.run("one", &options, &["visible", "--mib", "8", "--until", "/shared/go"])?;
    podman.says("one", "ready")?;
    exec_sees("one")?;
    podman.call(&["container", "checkpoint", "--leave-running", "--compress", "none", "--export", &export, "one"])?;

    node.stop_daemon()?;
    node.start_daemon(&[])?;
    node.client(podman.pid("one")?)?;
    exec_sees("one")?;
    podman.call(&["container", "checkpoint", "one"])?;
    podman.call(&["container", "restore", "one"])?;
    exec_sees("one")?;
    // Both containers run at the same time.
    for name in ["two", "three"] {
        podman.will_restore(name);
        podman.call(&["container", "restore", "--import", &export, "--name", name])?;
        exec_sees(name)?;
    }
    until_true("the three alone are there", || Ok(node.clients()?.len() == 3))?;
    fs::write(shared.join("go"), "")?;
    for name in ["one", "two", "three"] {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
        assert!(podman.call(&["logs", name])?.ends_with("the same\n"), "{name}");
    }
    drop(podman);
    node.finish()
}

#[test]
fn processes_of_a_container_have_its_limits_together_and_again_when_restored() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    // A shell and two processes with 32 and 16 MiB, and 2 MiB each for small allocations.
    let script = "/apps/visible --mib 32 --until /shared/go & /apps/visible --mib 16 --until /shared/go & wait";
    let annotations = ["gpus=1", "gpu-memory-mib=64", "workers=3"].map(|it| format!("dev.rekindle/{it}"));
    let mut options = vec!["--volume", &volume];
    options.extend(annotations.iter().flat_map(|it| ["--annotation", it]));
    podman.run("both", &options, &["/bin/sh", "-c", script])?;
    until_true("both are ready", || Ok(podman.call(&["logs", "both"])?.matches("ready").count() == 2))?;

    let visible = |mib: &'static str| podman.call(&["exec", "both", "/apps/visible", "--mib", mib]);
    let two = || until_true("the two alone are there", || Ok(node.clients()?.len() == 2));
    let holds = || -> Result {
        two()?;
        assert_eq!(visible("8")?, format!("count 1\n0 {SECOND} ok\n"));
        two()?;
        let said = visible("16").unwrap_err().to_string();
        assert!(said.contains("cudaErrorMemoryAllocation"), "{said}");
        Ok(())
    };
    holds()?;
    podman.call(&["container", "checkpoint", "both"])?;
    podman.call(&["container", "restore", "both"])?;
    holds()?;
    two()?;
    podman.call(&["exec", "--detach", "both", "/apps/visible", "--until", "/shared/go"])?;
    until_true("a third process is there", || Ok(node.clients()?.len() == 3))?;
    let said = visible("1").unwrap_err().to_string();
    assert!(said.contains("it was given 3 workers"), "{said}");
    fs::write(shared.join("go"), "")?;
    assert_eq!(podman.output("both")?.matches("the same").count(), 2);
    drop(podman);
    node.finish()
}

#[test]
fn containers_of_a_pod_have_a_gpu_each_and_are_restored_into_it() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    podman.call(&["pod", "create", "--name", "pod", "--network", "none"])?;
    let apps = format!("{}:/apps:ro", rekindle_e2e::stage::apps()?.display());
    let export = node.path("export.tar");
    let export = export.to_string_lossy();
    for (name, gpu) in [("pod-0", "0"), ("pod-1", "1")] {
        podman.will_restore(name);
        let device = format!("rekindle.dev/gpu={gpu}");
        let options = ["run", "--detach", "--pod", "pod", "--pids-limit", "0", "--name", name, "--device", &device];
        let program = ["--volume", &apps, "rekindle-e2e", "/apps/visible", "--until", "/tmp/go"];
        podman.call(&[&options[..], &program].concat())?;
        podman.says(name, "ready")?;
    }
    // Without a kernel that tracks writes, podman reports that, and the container goes on.
    if podman.call(&["container", "checkpoint", "--pre-checkpoint", "pod-0"]).is_err() {
        assert!(podman.pid("pod-0")? != 0);
    }
    podman.call(&["container", "checkpoint", "--compress", "none", "--export", &export, "pod-1"])?;
    podman.call(&["rm", "pod-1"])?;
    podman.call(&["container", "restore", "--import", &export, "--pod", "pod"])?;
    podman.call(&["container", "checkpoint", "pod-0"])?;
    podman.call(&["container", "restore", "pod-0"])?;
    for (name, gpu) in [("pod-0", FIRST), ("pod-1", SECOND)] {
        assert_eq!(podman.call(&["exec", name, "/apps/visible"])?, format!("count 1\n0 {gpu} ok\n"), "{name}");
        podman.call(&["exec", name, "touch", "/tmp/go"])?;
        assert!(podman.output(name)?.ends_with("the same\n"), "{name}");
    }
    podman.call(&["pod", "rm", "--force", "--time", "0", "pod"])?;
    drop(podman);
    node.finish()
}
