//! The GPUs that a container may use: given by annotation or by CDI device, and enforced whatever the container does.

use std::fs;

use rekindle_e2e::fake::FakeDaemon;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result};
use rekindle_wire::CONTROL_VERSION;
use serde_json::json;

const ALL: [&str; 2] = ["--annotation", "dev.rekindle/enable=true"];
/// The UUIDs of the software GPUs.
const FIRST: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707500";
const SECOND: &str = "GPU-72656b69-6e64-6c65-2d73-696d67707501";

/// The output of `visible` when it sees these GPUs and asks for one more.
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
    // The limit holds for any environment that a program of the container sets. The driver reads the list up to the
    // first GPU that does not exist.
    let run = |name: &str, options: &[&str], runs: &[(&str, &[&str])]| -> Result {
        let one = |(set, gpus): &(&str, &[&str])| format!("{set} /apps/visible --use {}", gpus.len());
        let script = runs.iter().map(one).collect::<Vec<_>>().join("; ");
        podman.run(name, options, &["/bin/sh", "-c", &script])?;
        let expected: String = runs.iter().map(|(_, gpus)| sees(gpus)).collect();
        assert_eq!(podman.output(name)?, expected, "{name}");
        Ok(())
    };
    let other = format!("CUDA_VISIBLE_DEVICES={FIRST},{SECOND}");
    let second = format!("dev.rekindle/gpus={SECOND}");
    let both = ["--device", "rekindle.dev/gpu=1", "--device", "rekindle.dev/gpu=0"];
    let and_annotated = ["--device", "rekindle.dev/gpu=1", ALL[0], ALL[1]];
    run("annotated", &ALL, &[("", &[FIRST, SECOND]), ("CUDA_VISIBLE_DEVICES=1,0,7", &[SECOND, FIRST])])?;
    run("one", &["--annotation", &second], &[("", &[SECOND]), (&other, &[]), ("CUDA_VISIBLE_DEVICES=0,1", &[SECOND])])?;
    run("device", &and_annotated, &[("LD_LIBRARY_PATH=", &[SECOND]), ("CUDA_VISIBLE_DEVICES=1", &[])])?;
    run("devices", &both, &[("", &[FIRST, SECOND])])?;
    drop(podman);
    node.finish()
}

#[test]
fn a_container_that_was_given_nothing_gets_nothing_from_the_daemon() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    // The container gets everything that a container with GPUs has, except the hook.
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
    // The answer of a daemon of another version to a message that it does not understand.
    let reason = format!(
        "the peer speaks control version {CONTROL_VERSION}, and this rekindled 9.9 speaks 99: install one version"
    );
    let fake = FakeDaemon::start(node.socket(), json!({ "Failed": { "reason": reason } }))?;
    refused("other-version", &device, &["this rekindled 9.9 speaks 99"])?;
    refused("other-version-annotated", &ALL, &["this rekindled 9.9 speaks 99"])?;
    drop(fake);
    // The folder of the workers' records lies beside these files.
    let entries = fs::read_dir("/run/rekindle-state").into_iter().flatten().flatten();
    let left: Vec<_> = entries.map(|it| it.path()).filter(|it| it.is_file()).collect();
    assert!(left.is_empty(), "what was refused is kept: {left:?}");
    drop(podman);
    node.start_daemon(&[])?;
    node.finish()
}
