//! Copies of ordinary memory, by a driver that has only four functions.

use std::ffi::c_void;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rekindle_images::content::ContentKey;
use rekindle_images::{DataFile, DataReader, HashKey, ImageError, PIECE_LENGTH, PieceHash, Storage};

use super::stage::tests::{alone, unit};
use super::*;
use crate::checkpoint::copying::{Place, Preservation, Task};
use crate::checkpoint::template::Template;
use crate::resources::initial::MOST;
use crate::resources::job::jobs;

const KEY: [u8; 16] = [3; 16];

unsafe extern "C" fn nothing() -> CUresult {
    CUDA_SUCCESS
}

unsafe extern "C" fn host_alloc(place: *mut *mut c_void, bytes: usize, _flags: u32) -> CUresult {
    // SAFETY: the place is the engine's; the memory is never given back.
    unsafe { *place = Box::leak(vec![0_u8; bytes].into_boxed_slice()).as_mut_ptr().cast() };
    CUDA_SUCCESS
}

unsafe extern "C" fn copy_to_host(host: *mut c_void, device: CUdeviceptr, bytes: usize, _: CUstream) -> CUresult {
    // SAFETY: addresses of the device are those of memory of the test's.
    unsafe { std::ptr::copy_nonoverlapping(device as *const u8, host.cast(), bytes) };
    CUDA_SUCCESS
}

fn driver() -> Driver {
    let find = |symbol: &'static str| {
        Ok(match symbol.trim_end_matches('\0') {
            "cuMemHostAlloc" => host_alloc as *const c_void,
            "cuMemcpyDtoHAsync_v2" => copy_to_host as *const c_void,
            _ => nothing as *const c_void,
        })
    };
    // SAFETY: what is called here has its signature, or takes what it is given and looks at none of it.
    unsafe { Driver::load(find) }.unwrap()
}

struct Memory(Vec<u8>);

impl Memory {
    /// Memory of this many pieces, which are all different, and the last of which is short.
    fn new(pieces: u64) -> Self {
        let mut bytes = vec![0; (pieces * PIECE_LENGTH - 100) as usize];
        bytes.chunks_mut(PIECE_LENGTH as usize).zip(1..).for_each(|(piece, byte)| piece.fill(byte));
        Self(bytes)
    }

    fn copying(&self, preservation: Preservation) -> Arc<Copying> {
        let address = self.0.as_ptr() as u64;
        let task =
            |job| Task { job, place: Place::Allocation(address), preservation, expected: None, before: None, soon: 0 };
        Copying::new(jobs(address, self.0.len() as u64, 0, 1).map(task).collect(), None, false)
    }
}

fn engine(driver: &Driver) -> Engine {
    let mut engine = Engine::new();
    (engine.count, engine.few) = (3, 2);
    engine.prepare(driver, &[1]).unwrap();
    engine.warm_up();
    engine
}

fn writer(file: &std::fs::File) -> DataWriter {
    DataWriter::new(file.try_clone().unwrap(), 0, ContentKey::from_bytes(KEY)).unwrap()
}

#[test]
fn what_comes_into_the_file_is_what_was_there_with_a_stage_and_without() {
    let _alone = alone();
    let (driver, memory) = (driver(), Memory::new(6));
    let mut engine = engine(&driver);
    for units in [0, 1, 4] {
        let numbers: Vec<u64> = (1..=units).map(|it| 10 * units + it).collect();
        engine.stage.set(2 * PIECE_LENGTH, &numbers, numbers.iter().map(|it| (*it, unit())).collect()).unwrap();
        let (file, copying) = (tempfile::tempfile().unwrap(), memory.copying(Preservation::Closed));
        engine.copy_out(&driver, &copying, &writer(&file)).unwrap();
        assert!(copying.may_open() && copying.copied() == memory.0.len() as u64);
        let pieces = copying.pieces().unwrap();
        assert_eq!(pieces.len(), 6);
        for (piece, content) in pieces.iter().zip(memory.0.chunks(PIECE_LENGTH as usize)) {
            let Storage::Stored(extent) = piece.storage else { panic!("{piece:?}") };
            let mut found = vec![0; content.len()];
            file.read_exact_at(&mut found, extent.offset).unwrap();
            assert!(found == content && piece.hash == writer(&file).hash(content), "{units} {}", piece.offset);
        }
        assert_eq!(std::iter::from_fn(|| engine.stage.take()).collect::<Vec<_>>().len() as u64, 2 * units);
    }
    engine.stage.set(0, &[], vec![]).unwrap();
}

#[test]
fn a_full_disk_leaves_nothing_on_the_stage() {
    let _alone = alone();
    let (driver, memory) = (driver(), Memory::new(6));
    let mut engine = engine(&driver);
    let numbers: Vec<u64> = (1..=8).collect();
    engine.stage.set(2 * PIECE_LENGTH, &numbers, numbers.iter().map(|it| (*it, unit())).collect()).unwrap();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let copying = memory.copying(Preservation::Protected);
    let result = engine.copy_out(&driver, &copying, &writer(&full));
    assert!(matches!(result, Err(EngineError::Image(ImageError::NoSpace { .. }))), "{result:?}");
    assert!(copying.has_failed() && copying.take().is_none());
    assert_eq!(std::iter::from_fn(|| engine.stage.take()).collect::<Vec<_>>().len(), 16);
    engine.stage.set(0, &[], vec![]).unwrap();
}

/// The copy that is to be given up at the third piece.
static GIVEN_UP: std::sync::Mutex<Option<Arc<Copying>>> = std::sync::Mutex::new(None);
static PIECES: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn give_up_with_the_third(
    host: *mut c_void,
    device: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    if PIECES.fetch_add(1, Relaxed) == 2
        && let Some(copying) = &*GIVEN_UP.lock().unwrap()
    {
        copying.fail();
    }
    // SAFETY: the caller's promise.
    unsafe { copy_to_host(host, device, bytes, stream) }
}

#[test]
fn hashes_of_the_device_are_stored_and_zeros_that_it_does_not_have_are_noticed() {
    let _alone = alone();
    let (driver, mut memory) = (driver(), Memory::new(3));
    memory.0[..PIECE_LENGTH as usize].fill(0);
    let mut engine = engine(&driver);
    let file = tempfile::tempfile().unwrap();
    let (of_zeros, other) = (writer(&file).hash(&memory.0[..PIECE_LENGTH as usize]), writer(&file).hash(b"other"));
    let mut copy = |known: [PieceHash; 3]| {
        let usual = memory.copying(Preservation::Closed);
        let copying = Copying::new(usual.tasks.clone(), None, false);
        copying.expect_device_hashes();
        copying.hashes.make().put(known.into_iter().enumerate());
        engine.copy_out(&driver, &copying, &writer(&file)).map(|()| copying.pieces().unwrap())
    };
    // A load compares these with what the device has then.
    let pieces = copy([of_zeros, other, other]).unwrap();
    assert_eq!(pieces.iter().map(|piece| piece.hash).collect::<Vec<_>>(), [of_zeros, other, other]);
    assert!(matches!(pieces[0].storage, Storage::Zero) && matches!(pieces[1].storage, Storage::Stored(_)));
    // A load sets zeros, and compares nothing.
    let failed = copy([other, other, other]);
    assert!(matches!(failed, Err(EngineError::NotCopied { .. })), "{failed:?}");
}

#[test]
fn a_copy_that_is_given_up_leaves_nothing_on_the_stage() {
    let _alone = alone();
    let (driver, memory) = (driver(), Memory::new(6));
    let driver = Driver { cuMemcpyDtoHAsync_v2: give_up_with_the_third, ..driver };
    let mut engine = engine(&driver);
    let numbers: Vec<u64> = (1..=8).collect();
    engine.stage.set(2 * PIECE_LENGTH, &numbers, numbers.iter().map(|it| (*it, unit())).collect()).unwrap();
    let (file, copying) = (tempfile::tempfile().unwrap(), memory.copying(Preservation::Protected));
    PIECES.store(0, Relaxed);
    *GIVEN_UP.lock().unwrap() = Some(Arc::clone(&copying));
    let result = engine.copy_out(&driver, &copying, &writer(&file));
    assert!(matches!(result, Err(EngineError::Cancelled)), "{result:?}");
    assert!(PIECES.load(Relaxed) < 6 && copying.pieces().is_err());
    assert_eq!(std::iter::from_fn(|| engine.stage.take()).collect::<Vec<_>>().len(), 16);
    engine.stage.set(0, &[], vec![]).unwrap();
}

#[test]
fn what_is_not_as_expected_once_a_copy_was_given_up_is_no_mispredicted_write() {
    let (driver, memory) = (driver(), Memory::new(6));
    let driver = Driver { cuMemcpyDtoHAsync_v2: give_up_with_the_third, ..driver };
    for wrong_before in [false, true] {
        let _alone = alone();
        let mut engine = engine(&driver);
        engine.lanes.truncate(1);
        let file = tempfile::tempfile().unwrap();
        let pieces: Vec<_> = memory.0.chunks(PIECE_LENGTH as usize).collect();
        let hash = |piece: usize| writer(&file).hash(pieces[piece]);
        let usual = memory.copying(Preservation::Protected);
        let tasks = usual.tasks.iter().enumerate().map(|(i, task)| {
            // From the third job on, or from the second, all expect the hash of another piece.
            let expected = hash(if i < 2 - usize::from(wrong_before) { i } else { 0 });
            Task { expected: Some(expected), ..*task }
        });
        let copying = Copying::new(tasks.collect(), None, false);
        PIECES.store(0, Relaxed);
        *GIVEN_UP.lock().unwrap() = Some(Arc::clone(&copying));
        let result = engine.copy_out(&driver, &copying, &writer(&file));
        match wrong_before {
            false => assert!(matches!(result, Err(EngineError::Cancelled)), "{result:?}"),
            true => assert!(matches!(result, Err(EngineError::MispredictedWrite { .. })), "{result:?}"),
        }
        assert_eq!(PIECES.load(Relaxed), 3);
    }
}

#[test]
fn no_more_is_taken_of_a_link_than_is_allowed_and_a_copy_that_is_held_back_can_be_given_up() {
    let _alone = alone();
    let (driver, memory) = (driver(), Memory::new(6));
    let mut engine = engine(&driver);
    // Two pieces per tenth of a second; the first is copied at once. The stage does not shorten the wait.
    engine.pace.limit(&[20 * PIECE_LENGTH]);
    for units in [0, 4] {
        let numbers: Vec<u64> = (1..=units).collect();
        engine.stage.set(2 * PIECE_LENGTH, &numbers, numbers.iter().map(|it| (*it, unit())).collect()).unwrap();
        let began = Instant::now();
        let copying = memory.copying(Preservation::Closed);
        engine.copy_out(&driver, &copying, &writer(&tempfile::tempfile().unwrap())).unwrap();
        assert!(began.elapsed() >= Duration::from_millis(235), "{:?}", began.elapsed());
    }
    engine.stage.set(0, &[], vec![]).unwrap();
    // One hour per piece.
    engine.pace.limit(&[PIECE_LENGTH / 3600]);
    let copying = memory.copying(Preservation::Protected);
    let result = std::thread::scope(|scope| {
        let copying = Arc::clone(&copying);
        let gives_up = Arc::clone(&copying);
        scope.spawn(move || {
            while gives_up.copied() < PIECE_LENGTH {
                std::thread::yield_now();
            }
            // Lanes that wait for their turn have no job: a command that writes the memory need not wait for them.
            gives_up.wait_until_quiet();
            assert!(gives_up.next_device().is_some());
            gives_up.fail();
        });
        engine.copy_out(&driver, &copying, &writer(&tempfile::tempfile().unwrap()))
    });
    assert!(matches!(result, Err(EngineError::Cancelled)), "{result:?}");
    // Nothing accesses the memory any more.
    copying.wait_until_quiet();
}

/// Reads parts of some memory at once, given by offset and length.
/// A driver whose copies to the device take place as late as they may: when their event is queried, or their stream is
/// synchronised.
mod late {
    use std::collections::HashMap;
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Stream {
        /// Destination, source and length of copies; a source of 0 stands for zeros.
        copies: Vec<(u64, u64, usize)>,
        done: usize,
        /// The number of copies before each event's last record.
        events: HashMap<CUevent, usize>,
    }

    static STREAM: Mutex<Option<Stream>> = Mutex::new(None);

    fn with<T>(f: impl FnOnce(&mut Stream) -> T) -> T {
        f(STREAM.lock().unwrap().get_or_insert_default())
    }

    impl Stream {
        fn run(&mut self, until: usize) {
            for &(to, from, bytes) in self.copies.get(self.done..until).unwrap_or_default() {
                // SAFETY: the engine's buffers and the test's memory, of that many bytes.
                unsafe {
                    match from {
                        0 => std::ptr::write_bytes(to as *mut u8, 0, bytes),
                        _ => std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes),
                    }
                }
            }
            self.done = self.done.max(until);
        }
    }

    unsafe extern "C" fn copy(to: CUdeviceptr, from: *const c_void, bytes: usize, _: CUstream) -> CUresult {
        with(|it| it.copies.push((to, from as u64, bytes)));
        CUDA_SUCCESS
    }

    unsafe extern "C" fn on_device(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, _: CUstream) -> CUresult {
        with(|it| it.copies.push((to, from, bytes)));
        CUDA_SUCCESS
    }

    /// The lengths of all copies so far, which are forgotten.
    pub(super) fn lengths() -> Vec<usize> {
        with(|it| std::mem::take(it).copies.iter().map(|(_, _, bytes)| *bytes).collect())
    }

    unsafe extern "C" fn set(to: CUdeviceptr, _zero: u8, bytes: usize, _: CUstream) -> CUresult {
        with(|it| it.copies.push((to, 0, bytes)));
        CUDA_SUCCESS
    }

    unsafe extern "C" fn create(event: *mut CUevent, _flags: u32) -> CUresult {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // SAFETY: the place is the engine's.
        unsafe { *event = NEXT.fetch_add(1, Relaxed) };
        CUDA_SUCCESS
    }

    unsafe extern "C" fn record(event: CUevent, _: CUstream) -> CUresult {
        with(|it| it.events.insert(event, it.copies.len()));
        CUDA_SUCCESS
    }

    unsafe extern "C" fn query(event: CUevent) -> CUresult {
        with(|it| it.run(it.events.get(&event).copied().unwrap_or(0)));
        CUDA_SUCCESS
    }

    unsafe extern "C" fn synchronize(_: CUstream) -> CUresult {
        with(|it| it.run(it.copies.len()));
        CUDA_SUCCESS
    }

    pub(super) fn driver() -> Driver {
        Driver {
            cuMemcpyHtoDAsync_v2: copy,
            cuMemcpyAsync: on_device,
            cuMemsetD8Async: set,
            cuEventCreate: create,
            cuEventRecord: record,
            cuEventQuery: query,
            cuStreamSynchronize: synchronize,
            ..super::driver()
        }
    }
}

#[test]
fn content_arrives_whole_however_late_copies_take_place() {
    let _alone = alone();
    let (driver, mut memory) = (driver(), Memory::new(9));
    memory.0.iter_mut().zip(0_u32..).for_each(|(byte, i)| *byte = (i.wrapping_mul(2_654_435_761) >> 24) as u8);
    memory.0[3 * PIECE_LENGTH as usize..][..PIECE_LENGTH as usize].fill(0);
    let (file, copying) = (tempfile::tempfile().unwrap(), memory.copying(Preservation::Closed));
    engine(&driver).copy_out(&driver, &copying, &writer(&file)).unwrap();
    let pieces = copying.pieces().unwrap();
    let driver = late::driver();
    for on_device in [true, false] {
        let mut engine = engine(&driver);
        let arrived = vec![7_u8; memory.0.len()];
        let jobs = jobs(arrived.as_ptr() as u64, arrived.len() as u64, 0, 1);
        let fill = Fill::new(jobs.zip(pieces.iter().copied()).collect(), |_| on_device);
        let key = HashKey::Content(ContentKey::from_bytes(KEY));
        let reader = DataReader::new(key, [(DataFile::own(0), file.try_clone().unwrap())]);
        engine.load(&driver, &fill, &reader).unwrap();
        assert!(arrived == memory.0, "{on_device}");
        assert_eq!((fill.loaded(), fill.bytes()), (memory.0.len() as u64, memory.0.len() as u64));
        assert_eq!(fill.set(), PIECE_LENGTH);
        assert_eq!(fill.to_compare().count(), if on_device { 8 } else { 0 });
        assert!(engine.lanes.iter().all(|lane| !lane.has_events(0)));
    }
}

/// What reads beside an engine.
fn reader(driver: &Driver) -> Peek {
    let mut reader = Peek::beside(&engine(driver));
    reader.prepare(driver, &[1]).unwrap();
    reader
}

fn peek(reader: &mut Peek, driver: &Driver, memory: &[u8], parts: &[(u64, u64)]) -> Option<Vec<Vec<u8>>> {
    let regions: Vec<_> = parts.iter().map(|(at, length)| (memory.as_ptr() as u64 + at, *length)).collect();
    // SAFETY: the parts lie in the memory.
    unsafe { reader.peek(driver, 0, &regions, Duration::ZERO) }
}

#[test]
fn a_little_memory_is_read_at_once_up_to_the_size_of_a_buffer() {
    let (driver, memory) = (driver(), Memory::new(2));
    let mut reader = reader(&driver);
    let parts = [(8, 16), (PIECE_LENGTH - 4, 8), (0, 0)];
    let read = peek(&mut reader, &driver, &memory.0, &parts).unwrap();
    let expected = parts.map(|(at, length)| memory.0[at as usize..][..length as usize].to_vec());
    assert_eq!(read, expected);
    let most = peek(&mut reader, &driver, &memory.0, &[(0, MOST)]);
    assert_eq!(most.map(|read| read[0].len() as u64), Some(MOST));
    assert_eq!(peek(&mut reader, &driver, &memory.0, &[(0, MOST), (0, 1)]), None);
    assert_eq!(peek(&mut reader, &driver, &memory.0, &[(0, u64::MAX), (0, 1)]), None);
}

#[test]
fn a_read_that_does_not_end_in_time_gives_its_buffer_up_and_is_the_last() {
    unsafe extern "C" fn never(_: CUevent) -> CUresult {
        CUDA_ERROR_NOT_READY
    }
    let (driver, memory) = (driver(), Memory::new(1));
    let mut engine = engine(&driver);
    let mut reader = Peek::beside(&engine);
    reader.prepare(&driver, &[1]).unwrap();
    let stuck = Driver { cuEventQuery: never, ..self::driver() };
    assert_eq!(peek(&mut reader, &stuck, &memory.0, &[(0, 8)]), None);
    assert_eq!(peek(&mut reader, &driver, &memory.0, &[(0, 8)]), None);
    // Neither a reset nor another lane uses the buffer again.
    reader.prepare(&driver, &[1]).unwrap();
    engine.count += 1;
    engine.prepare(&driver, &[1]).unwrap();
    let buffers: Vec<_> = engine.lanes.iter().map(|lane| lane.buffer).collect();
    assert!(buffers.iter().all(|buffer| !buffer.is_null() && *buffer != reader.buffer), "{buffers:?}");
}

#[test]
fn a_read_that_the_driver_refuses_is_none_and_the_next_may_do() {
    unsafe extern "C" fn refuse(_: *mut c_void, _: CUdeviceptr, _: usize, _: CUstream) -> CUresult {
        CUDA_ERROR_INVALID_VALUE
    }
    let (driver, memory) = (driver(), Memory::new(1));
    let mut reader = reader(&driver);
    let refusing = Driver { cuMemcpyDtoHAsync_v2: refuse, ..self::driver() };
    assert_eq!(peek(&mut reader, &refusing, &memory.0, &[(0, 8)]), None);
    assert_eq!(peek(&mut reader, &driver, &memory.0, &[(0, 8)]), Some(vec![vec![1; 8]]));
}

#[test]
fn what_a_template_has_is_copied_on_the_device_in_long_runs() {
    let _alone = alone();
    let (driver, mut memory) = (driver(), Memory::new(9));
    memory.0.iter_mut().zip(0_u32..).for_each(|(byte, i)| *byte = (i.wrapping_mul(2_654_435_761) >> 24) as u8);
    let zeros = 2 * PIECE_LENGTH as usize;
    memory.0[..zeros].fill(0);
    let (file, copying) = (tempfile::tempfile().unwrap(), memory.copying(Preservation::Closed));
    engine(&driver).copy_out(&driver, &copying, &writer(&file)).unwrap();
    let pieces = copying.pieces().unwrap();
    let (driver, arrived) = (late::driver(), vec![7_u8; memory.0.len()]);
    late::lengths();
    let (to, from) = (arrived.as_ptr() as u64, memory.0.as_ptr() as u64);
    // It has no zeros, pieces 4 to 6, in two parts that lie side by side, and nothing of the others.
    let part = |first: u64, count: u64| {
        let offset = first * PIECE_LENGTH;
        (to + offset, count * PIECE_LENGTH, from + offset)
    };
    let template = Template::imagined(&[part(4, 2), part(6, 1)]);
    let mut fill = Fill::new(jobs(to, arrived.len() as u64, 0, 1).zip(pieces.iter().copied()).collect(), |_| true);
    fill.copy_from(|part| template.find(0, part.job.address, part.job.length));
    let key = HashKey::Content(ContentKey::from_bytes(KEY));
    let reader = DataReader::new(key, [(DataFile::own(0), file.try_clone().unwrap())]);
    engine(&driver).load(&driver, &fill, &reader).unwrap();
    assert!(arrived == memory.0);
    assert_eq!((fill.loaded(), fill.set(), fill.copied()), (memory.0.len() as u64, zeros as u64, 3 * PIECE_LENGTH));
    let lengths = late::lengths();
    assert_eq!(lengths[..2], [zeros, 3 * PIECE_LENGTH as usize]);
    assert_eq!(lengths[2..].iter().sum::<usize>(), memory.0.len() - zeros - 3 * PIECE_LENGTH as usize);
}
