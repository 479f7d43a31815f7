//! Managed memory as a program describes it: what it has advised, and where it has last moved a range.
//!
//! The interposer and the software GPU share this, since neither moves pages by advice: they only have to answer what the program
//! asks about later (`cuMemRangeGetAttribute`).
//!
//! ```text
//!   allocation  [base ........................................ end)
//!   parts       [advice A    )[advice B )[advice A             )    split where a call says something of a part
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::shapes::CUmemLocation;
use crate::types::*;

/// `CU_MEM_ATTACH_GLOBAL`: every stream of every device may use the memory.
pub const ATTACH_GLOBAL: u32 = 1;
/// `CU_MEM_ATTACH_HOST`: no device may use the memory.
pub const ATTACH_HOST: u32 = 2;
/// `CU_MEM_ATTACH_SINGLE`: one stream may use the memory.
pub const ATTACH_SINGLE: u32 = 4;

/// `CU_DEVICE_CPU`.
pub const DEVICE_CPU: CUdevice = -1;
/// `CU_DEVICE_INVALID`.
pub const DEVICE_INVALID: CUdevice = -2;

/// Advice applies to whole pages of the host.
const PAGE: u64 = 4096;

/// The place that calls before CUDA 12.2 name by a device's ordinal, or -1 for the CPU.
#[must_use]
pub fn location(device: CUdevice) -> CUmemLocation {
    match device {
        DEVICE_CPU => CUmemLocation { kind: CU_MEM_LOCATION_TYPE_HOST, id: 0 },
        id => CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id },
    }
}

/// A `CUmemLocation` that C passed by value, in one register.
#[must_use]
pub fn passed(register: u64) -> CUmemLocation {
    CUmemLocation { kind: register as u32, id: (register >> 32) as i32 }
}

/// Checks that a stream may be given this memory (`cuStreamAttachMemAsync`): one that a program has made, or with other flags
/// any; and the whole of an allocation.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` otherwise.
pub fn check_attachment(allocation: &Range<u64>, length: usize, flags: u32, is_default: bool) -> Result<(), CUresult> {
    let whole = length == 0 || length as u64 == allocation.end - allocation.start;
    let known = matches!(flags, ATTACH_GLOBAL | ATTACH_HOST) || (flags == ATTACH_SINGLE && !is_default);
    if whole && known { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

/// The place of each of `count` ranges (`cuMemPrefetchBatchAsync`): `starts` tells from which range on each location holds.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where there is nothing, or where the starts do not begin with 0 and grow.
pub fn places(count: usize, locations: &[CUmemLocation], starts: &[usize]) -> Result<Vec<CUmemLocation>, CUresult> {
    let grow = starts.first() == Some(&0) && starts.is_sorted_by(|a, b| a < b) && starts.last() < Some(&count);
    if !grow || locations.len() != starts.len() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let ends = starts.iter().skip(1).copied().chain([count]);
    let each = locations.iter().zip(starts.iter().zip(ends));
    Ok(each.flat_map(|(location, (start, end))| std::iter::repeat_n(*location, end - start)).collect())
}

/// What a program has said of a part of an allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Advice {
    read_mostly: bool,
    preferred: Option<CUmemLocation>,
    accessed_by: BTreeSet<CUdevice>,
    prefetched: Option<CUmemLocation>,
}

#[derive(Debug)]
struct Allocation {
    end: u64,
    /// Where each part begins. The first is the allocation's beginning, and each ends where the next begins.
    parts: BTreeMap<u64, Advice>,
}

impl Allocation {
    /// Has a part begin at an address in the allocation.
    fn split(&mut self, at: u64) {
        if at < self.end
            && let Some((_, advice)) = self.parts.range(..=at).next_back()
        {
            let advice = advice.clone();
            self.parts.entry(at).or_insert(advice);
        }
    }

    /// The parts that a range meets.
    fn meets(&self, range: &Range<u64>) -> impl Iterator<Item = &Advice> {
        let first = self.parts.range(..=range.start).next_back().map_or(range.start, |(start, _)| *start);
        self.parts.range(first..range.end).map(|(_, advice)| advice)
    }

    fn change(&mut self, range: &Range<u64>, change: impl Fn(&mut Advice)) {
        self.split(range.start);
        self.split(range.end);
        self.parts.range_mut(range.clone()).for_each(|(_, advice)| change(advice));
    }
}

/// All managed memory of a process, by address.
#[derive(Debug, Default)]
pub struct Managed(Mutex<BTreeMap<u64, Allocation>>);

/// The value of an attribute of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number.
    One(i32),
    /// Ordinals of devices; the rest of the caller's array is to say [`DEVICE_INVALID`].
    Devices(Vec<CUdevice>),
}

impl Managed {
    /// No memory.
    #[must_use]
    pub const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Allocation>> {
        // Each change leaves the map valid.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an allocation, of which nothing has been said.
    pub fn add(&self, range: Range<u64>) {
        let parts = [(range.start, Advice::default())].into();
        self.all().insert(range.start, Allocation { end: range.end, parts });
    }

    /// Forgets an allocation.
    pub fn remove(&self, base: u64) {
        self.all().remove(&base);
    }

    /// Forgets the allocations that begin in a range.
    pub fn remove_all(&self, range: Range<u64>) {
        self.all().retain(|base, _| !range.contains(base));
    }

    /// The allocation that contains an address.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<Range<u64>> {
        let all = self.all();
        let (&base, allocation) = all.range(..=address).next_back()?;
        (address < allocation.end).then_some(base..allocation.end)
    }

    fn with<T>(
        &self,
        (address, count): (CUdeviceptr, usize),
        what: impl FnOnce(&mut Allocation, Range<u64>) -> Result<T, CUresult>,
    ) -> Result<T, CUresult> {
        let end = address.checked_add(count as u64).filter(|end| *end > address).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut all = self.all();
        let found = all.range_mut(..=address).next_back().filter(|(_, it)| end <= it.end);
        let (&base, allocation) = found.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let pages = (address & !(PAGE - 1)).max(base)..end.next_multiple_of(PAGE).min(allocation.end);
        what(allocation, pages)
    }

    /// `cuMemAdvise`. `is_device` tells which ordinals there are.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a range that does not lie in one allocation, and for an advice that does not exist;
    /// `CUDA_ERROR_INVALID_DEVICE` for a place that does not exist, where the advice needs one.
    pub fn advise(
        &self,
        range: (CUdeviceptr, usize),
        advice: u32,
        location: CUmemLocation,
        is_device: impl Fn(CUdevice) -> bool,
    ) -> Result<(), CUresult> {
        let place = || check_location(location, &is_device);
        // A processor that accesses the memory: a device or the CPU, not a part of the CPU's memory.
        let processor = || match (place()?, location.kind) {
            (_, CU_MEM_LOCATION_TYPE_DEVICE) => Ok(location.id),
            (_, CU_MEM_LOCATION_TYPE_HOST) => Ok(DEVICE_CPU),
            _ => Err(CUDA_ERROR_INVALID_DEVICE),
        };
        self.with(range, |allocation, pages| {
            match advice {
                1 | 2 => allocation.change(&pages, |it| it.read_mostly = advice == 1),
                3 => {
                    let place = place()?;
                    allocation.change(&pages, |it| it.preferred = Some(place));
                }
                4 => allocation.change(&pages, |it| it.preferred = None),
                5 => {
                    let processor = processor()?;
                    allocation.change(&pages, |it| {
                        it.accessed_by.insert(processor);
                    });
                }
                6 => {
                    let processor = processor()?;
                    allocation.change(&pages, |it| {
                        it.accessed_by.remove(&processor);
                    });
                }
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            }
            Ok(())
        })
    }

    /// `cuMemPrefetchAsync`, as far as it can be asked about later.
    ///
    /// # Errors
    /// As [`Managed::advise`].
    pub fn prefetch(
        &self,
        range: (CUdeviceptr, usize),
        location: CUmemLocation,
        is_device: impl Fn(CUdevice) -> bool,
    ) -> Result<(), CUresult> {
        self.with(range, |allocation, pages| {
            let place = check_location(location, &is_device)?;
            allocation.change(&pages, |it| it.prefetched = Some(place));
            Ok(())
        })
    }

    /// Checks a range that a program discards: its content is undefined from then on.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a range that does not lie in one allocation.
    pub fn discard(&self, range: (CUdeviceptr, usize)) -> Result<(), CUresult> {
        self.with(range, |_, _| Ok(()))
    }

    /// `cuMemRangeGetAttribute`: the value that holds for the whole range.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a range that does not lie in one allocation, and for an attribute that does not exist.
    pub fn attribute(&self, attribute: u32, range: (CUdeviceptr, usize)) -> Result<Value, CUresult> {
        self.with(range, |allocation, pages| {
            let parts: Vec<&Advice> = allocation.meets(&pages).collect();
            let same = |get: fn(&Advice) -> Option<CUmemLocation>| {
                let first = parts.first().and_then(|it| get(it))?;
                parts.iter().all(|it| get(it) == Some(first)).then_some(first)
            };
            let preferred = || same(|it| it.preferred);
            let prefetched = || same(|it| it.prefetched);
            Ok(match attribute {
                1 => Value::One(parts.iter().all(|it| it.read_mostly).into()),
                2 => Value::One(preferred().map_or(DEVICE_INVALID, device)),
                3 => {
                    let first = parts.first().map(|it| it.accessed_by.clone()).unwrap_or_default();
                    let by_all = |it: &CUdevice| parts.iter().all(|part| part.accessed_by.contains(it));
                    Value::Devices(first.into_iter().filter(by_all).collect())
                }
                4 => Value::One(prefetched().map_or(DEVICE_INVALID, device)),
                5 => Value::One(preferred().map_or(0, |it| it.kind as i32)),
                6 => Value::One(preferred().map_or(DEVICE_INVALID, number)),
                7 => Value::One(prefetched().map_or(0, |it| it.kind as i32)),
                8 => Value::One(prefetched().map_or(DEVICE_INVALID, number)),
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            })
        })
    }

    /// Writes an attribute's value into a caller's array of numbers.
    ///
    /// # Errors
    /// As [`Managed::attribute`], and `CUDA_ERROR_INVALID_VALUE` where the array is not as long as `cuda.h` wants it.
    ///
    /// # Safety
    /// `data` is null or has room for `size` bytes.
    pub unsafe fn write(
        &self,
        (data, size): (*mut i32, usize),
        attribute: u32,
        range: (CUdeviceptr, usize),
    ) -> Result<(), CUresult> {
        let value = self.attribute(attribute, range)?;
        let one = size_of::<i32>();
        let count = match &value {
            Value::One(_) => 1,
            Value::Devices(_) => size / one,
        };
        if data.is_null() || count == 0 || size != count * one {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let at = |place: usize| match &value {
            Value::One(number) => *number,
            Value::Devices(devices) => devices.get(place).copied().unwrap_or(DEVICE_INVALID),
        };
        // SAFETY: not null, so with room for `count` numbers by the caller's promise.
        (0..count).for_each(|place| unsafe { data.add(place).write_unaligned(at(place)) });
        Ok(())
    }
}

/// A place that exists.
fn check_location(location: CUmemLocation, is_device: &impl Fn(CUdevice) -> bool) -> Result<CUmemLocation, CUresult> {
    match location.kind {
        CU_MEM_LOCATION_TYPE_DEVICE if is_device(location.id) => Ok(location),
        CU_MEM_LOCATION_TYPE_HOST_NUMA if location.id >= 0 => Ok(location),
        kind if kind > CU_MEM_LOCATION_TYPE_DEVICE
            && kind != CU_MEM_LOCATION_TYPE_HOST_NUMA
            && kind <= CU_MEM_LOCATION_TYPE_LAST =>
        {
            Ok(CUmemLocation { kind, id: 0 })
        }
        _ => Err(CUDA_ERROR_INVALID_DEVICE),
    }
}

/// A place as the attributes before CUDA 12.2 name it.
fn device(location: CUmemLocation) -> CUdevice {
    if location.kind == CU_MEM_LOCATION_TYPE_DEVICE { location.id } else { DEVICE_CPU }
}

/// The number of a place among those of its kind.
fn number(location: CUmemLocation) -> i32 {
    match location.kind {
        CU_MEM_LOCATION_TYPE_DEVICE | CU_MEM_LOCATION_TYPE_HOST_NUMA => location.id,
        _ => DEVICE_INVALID,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x10_0000;

    fn managed() -> Managed {
        let managed = Managed::new();
        managed.add(BASE..BASE + 4 * PAGE);
        managed
    }

    fn is_device(device: CUdevice) -> bool {
        (0..2).contains(&device)
    }

    fn one(managed: &Managed, attribute: u32, from: u64, count: usize) -> i32 {
        match managed.attribute(attribute, (BASE + from, count)).unwrap() {
            Value::One(number) => number,
            Value::Devices(_) => panic!("attribute {attribute} is a list"),
        }
    }

    #[test]
    fn advice_holds_for_the_pages_that_it_was_given_for() {
        let managed = managed();
        let page = PAGE as usize;
        managed.advise((BASE + PAGE + 5, 1), 1, location(0), is_device).unwrap();
        assert_eq!([0, 1, 2, 3].map(|i| one(&managed, 1, i * PAGE, page)), [0, 1, 0, 0]);
        assert_eq!((one(&managed, 1, PAGE, page), one(&managed, 1, PAGE, page + 1)), (1, 0));
        managed.advise((BASE, 4 * page), 1, location(0), is_device).unwrap();
        assert_eq!(one(&managed, 1, 0, 4 * page), 1);
        managed.advise((BASE + 3 * PAGE, page), 2, location(0), is_device).unwrap();
        assert_eq!((one(&managed, 1, 0, 4 * page), one(&managed, 1, 0, 3 * page)), (0, 1));
    }

    #[test]
    fn places_are_told_as_both_generations_of_attributes_tell_them() {
        let managed = managed();
        let all = (BASE, 4 * PAGE as usize);
        assert_eq!((one(&managed, 2, 0, 1), one(&managed, 5, 0, 1)), (DEVICE_INVALID, 0));
        managed.advise(all, 3, location(1), is_device).unwrap();
        assert_eq!([2, 5, 6].map(|it| one(&managed, it, 0, 1)), [1, 1, 1]);
        managed.advise(all, 3, location(DEVICE_CPU), is_device).unwrap();
        assert_eq!([2, 5, 6].map(|it| one(&managed, it, 0, 1)), [DEVICE_CPU, 2, DEVICE_INVALID]);
        let node = CUmemLocation { kind: CU_MEM_LOCATION_TYPE_HOST_NUMA, id: 3 };
        managed.prefetch(all, node, is_device).unwrap();
        assert_eq!([4, 7, 8].map(|it| one(&managed, it, 0, 1)), [DEVICE_CPU, 3, 3]);
        managed.advise(all, 4, location(0), is_device).unwrap();
        assert_eq!(one(&managed, 2, 0, 1), DEVICE_INVALID);
    }

    #[test]
    fn a_device_accesses_a_range_if_it_accesses_all_of_it() {
        let managed = managed();
        let half = (BASE, 2 * PAGE as usize);
        managed.advise((BASE, 4 * PAGE as usize), 5, location(1), is_device).unwrap();
        managed.advise(half, 5, location(0), is_device).unwrap();
        assert_eq!(managed.attribute(3, half), Ok(Value::Devices(vec![0, 1])));
        assert_eq!(managed.attribute(3, (BASE, 4 * PAGE as usize)), Ok(Value::Devices(vec![1])));
        let mut room = [7; 3];
        // SAFETY: room for three numbers.
        unsafe { managed.write((room.as_mut_ptr(), 12), 3, half) }.unwrap();
        assert_eq!(room, [0, 1, DEVICE_INVALID]);
        for size in [0, 3, 13] {
            // SAFETY: an array of another length is refused.
            assert_eq!(unsafe { managed.write((room.as_mut_ptr(), size), 3, half) }, Err(CUDA_ERROR_INVALID_VALUE));
        }
    }

    #[test]
    fn what_does_not_exist_is_refused() {
        let managed = managed();
        let value = Err(CUDA_ERROR_INVALID_VALUE);
        let device = Err(CUDA_ERROR_INVALID_DEVICE);
        for range in [(BASE, 0), (BASE - 1, 1), (BASE + 4 * PAGE, 1), (BASE, 4 * PAGE as usize + 1), (u64::MAX, 9)] {
            assert_eq!(managed.advise(range, 1, location(0), is_device), value, "{range:?}");
            assert_eq!(managed.prefetch(range, location(0), is_device), value, "{range:?}");
            assert!(managed.attribute(1, range).is_err() && managed.discard(range).is_err(), "{range:?}");
        }
        let range = (BASE, 1);
        assert_eq!(managed.advise(range, 7, location(0), is_device), value);
        for kind in [3, 5] {
            assert_eq!(managed.advise(range, kind, location(2), is_device), device);
        }
        assert_eq!(managed.prefetch(range, CUmemLocation { kind: 9, id: 0 }, is_device), device);
        // Advice that needs no place.
        assert_eq!(managed.advise(range, 1, location(77), is_device), Ok(()));
        assert_eq!(managed.attribute(9, range), Err(CUDA_ERROR_INVALID_VALUE));
        managed.remove(BASE);
        assert_eq!(managed.discard(range), value);
    }

    #[test]
    fn each_range_of_a_batch_has_the_last_place_before_it() {
        let [host, first, second] = [-1, 0, 1].map(location);
        assert_eq!(places(4, &[first, host], &[0, 3]), Ok(vec![first, first, first, host]));
        assert_eq!(places(1, &[second], &[0]), Ok(vec![second]));
        for starts in [&[1, 2][..], &[0, 0], &[0, 4], &[0], &[]] {
            assert_eq!(places(4, &[first, host], starts), Err(CUDA_ERROR_INVALID_VALUE), "{starts:?}");
        }
        assert!(places(0, &[first], &[0]).is_err());
    }

    #[test]
    fn only_whole_allocations_are_attached_and_to_streams_that_exist() {
        let range = BASE..BASE + 100;
        for (length, flags, is_default, good) in [
            (0, ATTACH_GLOBAL, true, true),
            (100, ATTACH_HOST, true, true),
            (0, ATTACH_SINGLE, false, true),
            (0, ATTACH_SINGLE, true, false),
            (99, ATTACH_GLOBAL, false, false),
            (0, 0, false, false),
            (0, ATTACH_GLOBAL | ATTACH_HOST, false, false),
        ] {
            let checked = check_attachment(&range, length, flags, is_default);
            assert_eq!(checked.is_ok(), good, "{length} {flags} {is_default}");
        }
    }
}
