//! Builds that come, are chosen and go.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use rekindle_builds::{BuildError, BuildId, Library, Store, needs};
use tempfile::TempDir;

struct Machine {
    dir: TempDir,
    store: Store,
}

impl Machine {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("lib")).unwrap();
        let store = Store::new(&dir.path().join("lib"));
        Self { dir, store }
    }

    /// A directory with the libraries of a release.
    fn release(&self, name: &str, interposer: &str, nvml: Option<&str>) -> std::path::PathBuf {
        let dir = self.dir.path().join(name);
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("libcuda.so.1"), interposer).unwrap();
        if let Some(nvml) = nvml {
            fs::write(dir.join("libnvidia-ml.so.1"), nvml).unwrap();
        }
        dir
    }

    fn add(&self, release: &Path) -> BuildId {
        self.store.lock().unwrap().add(Library::in_dir(release).unwrap(), None).unwrap().id
    }

    fn link(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join("lib").join(name)).unwrap()
    }

    fn builds(&self) -> Vec<BuildId> {
        self.store.list().unwrap().into_iter().map(|it| it.id).collect()
    }

    /// The names of everything in the directory of builds.
    fn entries(&self) -> usize {
        fs::read_dir(self.store.builds_dir()).unwrap().count()
    }
}

#[test]
fn an_upgrade_leaves_the_files_of_the_build_before() {
    let machine = Machine::new();
    let (old, new) = (machine.release("old", "old", Some("old nvml")), machine.release("new", "new", Some("new nvml")));
    let old = machine.add(&old);
    machine.store.lock().unwrap().choose(old).unwrap();
    assert_eq!(machine.store.chosen(), Some(old));
    let kept = fs::File::open(machine.store.dir(old).join("libcuda.so.1")).unwrap();
    let new = machine.add(&new);
    assert_eq!(machine.link("libcuda.so.1"), "old", "a build that is only added changes nothing");
    machine.store.lock().unwrap().choose(new).unwrap();
    for (name, content) in [("libcuda.so.1", "new"), ("libcuda.so", "new"), ("libnvidia-ml.so.1", "new nvml")] {
        assert_eq!(machine.link(name), content);
    }
    let about = |file: fs::Metadata| (std::os::unix::fs::MetadataExt::ino(&file), file.len());
    let there = fs::metadata(machine.store.dir(old).join("libcuda.so.1")).unwrap();
    assert_eq!(about(there), about(kept.metadata().unwrap()), "it is the same file");
    // And back.
    machine.store.lock().unwrap().choose(old).unwrap();
    assert_eq!(machine.link("libnvidia-ml.so.1"), "old nvml");
    assert!(matches!(machine.store.lock().unwrap().remove(old), Err(BuildError::Chosen(id)) if id == old));
    machine.store.lock().unwrap().remove(new).unwrap();
    assert!(matches!(machine.store.lock().unwrap().remove(new), Err(BuildError::Absent { .. })));
    assert_eq!((machine.builds(), machine.entries()), (vec![old], 1));
    machine.store.lock().unwrap().choose_none().unwrap();
    assert_eq!(machine.store.chosen(), None);
    machine.store.lock().unwrap().remove(old).unwrap();
    assert_eq!(machine.entries(), 0);
}

#[test]
fn a_name_is_what_sha256sum_says_of_the_libraries() {
    let machine = Machine::new();
    let release = machine.release("release", "the interposer", Some("the other"));
    let script = "sha256sum libcuda.so.1 libnvidia-ml.so.1 | sha256sum | cut -c 1-32";
    let said = Command::new("sh").args(["-c", script]).current_dir(&release).output().unwrap();
    assert_eq!(machine.add(&release).to_string(), String::from_utf8(said.stdout).unwrap().trim());
}

#[test]
fn a_build_that_is_here_is_added_again_without_a_change() {
    let machine = Machine::new();
    let release = machine.release("release", "content", None);
    let id = machine.add(&release);
    assert_eq!((machine.add(&release), machine.entries()), (id, 1));
    machine.store.check(id).unwrap();
    let mode = fs::metadata(machine.store.dir(id)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o755);
    // Without NVML, a build that has it leaves no link behind.
    let with = machine.add(&machine.release("with", "content", Some("nvml")));
    machine.store.lock().unwrap().choose(with).unwrap();
    assert_eq!(machine.link("libnvidia-ml.so.1"), "nvml");
    machine.store.lock().unwrap().choose(id).unwrap();
    assert!(!machine.dir.path().join("lib/libnvidia-ml.so.1").is_symlink());
}

#[test]
fn content_that_is_not_what_the_name_says_is_refused() {
    let machine = Machine::new();
    let id = machine.add(&machine.release("release", "content", None));
    let other = machine.release("other", "other content", None);
    let error = machine.store.lock().unwrap().add(Library::in_dir(&other).unwrap(), Some(id)).unwrap_err();
    assert!(matches!(error, BuildError::Changed { expected, .. } if expected == id), "{error}");
    assert_eq!((machine.builds(), machine.entries()), (vec![id], 1));
    fs::write(machine.store.dir(id).join("libcuda.so.1"), "somebody's").unwrap();
    assert!(matches!(machine.store.check(id), Err(BuildError::Changed { .. })));
    // A reinstallation mends it.
    let again = Library::in_dir(&machine.dir.path().join("release")).unwrap();
    machine.store.lock().unwrap().add(again, Some(id)).unwrap();
    machine.store.check(id).unwrap();
    assert_eq!(machine.entries(), 1);
    let nothing = machine.store.lock().unwrap().add(Vec::new(), None);
    assert!(matches!(nothing, Err(BuildError::NoBuild(_))));
    assert!(matches!(Library::in_dir(machine.dir.path()), Err(BuildError::NoBuild(_))));
    assert!(matches!(
        machine.store.lock().unwrap().choose(BuildId::from_bytes([7; 16])),
        Err(BuildError::Absent { .. })
    ));
}

#[test]
fn who_has_a_library_mapped_or_will_look_for_it_needs_its_build() {
    let machine = Machine::new();
    // A program that maps the library as its own: the loader would refuse a file that is none.
    let sleep = fs::read("/bin/sleep").unwrap();
    let dir = machine.dir.path().join("release");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("libcuda.so.1"), sleep).unwrap();
    let id = machine.add(&dir);
    let idle = machine.add(&machine.release("idle", "idle", None));
    let builds = machine.store.list().unwrap();
    let needs = || needs::of(&builds).unwrap();
    assert!(needs()[&id].why().is_none() && needs()[&idle].why().is_none());

    let mut runs = Command::new(machine.store.dir(id).join("libcuda.so.1")).arg("1000").spawn().unwrap();
    let pid = runs.id() as i32;
    // The kernel lets its parent go on before it has mapped the program.
    assert_eq!(needs()[&id].processes, [pid].into());
    assert!(needs()[&idle].why().is_none());
    runs.kill().unwrap();
    runs.wait().unwrap();
    assert!(needs()[&id].why().is_none());

    let path = machine.store.dir(idle);
    let mut awaits = Command::new("/bin/sleep").arg("1000").env("LD_LIBRARY_PATH", &path).spawn().unwrap();
    assert_eq!(needs()[&idle].processes, [awaits.id() as i32].into());
    awaits.kill().unwrap();
    awaits.wait().unwrap();
    assert!(needs()[&idle].why().is_none());
}
