//! Virtual GPUs: one GPU is shown as several (`gpu.virtual`). Programs of several GPUs print on one GPU what they print on two, and
//! are dumped and restored as elsewhere: on virtual GPUs of other numbers, and on GPUs of the same size.

use std::fs;

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::{Hold, undisturbed};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Image, Node, Result, stage};
use rekindle_wire::control::{GpuInfo, Reply, Request};

const TWO: &str = "[gpu]\nvirtual = 2\n";
const FOUR: &str = "[gpu]\nvirtual = 4\n";
const ONE_GPU: (&str, &str) = ("SIMGPU_DEVICES", "1");
const GIB: u64 = 1 << 30;

/// A host with one GPU of 4 GiB that is shown as several.
fn node(configuration: &str) -> Result<Node> {
    Node::configured(configuration, &[ONE_GPU])
}

/// Dumps a program in its middle, and checks that it goes on from there.
fn dumped(node: &Node, app: App, expected: &str) -> Result<Image> {
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(expected)?;
    assert_eq!(node.restore(&image)?.finish()?, expected, "restored");
    Ok(image)
}

/// The output of a program directly on two software GPUs, and its final progress.
fn directly(node: &Node, name: &str) -> Result<(String, u64)> {
    let file = node.fresh("progress");
    let printed = undisturbed(name, &["--progress", file.to_str().context("a path that is no text")?])?;
    Ok((printed, fs::read_to_string(&file)?.trim().parse()?))
}

/// Starts a program with these arguments and GPUs, which waits past its middle.
fn start(node: &Node, name: &str, arguments: &[&str], gpus: &str, last: u64) -> Result<App> {
    let hold = Hold::new(node.fresh("hold"), last * 3 / 4)?;
    let mut command = node.command(&stage::app(name)?)?;
    let (variable, file) = hold.variable();
    command.env(variable, file).env("CUDA_VISIBLE_DEVICES", gpus);
    let app = node.run_command(name, command, arguments)?.held(Some(hold));
    app.reaches(last / 2)?;
    Ok(app)
}

/// Checks that a program prints what it prints directly: dumped and left running, and dumped, killed and restored.
fn prints_the_same(node: &Node, name: &str, arguments: &[&str], gpus: &str) -> Result {
    let (expected, last) = directly(node, name)?;
    let app = start(node, name, arguments, gpus, last)?;
    node.dump(&app)?;
    assert_eq!(app.finish()?, expected, "{name} left running");
    let app = start(node, name, arguments, gpus, last)?;
    dumped(node, app, &expected).with_context(|| name.to_owned())?;
    Ok(())
}

#[test]
fn programs_of_two_gpus_print_the_same_on_one() -> Result {
    let node = node(TWO)?;
    for name in ["twodev", "peers", "meet"] {
        prints_the_same(&node, name, &[], "0,1")?;
    }
    node.finish()
}

#[test]
fn any_two_of_four_virtual_gpus_are_peers_also_after_a_suspension() -> Result {
    let node = node(FOUR)?;
    let arguments = ["--first", "3", "--second", "1"];
    prints_the_same(&node, "twodev", &arguments, "0,1,2,3")?;
    let (expected, last) = directly(&node, "peers")?;
    for deep in [false, true] {
        let app = start(&node, "peers", &arguments, "0,1,2,3", last)?;
        let reply = node.ask(&Request::Suspend { pid: app.pid(), hold: false, deep })?;
        let Reply::Suspended(all) = reply else { bail!("Suspend was answered by {reply:?}") };
        assert!(all.len() == 1 && all[0].deep == deep, "{all:?}");
        dumped(&node, app, &expected)?;
    }
    node.finish()
}

#[test]
fn virtual_gpus_of_two_gpus_are_peers_across_and_beside() -> Result {
    let node = Node::configured(TWO, &[])?;
    for second in ["1", "2"] {
        prints_the_same(&node, "peers", &["--second", second], "0,1,2,3")?;
    }
    node.finish()
}

/// The second virtual GPU of a GPU has no primary context of the driver's: what programs do with one is done with the one that
/// stands for it.
#[test]
fn a_virtual_gpu_without_the_drivers_primary_context_does_what_others_do() -> Result {
    let node = node(TWO)?;
    for name in ["reset", "limits", "modules", "memory", "pools", "graphs", "textures", "printf", "callbacks", "mapped"]
    {
        prints_the_same(&node, name, &[], "1")?;
    }
    node.finish()
}

#[test]
fn processes_on_different_virtual_gpus_share_memory() -> Result {
    let node = node(TWO)?;
    for (name, arguments) in [("ipc", ["--rounds", "60"]), ("poolmates", ["--rounds", "60"])] {
        let expected = undisturbed(name, &arguments)?;
        let app = node.run(name, &arguments)?;
        app.reaches(20)?;
        dumped(&node, app, &expected).with_context(|| name.to_owned())?;
    }
    node.finish()
}

fn gpus(node: &Node) -> Result<Vec<GpuInfo>> {
    Ok(node.status()?.gpus)
}

/// Each has an identity, which stays, and which is not that of the GPU.
#[test]
fn each_virtual_gpu_has_an_identity_and_a_part_of_the_memory() -> Result {
    let mut node = Node::configured("", &[ONE_GPU])?;
    let [whole] = <[GpuInfo; 1]>::try_from(gpus(&node)?).ok().context("one GPU")?;
    node.stop_daemon()?;
    node.configure(FOUR);
    node.start_daemon(&[ONE_GPU])?;
    let parts = gpus(&node)?;
    assert_eq!(parts.len(), 4);
    for (at, part) in parts.iter().enumerate() {
        assert_eq!((&part.name, part.memory), (&whole.name, GIB));
        for other in parts[..at].iter().chain([&whole]) {
            assert!(part.uuid != other.uuid && part.pci_bus_id != other.pci_bus_id, "{part:?} {other:?}");
        }
    }
    // Programs see them in CUDA, by number and by UUID, and in NVML.
    let see = |list: &str, wanted: &[usize]| -> Result {
        let mut command = node.command(&stage::app("visible")?)?;
        let output = command.env("CUDA_VISIBLE_DEVICES", list).output()?;
        let lines = wanted.iter().enumerate().map(|(number, at)| format!("{number} {} ok\n", parts[*at].uuid));
        let expected = format!("count {}\n{}", wanted.len(), lines.collect::<String>());
        assert_eq!(String::from_utf8(output.stdout)?, expected, "{list}");
        Ok(())
    };
    see("0,1,2,3", &[0, 1, 2, 3])?;
    see("3,1", &[3, 1])?;
    see(&format!("{},{}", parts[2].uuid, parts[0].uuid), &[2, 0])?;
    see(&whole.uuid, &[])?;
    assert_eq!(node.run("nvml", &[])?.finish()?, "4 devices, CUDA 13000\nok\n");
    node.stop_daemon()?;
    node.start_daemon(&[ONE_GPU])?;
    assert_eq!(gpus(&node)?, parts, "after a restart");
    node.finish()
}

#[test]
fn a_program_has_no_more_memory_than_its_virtual_gpu() -> Result {
    let node = Node::configured(TWO, &[ONE_GPU, ("SIMGPU_MEMORY", "128M")])?;
    let expected = "free 64 of 64\nplain 64\nfree 0 of 64\npool 64\narrays 64\nmipmaps 48\npieces 64\nimported 64\n";
    for device in ["0", "1"] {
        let mut command = node.command(&stage::app("budget")?)?;
        let output = command.env("CUDA_VISIBLE_DEVICES", device).output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let said = String::from_utf8(output.stdout)?;
        assert!(said.starts_with(expected), "{device}: {said}");
        assert!(said.ends_with("more 48\nfree 0 of 64\n"), "{device}: {said}");
    }
    node.finish()
}

/// Starts `twodev` in its middle, and returns its image and what it prints.
fn image_of_two(node: &Node) -> Result<(Image, String)> {
    let expected = undisturbed("twodev", &[])?;
    let app = node.run("twodev", &[])?;
    app.reaches(20)?;
    let image = node.dump_and_kill(app)?;
    image.must_be_of_the_middle(&expected)?;
    Ok((image, expected))
}

#[test]
fn an_image_is_restored_on_virtual_gpus_of_other_numbers_and_of_another_gpu() -> Result {
    let mut node = node(TWO)?;
    let (image, expected) = image_of_two(&node)?;
    let had = gpus(&node)?;
    // The GPU that the program had is the second one now, and then not there at all: one other is, or two.
    for (order, at) in [("1,0", Some(1)), ("1", None), ("1,2", None)] {
        node.stop_daemon()?;
        node.start_daemon(&[("SIMGPU_DEVICES", "3"), ("CUDA_VISIBLE_DEVICES", order)])?;
        assert_eq!(gpus(&node)?.iter().position(|gpu| gpu.uuid == had[0].uuid), at);
        assert_eq!(node.restore(&image)?.finish()?, expected, "{order}");
    }
    node.finish()
}

/// The software GPU places the code of two contexts of one GPU otherwise than that of two GPUs.
#[test]
fn an_image_of_two_virtual_gpus_of_one_gpu_is_refused_on_other_gpus_and_stays_good() -> Result {
    let mut node = node(TWO)?;
    let (image, expected) = image_of_two(&node)?;
    node.stop_daemon()?;
    node.configure("");
    node.start_daemon(&[])?;
    node.try_restore(&image)?.fails_with("and is a Rekindle software GPU with 16 multiprocessors and 4096 MiB here")?;
    node.stop_daemon()?;
    node.start_daemon(&[("SIMGPU_MEMORY", "2G")])?;
    node.try_restore(&image)?.fails_with("the driver has placed the code otherwise")?;
    node.stop_daemon()?;
    node.configure(TWO);
    node.start_daemon(&[ONE_GPU])?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    node.finish()
}

#[test]
fn containers_have_a_virtual_gpu_each() -> Result {
    let node = Node::at_default_socket_with("[gpu]\nvirtual = 2\n")?;
    let parts = gpus(&node)?;
    // Two software GPUs.
    assert_eq!(parts.len(), 4);
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let names = ["first", "second"];
    // Both are parts of the first GPU.
    for (number, name) in [0, 2].into_iter().zip(names) {
        let options = ["--device", &*format!("rekindle.dev/gpu={number}"), "--volume", &volume];
        podman.run(name, &options, &["visible", "--mib", "8", "--until", "/shared/go"])?;
        podman.says(name, "ready")?;
        let sees = format!("count 1\n0 {} ok\n", parts[number].uuid);
        assert!(podman.call(&["logs", name])?.starts_with(&sees), "{name}");
    }
    let checkpoint = || names.iter().try_for_each(|it| podman.call(&["container", "checkpoint", it]).map(drop));
    let restore = || names.iter().try_for_each(|it| podman.call(&["container", "restore", it]).map(drop));
    checkpoint()?;
    restore()?;
    until_true("both are there", || Ok(node.clients()?.len() == 2))?;
    fs::write(shared.join("go"), "")?;
    for name in names {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
        assert!(podman.call(&["logs", name])?.ends_with("the same\n"), "{name}");
    }
    drop(podman);
    node.finish()
}

/// A process that sees one virtual GPU is one as on a GPU, so its image is restored there too.
#[test]
fn a_container_with_one_virtual_gpu_moves_to_a_gpu_of_the_same_size() -> Result {
    let mut node = Node::at_default_socket_with(TWO)?;
    let podman = Podman::new(&node)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let options = ["--annotation", "dev.rekindle/gpus=0", "--volume", &volume];
    podman.run("mover", &options, &["visible", "--mib", "8", "--until", "/shared/go"])?;
    podman.says("mover", "ready")?;
    podman.call(&["container", "checkpoint", "mover"])?;
    node.stop_daemon()?;
    node.configure("");
    node.start_daemon(&[("SIMGPU_MEMORY", "2G")])?;
    podman.call(&["container", "restore", "mover"])?;
    fs::write(shared.join("go"), "")?;
    assert_eq!(podman.exit_code("mover")?, 0);
    assert!(podman.call(&["logs", "mover"])?.ends_with("the same\n"));
    drop(podman);
    node.finish()
}
