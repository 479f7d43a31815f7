//! Damaged images: nothing panics, and nothing takes memory beyond what the image can account for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use rekindle_cuda_abi::code::{Entry, Program, parse, unmanaged_within};

/// The largest single allocation since it was last reset, in bytes.
static LARGEST: AtomicUsize = AtomicUsize::new(0);

struct Watching;

// SAFETY: all of it is the system's allocator's doing.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// The size that entries may unpack to here: some times the size of the true entries.
const LIMIT: usize = 1 << 20;
/// The most that an allocation may take: the unpacked entry, twice (growing vectors double), with the
/// tables read from it and the bytes of the allowance for names that overlap.
const LARGEST_ALLOWED: usize = 8 * LIMIT;

const IMAGES: [&[u8]; 8] = [
    include_bytes!("fixtures/code/forms.none.fatbin"),
    include_bytes!("fixtures/code/forms.speed.fatbin"),
    include_bytes!("fixtures/code/forms.size.fatbin"),
    include_bytes!("fixtures/code/forms.lto.fatbin"),
    include_bytes!("fixtures/code/forms.ptx"),
    include_bytes!("fixtures/code/heap.cubin"),
    include_bytes!("fixtures/code/heap.linked.cubin"),
    include_bytes!("fixtures/code/heap.ptx"),
];

fn ask(program: &Program<'_>) {
    let _ = program.globals();
    let _ = program.kernels();
    let _ = program.uses_device_malloc();
}

fn read(image: &[u8]) {
    let _ = unmanaged_within(image, LIMIT);
    let Ok(parsed) = parse(image) else { return };
    let _ = parsed.select((9, 0));
    let _ = parsed.select_ptx((u32::MAX, u32::MAX));
    let small = |entry: &&Entry<'_>| entry.payload_within(LIMIT).is_ok();
    for entry in parsed.entries.iter().filter(small) {
        if let Ok(program) = entry.unpack() {
            ask(&program);
        }
    }
}

/// Where and with what an image is overwritten, and where it is cut.
type Damage = (Vec<(usize, Vec<u8>)>, Option<usize>);

fn damage() -> impl Strategy<Value = Damage> {
    let value = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..9),
        Just(vec![0xff; 8]),
        Just(vec![0xff; 4]),
        Just(vec![0; 4]),
        Just(u64::MAX.to_le_bytes()[..7].to_vec()),
        (0_u32..64).prop_map(|bit| (1_u64 << bit).to_le_bytes().to_vec()),
    ];
    (prop::collection::vec((any::<usize>(), value), 0..6), prop::option::of(any::<usize>()))
}

fn apply(image: &[u8], window: usize, (changes, cut): &Damage) -> Vec<u8> {
    let mut image = image.to_vec();
    if let Some(cut) = cut {
        image.truncate(cut % (image.len() + 1));
    }
    for (at, bytes) in changes {
        let range = window.min(image.len());
        if range > 0 {
            let at = at % range;
            for (byte, new) in image.iter_mut().skip(at).zip(bytes) {
                *byte = *new;
            }
        }
    }
    image
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_anywhere(which in 0..IMAGES.len(), damage in damage()) {
        LARGEST.store(0, Ordering::Relaxed);
        read(&apply(IMAGES[which], usize::MAX, &damage));
        prop_assert!(LARGEST.load(Ordering::Relaxed) < LARGEST_ALLOWED);
    }

    /// Headers come first, so this hits them more often.
    #[test]
    fn damaged_at_the_start(which in 0..IMAGES.len(), damage in damage()) {
        LARGEST.store(0, Ordering::Relaxed);
        read(&apply(IMAGES[which], 256, &damage));
        prop_assert!(LARGEST.load(Ordering::Relaxed) < LARGEST_ALLOWED);
    }

    /// The tables of a cubin come last.
    #[test]
    fn damaged_tables(which in 5..7_usize, at in 0..8192_usize, bytes in prop::collection::vec(any::<u8>(), 1..9)) {
        let mut image = IMAGES[which].to_vec();
        let start = image.len().saturating_sub(8192);
        for (byte, new) in image.iter_mut().skip(start + at).zip(bytes) {
            *byte = new;
        }
        read(&image);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..512), which in 0..4_usize) {
        let magic: &[u8] = [
            &b""[..], &[0x50, 0xed, 0x55, 0xba], b"\x7fELF\x02\x01", b".version 9.0 .target sm_75 ",
        ][which];
        read(&[magic, &bytes].concat());
    }

    /// Words of PTX in any order.
    #[test]
    fn any_words(words in prop::collection::vec(prop::sample::select(vec![
        ".global", ".const", ".entry", ".func", ".param", ".b8", ".u64", ".align", ".attribute",
        ".managed", ".extern", ".v4", "call", "malloc", "%r1", "a", "b", "4", "0x10", "=", "[", "]",
        "(", ")", "{", "}", ",", ";", ":", "\"", "//", "/*", "*/", "\n", ".alias", ".ptr", ".target",
    ]), 0..64)) {
        read(format!(".version 9.0\n.target sm_75\n{}", words.join(" ")).as_bytes());
    }
}

#[test]
fn cut_everywhere() {
    for image in IMAGES {
        // Every length of the headers, and then some of the others.
        let lengths = (0..image.len().min(300)).chain((300..image.len()).step_by(997));
        for length in lengths {
            read(&image[..length]);
        }
    }
}
