//! The directory of builds.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::{BuildError, BuildId, INTERPOSER, LIBRARIES, NVML};

/// The name of the directory of builds, beside the links.
const BUILDS: &str = "builds";
/// The prefix of directories that are being filled. No build has such a name.
const NEW: &str = ".new-";
/// The largest library, in bytes: some twenty times what they have.
const LARGEST: u64 = 64 << 20;
/// How long to wait for somebody else who adds or removes builds: these copy a few megabytes, or look through all processes.
const LOCK_LIMIT: Duration = Duration::from_secs(30);
const LOCK_LOOK: Duration = Duration::from_millis(20);
/// Names by which programs also look for the libraries, and what they are links to.
const LINKS: [(&str, &str); 1] = [("libcuda.so", INTERPOSER)];

/// The builds of a machine.
#[derive(Clone, Debug)]
pub struct Store {
    /// The folder of Rekindle's libraries, such as `/usr/lib/rekindle`.
    library_dir: PathBuf,
}

/// A build that is here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    /// Its name.
    pub id: BuildId,
    /// Its directory.
    pub dir: PathBuf,
}

/// A library of a build, to be read.
#[derive(Debug)]
pub struct Library {
    /// One of [`LIBRARIES`].
    pub name: &'static str,
    /// Its content.
    pub file: File,
}

impl Library {
    /// The library of this name, with its content; none if no library of Rekindle has the name.
    #[must_use]
    pub fn named(name: &str, file: File) -> Option<Self> {
        let known = LIBRARIES.into_iter().find(|it| *it == name);
        known.map(|name| Self { name, file })
    }

    /// The libraries that lie in a directory.
    ///
    /// # Errors
    ///
    /// [`BuildError::NoBuild`] if it has no interposer; [`BuildError::File`] if a library cannot be opened.
    pub fn in_dir(dir: &Path) -> Result<Vec<Self>, BuildError> {
        let mut found = Vec::new();
        for name in LIBRARIES {
            let path = dir.join(name);
            match File::open(&path) {
                Ok(file) => found.push(Self { name, file }),
                Err(error) if error.kind() == io::ErrorKind::NotFound && name == NVML => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    return Err(BuildError::NoBuild(dir.to_owned()));
                }
                Err(error) => return Err(BuildError::at("cannot read", &path)(error)),
            }
        }
        Ok(found)
    }
}

impl Store {
    /// The builds below the folder of Rekindle's libraries.
    #[must_use]
    pub fn new(library_dir: &Path) -> Self {
        Self { library_dir: library_dir.to_owned() }
    }

    /// The directory that has a directory for each build.
    #[must_use]
    pub fn builds_dir(&self) -> PathBuf {
        self.library_dir.join(BUILDS)
    }

    /// The directory of a build, which need not be here.
    #[must_use]
    pub fn dir(&self, id: BuildId) -> PathBuf {
        self.builds_dir().join(id.to_string())
    }

    /// Whether a build is here. Its content is not read.
    #[must_use]
    pub fn has(&self, id: BuildId) -> bool {
        self.dir(id).join(INTERPOSER).is_file()
    }

    /// When a build was last added or chosen; none if it is not here.
    #[must_use]
    pub fn used(&self, id: BuildId) -> Option<SystemTime> {
        fs::metadata(self.dir(id)).and_then(|it| it.modified()).ok()
    }

    /// The builds that are here, in the order of their names.
    ///
    /// # Errors
    ///
    /// [`BuildError::File`] if the directory cannot be read; without the directory there are none.
    pub fn list(&self) -> Result<Vec<Build>, BuildError> {
        let dir = self.builds_dir();
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(BuildError::at("cannot read", &dir))?,
        };
        let mut builds = Vec::new();
        for entry in entries {
            let entry = entry.map_err(BuildError::at("cannot read", &dir))?;
            if let Some(id) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
                builds.push(Build { id, dir: entry.path() });
            }
        }
        builds.sort_by_key(|it| it.id);
        Ok(builds)
    }

    /// The build that new applications are given; none if the link to the interposer leads elsewhere or is missing.
    #[must_use]
    pub fn chosen(&self) -> Option<BuildId> {
        let target = fs::read_link(self.library_dir.join(INTERPOSER)).ok()?;
        let inside = target.strip_prefix(BUILDS).ok()?;
        inside.parent()?.to_str()?.parse().ok()
    }

    /// Makes the directory of builds if there is none, and waits until nobody else changes what is in it; for half a minute at most.
    ///
    /// # Errors
    ///
    /// [`BuildError::File`] if the directory cannot be made or locked; [`BuildError::Busy`] if somebody else has it for too long.
    pub fn lock(&self) -> Result<Locked<'_>, BuildError> {
        let dir = self.builds_dir();
        match fs::create_dir(&dir) {
            // Whatever the umask: applications of all users load from it.
            Ok(()) => fs::set_permissions(&dir, fs::Permissions::from_mode(0o755))
                .map_err(BuildError::at("cannot create", &dir))?,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(BuildError::at("cannot create", &dir)(error)),
        }
        let opened = File::open(&dir).map_err(BuildError::at("cannot read", &dir))?;
        let began = Instant::now();
        loop {
            match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked { store: self, _lock: opened }),
                Err(Errno::WOULDBLOCK) if began.elapsed() < LOCK_LIMIT => std::thread::sleep(LOCK_LOOK),
                Err(Errno::WOULDBLOCK) => return Err(BuildError::Busy(dir)),
                Err(error) => return Err(BuildError::at("cannot lock", &dir)(error.into())),
            }
        }
    }

    /// Compares the files of a build with its name.
    ///
    /// # Errors
    ///
    /// [`BuildError::Absent`] if it is not here, [`BuildError::Changed`] if its files are others.
    pub fn check(&self, id: BuildId) -> Result<(), BuildError> {
        let dir = self.dir(id);
        let libraries = match Library::in_dir(&dir) {
            Err(BuildError::NoBuild(_)) => return Err(BuildError::Absent { id, path: self.builds_dir() }),
            libraries => libraries?,
        };
        let hash = |Library { name, mut file }: Library| Ok((name, hash_of(&mut file, &dir.join(name))?));
        let found = BuildId::of(libraries.into_iter().map(hash).collect::<Result<Vec<_>, BuildError>>()?);
        if found == id { Ok(()) } else { Err(BuildError::Changed { path: dir, expected: id, found }) }
    }
}

/// The builds of a machine, which nobody else changes meanwhile.
#[derive(Debug)]
pub struct Locked<'a> {
    store: &'a Store,
    _lock: File,
}

impl Locked<'_> {
    /// Adds a build, unless it is here already, and returns its name. Either all of its files are there under its name, or nothing is.
    /// A directory of that name with other content is replaced.
    ///
    /// # Errors
    ///
    /// [`BuildError::Changed`] if `expected` names another build than these libraries are; [`BuildError::NoBuild`] and
    /// [`BuildError::TooLarge`] if they are none of Rekindle's; [`BuildError::File`] if a file cannot be read or written.
    pub fn add(&self, libraries: Vec<Library>, expected: Option<BuildId>) -> Result<Build, BuildError> {
        let builds = self.store.builds_dir();
        if !libraries.iter().any(|it| it.name == INTERPOSER) {
            return Err(BuildError::NoBuild(builds));
        }
        let new = New::in_dir(&builds)?;
        let mut hashes = Vec::new();
        for Library { name, mut file } in libraries {
            let path = new.0.join(name);
            let mut copy = File::create_new(&path).map_err(BuildError::at("cannot create", &path))?;
            // The content may be anybody's, and may grow meanwhile.
            let copied = file.rewind().and_then(|()| io::copy(&mut file.take(LARGEST + 1), &mut copy));
            if copied.map_err(BuildError::at("cannot write", &path))? > LARGEST {
                return Err(BuildError::TooLarge { name, limit: LARGEST });
            }
            copy.set_permissions(fs::Permissions::from_mode(0o755)).map_err(BuildError::at("cannot write", &path))?;
            copy.sync_all().map_err(BuildError::at("cannot write", &path))?;
            // Of the copy: the original may be changed meanwhile.
            hashes.push((name, hash_of(&mut reopened(&path)?, &path)?));
        }
        for (link, target) in LINKS {
            let path = new.0.join(link);
            symlink(target, &path).map_err(BuildError::at("cannot create", &path))?;
        }
        let id = BuildId::of(hashes);
        if let Some(expected) = expected.filter(|it| *it != id) {
            return Err(BuildError::Changed { path: builds, expected, found: id });
        }
        let dir = self.store.dir(id);
        sync(&new.0)?;
        match fs::rename(&new.0, &dir) {
            Ok(()) => sync(&builds)?,
            Err(error) if matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::DirectoryNotEmpty) => {
                // One that is damaged is replaced: this is how a reinstallation mends it.
                if self.store.check(id).is_err() {
                    self.discard(id)?;
                    fs::rename(&new.0, &dir).map_err(BuildError::at("cannot create", &dir))?;
                    sync(&builds)?;
                }
                touch(&dir)?;
            }
            Err(error) => return Err(BuildError::at("cannot create", &dir)(error)),
        }
        Ok(Build { id, dir })
    }

    /// Has new applications be given a build: the links lead to it from now on. Each link leads to the old or the new build at any
    /// moment.
    ///
    /// # Errors
    ///
    /// [`BuildError::Absent`] if it is not here; [`BuildError::File`] if a link cannot be made.
    pub fn choose(&self, id: BuildId) -> Result<(), BuildError> {
        if !self.store.has(id) {
            return Err(BuildError::Absent { id, path: self.store.builds_dir() });
        }
        let inside = Path::new(BUILDS).join(id.to_string());
        for name in LIBRARIES {
            let link = self.store.library_dir.join(name);
            if self.store.dir(id).join(name).exists() {
                replace_link(&inside.join(name), &link)?;
            } else {
                remove_file(&link)?;
            }
        }
        for (link, target) in LINKS {
            replace_link(Path::new(target), &self.store.library_dir.join(link))?;
        }
        touch(&self.store.dir(id))?;
        sync(&self.store.library_dir)
    }

    /// Removes a build. Whoever calls this has found that nothing needs it.
    ///
    /// # Errors
    ///
    /// [`BuildError::Chosen`] if new applications are given it; [`BuildError::Absent`] if it is not here; [`BuildError::File`] if a file
    /// cannot be removed.
    pub fn remove(&self, id: BuildId) -> Result<(), BuildError> {
        if self.store.chosen() == Some(id) {
            return Err(BuildError::Chosen(id));
        }
        self.discard(id)
    }

    /// Removes the links, so that there is no build for new applications, as before the first [`choose`](Self::choose).
    ///
    /// # Errors
    ///
    /// [`BuildError::File`] if a link cannot be removed.
    pub fn choose_none(&self) -> Result<(), BuildError> {
        let names = LIBRARIES.into_iter().chain(LINKS.map(|(link, _)| link));
        names
            .map(|name| self.store.library_dir.join(name))
            .filter(|it| it.is_symlink())
            .try_for_each(|it| remove_file(&it))
    }

    fn discard(&self, id: BuildId) -> Result<(), BuildError> {
        let dir = self.store.dir(id);
        // Under another name first: a build is there with all of its files, or not at all.
        let gone = New::in_dir(&self.store.builds_dir())?;
        match fs::rename(&dir, &gone.0) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(BuildError::Absent { id, path: self.store.builds_dir() })
            }
            Err(error) => Err(BuildError::at("cannot remove", &dir)(error)),
        }
    }
}

/// A directory that is removed when this is dropped, unless it has been renamed.
struct New(PathBuf);

impl New {
    fn in_dir(builds: &Path) -> Result<Self, BuildError> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| BuildError::at("cannot create a directory in", builds)(error.into()))?;
        let dir = builds.join(format!("{NEW}{:016x}", u64::from_ne_bytes(random)));
        fs::create_dir(&dir).map_err(BuildError::at("cannot create", &dir))?;
        let new = Self(dir);
        // Whatever the umask: applications of all users load from it.
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&new.0, mode).map_err(BuildError::at("cannot create", &new.0))?;
        Ok(new)
    }
}

impl Drop for New {
    fn drop(&mut self) {
        // It is there no more if it has been renamed. One that a killed program has left disturbs nobody.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The SHA-256 of a file's content, from its present position on.
fn hash_of(file: &mut File, path: &Path) -> Result<[u8; 32], BuildError> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer).map_err(BuildError::at("cannot read", path))? {
            0 => return Ok(hash.finalize().into()),
            length => hash.update(&buffer[..length]),
        }
    }
}

/// Notes that a build has been added or chosen now.
fn touch(dir: &Path) -> Result<(), BuildError> {
    let touched = File::open(dir).and_then(|it| it.set_modified(SystemTime::now()));
    touched.map_err(BuildError::at("cannot write", dir))
}

fn reopened(path: &Path) -> Result<File, BuildError> {
    File::open(path).map_err(BuildError::at("cannot read", path))
}

fn sync(dir: &Path) -> Result<(), BuildError> {
    let opened = rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let synced = opened.and_then(rustix::fs::fsync);
    synced.map_err(|error| BuildError::at("cannot write", dir)(error.into()))
}

fn replace_link(target: &Path, link: &Path) -> Result<(), BuildError> {
    if fs::read_link(link).is_ok_and(|it| it == target) {
        return Ok(());
    }
    let mut name = link.file_name().unwrap_or(OsStr::new("")).to_owned();
    name.push(".new");
    let new = link.with_file_name(name);
    remove_file(&new)?;
    symlink(target, &new).map_err(BuildError::at("cannot create", &new))?;
    fs::rename(&new, link).map_err(BuildError::at("cannot replace", link))
}

fn remove_file(path: &Path) -> Result<(), BuildError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(BuildError::at("cannot remove", path)(error)),
        _ => Ok(()),
    }
}
