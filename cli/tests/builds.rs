//! `rekindle builds add`, from an image and from archives of images.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use rekindle_builds::{BuildId, INTERPOSER, Library, NVML, Store};
use rekindle_images::{CreateOptions, ImageDir, ImageWriter, Manifest, Protocol, code_name};
use tempfile::TempDir;

/// A machine without a build, and what another machine brings.
struct Machine {
    dir: TempDir,
    store: Store,
}

impl Machine {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        for name in ["lib", "tmp", "other"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let store = Store::new(&dir.path().join("lib"));
        Self { dir, store }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An image that carries a build of these libraries, in a directory of this name. Returns the build, and the file with the interposer.
    fn image(&self, name: &str, interposer: &str, nvml: &str) -> (BuildId, PathBuf) {
        let release = self.path(&format!("{name}.release"));
        fs::create_dir(&release).unwrap();
        fs::write(release.join(INTERPOSER), interposer).unwrap();
        fs::write(release.join(NVML), nvml).unwrap();
        let other = Store::new(&self.path("other"));
        let id = other.lock().unwrap().add(Library::in_dir(&release).unwrap(), None).unwrap().id;

        let dir = self.path(name);
        fs::create_dir_all(&dir).unwrap();
        let writer = ImageWriter::create(ImageDir::open(&dir).unwrap(), CreateOptions::new().unwrap()).unwrap();
        // As a program has it.
        writer.put_code(b"code of a program").unwrap();
        let libraries = [(INTERPOSER, interposer), (NVML, nvml)];
        let libraries: Vec<_> = libraries
            .map(|(name, it)| rekindle_images::Library {
                name: name.into(),
                code: writer.put_code(it.as_bytes()).unwrap(),
            })
            .into();
        let code = dir.join(code_name(libraries[0].code));
        let mut manifest = Manifest::new(1_700_000_000, Protocol::Stop);
        manifest.builds = vec![rekindle_images::Build { id: id.to_bytes(), directory: release, libraries }];
        writer.commit(manifest).unwrap();
        (id, code)
    }

    /// An archive of these directories.
    fn archive(&self, option: &str, names: &[&str]) -> PathBuf {
        let archive = self.path("archive");
        let done = Command::new("tar").arg(option).arg(&archive).arg("-C").arg(self.dir.path()).args(names).status();
        assert!(done.unwrap().success());
        archive
    }

    /// The exit code, what it prints and what it complains of.
    fn add(&self, from: &Path, options: &[&str]) -> (i32, String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
        command.args(["builds", "add", "--lib"]).arg(self.path("lib")).args(options).arg(from);
        let output = command.env("TMPDIR", self.path("tmp")).output().unwrap();
        let text = |it| String::from_utf8(it).unwrap();
        assert!(fs::read_dir(self.path("tmp")).unwrap().next().is_none(), "what was unpacked is left");
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }

    fn fails(&self, from: &Path, options: &[&str], code: i32, reason: &str) {
        let (found, out, err) = self.add(from, options);
        assert_eq!((found, out.as_str()), (code, ""), "{err}");
        assert!(err.contains(reason), "{err}");
    }

    fn builds(&self) -> Vec<BuildId> {
        self.store.list().unwrap().into_iter().map(|it| it.id).collect()
    }
}

#[test]
fn an_archive_brings_the_build_of_its_image() {
    // Podman's archives have the image in this directory, among files of its own.
    for (option, compressed) in [("-cf", false), ("-czf", false), ("-cf", true)] {
        let machine = Machine::new();
        let (id, _) = machine.image("checkpoint", "interposer", "nvml");
        fs::write(machine.path("config.dump"), "{}").unwrap();
        let archive = machine.archive(option, &["config.dump", "checkpoint"]);
        if compressed {
            let content = fs::read(&archive).unwrap();
            fs::write(&archive, zstd::encode_all(&content[..], 3).unwrap()).unwrap();
        }
        let (code, out, err) = machine.add(&archive, &["--use"]);
        assert_eq!((code, out), (0, format!("{}\n", machine.store.dir(id).display())), "{option} {err}");
        assert_eq!((machine.builds(), machine.store.chosen()), (vec![id], Some(id)));
        machine.store.check(id).unwrap();
        // Once more, and from the image itself.
        assert_eq!(machine.add(&archive, &[]).0, 0);
        assert_eq!(machine.add(&machine.path("checkpoint"), &[]).0, 0);
        assert_eq!(machine.builds(), [id]);
    }
}

#[test]
fn an_archive_of_several_images_brings_all_builds() {
    let machine = Machine::new();
    let mut all = vec![machine.image("1", "a", "nvml").0, machine.image("2", "b", "nvml").0];
    machine.image("3", "b", "nvml");
    let archive = machine.archive("-cf", &["./1", "./2", "./3"]);
    let (code, out, err) = machine.add(&archive, &[]);
    assert_eq!((code, out.lines().count()), (0, 2), "{err}");
    all.sort();
    assert_eq!(machine.builds(), all);
    machine.fails(&archive, &["--use"], 3, "has 2 builds: choose one of them by its directory");
    assert_eq!(machine.store.chosen(), None);
}

#[test]
fn an_archive_that_lacks_a_build_or_has_another_adds_nothing() {
    let machine = Machine::new();
    let (_, code) = machine.image("image", "interposer", "nvml");
    fs::create_dir(machine.path("none")).unwrap();
    machine.fails(
        &machine.archive("-cf", &["none"]),
        &[],
        3,
        "holds no image of Rekindle (tar: *rekindle.img: Not found",
    );
    fs::write(machine.path("text"), "text").unwrap();
    machine.fails(
        &machine.path("text"),
        &[],
        3,
        "holds no image of Rekindle (tar: This does not look like a tar archive",
    );
    machine.fails(&machine.path("nothing"), &[], 3, "no build of Rekindle's libraries");

    fs::write(&code, "changed").unwrap();
    machine.fails(&machine.archive("-cf", &["image"]), &[], 3, "are those of build");
    // A link of an archive leads nowhere.
    fs::write(machine.path("secret"), "interposer").unwrap();
    fs::remove_file(&code).unwrap();
    symlink(machine.path("secret"), &code).unwrap();
    machine.fails(&machine.archive("-cf", &["image"]), &[], 3, "which has libcuda.so.1");
    fs::remove_file(&code).unwrap();
    machine.fails(&machine.archive("-cf", &["image"]), &[], 3, "if its image builds on another one");
    fs::write(machine.path("image/rekindle.img"), "changed").unwrap();
    machine.fails(&machine.archive("-cf", &["image"]), &[], 4, "rekindle.img");
    assert!(machine.builds().is_empty());
}
