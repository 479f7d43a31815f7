//! Who needs a build: processes, mounts, and containers that are stopped.
//!
//! Nothing of this is exact for all time, since a process may begin to need a build at any moment. But only processes that need it already
//! can lead to further ones: new applications are given the chosen build, which is never removed.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Build, BuildId, LIBRARIES};

/// Where podman keeps the configurations of containers, for root: this directory has `DRIVER-containers/ID/userdata/config.json`.
const PODMAN: [&str; 2] = ["/var/lib/containers/storage", "/run/containers/storage"];
/// The file that may name another directory, as `graphroot`.
const PODMAN_STORAGE: &str = "/etc/containers/storage.conf";
/// Where it lies for users other than root, below each home.
const PODMAN_OF_USERS: &str = ".local/share/containers/storage";
/// The directories of specifications by which container engines mount a build.
const CDI: [&str; 2] = ["/etc/cdi", "/run/cdi"];

/// How long a process may be between two programs: it reads the first pages of the new one from its disk.
const EXEC: Duration = Duration::from_secs(5);

/// Who needs a build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Processes that have one of its libraries mapped, or will look for them there.
    pub processes: BTreeSet<i32>,
    /// Whether it is mounted somewhere, as in containers that run.
    pub mounted: bool,
    /// Files that say how containers are started, and name it.
    pub containers: BTreeSet<PathBuf>,
}

impl Needs {
    /// Who needs the build, in words; none if nobody does.
    #[must_use]
    pub fn why(&self) -> Option<String> {
        match self {
            Self { processes, .. } if !processes.is_empty() => Some(format!("processes {processes:?} need it")),
            Self { mounted: true, .. } => Some("it is mounted".to_owned()),
            Self { containers, .. } if !containers.is_empty() => Some(format!("containers need it: {containers:?}")),
            _ => None,
        }
    }
}

/// Finds out who needs each of these builds. Root sees everything in its pid namespace; another user sees its own processes.
///
/// # Errors
///
/// The error of reading `/proc`, or anything else that may show a need; not where this user may not read it.
pub fn of(builds: &[Build]) -> io::Result<BTreeMap<BuildId, Needs>> {
    let mut needs: BTreeMap<BuildId, Needs> = builds.iter().map(|it| (it.id, Needs::default())).collect();
    let mut looked_at = HashSet::new();
    for pid in processes()? {
        wait_for_exec(pid)?;
        for id in mapped_by(pid, builds)?.into_iter().chain(awaited(pid, builds)?) {
            needs.entry(id).or_default().processes.insert(pid);
        }
        // One table for all processes of a mount namespace.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if looked_at.insert(namespace) {
            let mounts = read(format!("/proc/{pid}/mountinfo"))?;
            let mounts = String::from_utf8_lossy(&mounts);
            for build in builds.iter().filter(|it| is_mounted(it.id, &mounts)) {
                needs.entry(build.id).or_default().mounted = true;
            }
        }
    }
    for file in storages()?.iter().flat_map(|it| configurations(it)).chain(specifications()) {
        let text = read(&file)?;
        for build in builds.iter().filter(|it| names(&text, &it.dir)) {
            needs.entry(build.id).or_default().containers.insert(file.clone());
        }
    }
    Ok(needs)
}

/// The builds whose libraries a process has mapped, also where it sees them under other names, as in a container. None for a process
/// that is gone or cannot be examined.
#[must_use]
pub fn mapped(pid: i32, builds: &[Build]) -> BTreeSet<BuildId> {
    mapped_by(pid, builds).unwrap_or_default()
}

fn mapped_by(pid: i32, builds: &[Build]) -> io::Result<BTreeSet<BuildId>> {
    let mut maps = read(format!("/proc/{pid}/maps"))?;
    if maps.is_empty() {
        maps = maps_of_threads(pid)?;
    }
    let libraries: Vec<_> =
        builds.iter().flat_map(|build| LIBRARIES.map(|name| (build.id, build.dir.join(name)))).collect();
    let mut found = BTreeSet::new();
    let mut last = "";
    let maps = String::from_utf8_lossy(&maps);
    for (range, path) in maps.lines().filter_map(mapping) {
        // A library is mapped in several parts, one after another.
        if path == last {
            continue;
        }
        last = path;
        let file = fs::metadata(format!("/proc/{pid}/map_files/{range}"));
        let is_it = |(_, ours): &&(BuildId, PathBuf)| {
            // Who may not see the files of mappings sees the paths.
            match (&file, fs::metadata(ours)) {
                (Ok(file), Ok(ours)) => (file.dev(), file.ino()) == (ours.dev(), ours.ino()),
                (Err(_), Ok(_)) => ours == Path::new(path),
                (_, Err(_)) => false,
            }
        };
        found.extend(libraries.iter().find(is_it).map(|(id, _)| *id));
    }
    Ok(found)
}

/// Waits until a process has what its `execve` gives it. In between it has the memory of the new program, but no mapping of a file and no
/// environment (Linux `fs/binfmt_elf.c`, `load_elf_binary`: `create_elf_tables` comes last, and writes the auxiliary vector).
fn wait_for_exec(pid: i32) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let vector = read(format!("/proc/{pid}/auxv"))?;
        // A thread of the kernel has no vector; a program's begins with a type that is not zero.
        if vector.is_empty() || vector.iter().any(|byte| *byte != 0) {
            return Ok(());
        }
        if start.elapsed() > EXEC {
            let text =
                format!("process {pid} has been in execve for {EXEC:?}: nobody can tell which libraries it needs");
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// The mappings of a process whose first thread has ended: another thread has them.
fn maps_of_threads(pid: i32) -> io::Result<Vec<u8>> {
    for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
        let maps = read(thread.path().join("maps"))?;
        if !maps.is_empty() {
            return Ok(maps);
        }
    }
    Ok(Vec::new())
}

/// The range and the path of a mapping of a file that is named like one of the libraries. In a container, the interposer lies also
/// under the names of the image's own driver.
fn mapping(line: &str) -> Option<(&str, &str)> {
    let path = &line[line.find('/')?..];
    let name = path.rsplit('/').next()?;
    let is_ours = LIBRARIES.iter().any(|it| name.starts_with(it.trim_end_matches(".1")));
    is_ours.then_some((line.split(' ').next()?, path))
}

/// The builds that the environment of a process names: the process may load the libraries later.
fn awaited(pid: i32, builds: &[Build]) -> io::Result<Vec<BuildId>> {
    let environment = read(format!("/proc/{pid}/environ"))?;
    Ok(builds.iter().filter(|it| names(&environment, &it.dir)).map(|it| it.id).collect())
}

/// Whether a table of mounts has one whose root is a build's directory or in it. A root begins at its file system's own, which need not
/// be mounted at `/`, so only the name counts.
fn is_mounted(id: BuildId, mounts: &str) -> bool {
    let id = id.to_string();
    // Fields: number, parent, device, root, place, ...
    mounts.lines().filter_map(|line| line.split(' ').nth(3)).any(|root| root.split('/').any(|it| it == id))
}

fn names(text: &[u8], dir: &Path) -> bool {
    let dir = dir.as_os_str().as_bytes();
    text.windows(dir.len().max(1)).any(|it| it == dir)
}

/// Reads a file. One that is gone is empty, and so is one that this user may not read: a process that not even root may examine is
/// none of this machine's programs, but that of a sandbox around it.
fn read(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    match fs::read(&path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            Ok(Vec::new())
        }
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(Vec::new()),
        Err(error) => Err(io::Error::new(error.kind(), format!("{}: {error}", path.as_ref().display()))),
        text => text,
    }
}

fn processes() -> io::Result<Vec<i32>> {
    let entries = fs::read_dir("/proc")?;
    let all: Vec<i32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    // Without it nothing can be said: this program itself is a process.
    if all.is_empty() { Err(io::Error::other("/proc is not mounted")) } else { Ok(all) }
}

/// Where podman keeps what it knows of containers.
fn storages() -> io::Result<Vec<PathBuf>> {
    let mut all: Vec<PathBuf> = PODMAN.map(PathBuf::from).into();
    let text = read(PODMAN_STORAGE)?;
    all.extend(String::from_utf8_lossy(&text).lines().filter_map(|line| {
        let value = line.trim().strip_prefix("graphroot")?.trim_start().strip_prefix('=')?;
        Some(PathBuf::from(value.trim().trim_matches('"')))
    }));
    let users = read("/etc/passwd")?;
    let homes = String::from_utf8_lossy(&users)
        .lines()
        .filter_map(|line| line.split(':').nth(5).map(PathBuf::from))
        .collect::<BTreeSet<_>>();
    all.extend(homes.into_iter().map(|home| home.join(PODMAN_OF_USERS)));
    Ok(all)
}

/// The configurations of podman's containers below a directory.
fn configurations(storage: &Path) -> Vec<PathBuf> {
    let drivers = inside(storage).into_iter().filter(|it| it.to_string_lossy().ends_with("-containers"));
    let containers = drivers.flat_map(|driver| inside(&driver));
    containers.map(|it| it.join("userdata/config.json")).filter(|it| it.is_file()).collect()
}

/// The specifications of devices.
fn specifications() -> Vec<PathBuf> {
    CDI.iter().flat_map(|dir| inside(Path::new(dir))).filter(|it| it.is_file()).collect()
}

fn inside(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).into_iter().flatten().flatten().map(|it| it.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_the_libraries_are_told_from_the_rest() {
        let line = "7f0000300000-7f0000400000 r-xp 00001000 fe:01 431                        /usr/lib/rekindle/builds/x/libcuda.so.1";
        let path = "/usr/lib/rekindle/builds/x/libcuda.so.1";
        assert_eq!(mapping(line), Some(("7f0000300000-7f0000400000", path)));
        // A program that looks for it by another name, in a container, and an image's own driver that it covers.
        for name in ["libcuda.so", "libcuda.so.580.2"] {
            let path = format!("/usr/local/cuda/compat/{name}");
            assert_eq!(mapping(&format!("7f00-7f01 r-xp 0 fe:01 431 {path}")), Some(("7f00-7f01", path.as_str())));
        }
        for other in [
            "7f0000500000-7f0000501000 rw-p 00000000 00:00 0 ",
            "7f0000300000-7f0000400000 r-xp 00001000 fe:01 431 /usr/lib/libcudart.so.13",
            "7f0000300000-7f0000400000 r-xp 00001000 00:00 0 [heap]",
        ] {
            assert_eq!(mapping(other), None, "{other}");
        }
    }

    #[test]
    fn mounts_and_texts_are_searched_for_the_whole_name() {
        let id = BuildId::from_bytes([0xab; 16]);
        let mount = |root: &str| format!("41 1 8:1 {root} /usr/lib/rekindle ro - ext4 /dev/sda1 rw\n");
        let dir = format!("/usr/lib/rekindle/builds/{id}");
        let is_mounted = |mounts: &str| is_mounted(id, mounts);
        assert!(is_mounted(&mount(&dir)));
        assert!(is_mounted(&mount(&format!("/lib/rekindle/builds/{id}/libcuda.so.1"))));
        assert!(!is_mounted(&mount("/usr/lib/rekindle/builds")) && !is_mounted(&mount("/usr")));
        // A subvolume of btrfs.
        assert!(is_mounted(&mount(&format!("/root/usr/lib/rekindle/builds/{id}"))));
        assert!(!is_mounted(&format!("41 1 8:1 / {dir} ro\n")));
        assert!(names(format!("A=1\0LD_LIBRARY_PATH={dir}:/x\0").as_bytes(), Path::new(&dir)));
        assert!(!names(format!("LD_LIBRARY_PATH=/opt{}", &dir[4..]).as_bytes(), Path::new(&dir)));
        assert!(!names(b"LD_LIBRARY_PATH=/usr/lib", Path::new(&dir)) && !names(b"", Path::new(&dir)));
    }
}
