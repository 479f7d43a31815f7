//! Rekindle is replaced by another release and back, on a host whose programs run and are checkpointed all the while: programs keep
//! the build of the libraries that they have mapped.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use rekindle_builds::{BuildId, Library, Store};
use rekindle_e2e::app::{Hold, undisturbed};
use rekindle_e2e::{App, Node, Result, stage};
use serde_json::Value;

const ARGUMENTS: [&str; 4] = ["--iterations", "600", "--sleep-us", "4000"];

/// A host that may be upgraded, and its builds: the one that is installed, and the next.
struct Host {
    node: Node,
    libraries: PathBuf,
    store: Store,
    old: BuildId,
    /// The libraries of the next release, as a package brings them.
    next: PathBuf,
}

impl Host {
    fn start() -> Result<Self> {
        let mut node = Node::without_daemon()?;
        let libraries = node.own_libraries()?;
        let store = Store::new(&libraries);
        let old = store.chosen().context("no build is chosen")?;
        node.start_daemon(&[])?;
        // Bytes behind the end of an ELF file mean nothing to the loader, but the file has another size.
        let next = node.path("next");
        fs::create_dir(&next)?;
        for Library { name, .. } in Library::in_dir(&store.dir(old))? {
            fs::copy(store.dir(old).join(name), next.join(name))?;
            File::options().append(true).open(next.join(name))?.write_all(b"the next release")?;
        }
        Ok(Self { node, libraries, store, old, next })
    }

    fn rekindle(&self, arguments: &[&OsStr]) -> Result<String> {
        let mut all: Vec<&OsStr> = vec!["builds".as_ref(), "--lib".as_ref(), self.libraries.as_ref()];
        all.extend(arguments);
        let output = self.node.rekindle(&all)?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Has new programs be given the libraries of a directory, and removes what nobody needs: what a package does.
    fn install(&self, release: &Path) -> Result<BuildId> {
        self.rekindle(&["add".as_ref(), "--use".as_ref(), release.as_ref()])?;
        self.rekindle(&["prune".as_ref(), "--now".as_ref()])?;
        self.store.chosen().context("no build is chosen")
    }

    /// The builds that are here.
    fn builds(&self) -> Result<Vec<BuildId>> {
        Ok(self.store.list()?.into_iter().map(|it| it.id).collect())
    }

    /// Runs a program as `rekindle run` does.
    fn run(&self) -> Result<App> {
        let mut command = self.node.command(&stage::program("rekindle")?)?;
        command.env_remove("LD_LIBRARY_PATH").args(["run", "--lib"]).arg(&self.libraries).arg("--");
        command.arg(stage::app("globals")?);
        let hold = Hold::new(self.node.fresh("hold"), 450)?;
        let (name, file) = hold.variable();
        command.env(name, file);
        let app = self.node.run_command("globals", command, &ARGUMENTS)?.held(Some(hold));
        app.reaches(100)?;
        Ok(app)
    }
}

/// The builds that an image carries.
fn carried(node: &Node, image: &Path) -> Result<Vec<String>> {
    let output = node.rekindle(&["inspect".as_ref(), "--json".as_ref(), image.as_ref()])?;
    let about: Value = serde_json::from_slice(&output.stdout)?;
    Ok(serde_json::from_value(about["builds"].clone())?)
}

/// From old to new to old. Programs of both are dumped before, meanwhile and after, and each image is restored under each.
#[test]
fn programs_are_dumped_and_restored_across_an_upgrade_and_back() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let host = Host::start()?;
    let node = &host.node;
    let release = node.path("release");
    fs::create_dir(&release)?;
    for Library { name, .. } in Library::in_dir(&host.store.dir(host.old))? {
        fs::copy(host.store.dir(host.old).join(name), release.join(name))?;
    }

    let first = host.run()?;
    let before = node.dump(&first)?;
    let new = host.install(&host.next)?;
    assert_ne!(new, host.old);
    assert_eq!(host.builds()?.len(), 2, "the first program has mapped the old build");
    let after = node.dump(&first)?;
    let second = host.run()?;
    let of_second = node.dump(&second)?;
    assert_eq!(host.install(&release)?, host.old);
    let back = node.dump(&second)?;
    for (image, build) in [(&before, host.old), (&after, host.old), (&of_second, new), (&back, new)] {
        assert_eq!(carried(node, &image.dir)?, [build.to_string()]);
    }
    assert_eq!(first.finish()?, expected, "the program that ran through the upgrade");
    assert_eq!(second.finish()?, expected, "the program that ran through the downgrade");

    // Nobody needs the new build any more, and its images bring it.
    host.rekindle(&["prune".as_ref(), "--now".as_ref()])?;
    assert_eq!(host.builds()?, [host.old]);
    for image in [&before, &after, &of_second, &back] {
        assert_eq!(node.restore(image)?.finish()?, expected, "{}", image.dir.display());
    }
    assert_eq!(host.builds()?.len(), 2);
    // The other way about.
    assert_eq!(host.install(&host.next)?, new);
    assert_eq!(host.builds()?, [new]);
    for image in [&back, &before] {
        assert_eq!(node.restore(image)?.finish()?, expected, "{}", image.dir.display());
    }
    host.node.finish()
}

#[test]
fn an_image_brings_its_build_to_a_host_that_has_none() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let host = Host::start()?;
    let node = &host.node;
    let image = node.dump_and_kill(host.run()?)?;
    host.rekindle(&["prune".as_ref(), "--all".as_ref()])?;
    assert!(!host.store.builds_dir().exists());
    assert_eq!(node.restore(&image)?.finish()?, expected);
    // By hand, for what restores without asking the daemon first.
    host.rekindle(&["prune".as_ref(), "--now".as_ref()])?;
    assert!(host.builds()?.is_empty());
    let said = host.rekindle(&["add".as_ref(), image.dir.as_ref()])?;
    assert_eq!(said, format!("{}\n", host.store.dir(host.old).display()));
    host.store.check(host.old)?;
    // The same from an archive.
    let archive = node.path("image.tar.gz");
    let tar = Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(&image.dir).arg(".").status()?;
    ensure!(tar.success(), "tar: {tar}");
    host.rekindle(&["prune".as_ref(), "--now".as_ref()])?;
    assert!(host.builds()?.is_empty());
    assert_eq!(host.rekindle(&["add".as_ref(), archive.as_ref()])?, said);
    host.store.check(host.old)?;
    assert_eq!(node.restore(&image)?.finish()?, expected);
    host.node.finish()
}

/// A program that has mapped nothing yet is in need of the build as well.
#[test]
fn a_build_that_a_program_has_mapped_or_may_map_stays() -> Result {
    let host = Host::start()?;
    let app = host.run()?;
    let removed = host.rekindle(&["prune".as_ref(), "--all".as_ref()])?;
    assert_eq!((removed.as_str(), host.builds()?), ("", vec![host.old]));
    let listed: Value = serde_json::from_str(&host.rekindle(&["--json".as_ref()])?)?;
    let processes: Vec<i32> = serde_json::from_value(listed[0]["processes"].clone())?;
    assert!(processes.contains(&app.pid()) && listed[0]["used"] == false, "{listed}");
    app.finish()?;
    // A program that was started just now may have shown nothing of its need.
    assert_eq!((host.rekindle(&["prune".as_ref()])?.as_str(), host.builds()?), ("", vec![host.old]));
    let removed = host.rekindle(&["prune".as_ref(), "--all".as_ref()])?;
    assert_eq!(removed, format!("removed build {}\n", host.old));
    host.node.finish()
}
