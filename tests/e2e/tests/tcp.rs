//! A container that publishes a service over TCP, which computes its answers on a GPU. Its port, its name, its
//! connections and its health check survive checkpoints. CRIU 4.1 cannot dump an inet socket on Linux 6.16 and later.

use std::net::Ipv4Addr;

use anyhow::ensure;
use rekindle_e2e::network::{self, Network};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::service::Service;
use rekindle_e2e::{Node, Result, process};

use crate::container_protect;
use crate::protect::{newest, rekindle, wait_for};

const LOCALHOST: Ipv4Addr = Ipv4Addr::LOCALHOST;
/// The port in the container.
const PORT: u16 = 7301;
const PUBLISHED: u16 = 17301;
const PUBLISHED_TOO: u16 = 17302;
/// The host's `flock`, since busybox may lack it.
const FLOCK: &str = "/usr/bin/flock:/usr/bin/flock:ro";
const LOCK: &str = "/tmp/lock";
/// The container's own health check.
const HEALTH: &str = "echo count | nc 127.0.0.1 7301 | grep -q ^count";

/// Starts the service with a published port. A process in the container holds a lock as long as the service runs.
fn publish(podman: &Podman, name: &str, more: &[&str]) -> Result {
    let published = format!("{PUBLISHED}:{PORT}");
    let network = ["--network", "podman", "--publish", &published, "--volume", FLOCK];
    let health = ["--health-cmd", HEALTH, "--health-interval", "disable"];
    let options = [&["--device", "rekindle.dev/gpu=0"], &network[..], &health, more].concat();
    let program = ["/usr/bin/flock", LOCK, "/apps/counter", "--tcp", "1", "--mib", "2", "--port", &PORT.to_string()];
    podman.run(name, &options, &program)?;
    podman.says(name, "port ")?;
    Ok(())
}

/// Checks the container's port and health as podman reports them, and that the lock is held.
fn is_whole(podman: &Podman, name: &str, published: u16) -> Result {
    let port = podman.call(&["port", name])?;
    ensure!(port == format!("{PORT}/tcp -> 0.0.0.0:{published}\n"), "{name} has {port:?}");
    podman.call(&["healthcheck", "run", name])?;
    let health = podman.call(&["inspect", "--format", "{{.State.Health.Status}}", name])?;
    ensure!(health.trim() == "healthy", "{name} is {health:?}");
    let locked = podman.call(&["exec", name, "/bin/sh", "-c", &format!("flock -n {LOCK} true || echo locked")])?;
    ensure!(locked == "locked\n", "the lock of {name} is free");
    Ok(())
}

#[test]
fn a_published_service_is_checkpointed_restored_and_imported() -> Result {
    let _network = Network::new()?;
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let export = node.path("export.tar");
    let export = export.to_string_lossy();
    publish(&podman, "service", &["--volume", "kept:/kept"])?;
    let asked = |published| Service::connect(LOCALHOST, published);
    is_whole(&podman, "service", PUBLISHED)?;

    let before = asked(PUBLISHED)?.reaches(50)?;
    // podman reports that a lock needs the option, and the container goes on.
    let said = podman.call(&["container", "checkpoint", "service"]).unwrap_err().to_string();
    assert!(said.contains("lock"), "{said}");
    let options = ["--leave-running", "--file-locks", "--ignore-volumes", "--compress", "none", "--export", &export];
    podman.call(&[&["container", "checkpoint"], &options[..], &["service"]].concat())?;
    podman.call(&["exec", "service", "touch", "/kept/later"])?;
    let later = asked(PUBLISHED)?.count()? + 600;
    let stopped = asked(PUBLISHED)?.reaches(later)?;
    is_whole(&podman, "service", PUBLISHED)?;

    podman.call(&["container", "checkpoint", "--file-locks", "service"])?;
    podman.call(&["container", "restore", "--file-locks", "service"])?;
    let restored = asked(PUBLISHED)?.count()?;
    assert!(stopped <= restored, "at {restored}, and it was at {stopped} before");
    asked(PUBLISHED)?.check()?;
    is_whole(&podman, "service", PUBLISHED)?;

    podman.will_restore("other");
    let published = format!("{PUBLISHED_TOO}:{PORT}");
    let options = ["--file-locks", "--ignore-volumes", "--import", &export, "--name", "other", "--publish", &published];
    podman.call(&[&["container", "restore"], &options[..]].concat())?;
    podman.call(&["exec", "other", "test", "-e", "/kept/later"])?;
    let other = asked(PUBLISHED_TOO)?.count()?;
    assert!(before <= other && other < later, "at {other}, and it was exported after {before} and before {later}");
    asked(PUBLISHED_TOO)?.check()?;
    is_whole(&podman, "other", PUBLISHED_TOO)?;
    for (name, published) in [("service", PUBLISHED), ("other", PUBLISHED_TOO)] {
        asked(published)?.quit()?;
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
    }
    drop(podman);
    node.finish()
}

/// It is killed while it is protected.
#[test]
fn a_protected_service_comes_back_at_its_port_and_its_address() -> Result {
    let _network = Network::new()?;
    let node = container_protect::node()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    publish(&podman, "service", &["--volume", "kept:/kept"])?;
    let address = || podman.call(&["inspect", "--format", "{{.NetworkSettings.IPAddress}}", "service"]);
    let was = address()?;
    let program = container_protect::program(&node, "runc")?;
    let protect = ["protect", "--container", "service", "--podman", &program, "--every", "300ms", "--file-locks"];
    rekindle(&node, &protect)?;
    for restores in 1..=2 {
        let before = wait_for(&node, "service", "an image", |it| it["runs"] == true && newest(it) > restores)?;
        let count = Service::connect(LOCALHOST, PUBLISHED)?.count()?;
        podman.call(&["exec", "service", "touch", &format!("/kept/{restores}")])?;
        wait_for(&node, "service", "an image of a later count", |it| newest(it) > newest(&before) + 1)?;
        process::signal(podman.pid("service")?, libc::SIGKILL)?;
        wait_for(&node, "service", "it is restored", |it| it["restores"] == restores && it["runs"] == true)?;
        let mut asked = Service::connect(LOCALHOST, PUBLISHED)?;
        let now = asked.count()?;
        ensure!(now >= count, "at {now}, and an image was made after {count}");
        asked.check()?;
        is_whole(&podman, "service", PUBLISHED)?;
        assert_eq!(address()?, was);
        podman.call(&["exec", "service", "test", "-e", &format!("/kept/{restores}")])?;
    }
    Service::connect(LOCALHOST, PUBLISHED)?.quit()?;
    let over = wait_for(&node, "service", "it is over", |it| it["phase"] == "over" && it["guard"].is_null())?;
    assert_eq!(over["ending"]["exited"], 0, "{over:#}");
    drop(podman);
    node.finish()
}

#[test]
fn open_connections_to_a_published_service_go_on() -> Result {
    let network = Network::new()?;
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    publish(&podman, "service", &[])?;
    // The connections go from another machine to the published port, and from this machine to the container's own
    // address. (A connection from this machine to the published port would be translated to come from podman's bridge,
    // and would die when the bridge is removed with its last container.)
    let address: Ipv4Addr =
        podman.call(&["inspect", "--format", "{{.NetworkSettings.IPAddress}}", "service"])?.trim().parse()?;
    let mut open =
        [network.elsewhere(|| Service::connect(network::HERE, PUBLISHED))?, Service::connect(address, PORT)?];
    let [mut before, _] = [open[0].reaches(30)?, open[1].reaches(30)?];
    for leave_running in [true, false] {
        let options: &[&str] = if leave_running { &["--leave-running"] } else { &[] };
        let checkpoint = ["container", "checkpoint", "--tcp-established", "--file-locks"];
        podman.call(&[&checkpoint, options, &["service"]].concat())?;
        if !leave_running {
            podman.call(&["container", "restore", "--tcp-established", "--file-locks", "service"])?;
        }
        for each in &mut open {
            let after = each.count()?;
            assert!(before <= after, "at {after}, and it was at {before} before");
            each.check()?;
        }
        before = open[0].reaches(before + 30)?;
    }
    Service::connect(LOCALHOST, PUBLISHED)?.check()?;
    let [open, _] = open;
    open.quit()?;
    assert_eq!(podman.exit_code("service")?, 0);
    drop(podman);
    node.finish()
}
