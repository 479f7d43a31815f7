//! Containers of crun, which runs no hooks when it restores.

use std::fs;

use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result};

const SECOND: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707501";

#[test]
fn a_container_of_crun_is_checkpointed_restored_and_imported_with_its_gpu() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::with_runtime(&node, "crun")?;
    podman.generate_cdi()?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let export = node.path("export.tar");
    let export = export.to_string_lossy();
    // Another process of the container, which has only what the container was given.
    let exec_sees = |name: &str| -> Result {
        let said = podman.call(&["exec", name, "/apps/visible", "--mib", "40"]);
        assert!(said.unwrap_err().to_string().contains("cudaErrorMemoryAllocation"), "{name}: its limit is gone");
        let said = podman.call(&["exec", name, "/apps/visible", "--use", "1"])?;
        assert_eq!(said, format!("count 1\n0 {SECOND} ok\nuse 1: cudaErrorInvalidDevice\n"), "{name}");
        Ok(())
    };
    let limit = ["--annotation", "dev.rekindle/gpu-memory-mib=48"];
    let options = [&["--device", "rekindle.dev/gpu=1", "--volume", &volume], &limit[..]].concat();
    podman.run("crun-one", &options, &["visible", "--mib", "8", "--until", "/shared/go"])?;
    podman.says("crun-one", "ready")?;
    exec_sees("crun-one")?;
    let checkpoint = ["container", "checkpoint", "--leave-running", "--compress", "none", "--export", &export];
    podman.call(&[&checkpoint[..], &["crun-one"]].concat())?;
    exec_sees("crun-one")?;
    podman.call(&["container", "checkpoint", "crun-one"])?;
    podman.call(&["container", "restore", "crun-one"])?;
    exec_sees("crun-one")?;
    podman.will_restore("crun-two");
    podman.call(&["container", "restore", "--import", &export, "--name", "crun-two"])?;
    exec_sees("crun-two")?;
    fs::write(shared.join("go"), "")?;
    for name in ["crun-one", "crun-two"] {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
        assert!(podman.call(&["logs", name])?.ends_with("the same\n"), "{name}");
    }
    drop(podman);
    node.finish()
}

#[test]
fn what_cannot_be_given_fails_the_run_under_crun_too() -> Result {
    let mut node = Node::at_default_socket_with("[containers]\nworkers = 2\n")?;
    let podman = Podman::with_runtime(&node, "crun")?;
    podman.generate_cdi()?;
    let refused = |name: &str, options: &[&str], words: &[&str]| -> Result {
        let said = podman.refuses_to_run_in("rekindle-e2e", name, options, &["visible"])?;
        for word in words {
            assert!(said.contains(word), "{name}: {said}");
        }
        Ok(())
    };
    let device = ["--device", "rekindle.dev/gpu=0"];
    refused("crun-unknown", &["--annotation", "dev.rekindle/gpus=2"], &["no GPU \"2\"", "0 to 1"])?;
    let many = ["--annotation", "dev.rekindle/workers=3"];
    refused("crun-many", &[&device[..], &many].concat(), &["3 workers", "no more than 2"])?;
    node.stop_daemon()?;
    refused("crun-away", &device, &["no daemon at", "start rekindled"])?;
    drop(podman);
    node.start_daemon(&[])?;
    node.finish()
}
