//! Green contexts: parts of a primary context that have some of the device's multiprocessors, and streams of their own.
//!
//! ```text
//!   resource (a set of multiprocessors) ── split ──> parts, rest ── descriptor ──> green context
//! ```
//!
//! Multiprocessors have no part in how this device executes kernels, so the set only says what it says. The default stream of
//! a green context and its blocking streams wait for each other, and for no others ([`crate::order`]).
//!
//! A resource is a value that the program keeps. In its bytes is a number of this process, and a resource of another process
//! is refused, as a driver may do whose resources hold addresses.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use rekindle_cuda_abi::types::*;

use crate::attributes;
use crate::config::config;
use crate::context::Context;
use crate::device::Device;
use crate::handles::{self, Object};
use crate::status::{Result, ensure};

/// Words of a set of multiprocessors.
const WORDS: usize = 8;

/// A set of a device's multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Processors {
    pub(crate) device: u32,
    /// The split that it is a part of, 0 for none.
    instance: u64,
    set: [u64; WORDS],
}

/// The number in the resources of this process.
fn process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(1, |it| it.as_nanos() as u64) << 22 | u64::from(std::process::id())
    })
}

impl Processors {
    /// All of a device's. Only so many have numbers here.
    pub(crate) fn all(device: &Device) -> Result<Self> {
        let count = config().multiprocessors as usize;
        ensure(count <= WORDS * 64, CUDA_ERROR_NOT_SUPPORTED)?;
        Ok(Self { device: device.ordinal as u32, instance: 0, set: Self::range(0, count) })
    }

    fn range(first: usize, count: usize) -> [u64; WORDS] {
        let mut set = [0; WORDS];
        (first..first + count).for_each(|at| set[at / 64] |= 1 << (at % 64));
        set
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u32 {
        self.set.iter().map(|word| word.count_ones()).sum()
    }

    /// Takes so many out.
    fn take(&mut self, mut count: u32) -> [u64; WORDS] {
        let mut taken = [0; WORDS];
        for (word, to) in self.set.iter_mut().zip(&mut taken) {
            while *word != 0 && count > 0 {
                let lowest = *word & word.wrapping_neg();
                *word ^= lowest;
                *to |= lowest;
                count -= 1;
            }
        }
        taken
    }

    /// The smallest part, and what the size of each is a multiple of.
    fn granularity(flags: u32) -> u32 {
        const MAJOR: u32 = 75;
        let newest = attributes::value(MAJOR, 0).unwrap_or(0) >= 9;
        if newest && flags & CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING == 0 { 8 } else { 2 }
    }

    /// The structure that programs have.
    pub(crate) fn to_program(self) -> CUdevResource {
        if self.count() == 0 {
            return CUdevResource::default();
        }
        let granularity = Self::granularity(0);
        let processors = CUdevSmResource { count: self.count(), smallest_part: granularity, alignment: granularity };
        let mut resource = CUdevResource { kind: CU_DEV_RESOURCE_TYPE_SM, processors, ..Default::default() };
        let words = [process(), u64::from(self.device), self.instance].into_iter().chain(self.set);
        for (room, word) in resource.internal.chunks_exact_mut(8).zip(words) {
            room.copy_from_slice(&word.to_le_bytes());
        }
        resource
    }

    /// The set that a program's structure stands for.
    pub(crate) fn of_program(resource: &CUdevResource) -> Result<Self> {
        ensure(resource.kind == CU_DEV_RESOURCE_TYPE_SM, CUDA_ERROR_INVALID_RESOURCE_TYPE)?;
        let words = resource.internal.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let words: Vec<u64> = words.collect();
        let [of, device, instance, set @ ..] = words.as_slice() else { return Err(CUDA_ERROR_INVALID_VALUE) };
        ensure(*of == process(), CUDA_ERROR_INVALID_VALUE)?;
        let set = set.try_into().map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        Ok(Self { device: *device as u32, instance: *instance, set })
    }

    /// Parts of equal size, at most so many, and the rest.
    pub(crate) fn split(mut self, most: Option<u32>, flags: u32, least: u32) -> Result<(Vec<Self>, Self)> {
        ensure(least <= self.count(), CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)?;
        // A part is split again only when a green context has been made of it.
        ensure(self.instance == 0, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)?;
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let instance = NEXT.fetch_add(1, Ordering::Relaxed);
        let granularity = Self::granularity(flags);
        let size = least.max(1).next_multiple_of(granularity);
        let count = (self.count() / size).min(most.unwrap_or(u32::MAX));
        let parts = (0..count).map(|_| Self { instance, set: self.take(size), ..self }).collect();
        self.instance = instance;
        Ok((parts, self))
    }

    /// What parts of one split are together.
    pub(crate) fn together(parts: &[Self]) -> Result<Self> {
        let (first, others) = parts.split_first().ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut whole = *first;
        for part in others {
            let fits = part.device == whole.device && part.instance == whole.instance && whole.instance != 0;
            let overlaps = part.set.iter().zip(&whole.set).any(|(one, other)| one & other != 0);
            ensure(fits && !overlaps, CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION)?;
            whole.set.iter_mut().zip(&part.set).for_each(|(word, more)| *word |= more);
        }
        // It can be split again.
        whole.instance = 0;
        Ok(whole)
    }
}

/// A descriptor, which nothing ends.
impl Object for Processors {}

/// A green context.
#[derive(Debug)]
pub(crate) struct Green {
    /// The result of `cuGreenCtxGetId`; its streams' group, too.
    pub(crate) id: u64,
    /// Its handle.
    pub(crate) handle: CUgreenCtx,
    /// The handle of the context that it is converted into.
    pub(crate) converted: CUcontext,
    pub(crate) processors: Processors,
    primary: CUcontext,
    context: Weak<Context>,
    gone: AtomicBool,
}

/// What the handle of the context that a green context is converted into stands for.
#[derive(Debug)]
pub(crate) struct Converted(pub(crate) Arc<Green>);

impl Green {
    /// Makes a green context in a primary one.
    pub(crate) fn create(context: &Arc<Context>, processors: Processors) -> Arc<Self> {
        let (handle, converted) = (handles::next(), handles::next());
        let (primary, weak) = (context.handle, Arc::downgrade(context));
        let (id, gone) = (Context::next_id(), AtomicBool::new(false));
        let green = Arc::new(Self { id, handle, converted, processors, primary, context: weak, gone });
        handles::insert(handle, green.clone());
        handles::insert(converted, Arc::new(Converted(green.clone())));
        green
    }

    /// Ends its handles. Its streams' commands are still executed.
    pub(crate) fn end(&self) {
        self.gone.store(true, Ordering::SeqCst);
        handles::remove(self.converted);
        handles::remove(self.handle);
    }

    /// The primary context that it is a part of.
    pub(crate) fn context(&self) -> Result<Arc<Context>> {
        ensure(!self.gone.load(Ordering::SeqCst), CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
        self.context.upgrade().ok_or(CUDA_ERROR_CONTEXT_IS_DESTROYED)
    }
}

impl Object for Green {
    fn belongs_to(&self, context: u64) -> bool {
        self.primary == context
    }
}

impl Object for Converted {
    fn belongs_to(&self, context: u64) -> bool {
        self.0.primary == context
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole() -> Processors {
        Processors { device: 0, instance: 0, set: Processors::range(0, 132) }
    }

    #[test]
    fn a_split_makes_disjoint_parts_of_equal_size_and_leaves_the_rest() {
        let (parts, rest) = whole().split(None, 0, 30).unwrap();
        assert_eq!(parts.iter().map(Processors::count).collect::<Vec<_>>(), [32; 4]);
        assert_eq!(rest.count(), 4);
        let together = Processors::together(&[parts.as_slice(), &[rest]].concat()).unwrap();
        assert_eq!(together, whole());
        let (few, rest) = whole().split(Some(2), 0, 8).unwrap();
        assert_eq!((few.len(), rest.count()), (2, 116));
    }

    #[test]
    fn parts_of_two_splits_are_no_descriptor_and_a_part_is_not_split() {
        let (one, _) = whole().split(None, 0, 8).unwrap();
        let (other, _) = whole().split(None, 0, 8).unwrap();
        let refused = Err(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION);
        assert_eq!(Processors::together(&[one[0], other[1]]), refused);
        assert_eq!(Processors::together(&[one[0], one[0]]), refused);
        assert_eq!(one[0].split(None, 0, 8).map(drop), refused.map(drop));
    }

    #[test]
    fn a_resource_of_another_process_is_refused() {
        let mut resource = whole().to_program();
        assert_eq!(Processors::of_program(&resource), Ok(whole()));
        resource.internal[0] ^= 1;
        assert_eq!(Processors::of_program(&resource), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(Processors::of_program(&CUdevResource::default()), Err(CUDA_ERROR_INVALID_RESOURCE_TYPE));
    }
}
