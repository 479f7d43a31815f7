//! Making an image: files, code, manifest, commit.
//!
//! ```text
//!            create                       commit
//!  (anything) ────► open ──────────────────────────────────────────► committed
//!                    │ data_file, put_code,   1 data and code durable
//!                    │ code_file              2 manifest durable, under its temporary name where there is an older image
//!                    │                        3 commit record durable: from this rename on the new image counts
//!                    │                        4 manifest renamed, files of the older image removed
//!                    └── abort, drop, a failed commit ──► our files are gone
//! ```
//!
//! A committed image that is in the directory already stays whole until step 3: the new one is made beside it, of files with
//! other numbers, and shares code files of the same content. The commit record says which files count, and by its checksum
//! which of the two manifests, so one rename takes the step from the old image to the new one.
//!
//! A process that is killed on the way leaves files that no commit record names: readers pass over them,
//! and the next writer removes them. The images that an image builds on are only read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::base::{Base, Tables};
use crate::compress::CompressionChoice;
use crate::content::ContentKey;
use crate::decode::Decoder;
use crate::dir::ImageDir;
use crate::hash::{CheckpointId, Checksum, CodeHash};
use crate::image::read_code_file;
use crate::limits::{FIRST_FREE_DATA_FILE, FORMAT_VERSION, MAX_CODE, MAX_FILES};
use crate::manifest::{CodeImage, Manifest, Parent, Storage};
use crate::names::{
    BESIDE, COMMIT, COMMIT_TEMPORARY, LAST_RESTORE, MANIFEST, MANIFEST_TEMPORARY, Name, code_name, data_name,
};
use crate::record::{CommitRecord, Companion, FileEntry, FileSizes};
use crate::{ImageError, chain, encode, envelope, recovery, sys, validate};

/// The options with which an image is begun.
#[derive(Debug, Clone, Copy)]
pub struct CreateOptions {
    /// The checkpoint's name.
    pub id: CheckpointId,
    /// The key of the pieces' hashes.
    pub key: ContentKey,
    /// Whether a committed image in the directory may be replaced. The old image stays as it is until the new one is
    /// committed, and is gone then.
    pub replace: bool,
    /// The name of a file of others in the directory that this image belongs with, if there is one: what is in it at the
    /// commit is recorded, and compared by [`Image::check_companion`](crate::Image::check_companion).
    pub companion: Option<&'static str>,
    /// How the image's pieces are to be compressed. For the processes that write pieces: a writer of data files takes this
    /// choice itself.
    pub compression: CompressionChoice,
}

impl CreateOptions {
    /// A random name and key, replacing nothing, not compressed.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub fn new() -> Result<Self, ImageError> {
        Ok(Self {
            id: CheckpointId::random()?,
            key: ContentKey::random()?,
            replace: false,
            companion: None,
            compression: CompressionChoice::Off,
        })
    }
}

/// An image that is durable and whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its name.
    pub id: CheckpointId,
    /// The checksum of its manifest, by which an incremental image refers to it.
    pub manifest_hash: Checksum,
    /// Bytes in all its files.
    pub bytes: u64,
    /// Number of its files.
    pub files: usize,
}

/// An image being written.
///
/// Unless [`commit`](Self::commit) returns success, every file it made is removed, and nothing
/// else in the directory: when it is dropped, or by [`abort`](Self::abort), which also says
/// whether that worked. Methods that add files may be called from several threads.
#[derive(Debug)]
pub struct ImageWriter {
    dir: ImageDir,
    options: CreateOptions,
    base: Option<Box<Base>>,
    /// The image that is in the directory until this one is committed.
    kept: Option<CommitRecord>,
    /// The record of the files of others of the image that this one is made of, if it is made of one.
    others: Option<(Option<Companion>, bool)>,
    files: Mutex<Files>,
    finished: bool,
}

#[derive(Debug, Default)]
struct Files {
    /// Kept open, so that a failed write-back is reported to us.
    data: BTreeMap<u32, File>,
    /// The clients that have their first data file.
    firsts: BTreeSet<u32>,
    code: BTreeMap<CodeHash, Code>,
    /// The count of numbers from [`FIRST_FREE_DATA_FILE`] on that were given out.
    more: u32,
}

/// A code file. Not kept open: there may be thousands.
#[derive(Debug, Clone, Copy)]
struct Code {
    size: u64,
    /// Whether another process writes it, so that its content must be checked.
    foreign: bool,
    /// Whether the file belongs to the image that this one replaces.
    shared: bool,
    /// The ancestor that has the file; 0 is this image.
    depth: u32,
}

impl ImageWriter {
    /// Begins an image in `dir`.
    ///
    /// A committed image that is there stays until the new one is committed. A flattening of it that was killed while its
    /// files took the place of the old ones comes to its end first. All else that a killed writer has left is removed.
    /// Files that are not ours stay.
    ///
    /// # Errors
    /// [`ImageError::Exists`] if a committed image is there and may not be replaced,
    /// [`ImageError::Busy`] if another writer is at work, [`ImageError::BuiltOn`] if one elsewhere needs what is there,
    /// [`ImageError::Io`].
    pub fn create(dir: ImageDir, options: CreateOptions) -> Result<Self, ImageError> {
        Self::create_on(dir, options, None)
    }

    /// As [`create`](Self::create), for an image that builds on another where there is one, whose key it takes:
    /// `options.key` counts only without. If nothing of the base turns out to be needed, the image stands alone.
    ///
    /// # Errors
    /// The errors of [`create`](Self::create).
    pub fn create_on(dir: ImageDir, mut options: CreateOptions, base: Option<Base>) -> Result<Self, ImageError> {
        if let Some(base) = &base {
            options.key = base.key();
        }
        dir.lock()?;
        let committed = dir.names()?.iter().any(|name| name == COMMIT);
        // While its files are moved over, an image is committed only in there.
        let beside = dir.inner_dir(BESIDE)?;
        let moving = beside.as_ref().map(|it| it.open_file(COMMIT)).transpose()?.flatten().is_some();
        if (committed || moving) && !options.replace {
            return Err(ImageError::Exists { dir: dir.path().to_owned() });
        }
        drop(beside);
        match recovery::settle_flattening(&dir) {
            // A flattened image that cannot take the place of the image.
            Err(error) if error.kind().is_bad_image() => dir.remove_dir(BESIDE)?,
            settled => drop(settled?),
        }
        let kept = recovery::settle_commit(&dir)?;
        let (base, files) = (base.map(Box::new), Mutex::default());
        Ok(Self { dir, options, base, kept, others: None, files, finished: false })
    }

    /// As [`create`](Self::create), for the same checkpoint as that of another image: it belongs with the same files of
    /// others.
    pub(crate) fn create_again(dir: ImageDir, options: CreateOptions, of: &CommitRecord) -> Result<Self, ImageError> {
        let mut writer = Self::create(dir, options)?;
        writer.others = Some((of.companion.clone(), of.others_overwritten));
        Ok(writer)
    }

    /// Removes the committed image that is in `dir`, and everything that was left there by whoever was killed.
    ///
    /// # Errors
    /// The errors of [`create`](Self::create).
    pub fn remove_image(dir: ImageDir) -> Result<(), ImageError> {
        let writer = Self::create(dir, CreateOptions { replace: true, ..CreateOptions::new()? })?;
        let dir = &writer.dir;
        // Without it the rest is no image, however far this gets.
        dir.remove(COMMIT)?;
        dir.sync()?;
        for name in dir.names()?.iter().filter(|name| Name::parse(name).is_some()) {
            dir.remove(name)?;
        }
        dir.sync()
    }

    /// Notes durably that the files of others in the directory are about to be written over, so that the committed image
    /// that is in there, if there is one, does not belong with them any more ([`Image::check_companion`]).
    ///
    /// [`Image::check_companion`]: crate::Image::check_companion
    ///
    /// # Errors
    /// [`ImageError::NoSpace`], [`ImageError::Io`].
    pub fn disown(&self) -> Result<(), ImageError> {
        match &self.kept {
            Some(kept) if !kept.others_overwritten => {
                let record = CommitRecord { others_overwritten: true, ..kept.clone() };
                let (bytes, _) = envelope::seal(envelope::COMMIT, &encode::commit(&record)?)?;
                self.dir.remove(COMMIT_TEMPORARY)?;
                self.write_temporary(COMMIT_TEMPORARY, &bytes)?;
                self.dir.rename(COMMIT_TEMPORARY, COMMIT)?;
                self.dir.sync()
            }
            _ => Ok(()),
        }
    }

    /// Whether a committed image is in the directory until this one is.
    #[must_use]
    pub fn replaces(&self) -> bool {
        self.kept.is_some()
    }

    /// The checkpoint's name.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.options.id
    }

    /// The key of the pieces' hashes.
    #[must_use]
    pub fn key(&self) -> ContentKey {
        self.options.key
    }

    /// How its pieces are to be compressed.
    #[must_use]
    pub fn compression(&self) -> CompressionChoice {
        self.options.compression
    }

    /// The image that this one builds on.
    #[must_use]
    pub fn base(&self) -> Option<&Base> {
        self.base.as_deref()
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &ImageDir {
        &self.dir
    }

    /// Makes the first data file of client number `index`, empty, open for writing only, readable by its owner, and says
    /// which number it has: the client's, unless the image that this one takes the place of has a file of that. It may be
    /// handed to a process that is not trusted.
    ///
    /// # Errors
    /// [`ImageError::Invalid`] if it was made before; [`ImageError::NoSpace`],
    /// [`ImageError::Io`].
    pub fn data_file(&self, index: u32) -> Result<(u32, File), ImageError> {
        if !self.files().firsts.insert(index) {
            return Err(ImageError::Invalid { what: format!("data file {index} made twice") });
        }
        if self.keeps(&data_name(index)) {
            return self.another_data_file();
        }
        Ok((index, self.make_data_file(index)?))
    }

    fn make_data_file(&self, index: u32) -> Result<File, ImageError> {
        let mut files = self.files();
        if files.data.contains_key(&index) {
            return Err(ImageError::Invalid { what: format!("data file {index} made twice") });
        }
        let name = data_name(index);
        let file = self.dir.create_file(&name)?;
        match file.try_clone() {
            Ok(kept) => {
                files.data.insert(index, kept);
                Ok(file)
            }
            Err(error) => {
                self.dir.remove(&name)?;
                Err(ImageError::io("duplicate", name, error))
            }
        }
    }

    /// Makes a data file with a number that no client has (from [`FIRST_FREE_DATA_FILE`] on), as
    /// [`data_file`](Self::data_file) does, and says which. If it is still empty at the commit it is not in the image.
    ///
    /// # Errors
    /// The errors of [`data_file`](Self::data_file).
    pub fn another_data_file(&self) -> Result<(u32, File), ImageError> {
        let index = loop {
            let mut files = self.files();
            let index = FIRST_FREE_DATA_FILE.checked_add(files.more);
            let index = index.ok_or_else(|| ImageError::Invalid { what: format!("more than {MAX_FILES} files") })?;
            files.more += 1;
            if !self.keeps(&data_name(index)) {
                break index;
            }
        };
        Ok((index, self.make_data_file(index)?))
    }

    /// Whether the image that is in the directory has a file of this name.
    fn keeps(&self, name: &str) -> bool {
        self.kept.as_ref().is_some_and(|kept| kept.files.iter().any(|it| it.name == name))
    }

    /// A data file that was made before, opened so that it is written past the page cache, where that is worth it.
    #[must_use]
    pub fn direct_file(&self, index: u32) -> Option<File> {
        let is_there = self.files().data.contains_key(&index);
        is_there.then(|| self.dir.open_direct(&data_name(index)))?
    }

    /// Adds a code image, unless the image has it already, and returns its hash.
    ///
    /// # Errors
    /// [`ImageError::TooLarge`], [`ImageError::NoSpace`], [`ImageError::Io`]. The image cannot be
    /// committed then.
    pub fn put_code(&self, code: &[u8]) -> Result<CodeHash, ImageError> {
        let hash = CodeHash::of(code);
        if let Some(mut file) = self.new_code(hash, code.len() as u64, false)? {
            file.write_all(code).map_err(|error| ImageError::write(&code_name(hash), code.len() as u64, error))?;
        }
        Ok(hash)
    }

    /// Makes the file of a code image for another process to fill; `None` if the image has it
    /// already. Length and hash are checked at the commit.
    ///
    /// # Errors
    /// [`ImageError::TooLarge`], [`ImageError::NoSpace`], [`ImageError::Io`].
    pub fn code_file(&self, hash: CodeHash, length: u64) -> Result<Option<File>, ImageError> {
        self.new_code(hash, length, true)
    }

    /// A code image that the image has by now, in its own files or in an image that it builds on, to be read.
    ///
    /// # Errors
    /// [`ImageError::Missing`] if it has none with that hash; [`ImageError::Io`].
    pub fn open_code(&self, hash: CodeHash) -> Result<File, ImageError> {
        let name = code_name(hash);
        match (self.dir.open_file(&name)?, &self.base) {
            (Some((file, _)), _) => Ok(file),
            (None, Some(base)) => base.image().code_file(hash),
            (None, None) => Ok(self.dir.require_file(&name)?.0),
        }
    }

    /// Makes data and code durable, so that a commit that follows has little left to do. Needed
    /// only where the two are to be timed apart.
    ///
    /// # Errors
    /// [`ImageError::NoSpace`] where the file system notices only now; [`ImageError::Io`].
    pub fn sync(&self) -> Result<(), ImageError> {
        let files = self.files();
        // The disk need not wait for one to be whole before it gets the next: a third less time for 16 files of a dirty
        // page cache.
        files.data.values().for_each(sys::begin_write_back);
        for (index, file) in &files.data {
            sync(file, &data_name(*index))?;
        }
        for (hash, _) in files.code.iter().filter(|(_, code)| code.depth == 0) {
            let name = code_name(*hash);
            sync(&self.dir.require_file(&name)?.0, &name)?;
        }
        Ok(())
    }

    /// Makes the image whole and durable. All writing to its files must have ended.
    ///
    /// `manifest` gets this image's id, key, code list and parent. It is checked against the files, as
    /// it will be when the image is opened; a piece that is said to be in an ancestor must be one that the same process
    /// had there, with the same hash.
    ///
    /// # Errors
    /// [`ImageError::Invalid`] if the manifest does not fit the files, [`ImageError::Corrupt`] if
    /// another process filled a code file with something else, [`ImageError::Parent`] if an image that this one builds
    /// on is not as it was when that was opened, [`ImageError::TooLarge`],
    /// [`ImageError::NoSpace`], [`ImageError::Io`]. In each case the image is gone, and one that was there before is as it
    /// was; but when the disk fails behind step 3, the new one is in its place and may not be durable.
    pub fn commit(self, manifest: Manifest) -> Result<Committed, ImageError> {
        self.commit_if(manifest, || true)
    }

    /// As [`commit`](Self::commit), if `wanted` says so when all but the last step is done.
    ///
    /// # Errors
    /// The errors of [`commit`](Self::commit), and [`ImageError::GivenUp`].
    pub fn commit_if(mut self, mut manifest: Manifest, wanted: impl FnOnce() -> bool) -> Result<Committed, ImageError> {
        self.remove_unused()?;
        self.sync()?;
        let files = self.check_files()?;
        manifest.format_version = FORMAT_VERSION;
        manifest.id = self.options.id;
        manifest.hash_key = self.options.key.into();
        manifest.code = self.code_list();
        manifest.parent = self.parent_of(&manifest)?;
        let base = self.base().filter(|_| manifest.parent.is_some());
        let behind = base.map(Base::files).unwrap_or_default();
        let layers: Vec<_> = std::iter::once(&files).chain(behind).collect();
        let message = check_manifest(&manifest, &layers)?;

        let (bytes, manifest_hash) = envelope::seal(envelope::MANIFEST, &message)?;
        let (companion, others_overwritten) = match (self.others.take(), self.options.companion) {
            (Some(others), _) => others,
            (None, Some(name)) => (Companion::read(&self.dir, name)?, false),
            (None, None) => (None, false),
        };
        let record = CommitRecord {
            id: manifest.id,
            manifest_hash,
            manifest_length: bytes.len() as u64,
            files: entries(&files),
            companion,
            others_overwritten,
        };
        let message = encode::commit(&record)?;
        let (record_bytes, _) = envelope::seal(envelope::COMMIT, &message)?;

        self.write_temporary(MANIFEST_TEMPORARY, &bytes)?;
        // As a reader will look for it: locks keep out our own writers only.
        chain::open(&self.dir, &manifest)?;
        self.write_temporary(COMMIT_TEMPORARY, &record_bytes)?;
        if self.kept.is_none() {
            self.dir.rename(MANIFEST_TEMPORARY, MANIFEST)?;
        }
        self.dir.sync()?;
        if !wanted() {
            return Err(ImageError::GivenUp { dir: self.dir.path().to_owned() });
        }
        // From here on the image is whole.
        self.dir.rename(COMMIT_TEMPORARY, COMMIT)?;
        // No earlier image remains to go back to.
        self.finished = self.kept.is_some();
        self.dir.sync()?;
        self.finished = true;
        if let Some(kept) = &self.kept {
            self.dir.rename(MANIFEST_TEMPORARY, MANIFEST)?;
            self.dir.sync()?;
            let names = record.names();
            for name in kept.names().difference(&names).chain([&LAST_RESTORE]) {
                // A file that stays does no harm, and the next writer removes it.
                let _ = self.dir.remove(name);
            }
        }

        let content: u64 = record.files.iter().map(|it| it.size).sum();
        Ok(Committed {
            id: manifest.id,
            manifest_hash,
            bytes: content + (bytes.len() + record_bytes.len()) as u64,
            files: record.files.len() + 2,
        })
    }

    /// Removes the files that were made, and only those.
    ///
    /// # Errors
    /// The first file that could not be removed; the others are removed all the same.
    pub fn abort(mut self) -> Result<(), ImageError> {
        self.finished = true;
        self.remove_files()
    }

    /// Removes files that were made for threads which then had nothing to write.
    fn remove_unused(&self) -> Result<(), ImageError> {
        let mut files = self.files();
        let mut unused = Vec::new();
        for (&index, file) in files.data.range(FIRST_FREE_DATA_FILE..) {
            let status =
                file.metadata().map_err(|error| ImageError::io("read the size of", data_name(index), error))?;
            if status.len() == 0 {
                unused.push(index);
            }
        }
        for index in unused {
            self.dir.remove(&data_name(index))?;
            files.data.remove(&index);
        }
        Ok(())
    }

    fn files(&self) -> MutexGuard<'_, Files> {
        // A panic elsewhere leaves nothing half-done in here.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn new_code(&self, hash: CodeHash, size: u64, foreign: bool) -> Result<Option<File>, ImageError> {
        let name = code_name(hash);
        if size > MAX_CODE {
            return Err(ImageError::TooLarge { file: name, what: "the code image", size, limit: MAX_CODE });
        }
        let mut files = self.files();
        if files.code.contains_key(&hash) {
            return Ok(None);
        }
        if let Some(depth) = self.base.as_ref().and_then(|base| base.code(hash, size)) {
            files.code.insert(hash, Code { size, foreign: false, shared: false, depth });
            return Ok(None);
        }
        if self.keeps(&name) {
            if read_code_file(&self.dir, hash, size).is_ok() {
                files.code.insert(hash, Code { size, foreign: false, shared: true, depth: 0 });
                return Ok(None);
            }
            // The image that it belongs to is damaged, and cannot be restored.
            self.dir.remove(&name)?;
        }
        let file = self.dir.create_file(&name)?;
        files.code.insert(hash, Code { size, foreign, shared: false, depth: 0 });
        Ok(Some(file))
    }

    fn code_list(&self) -> Vec<CodeImage> {
        let files = self.files();
        let image = |(&hash, code): (&CodeHash, &Code)| CodeImage { hash, size: code.size, parent_depth: code.depth };
        files.code.iter().map(image).collect()
    }

    /// The parent, if anything of the image is in one. Workers have said which pieces are, and are not trusted.
    fn parent_of(&self, manifest: &Manifest) -> Result<Option<Parent>, ImageError> {
        let mut used = manifest.code.iter().any(|it| it.parent_depth > 0);
        let mut tables = self.base().map(Tables::new);
        for client in &manifest.clients {
            for piece in client.regions().flat_map(|region| region.pieces) {
                let Storage::Parent { .. } = piece.storage else { continue };
                used = true;
                let known = tables.as_mut().and_then(|it| it.of(client.namespace_pid).get(piece.hash, piece.length));
                if known != Some(piece.storage) {
                    let what =
                        format!("client {} refers to content of another image that it did not have", client.index);
                    return Err(ImageError::Invalid { what });
                }
            }
        }
        Ok(self.base().filter(|_| used).map(Base::reference))
    }

    /// The sizes that the files have now, code compared with what was announced.
    fn check_files(&self) -> Result<FileSizes, ImageError> {
        let files = self.files();
        if files.data.len() + files.code.len() > MAX_FILES {
            return Err(ImageError::Invalid { what: format!("more than {MAX_FILES} files") });
        }
        let mut sizes = FileSizes::default();
        for (&index, file) in &files.data {
            let status =
                file.metadata().map_err(|error| ImageError::io("read the size of", data_name(index), error))?;
            sizes.data.insert(index, status.len());
        }
        for (&hash, code) in files.code.iter().filter(|(_, code)| code.depth == 0) {
            if code.foreign {
                read_code_file(&self.dir, hash, code.size)?;
            } else {
                // A failed write may have left a part.
                let name = code_name(hash);
                if self.dir.require_file(&name)?.1 != code.size {
                    return Err(ImageError::Invalid { what: format!("{name} was not written in full") });
                }
            }
            sizes.code.insert(hash, code.size);
        }
        Ok(sizes)
    }

    /// A file under the name that it has until it is whole and durable.
    fn write_temporary(&self, name: &str, bytes: &[u8]) -> Result<(), ImageError> {
        let mut file = self.dir.create_file(name)?;
        file.write_all(bytes).map_err(|error| ImageError::write(name, bytes.len() as u64, error))?;
        sync(&file, name)
    }

    fn remove_files(&self) -> Result<(), ImageError> {
        let files = self.files();
        let data = files.data.keys().map(|index| data_name(*index));
        let own = files.code.iter().filter(|(_, code)| code.depth == 0 && !code.shared);
        let code = own.map(|(hash, _)| code_name(*hash));
        // The commit record first: without it the rest is not an image, however far this gets.
        let named: &[_] = if self.kept.is_some() { &[] } else { &[COMMIT, MANIFEST] };
        named
            .iter()
            .chain(&[COMMIT_TEMPORARY, MANIFEST_TEMPORARY])
            .map(|name| (*name).to_owned())
            .chain(data)
            .chain(code)
            .map(|name| self.dir.remove(&name))
            .fold(Ok(()), Result::and)
            .and(self.dir.sync())
    }
}

impl Drop for ImageWriter {
    fn drop(&mut self) {
        if !self.finished {
            // A destructor has no way to report an error. Files that stay have no commit record, or their sizes give them away.
            let _ = self.remove_files();
        }
    }
}

fn sync(file: &File, name: &str) -> Result<(), ImageError> {
    file.sync_all().map_err(|error| ImageError::write(name, 0, error))
}

/// The encoded manifest, after it was read back: what cannot be read must not be committed.
fn check_manifest(manifest: &Manifest, files: &[&FileSizes]) -> Result<Vec<u8>, ImageError> {
    validate::check(manifest, files).map_err(|what| ImageError::Invalid { what })?;
    let message = encode::manifest(manifest)?;
    if Decoder::new(MANIFEST).manifest(&message, FORMAT_VERSION)? != *manifest {
        return Err(ImageError::Invalid { what: "a manifest that reads back as another".to_owned() });
    }
    Ok(message)
}

fn entries(files: &FileSizes) -> Vec<FileEntry> {
    let entry = |name, &size| FileEntry { name, size };
    let data = files.data.iter();
    let code = files.code.iter();
    data.map(|(index, size)| entry(data_name(*index), size))
        .chain(code.map(|(hash, size)| entry(code_name(*hash), size)))
        .collect()
}
