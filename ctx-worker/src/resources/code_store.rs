//! Images of code: how they arrive in parts, how they are kept for the checkpoint, and what their content declares.
//!
//! An image is kept as it came through the ring: the number of its parts, their lengths, and their bytes one after the
//! other. Most images have one part; a program linked on the device side has several.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::sync::Arc;

use memchr::memmem;
use rekindle_cuda_abi::code::{self, CodeError};
use rekindle_images::{BlobKind, CodeHash};
use thiserror::Error;

use crate::resources::broken_image::BrokenImage;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::session::state::StateError;

/// The most bytes of all images that have not arrived completely.
const MAX_ARRIVING: usize = 2 << 30;

/// An image of code.
pub(crate) struct Image {
    pub(crate) hash: CodeHash,
    /// The bytes as they are saved, and [`AFTER`].
    stored: Vec<u8>,
    /// The parts as the driver gets them, where it cannot use what is stored: each is aligned, and followed by a zero. Managed
    /// variables are ordinary ones in them.
    copies: Option<Vec<Vec<u64>>>,
    /// Kernels whose code reaches the device's `malloc`.
    pub(crate) allocating: HashSet<String>,
    /// The offset and size of each parameter, for the kernels that declare them.
    pub(crate) params: HashMap<String, Vec<(u64, u64)>>,
    /// Whether the code may print, or fail an assertion.
    pub(crate) prints: bool,
    /// Whether the code may keep addresses of functions in memory.
    pub(crate) takes_function_addresses: bool,
    /// Whether the driver may have to compile the code before it can load it.
    pub(crate) must_be_compiled: bool,
    /// The code's variables, or why they cannot be known.
    pub(crate) globals: Result<Vec<Global>, UnknownGlobals>,
}

/// A variable in an image's code.
#[derive(Clone, Debug)]
pub(crate) struct Global {
    pub(crate) name: CString,
    /// Whether the code declares it as managed.
    pub(crate) managed: bool,
    /// Whether losing the variable unnoticed would do no harm: the compiler made it, and nothing ever writes it.
    pub(crate) constant: bool,
    /// Some of the symbols whose addresses the initial value holds.
    pub(crate) points_to: Vec<String>,
}

impl Image {
    /// The bytes that an image needs beside its own. Where [`Image::new`] gets a vector with room for them, it copies nothing.
    pub(crate) const EXTRA: usize = AFTER.len();

    /// Reads an image with this hash as it arrived or was saved, for devices of this compute capability.
    pub(crate) fn new(hash: CodeHash, bytes: Vec<u8>, capability: (u32, u32)) -> Result<Self, BrokenImage> {
        let (length, mut stored) = (bytes.len(), bytes);
        stored.extend(AFTER);
        let slices = split(&stored[..length])?;
        let usable = slices.len() == 1 && slices[0].as_ptr().cast::<u64>().is_aligned();
        let Description { allocating, params, prints, takes_function_addresses, must_be_compiled, mut globals } =
            describe(&slices, capability);
        // Libraries have hundreds of megabytes of code: it is copied only if it must be.
        let mut copies = (!usable).then(|| slices.iter().map(|s| aligned(s)).collect());
        if globals.as_ref().is_ok_and(|globals| globals.iter().any(|it| it.managed)) {
            match without_managed(&slices) {
                Ok(without) => copies = Some(without),
                Err(why) => globals = Err(UnknownGlobals::Managed(why)),
            }
        }
        Ok(Self {
            hash,
            stored,
            copies,
            allocating,
            params,
            prints,
            takes_function_addresses,
            must_be_compiled,
            globals,
        })
    }

    /// The managed variables.
    pub(crate) fn managed(&self) -> impl Iterator<Item = &Global> {
        self.globals.iter().flatten().filter(|it| it.managed)
    }

    /// The bytes as they are saved.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.stored[..self.stored.len() - AFTER.len()]
    }

    /// The bytes of an image of one part.
    pub(crate) fn single(&self) -> Option<&[u8]> {
        match split(self.bytes()) {
            Ok(parts) if parts.len() == 1 => parts.first().copied(),
            _ => None,
        }
    }

    /// Calls `load` with a pointer as the driver's loading functions take it.
    pub(crate) fn with_pointer<T>(&self, load: impl FnOnce(*const std::ffi::c_void) -> T) -> T {
        let parts = match (&self.copies, self.single()) {
            (Some(parts), _) => parts,
            (None, single) => return load(single.unwrap_or(&AFTER).as_ptr().cast()),
        };
        if let [single] = &parts[..] {
            return load(single.as_ptr().cast());
        }
        // nvcc's wrapper of version 2: the linked image, and the images that it was linked from.
        #[repr(C)]
        struct Wrapper {
            magic: u32,
            version: u32,
            data: *const u64,
            rest: *const *const u64,
        }
        let mut rest: Vec<*const u64> = parts[1..].iter().map(|p| p.as_ptr()).collect();
        rest.push(std::ptr::null());
        let wrapper = Wrapper { magic: 0x4662_43b1, version: 2, data: parts[0].as_ptr(), rest: rest.as_ptr() };
        load((&raw const wrapper).cast())
    }
}

fn split(bytes: &[u8]) -> Result<Vec<&[u8]>, BrokenImage> {
    let word = |i: usize| {
        let word = bytes.get(i * 8..i * 8 + 8).ok_or(BrokenImage("too short"))?;
        Ok(u64::from_le_bytes(word.try_into().map_err(|_| BrokenImage("too short"))?))
    };
    let count = word(0)? as usize;
    if count == 0 || count > bytes.len() / 8 {
        return Err(BrokenImage("an impossible number of parts"));
    }
    let mut rest = bytes.get((count + 1) * 8..).ok_or(BrokenImage("too short"))?;
    let mut parts = Vec::new();
    for i in 0..count {
        let length = usize::try_from(word(i + 1)?).map_err(|_| BrokenImage("an impossible length"))?;
        let (part, after) = rest.split_at_checked(length).ok_or(BrokenImage("a part longer than the image"))?;
        parts.push(part);
        rest = after;
    }
    if rest.is_empty() { Ok(parts) } else { Err(BrokenImage("longer than its parts")) }
}

/// Follows the bytes of a part, so that PTX ends in a NUL even where the client forgot it.
const AFTER: [u8; 8] = [0; 8];

/// Parts in which managed variables are ordinary ones.
fn without_managed(parts: &[&[u8]]) -> Result<Vec<Vec<u64>>, CodeError> {
    let mut any = false;
    let each = parts.iter().map(|part| match code::unmanaged(part)? {
        Some(without) => {
            any = true;
            Ok(aligned(&without))
        }
        None => Ok(aligned(part)),
    });
    let each = each.collect::<Result<_, CodeError>>()?;
    if any { Ok(each) } else { Err(CodeError::Malformed("no declaration of one")) }
}

fn aligned(bytes: &[u8]) -> Vec<u64> {
    let mut words = vec![0_u64; bytes.len() / 8 + 1];
    let (whole, rest) = bytes.as_chunks::<8>();
    for (word, chunk) in words.iter_mut().zip(whole) {
        *word = u64::from_ne_bytes(*chunk);
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    words[whole.len()] = u64::from_ne_bytes(last);
    words
}

/// Names that the compiler makes for constants: format strings, virtual tables, unnamed constants.
fn made_by_compiler(name: &str) -> bool {
    name.starts_with("$str") || name.starts_with("_ZTV") || name.starts_with("__unnamed") || name.starts_with("$__")
}

/// Why the variables of an image are not known.
#[derive(Debug, Error)]
pub(crate) enum UnknownGlobals {
    #[error("none of its entries fits the device")]
    NoEntry,
    #[error("its managed variables cannot be told from what else is in it: {0}")]
    Managed(CodeError),
    #[error("`{0}` is a variable inside a function")]
    InFunction(String),
    #[error(transparent)]
    Code(#[from] CodeError),
}

/// The declarations in an image's code.
struct Description {
    allocating: HashSet<String>,
    params: HashMap<String, Vec<(u64, u64)>>,
    prints: bool,
    takes_function_addresses: bool,
    must_be_compiled: bool,
    globals: Result<Vec<Global>, UnknownGlobals>,
}

/// The driver's functions that write to this process's stdout and stderr.
const PRINTING: [&[u8]; 2] = [b"vprintf", b"__assertfail"];

fn describe(parts: &[&[u8]], capability: (u32, u32)) -> Description {
    let (allocating, params) = (HashSet::new(), HashMap::new());
    let mut found = Description {
        allocating,
        params,
        prints: false,
        takes_function_addresses: false,
        must_be_compiled: false,
        globals: Ok(Vec::new()),
    };
    let mut globals = Vec::new();
    let mut fits = false;
    for part in parts {
        let Ok(image) = code::parse(part) else { continue };
        let Some(entry) = image.select(capability) else { continue };
        fits = true;
        if let Err(why) = describe_entry(entry, &mut found, &mut globals) {
            found.globals = Err(why);
            found.prints = true;
            found.takes_function_addresses = true;
            found.must_be_compiled = true;
            return found;
        }
    }
    // Code that cannot be read may do anything.
    found.prints |= !fits;
    found.takes_function_addresses |= !fits;
    found.must_be_compiled |= !fits;
    found.globals = if fits { Ok(globals) } else { Err(UnknownGlobals::NoEntry) };
    found
}

fn describe_entry(
    entry: &code::Entry<'_>,
    found: &mut Description,
    globals: &mut Vec<Global>,
) -> Result<(), UnknownGlobals> {
    let program = entry.unpack()?;
    let bytes = program.bytes();
    // Libraries have hundreds of megabytes of code.
    found.prints |= PRINTING.iter().any(|name| memmem::find(bytes, name).is_some());
    found.takes_function_addresses |= program.takes_function_addresses()?;
    found.must_be_compiled |= program.is_ptx();
    for kernel in program.kernels()? {
        if kernel.allocates {
            found.allocating.insert(kernel.name.clone());
        }
        if let Some(params) = kernel.params {
            let params = params.iter().map(|p| (u64::from(p.offset), u64::from(p.size))).collect();
            found.params.insert(kernel.name, params);
        }
    }
    let all = program.globals()?;
    let has_managed = all.iter().any(|it| it.managed);
    for global in all {
        if global.in_function && !made_by_compiler(&global.name) {
            if has_managed {
                return Err(UnknownGlobals::Managed(CodeError::Malformed("a variable inside a function, beside them")));
            }
            return Err(UnknownGlobals::InFunction(global.name.clone()));
        }
        let Ok(name) = CString::new(global.name.as_str()) else { continue };
        let (managed, constant) = (global.managed, made_by_compiler(&global.name));
        globals.push(Global { constant, managed, name, points_to: global.points_to });
    }
    Ok(())
}

/// The images of a client.
#[derive(Default)]
pub(crate) struct CodeStore {
    arriving: HashMap<u64, Vec<u8>>,
    images: HashMap<CodeHash, Arc<Image>>,
}

impl CodeStore {
    /// Adds a part of an image; parts come in order.
    pub(crate) fn part(&mut self, number: u64, offset: u64, total: u64, bytes: &[u8]) -> Result<(), BrokenImage> {
        let arriving: usize = self.arriving.values().map(Vec::len).sum();
        if arriving + bytes.len() > MAX_ARRIVING || total > MAX_ARRIVING as u64 {
            return Err(BrokenImage("larger than any may be"));
        }
        let image = self.arriving.entry(number).or_default();
        if image.len() as u64 != offset || offset + bytes.len() as u64 > total {
            return Err(BrokenImage("parts out of order"));
        }
        image.extend_from_slice(bytes);
        Ok(())
    }

    /// Completes the image with this number. Equal images are kept once.
    pub(crate) fn complete(&mut self, number: u64, capability: (u32, u32)) -> Result<Arc<Image>, BrokenImage> {
        let bytes = self.arriving.remove(&number).ok_or(BrokenImage("no part of it has come"))?;
        let hash = CodeHash::of(&bytes);
        if let Some(known) = self.images.get(&hash) {
            return Ok(known.clone());
        }
        Ok(self.keep(Image::new(hash, bytes, capability)?))
    }

    /// Takes the bytes that came as an image with this number, and are not code.
    pub(crate) fn take(&mut self, number: u64) -> Result<Vec<u8>, BrokenImage> {
        let taken = self.peek(number).map(<[u8]>::to_vec);
        self.arriving.remove(&number);
        taken
    }

    /// The bytes that `take` would take.
    pub(crate) fn peek(&self, number: u64) -> Result<&[u8], BrokenImage> {
        let bytes = self.arriving.get(&number).ok_or(BrokenImage("no part of it has come"))?;
        match split(bytes)?.as_slice() {
            [part] => Ok(part),
            _ => Err(BrokenImage("an impossible number of parts")),
        }
    }

    /// Keeps an image.
    pub(crate) fn keep(&mut self, image: Image) -> Arc<Image> {
        let image = Arc::new(image);
        self.images.insert(image.hash, image.clone());
        image
    }

    /// Drops the images that nothing needs any more.
    pub(crate) fn keep_only(&mut self, needed: &HashSet<CodeHash>) {
        self.images.retain(|hash, _| needed.contains(hash));
    }

    /// The number of bytes of the images that are not among these.
    pub(crate) fn bytes_besides(&self, these: &HashSet<CodeHash>) -> usize {
        self.images.iter().filter(|(hash, _)| !these.contains(hash)).map(|(_, image)| image.bytes().len()).sum()
    }

    pub(crate) fn get(&self, hash: &CodeHash) -> Option<Arc<Image>> {
        self.images.get(hash).cloned()
    }
}

/// Images whose parts have not all arrived, by their numbers: the parts that have arrived are no longer in the ring.
impl Saved for CodeStore {
    const KIND: BlobKind = BlobKind::ArrivingCode;
    type With<'a> = ();

    fn save(&self) -> Result<Vec<Part>, StateError> {
        let part = |(&handle, bytes): (&u64, &Vec<u8>)| Part { handle, bytes: bytes.clone() };
        Ok(self.arriving.iter().map(part).collect())
    }

    fn load(&mut self, part: Part, (): ()) -> Result<(), NotLoaded> {
        self.arriving.insert(part.handle, part.bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_images_are_errors() {
        assert!(split(&[]).is_err());
        assert!(split(&u64::MAX.to_le_bytes()).is_err());
        let mut bytes = 1_u64.to_le_bytes().to_vec();
        bytes.extend(100_u64.to_le_bytes());
        bytes.extend([0; 50]);
        assert_eq!(split(&bytes), Err(BrokenImage("a part longer than the image")));
    }

    /// An image of these parts as it arrives.
    fn image(parts: &[&[u8]]) -> Image {
        let words = std::iter::once(parts.len()).chain(parts.iter().map(|part| part.len()));
        let mut bytes: Vec<u8> = words.flat_map(|word| (word as u64).to_le_bytes()).collect();
        bytes.extend(parts.concat());
        Image::new(CodeHash::of(&bytes), bytes, (9, 0)).unwrap()
    }

    fn given_to_driver(image: &Image) -> String {
        // SAFETY: an image of one part is followed by a NUL.
        let text = |pointer: *const std::ffi::c_void| unsafe { std::ffi::CStr::from_ptr(pointer.cast()) };
        image.with_pointer(|pointer| text(pointer).to_string_lossy().into_owned())
    }

    #[test]
    fn the_driver_gets_managed_variables_as_ordinary_ones_and_an_image_keeps_them() {
        const TEXT: &str =
            ".version 7.0\n.target sm_75\n.global .attribute(.managed) .align 4 .u32 a = 5;\n.global .u32 b;\n";
        let managed = image(&[TEXT.as_bytes()]);
        assert_eq!(given_to_driver(&managed), TEXT.replace(".attribute(.managed)", "                    "));
        assert_eq!(managed.single(), Some(TEXT.as_bytes()));
        let names: Vec<_> = managed.managed().map(|it| it.name.to_str().unwrap()).collect();
        assert_eq!((names, managed.globals.as_ref().unwrap().len()), (vec!["a"], 2));
        let plain = TEXT.replace(".attribute(.managed) ", "");
        let plain_image = image(&[plain.as_bytes()]);
        assert_eq!((given_to_driver(&plain_image), plain_image.managed().count()), (plain, 0));
    }

    #[test]
    fn managed_variables_that_cannot_be_changed_make_the_variables_unknown() {
        let text = ".version 7.0\n.target sm_75\n.global .attribute(.managed, .other) .u32 a;\n";
        assert!(matches!(image(&[text.as_bytes()]).globals, Err(UnknownGlobals::Managed(_))));
    }

    #[test]
    fn parts_come_in_order_or_not_at_all() {
        let mut store = CodeStore::default();
        store.part(1, 0, 10, &[0; 5]).unwrap();
        assert!(store.part(1, 6, 10, &[0; 4]).is_err());
        assert!(store.part(1, 5, 10, &[0; 6]).is_err());
        assert!(store.complete(2, (9, 0)).is_err());
    }
}
