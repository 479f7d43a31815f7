//! The builds that a packed checkpoint carries: an archive that podman has exported, or one that `tar` has made of an image.
//!
//! `tar` unpacks the manifests and then the libraries that they name, and nothing else: an archive may be larger than any disk
//! here. It may be anybody's, but its libraries are added only if they are those of the build that the manifest names.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};
use rekindle_builds::{BuildId, Library};
use rekindle_images::{ImageDir, MANIFEST, Manifest, code_name};

use crate::failure::Failure;

/// What a file compressed with zstd begins with (RFC 8878). podman exports such archives by default.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The builds that the images in an archive carry, each with its libraries.
pub(super) fn carried(archive: &Path) -> Result<Vec<(BuildId, Vec<Library>)>, Failure> {
    const LOOK: &str = "cannot look through what was unpacked";
    let scratch = Scratch::new()?;
    let said = unpack(archive, &scratch.0, &BTreeSet::from([MANIFEST.to_owned()]), Reads::All)?;
    let manifests = files(&scratch.0).context(LOOK)?;
    if manifests.is_empty() {
        return Err(Failure::refused(anyhow!("{} holds no image of Rekindle{said}", archive.display())));
    }
    let mut builds = Vec::new();
    for manifest in manifests {
        let dir = manifest.parent().unwrap_or(&scratch.0);
        builds.extend(Manifest::peek(&ImageDir::open(dir)?)?.builds);
    }
    if builds.is_empty() {
        return Err(Failure::refused(anyhow!("{} carries no build of Rekindle's libraries", archive.display())));
    }
    let names = builds.iter().flat_map(|it| &it.libraries).map(|it| code_name(it.code)).collect();
    let said = unpack(archive, &scratch.0, &names, Reads::UntilFound)?;
    let files = files(&scratch.0).context(LOOK)?;
    let mut carried: Vec<(BuildId, Vec<Library>)> = Vec::new();
    for build in builds {
        let id = BuildId::from_bytes(build.id);
        // Several images in an archive have the same as a rule.
        if carried.iter().any(|it| it.0 == id) {
            continue;
        }
        let mut libraries = Vec::new();
        for it in &build.libraries {
            let name = code_name(it.code);
            let lacks = || {
                let what = format!("{} lacks {name}, which has {}{said}", archive.display(), it.name);
                Failure::refused(anyhow!("{what}: if its image builds on another one, add the build from that"))
            };
            let path = files.iter().find(|path| path.ends_with(&name)).ok_or_else(lacks)?;
            let file = open(path).with_context(|| format!("cannot read {}", path.display()))?;
            let unknown = || Failure::bad_image(anyhow!("bad image: {:?} is no library of Rekindle", it.name));
            libraries.push(Library::named(&it.name, file).ok_or_else(unknown)?);
        }
        carried.push((id, libraries));
    }
    Ok(carried)
}

/// How much of an archive is read.
#[derive(PartialEq)]
enum Reads {
    All,
    /// Until there is one file of each name.
    UntilFound,
}

/// Unpacks the files of these names, in whatever directory of the archive they are. Returns, in brackets, what `tar` has complained of: a
/// name that is not in the archive is no failure of this.
fn unpack(archive: &Path, to: &Path, names: &BTreeSet<String>, reads: Reads) -> anyhow::Result<String> {
    let cannot = || format!("cannot unpack {}", archive.display());
    let mut file = File::open(archive).with_context(cannot)?;
    let mut magic = [0; 4];
    let is_zstd = file.read_exact(&mut magic).is_ok() && magic == ZSTD;
    let mut tar = Command::new("tar");
    tar.env("LC_ALL", "C")
        .args(["--extract", "--no-same-owner", "--no-same-permissions", "--wildcards"])
        .arg("-C")
        .arg(to);
    // `tar` knows the other compressions of podman's by itself, with programs that every distribution has.
    tar.arg("-f").arg(if is_zstd { Path::new("-") } else { archive });
    if reads == Reads::UntilFound {
        tar.arg("--occurrence=1");
    }
    tar.args(names.iter().map(|it| format!("*{it}")));
    tar.stdin(if is_zstd { Stdio::piped() } else { Stdio::null() }).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut tar = tar.spawn().context("cannot run tar")?;
    let mut decompressed = Ok(());
    if let Some(mut input) = tar.stdin.take() {
        file.rewind().with_context(cannot)?;
        decompressed = zstd::stream::copy_decode(file, &mut input);
    }
    let output = tar.wait_with_output().context("cannot run tar")?;
    match decompressed {
        // It has what it wants.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        result => result.with_context(cannot)?,
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().next().unwrap_or("tar fails");
    Ok(if output.status.success() { String::new() } else { format!(" ({said})") })
}

/// All regular files in a directory and below it; links are not followed.
fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)
}

/// A directory of this process's own, which goes with this.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> anyhow::Result<Self> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .context("cannot create a directory")?;
        let dir = std::env::temp_dir().join(format!("rekindle-builds-{:016x}", u64::from_ne_bytes(random)));
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left of it is in a directory for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}
