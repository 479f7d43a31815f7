//! The program `counter`, which answers over UDP how far it has counted, and checks all data on its GPU: as a process
//! of the host, and in a container. CRIU 4.1 cannot dump a process with an inet socket on Linux 6.16 and later.

use rekindle_e2e::counter::Counter;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::{Node, Result};

#[test]
fn the_counter_comes_back_at_the_moment_of_the_dump() -> Result {
    let node = Node::start()?;
    let (app, counter) = Counter::start(&node, 32)?;
    let before = counter.reaches(50)?;
    let image = node.dump(&app)?;
    let later = counter.count()? + 200;
    counter.reaches(later)?;
    counter.check()?;
    app.kill()?;

    let app = node.restore(&image)?;
    let restored = counter.count()?;
    assert!(before <= restored, "at {restored}, and it was at {before} before the dump");
    assert!(restored < later, "at {restored}, and the original was killed at {later}");
    counter.check()?;
    counter.reaches(later + 1)?;
    counter.check()?;
    counter.quit()?;
    app.finish()?;
    node.finish()
}

#[test]
fn the_counter_in_a_container_comes_back_at_its_moments() -> Result {
    const PORT: u16 = 7301;
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let export = node.path("export.tar");
    let export = export.to_string_lossy();
    podman.run(
        "counter",
        &["--annotation", "dev.rekindle/enable=true"],
        &["counter", "--mib", "16", "--port", &PORT.to_string()],
    )?;
    podman.says("counter", "port ")?;
    let asked = |name: &str| podman.pid(name).map(|pid| Counter::inside(PORT, pid));

    let before = asked("counter")?.reaches(50)?;
    podman.call(&["container", "checkpoint", "--leave-running", "--export", &export, "counter"])?;
    let later = asked("counter")?.count()? + 600;
    let stopped = asked("counter")?.reaches(later)?;
    podman.call(&["container", "checkpoint", "counter"])?;
    podman.call(&["container", "restore", "counter"])?;
    podman.set_loopback_up("counter")?;
    let restored = asked("counter")?.count()?;
    assert!(stopped <= restored, "at {restored}, and it was at {stopped} before");
    asked("counter")?.check()?;

    podman.will_restore("other");
    podman.call(&["container", "restore", "--import", &export, "--name", "other"])?;
    podman.set_loopback_up("other")?;
    let other = asked("other")?.count()?;
    assert!(before <= other && other < later, "at {other}, and it was exported after {before} and before {later}");
    asked("other")?.check()?;
    for name in ["counter", "other"] {
        asked(name)?.quit()?;
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
    }
    drop(podman);
    node.finish()
}
