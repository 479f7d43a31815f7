//! Whether the interposer can run in a container's image. That depends on the image's C library, and on a driver library that
//! the image may have.
//!
//! The hook opens the image's files below its root directory only: links in the image may be absolute, or lead anywhere.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use thiserror::Error;

/// The loader's default folders, in which distributions have the C library.
const LIB_DIRS: [&str; 6] =
    ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// Other folders in which images have a driver library.
const DRIVER_DIRS: [&str; 5] = [
    "/usr/local/cuda/compat",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/local/lib",
    "/usr/local/lib/x86_64-linux-gnu",
];
const MUSL_LOADER: &str = "/lib/ld-musl-x86_64.so.1";
/// The most bytes that are read of a library. No C library is that large.
const LIBRARY_MAX: u64 = 64 << 20;

/// The interposer cannot run in an image.
#[derive(Debug, Error)]
pub(crate) enum ImageError {
    #[error("the container's image has musl as its C library, and CUDA programs need glibc: use an image with glibc")]
    Musl,
    #[error(
        "the container's image has glibc 2.{has}, and the interposer needs 2.{needs} or newer: use a newer image, or an interposer built for older ones (scripts/dist makes one)"
    )]
    Old { has: u32, needs: u32 },
    #[error(
        "the container's image has a driver library of its own at {}, which its programs find before ours: run it by annotation (podman run --annotation dev.rekindle/enable=true), which covers it", .0.display()
    )]
    OwnDriver(PathBuf),
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
}

/// The root directory of a container.
pub(crate) struct Image {
    path: PathBuf,
    root: OwnedFd,
}

impl Image {
    /// Opens a root directory.
    pub(crate) fn open(root: &Path) -> Result<Self, ImageError> {
        let failed = |source| ImageError::Read { path: root.into(), source };
        let path = root.canonicalize().map_err(failed)?;
        let dir = File::open(&path).map_err(failed)?;
        Ok(Self { path, root: dir.into() })
    }

    /// Whether programs in it can load the interposer. An image without any C library passes: its programs are linked
    /// statically, or come in a volume.
    pub(crate) fn check(&self, interposer: &Path) -> Result<(), ImageError> {
        let library = LIB_DIRS.iter().find_map(|dir| self.file(&format!("{dir}/libc.so.6")));
        let Some(library) = library else {
            return if self.file(MUSL_LOADER).is_some() { Err(ImageError::Musl) } else { Ok(()) };
        };
        let read = |file: File, path: &Path| {
            newest_glibc(file).map_err(|source| ImageError::Read { path: path.into(), source })
        };
        let has = read(library, &self.path.join("libc.so.6"))?;
        let ours = File::open(interposer).map_err(|source| ImageError::Read { path: interposer.into(), source })?;
        let needs = read(ours, interposer)?;
        match (has, needs) {
            (Some(has), Some(needs)) if has < needs => Err(ImageError::Old { has, needs }),
            _ => Ok(()),
        }
    }

    /// The image's own files with this library's name, in its loader's folders and in `more`.
    pub(crate) fn own<'a>(&self, library: &str, more: impl IntoIterator<Item = &'a str>) -> BTreeSet<PathBuf> {
        let known = LIB_DIRS.into_iter().chain(DRIVER_DIRS).chain(more).map(str::to_owned);
        let dirs = known.chain(self.configured_dirs());
        let drivers = dirs.filter(|dir| dir.starts_with('/')).filter_map(|dir| {
            // The file to which links in the image lead.
            self.place(&format!("{dir}/{library}"))
        });
        drivers.collect()
    }

    /// Checks that programs find the interposer: each driver library that their loader would find earlier is covered by a
    /// mount of the container.
    pub(crate) fn check_search_path(&self, library_path: &str, mounts: &[&str]) -> Result<(), ImageError> {
        let configured = self.configured_dirs();
        let searched = library_path.split(':').chain(configured.iter().map(String::as_str));
        let searched = searched.filter(|dir| dir.starts_with('/')).map(|dir| dir.trim_end_matches('/'));
        // A file in a mount does not belong to the image.
        let is_mount = |place: &Path| mounts.iter().any(|mount| place.starts_with(mount));
        let covered: BTreeSet<_> = mounts.iter().filter_map(|mount| self.place(mount)).collect();
        for dir in searched {
            let path = format!("{dir}/libcuda.so.1");
            if is_mount(Path::new(&path)) {
                return Ok(());
            }
            if let Some(place) = self.place(&path).filter(|place| !covered.contains(place) && !is_mount(place)) {
                return Err(ImageError::OwnDriver(place));
            }
        }
        Ok(())
    }

    /// Whether the image has a file with content at a path. A runtime creates an empty file as a mount point.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.file(path).and_then(|file| file.metadata().ok()).is_some_and(|about| about.len() > 0)
    }

    /// The regular file that a path of the image leads to, as a path in it.
    fn place(&self, path: &str) -> Option<PathBuf> {
        let file = self.file(path)?;
        let place = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        Some(Path::new("/").join(place.strip_prefix(&self.path).ok()?))
    }

    /// The folders that /etc/ld.so.conf.d names.
    fn configured_dirs(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path.join("etc/ld.so.conf.d")) else { return Vec::new() };
        let mut dirs = Vec::new();
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(file) = self.file(&format!("/etc/ld.so.conf.d/{}", name.to_string_lossy())) else { continue };
            let mut text = String::new();
            if file.take(1 << 16).read_to_string(&mut text).is_ok() {
                dirs.extend(text.lines().map(str::trim).filter(|line| line.starts_with('/')).map(str::to_owned));
            }
        }
        dirs
    }

    /// A regular file of the image, its links followed inside the image.
    fn file(&self, path: &str) -> Option<File> {
        let file = self.open_in(Path::new(path)).ok()?;
        file.metadata().is_ok_and(|about| about.is_file()).then_some(file)
    }

    fn open_in(&self, path: &Path) -> io::Result<File> {
        // Without blocking: the image may have a FIFO there.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(openat2(&self.root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)?.into())
    }
}

/// The newest version 2.N of glibc that a library names. For glibc itself that is its version, for others the oldest version
/// that they need.
fn newest_glibc(file: File) -> io::Result<Option<u32>> {
    const NAME: &[u8] = b"GLIBC_2.";
    let mut bytes = Vec::new();
    file.take(LIBRARY_MAX).read_to_end(&mut bytes)?;
    let version = |at: usize| {
        let digits = bytes.get(at + NAME.len()..)?.iter().take_while(|byte| byte.is_ascii_digit()).take(4);
        digits.fold(None, |number: Option<u32>, digit| Some(number.unwrap_or(0) * 10 + u32::from(digit - b'0')))
    };
    let starts = bytes.windows(NAME.len()).enumerate().filter(|(_, name)| *name == NAME);
    Ok(starts.filter_map(|(at, _)| version(at)).max())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, mkfifoat};
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// An image with these files.
    fn image(files: &[(&str, &str)]) -> TempDir {
        let dir = TempDir::new().unwrap();
        for (name, content) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        dir
    }

    fn check(files: &[(&str, &str)], interposer: &str) -> Result<(), ImageError> {
        let ours = image(&[("libcuda.so.1", interposer)]);
        let theirs = image(files);
        Image::open(theirs.path())?.check(&ours.path().join("libcuda.so.1"))
    }

    const LIBC: &str = "usr/lib/x86_64-linux-gnu/libc.so.6";

    #[test]
    fn an_image_with_too_old_a_glibc_is_refused_with_both_versions() {
        let error = check(&[(LIBC, "GLIBC_2.2.5\0GLIBC_2.24\0GLIBC_PRIVATE")], "GLIBC_2.28\0GLIBC_2.3").unwrap_err();
        assert!(matches!(error, ImageError::Old { has: 24, needs: 28 }), "{error}");
        check(&[(LIBC, "GLIBC_2.9\0GLIBC_2.28\0")], "GLIBC_2.28\0GLIBC_2.3").unwrap();
        check(&[("lib64/libc.so.6", "GLIBC_2.41\0")], "GLIBC_2.28").unwrap();
    }

    #[test]
    fn an_image_with_musl_and_without_glibc_is_refused() {
        let musl = ("lib/ld-musl-x86_64.so.1", "");
        assert!(matches!(check(&[musl], "GLIBC_2.28"), Err(ImageError::Musl)));
        check(&[musl, (LIBC, "GLIBC_2.36")], "GLIBC_2.28").unwrap();
        check(&[("bin/static", "")], "GLIBC_2.28").unwrap();
    }

    #[test]
    fn driver_libraries_are_found_through_links_inside_the_image_only() {
        let dir = image(&[
            ("usr/lib/x86_64-linux-gnu/libcuda.so.580.1", ""),
            ("usr/local/cuda-13.0/compat/libcuda.so.580.2", ""),
            ("srv/own/libcuda.so.1", ""),
            ("srv/env/libcuda.so.1", ""),
            ("etc/ld.so.conf.d/own.conf", "# a comment\n/srv/own\n"),
        ]);
        let root = dir.path();
        symlink("libcuda.so.580.1", root.join("usr/lib/x86_64-linux-gnu/libcuda.so.1")).unwrap();
        symlink("usr/lib", root.join("lib")).unwrap();
        symlink("/usr/local/cuda-13.0", root.join("usr/local/cuda")).unwrap();
        symlink("/usr/local/cuda/compat/libcuda.so.580.2", root.join("usr/local/cuda-13.0/compat/libcuda.so.1"))
            .unwrap();
        // Leads out of the image, or nowhere.
        fs::create_dir_all(root.join("usr/local/lib")).unwrap();
        symlink("../../../../../../../../../etc/passwd", root.join("usr/local/lib/libcuda.so.1")).unwrap();
        let found = Image::open(root).unwrap().own("libcuda.so.1", ["/srv/env", "relative", ""]);
        let expected = [
            "/srv/env/libcuda.so.1",
            "/srv/own/libcuda.so.1",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.580.1",
            "/usr/local/cuda-13.0/compat/libcuda.so.580.2",
        ];
        assert_eq!(found.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_fifo_in_place_of_a_library_does_not_block_the_check() {
        let dir = image(&[("usr/lib/x86_64-linux-gnu/other", "")]);
        mkfifoat(CWD, dir.path().join(LIBC), Mode::RUSR | Mode::WUSR).unwrap();
        let ours = image(&[("libcuda.so.1", "GLIBC_2.28")]);
        Image::open(dir.path()).unwrap().check(&ours.path().join("libcuda.so.1")).unwrap();
    }
}
