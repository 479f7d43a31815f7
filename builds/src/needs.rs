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

use crate::{Build, BuildId, LIBRARIES};

/// Where podman keeps the configurations of containers, for root: this directory has `DRIVER-containers/ID/userdata/config.json`.
const PODMAN: [&str; 2] = ["/var/lib/containers/storage", "/run/containers/storage"];

/// Who needs a build.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Processes that have one of its libraries mapped, or will look for them there.
    pub processes: BTreeSet<i32>,
    /// Whether it is mounted somewhere, as in containers that run.
    pub mounted: bool,
    /// Files that say how a container is started again, and name it.
    pub containers: BTreeSet<PathBuf>,
}

impl Needs {
    /// Whether nobody needs the build.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty() && !self.mounted && self.containers.is_empty()
    }
}

/// Finds out who needs each of these builds. Root sees everything; another user sees its own processes.
///
/// # Errors
///
/// The error of reading `/proc`.
pub fn of(builds: &[Build]) -> io::Result<BTreeMap<BuildId, Needs>> {
    let mut needs: BTreeMap<BuildId, Needs> = builds.iter().map(|it| (it.id, Needs::default())).collect();
    let mut looked_at = HashSet::new();
    for pid in processes()? {
        for id in mapped(pid, builds).into_iter().chain(awaited(pid, builds)) {
            needs.entry(id).or_default().processes.insert(pid);
        }
        // One table for all processes of a mount namespace.
        let Ok(namespace) = fs::read_link(format!("/proc/{pid}/ns/mnt")) else { continue };
        if looked_at.insert(namespace) {
            let mounts = fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
            for build in builds.iter().filter(|it| is_mounted(&it.dir, &mounts)) {
                needs.entry(build.id).or_default().mounted = true;
            }
        }
    }
    for file in PODMAN.iter().flat_map(|storage| configurations(Path::new(storage))) {
        let Ok(text) = fs::read(&file) else { continue };
        for build in builds.iter().filter(|it| names(&text, &it.dir)) {
            needs.entry(build.id).or_default().containers.insert(file.clone());
        }
    }
    Ok(needs)
}

/// The builds whose libraries a process has mapped, also where it sees them under other paths, as in a container. None for a process that
/// is gone.
#[must_use]
pub fn mapped(pid: i32, builds: &[Build]) -> BTreeSet<BuildId> {
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
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
        let name = Path::new(path).file_name().unwrap_or_default();
        let is_it = |build: &&Build| {
            let ours = build.dir.join(name);
            // Who may not see the files of mappings sees the paths.
            match (&file, fs::metadata(&ours)) {
                (Ok(file), Ok(ours)) => (file.dev(), file.ino()) == (ours.dev(), ours.ino()),
                (Err(_), Ok(_)) => ours == Path::new(path),
                (_, Err(_)) => false,
            }
        };
        found.extend(builds.iter().find(is_it).map(|it| it.id));
    }
    found
}

/// The range and the path of a mapping of a file that is named like one of the libraries.
fn mapping(line: &str) -> Option<(&str, &str)> {
    let path = &line[line.find('/')?..];
    let name = path.rsplit('/').next()?;
    LIBRARIES.contains(&name).then_some((line.split(' ').next()?, path))
}

/// The builds that the environment of a process names: the process may load the libraries later.
fn awaited(pid: i32, builds: &[Build]) -> Vec<BuildId> {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    builds.iter().filter(|it| names(&environment, &it.dir)).map(|it| it.id).collect()
}

/// Whether a table of mounts has one whose root is a build's directory or in it. A root begins at its file system's own, which need not
/// be mounted at `/`.
fn is_mounted(build: &Path, mounts: &str) -> bool {
    // Fields: number, parent, device, root, place, ...
    let mut roots = mounts.lines().filter_map(|line| Path::new(line.split(' ').nth(3)?).strip_prefix("/").ok());
    let is_build = |at: &Path| at.file_name() == build.file_name() && build.ends_with(at);
    roots.any(|root| root.ancestors().any(is_build))
}

fn names(text: &[u8], dir: &Path) -> bool {
    let dir = dir.as_os_str().as_bytes();
    text.windows(dir.len().max(1)).any(|it| it == dir)
}

fn processes() -> io::Result<Vec<i32>> {
    let entries = fs::read_dir("/proc")?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The configurations of podman's containers below a directory.
fn configurations(storage: &Path) -> Vec<PathBuf> {
    let inside = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|it| it.path());
    let drivers = inside(storage).filter(|it| it.to_string_lossy().ends_with("-containers"));
    let containers = drivers.flat_map(|driver| inside(&driver).collect::<Vec<_>>());
    containers.map(|it| it.join("userdata/config.json")).filter(|it| it.is_file()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_of_the_libraries_are_told_from_the_rest() {
        let line = "7f0000300000-7f0000400000 r-xp 00001000 fe:01 431                        /usr/lib/rekindle/builds/x/libcuda.so.1";
        let path = "/usr/lib/rekindle/builds/x/libcuda.so.1";
        assert_eq!(mapping(line), Some(("7f0000300000-7f0000400000", path)));
        for other in [
            "7f0000500000-7f0000501000 rw-p 00000000 00:00 0 ",
            "7f0000300000-7f0000400000 r-xp 00001000 fe:01 431 /usr/lib/libcuda.so.1.2",
            "7f0000300000-7f0000400000 r-xp 00001000 fe:01 431 /usr/lib/libcuda.so.1 (deleted)",
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
        let is_mounted = |mounts: &str| is_mounted(Path::new(&dir), mounts);
        assert!(is_mounted(&mount(&dir)));
        assert!(is_mounted(&mount(&format!("/lib/rekindle/builds/{id}/libcuda.so.1"))));
        assert!(!is_mounted(&mount("/usr/lib/rekindle/builds")) && !is_mounted(&mount("/usr")));
        assert!(!is_mounted(&mount(&format!("/opt/lib/rekindle/builds/{id}"))));
        assert!(!is_mounted(&format!("41 1 8:1 / {dir} ro\n")));
        assert!(names(format!("A=1\0LD_LIBRARY_PATH={dir}:/x\0").as_bytes(), Path::new(&dir)));
        assert!(!names(format!("LD_LIBRARY_PATH=/opt{}", &dir[4..]).as_bytes(), Path::new(&dir)));
        assert!(!names(b"LD_LIBRARY_PATH=/usr/lib", Path::new(&dir)) && !names(b"", Path::new(&dir)));
    }
}
