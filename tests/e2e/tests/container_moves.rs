//! What a container was given stays its own: when the daemon is restarted, when it is stopped and restored, when it is
//! imported under other names.

use std::fs;

use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result};

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
    // Another process of the container, which was not there when it was given something.
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
    // Side by side.
    for name in ["two", "three"] {
        podman.will_restore(name);
        podman.call(&["container", "restore", "--import", &export, "--name", name])?;
        exec_sees(name)?;
    }
    assert_eq!(node.clients()?.len(), 3);
    fs::write(shared.join("go"), "")?;
    for name in ["one", "two", "three"] {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
        assert!(podman.call(&["logs", name])?.ends_with("the same\n"), "{name}");
    }
    drop(podman);
    node.finish()
}
