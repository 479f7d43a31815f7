//! A dump into a directory that already has an image. The old image stays valid until the new one is, or a restore
//! detects that the files do not belong together.

use std::fs;
use std::path::Path;

use anyhow::ensure;
use rekindle_e2e::gate::{Gate, Moment};
use rekindle_e2e::{App, Fate, Image, Node, Result, process, until};
use rekindle_images::{CheckpointId, ErrorKind, Image as GpuImage};
use rekindle_wire::control::{ProtocolChange, Request};

/// The message of a restore from an image beside CRIU's files of another dump.
const ANOTHER: &str = "are of another dump";

fn start(node: &Node) -> Result<App> {
    let app = node.run("globals", &["--iterations", "20000", "--sleep-us", "4000"])?;
    app.reaches(20)?;
    Ok(app)
}

fn gate(node: &Node) -> Result<Gate> {
    let dir = node.path("gate");
    fs::create_dir(&dir)?;
    Gate::start(&dir, node.socket())
}

/// Dumps into a directory of this name, and leaves the program running.
fn dump_into(node: &Node, app: &App, dir: &Path) -> Result<Image> {
    let (criu, image) = node.start_dump_into(dir.to_owned(), app, Fate::Running)?;
    criu.wait()?.succeeds()?;
    Ok(image)
}

fn id(dir: &Path) -> Result<CheckpointId> {
    Ok(GpuImage::open(dir)?.manifest().id)
}

/// Dumps into the directory once more, and kills CRIU at this moment.
fn killed_at(node: &Node, gate: &Gate, app: &App, dir: &Path, moment: Moment) -> Result {
    gate.hold(moment)?;
    let criu = gate.setting(node.criu());
    let (mut criu, _) = node.start_dump_by(&criu, dir.to_owned(), app, Fate::Running)?;
    gate.reached(&mut criu)?;
    process::signal(criu.pid(), libc::SIGKILL)?;
    gate.open()?;
    ensure!(!criu.wait()?.status.success(), "it was killed");
    app.advances()
}

#[test]
fn an_image_stays_restorable_when_the_next_dump_into_its_directory_ends_before_the_freeze() -> Result {
    let node = Node::start()?;
    let (gate, app, dir) = (gate(&node)?, start(&node)?, node.path("image"));
    fs::create_dir(&dir)?;
    let image = dump_into(&node, &app, &dir)?;
    let (first, before) = (id(&dir)?, image.files()?);
    for protocol in ["recopy", "stop", "clone", "cow"] {
        node.ask(&Request::Protocol { pid: app.pid(), change: ProtocolChange::Choose(protocol.to_owned()) })?;
        killed_at(&node, &gate, &app, &dir, Moment::After("Pause"))?;
        until("the daemon has removed what it wrote", || Ok((image.files()? == before).then_some(())))?;
        ensure!(id(&dir)? == first, "{protocol}: it is another image");
        GpuImage::open(&dir)?.check_companion()?;
    }
    let later = app.progress()?;
    app.kill()?;
    let app = node.restore(&image)?;
    ensure!(app.position()? < later, "it was restored from another image");
    app.kill()?;
    drop(gate);
    node.finish()
}

#[test]
fn an_image_whose_criu_files_were_overwritten_is_refused_until_the_next_dump_is_whole() -> Result {
    let node = Node::start()?;
    let (gate, app, dir) = (gate(&node)?, start(&node)?, node.path("image"));
    fs::create_dir(&dir)?;
    dump_into(&node, &app, &dir)?;
    for moment in [Moment::After("Frozen"), Moment::After("Socket"), Moment::Script("post-dump")] {
        let (first, before) = (id(&dir)?, fs::read_dir(&dir)?.count());
        killed_at(&node, &gate, &app, &dir, moment)?;
        until("the daemon has let the program go", || Ok(node.client(app.pid()).ok()))?;
        ensure!(id(&dir)? == first, "{moment:?}: it is another image, of {before} files");
        let refused = GpuImage::open(&dir)?.check_companion();
        ensure!(refused.is_err_and(|it| it.kind() == ErrorKind::OtherDump), "{moment:?}: it is taken for whole");
        let restored = node.rekindle(&["restore".as_ref(), dir.as_os_str()])?;
        let said = String::from_utf8_lossy(&restored.stderr).into_owned();
        ensure!(restored.status.code() == Some(4) && said.contains(ANOTHER), "{restored:?}");
        // CRIU restores without a command of Rekindle's.
        let log = node.path("refused.log");
        node.criu().restore(&dir, log)?.wait()?.fails_with(ANOTHER)?;

        let image = dump_into(&node, &app, &dir)?;
        ensure!(id(&image.dir)? != first, "{moment:?}: it is still the old image");
        GpuImage::open(&dir)?.check_companion()?;
    }
    // The image is of the time between these two, and later the program is far ahead of it.
    let before = app.progress()?;
    let image = dump_into(&node, &app, &dir)?;
    let later = app.progress()? + 500;
    app.reaches(later)?;
    app.kill()?;
    let app = node.restore(&image)?;
    let position = app.position()?;
    ensure!(
        (before..later).contains(&position),
        "it was restored from another image: {position}, not {before}..{later}"
    );
    app.kill()?;
    drop(gate);
    node.finish()
}

#[test]
fn an_image_beside_criu_files_of_a_dump_that_nobody_told_of_is_refused() -> Result {
    let node = Node::start()?;
    let (app, dir, other) = (start(&node)?, node.path("image"), node.path("other"));
    fs::create_dir(&dir)?;
    fs::create_dir(&other)?;
    dump_into(&node, &app, &dir)?;
    dump_into(&node, &app, &other)?;
    app.kill()?;
    let inventories = [&dir, &other].map(|it| fs::read(it.join("inventory.img")));
    let [Ok(first), Ok(second)] = inventories else { anyhow::bail!("{inventories:?}") };
    ensure!(first != second, "CRIU's inventory does not tell two dumps from each other");
    for entry in fs::read_dir(&other)? {
        let name = entry?.file_name();
        if !name.to_string_lossy().starts_with("rekindle") {
            fs::copy(other.join(&name), dir.join(&name))?;
        }
    }
    node.criu().restore(&dir, node.path("refused.log"))?.wait()?.fails_with(ANOTHER)?;
    node.finish()
}

#[test]
fn processes_without_a_gpu_dumped_over_an_image_come_back_as_what_they_are() -> Result {
    let node = Node::start()?;
    let (gate, app, dir) = (gate(&node)?, start(&node)?, node.path("image"));
    fs::create_dir(&dir)?;
    let image = dump_into(&node, &app, &dir)?;
    let first = id(&dir)?;

    let mut command = std::process::Command::new("sleep");
    command.arg("10000");
    let foreign = App::start(&mut command, &node.fresh("foreign"), None)?;
    let dump =
        |criu: &rekindle_e2e::criu::Setting| criu.dump(foreign.pid(), &dir, Fate::Running, node.path("dump.log"));
    // The old image stays until the dump has succeeded. CRIU has begun to overwrite its own files, so the image reports
    // that.
    gate.hold(Moment::Script("post-dump"))?;
    let mut criu = dump(&gate.setting(node.criu()))?;
    gate.reached(&mut criu)?;
    process::signal(criu.pid(), libc::SIGKILL)?;
    gate.open()?;
    ensure!(!criu.wait()?.status.success(), "it was killed");
    ensure!(id(&dir)? == first, "it is another image");
    ensure!(GpuImage::open(&dir)?.check_companion().is_err(), "it is taken for whole");

    dump(&node.criu())?.wait()?.succeeds()?;
    ensure!(image.files()?.is_empty(), "{:?}", image.files()?);
    let identity = foreign.identity().clone();
    foreign.kill()?;
    node.criu().restore(&dir, node.path("restore.log"))?.wait()?.succeeds()?;
    App::adopt(identity).kill()?;

    dump_into(&node, &app, &dir)?;
    app.kill()?;
    let app = node.restore(&image)?;
    app.advances()?;
    app.kill()?;
    drop(gate);
    node.finish()
}
