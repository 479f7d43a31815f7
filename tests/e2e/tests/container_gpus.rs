//! Which GPUs a container may use: given by annotation and by CDI device, and held to whatever the container does.

use std::fs;

use rekindle_e2e::fake::FakeDaemon;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result};
use rekindle_wire::WIRE_VERSION;
use serde_json::json;

const ALL: [&str; 2] = ["--annotation", "dev.rekindle/enable=true"];
/// The software GPU's.
const FIRST: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707500";
const SECOND: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707501";

/// What `visible` says that sees these, and asks for one more.
fn sees(gpus: &[&str]) -> String {
    let lines = gpus.iter().enumerate().map(|(number, uuid)| format!("{number} {uuid} ok\n"));
    let error = if gpus.is_empty() { "cudaErrorNoDevice" } else { "cudaErrorInvalidDevice" };
    let count = gpus.len();
    format!("count {count}\n{}use {count}: {error}\n", lines.collect::<String>())
}

#[test]
fn a_container_sees_the_gpus_it_was_given_and_cannot_widen_that() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let specification = podman.generate_cdi()?;
    assert!(specification.contains(SECOND), "{specification}");
    let second = format!("dev.rekindle/gpus={SECOND}");
    let both = format!("CUDA_VISIBLE_DEVICES={FIRST},{SECOND}");
    let first_of_all = format!("CUDA_VISIBLE_DEVICES={FIRST}");
    let containers: [(&str, &[&str], &[&str]); 9] = [
        ("annotated", &ALL, &[FIRST, SECOND]),
        ("annotated-one", &["--annotation", "dev.rekindle/gpus=1"], &[SECOND]),
        ("annotated-uuid", &["--annotation", &second], &[SECOND]),
        ("device-all", &["--device", "rekindle.dev/gpu=all"], &[FIRST, SECOND]),
        ("device-one", &["--device", "rekindle.dev/gpu=1"], &[SECOND]),
        ("device-two", &["--device", "rekindle.dev/gpu=1", "--device", "rekindle.dev/gpu=0"], &[FIRST, SECOND]),
        (
            "device-and-annotation",
            &["--device", "rekindle.dev/gpu=1", "--annotation", "dev.rekindle/enable=true"],
            &[SECOND],
        ),
        // The driver's reading: up to the first that names none.
        ("hides", &["--device", "rekindle.dev/gpu=1", "--env", &both], &[]),
        ("turns", &["--device", "rekindle.dev/gpu=all", "--env", "CUDA_VISIBLE_DEVICES=1,0,7"], &[SECOND, FIRST]),
    ];
    for (name, options, gpus) in containers {
        podman.run(name, options, &["visible", "--use", &gpus.len().to_string()])?;
        assert_eq!(podman.output(name)?, sees(gpus), "{name}");
    }
    // Whatever a program of the container does with its environment.
    let script = format!("{first_of_all} /apps/visible --use 0; CUDA_VISIBLE_DEVICES=0,1 /apps/visible --use 1");
    podman.run("shell", &["--device", "rekindle.dev/gpu=1"], &["/bin/sh", "-c", &script])?;
    assert_eq!(podman.output("shell")?, format!("count 0\nuse 0: cudaErrorNoDevice\n{}", sees(&[SECOND])));
    drop(podman);
    node.finish()
}

#[test]
fn a_container_that_was_given_nothing_gets_nothing_from_the_daemon() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    // All that a container with GPUs has, but for the hook.
    let interposer = rekindle_e2e::stage::interposer()?;
    let library = format!("{}:/usr/lib/rekindle:ro", interposer.display());
    let options =
        ["--volume", &library, "--volume", "/run/rekindle:/run/rekindle", "--env", "LD_LIBRARY_PATH=/usr/lib/rekindle"];
    podman.run("taker", &options, &["visible"])?;
    assert_eq!(podman.exit_code("taker")?, 3);
    let said = podman.errors("taker")?;
    assert!(said.contains("was given no GPU") && said.contains("--device rekindle.dev/gpu=all"), "{said}");
    assert!(node.clients()?.is_empty());
    drop(podman);
    node.finish()
}

#[test]
fn what_cannot_be_given_fails_the_run_with_the_reason_in_podmans_output() -> Result {
    let quotas = "[containers]\ngpu_memory_mib = 64\nworkers = 2\n";
    let mut node = Node::at_default_socket_with(quotas)?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let refused = |name: &str, options: &[&str], words: &[&str]| -> Result {
        let said = podman.refuses_to_run_in("rekindle-e2e", name, options, &["visible"])?;
        for word in words {
            assert!(said.contains(word), "{name}: {said}");
        }
        Ok(())
    };
    refused("unknown", &["--annotation", "dev.rekindle/gpus=2"], &["no GPU \"2\"", "0 to 1"])?;
    refused("unknown-device", &["--device", "rekindle.dev/gpu=2"], &["rekindle.dev/gpu=2"])?;
    let much = ["--annotation", "dev.rekindle/gpu-memory-mib=65"];
    refused("much", &[&ALL[..], &much].concat(), &["65 MiB of GPU memory", "no more than 64"])?;
    let device = ["--device", "rekindle.dev/gpu=0"];
    refused("much-device", &[&device[..], &much].concat(), &["65 MiB of GPU memory", "no more than 64"])?;
    let nonsense = ["--annotation", "dev.rekindle/workers=many"];
    refused("nonsense", &[&device[..], &nonsense].concat(), &["dev.rekindle/workers", "whole number"])?;

    node.stop_daemon()?;
    refused("away", &device, &["no daemon at", "start rekindled"])?;
    // What a daemon of another version says to whatever it does not understand.
    let reason =
        format!("wire version {WIRE_VERSION} was spoken, and this rekindled 9.9 speaks 99: install one version");
    let fake = FakeDaemon::start(node.socket(), json!({ "Failed": { "reason": reason } }))?;
    refused("other-version", &device, &["this rekindled 9.9 speaks 99"])?;
    refused("other-version-annotated", &ALL, &["this rekindled 9.9 speaks 99"])?;
    drop(fake);
    let left = fs::read_dir("/run/rekindle-state").map(Iterator::count).unwrap_or(0);
    assert_eq!(left, 0, "what was refused is not kept");
    drop(podman);
    node.start_daemon(&[])?;
    node.finish()
}
