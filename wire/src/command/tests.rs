//! The layout of commands is kept: images hold deferred ones as they came from the ring, and clients of earlier versions
//! send them.

use std::collections::HashSet;
use std::ffi::CStr;

use proptest::prelude::*;

use super::*;
use crate::boxes::End;
use crate::codec::Writer;

/// The calls of a writer, in their order, as they were when each command was written by hand.
trait Part {
    fn put(&self, w: &mut Writer);
}

impl Part for u64 {
    fn put(&self, w: &mut Writer) {
        w.word(*self);
    }
}

impl<const N: usize> Part for [u8; N] {
    fn put(&self, w: &mut Writer) {
        w.blob(self);
    }
}

impl Part for &CStr {
    fn put(&self, w: &mut Writer) {
        w.text(self);
    }
}

impl Part for Writer {
    fn put(&self, w: &mut Writer) {
        w.blob(self.bytes());
    }
}

fn parts(parts: &[&dyn Part]) -> Writer {
    let mut w = Writer::new();
    parts.iter().for_each(|part| part.put(&mut w));
    w
}

/// Numbers of commands that [`same`] has seen.
type Seen = HashSet<u16>;

fn same<P: Parameters>(seen: &mut Seen, parameters: &P, by_hand: &[&dyn Part]) {
    let mut w = Writer::new();
    parameters.append(&mut w);
    let expected = parts(by_hand);
    for call in P::COMMANDS {
        assert_eq!(w.bytes(), expected.bytes(), "{}", declaration(*call).unwrap().name);
        assert_eq!(again(*call, w.bytes()), Some(Ok(expected.bytes().to_vec())), "{call}");
        assert!(seen.insert(*call));
    }
}

fn launch() -> (Launch<'static>, Writer) {
    let launch = Launch {
        function: 1,
        grid: [2, 3, 4],
        block: [5, 6, 7],
        shared_bytes: 8,
        flags: COOPERATIVE,
        stream: 9,
        attributes: &[1; 72],
        parameters: b"parameters",
    };
    let pair = |low: u64, high: u64| low | high << 32;
    let shape: [&dyn Part; 4] = [&pair(2, 3), &pair(4, 5), &pair(6, 7), &pair(8, 1)];
    let [a, b, c, d] = shape;
    (launch, parts(&[&1, a, b, c, d, &9, &[1; 72], b"parameters"]))
}

#[test]
fn every_command_lies_in_the_ring_as_when_it_was_written_by_hand() {
    let seen = &mut Seen::new();
    same(seen, &MakeContext { context: 1, device: 2, flags: 3 }, &[&1, &2, &3]);
    same(seen, &EndContext { context: 1 }, &[&1]);
    same(seen, &SyncContext { context: 1 }, &[&1]);
    same(seen, &OfStream { stream: 1 }, &[&1]);
    same(seen, &SyncEvent { event: 1 }, &[&1]);
    same(seen, &MemAlloc { bytes: 1 }, &[&1]);
    same(seen, &MemFree { address: 1 }, &[&1]);
    same(seen, &WindowReserved { device: 1, end: 2 }, &[&1, &2]);
    same(seen, &PinnedMap { address: 1, size: 2, flags: 3, serial: 4 }, &[&1, &2, &3, &4]);
    same(seen, &PinnedUnmap { address: 1 }, &[&1]);
    same(seen, &ManagedMap { address: 1, size: 2, serial: 3 }, &[&1, &2, &3]);
    same(seen, &ManagedUnmap { address: 1 }, &[&1]);
    same(seen, &ManagedToDevice { address: 1, bytes: 2 }, &[&1, &2]);
    let variable = ManagedVariable { parent: 1, address: 2, size: 3, pages: 4, length: 5, serial: 6 };
    same(seen, &variable, &[&1, &2, &3, &4, &5, &6]);
    same(seen, &MemInfo {}, &[]);

    same(seen, &CopyMemory { destination: 1, source: 2, bytes: 3, stream: 4 }, &[&1, &2, &3, &4]);
    same(seen, &CopyBytes { destination: 1, stream: 2, bytes: b"abc" }, &[&1, &2, b"abc"]);
    same(seen, &CopyChunk { device: 1, chunk: 2, bytes: 3, stream: 4 }, &[&1, &2, &3, &4]);
    let (memory, array) = (End::Memory { address: 3, pitch: 4, rows: 5 }, End::Array { array: 6, at: [7, 8, 9] });
    let copy = CopyBox { first: 0, second: 2, end: memory, source: array, size: [10, 11, 12], stream: 13 };
    let (to, from): ([&dyn Part; 5], [&dyn Part; 5]) = ([&0, &3, &4, &5, &0], [&1, &6, &7, &8, &9]);
    let tail: [&dyn Part; 4] = [&10, &11, &12, &13];
    let ends: Vec<&dyn Part> = [&0_u64 as &dyn Part, &2].into_iter().chain(to).chain(from).chain(tail).collect();
    same(seen, &copy, &ends);
    let one: Vec<&dyn Part> = [&0_u64 as &dyn Part, &2].into_iter().chain(from).chain(tail).collect();
    same(seen, &CopyBoxChunk { first: 0, chunk: 2, end: array, size: [10, 11, 12], stream: 13 }, &one);
    let bytes: Vec<&dyn Part> = one.iter().copied().chain([b"xyz" as &dyn Part]).collect();
    let copy = CopyBoxBytes { first: 0, second: 2, end: array, size: [10, 11, 12], stream: 13, bytes: b"xyz" };
    same(seen, &copy, &bytes);

    same(seen, &CodePart { image: 1, offset: 2, total: 3, bytes: b"part" }, &[&1, &2, &3, b"part"]);
    same(seen, &LoadCode { handle: 1, image: 2, options: b"" }, &[&1, &2, b""]);
    same(seen, &UnloadCode { handle: 1 }, &[&1]);
    same(seen, &FindFunction { function: 1, parent: 2, name: c"name" }, &[&1, &2, &c"name"]);
    same(seen, &KernelFunction { function: 1, kernel: 2 }, &[&1, &2]);
    same(seen, &LibraryModule { module: 1, library: 2 }, &[&1, &2]);
    same(seen, &FindGlobal { parent: 1, name: c"name" }, &[&1, &c"name"]);
    same(seen, &KernelNames { parent: 1, start: 2 }, &[&1, &2]);
    same(seen, &Instantiate { parent: 1 }, &[&1]);

    let (one, by_hand) = launch();
    let mut w = Writer::new();
    one.write(&mut w);
    assert_eq!(w.bytes(), by_hand.bytes());
    assert!(seen.insert(LAUNCH));
    let pair = (1_u64 << 32 | 8, b"parameters");
    let all: [&dyn Part; 9] = [&7, &1, &(3 << 32 | 2), &(5 << 32 | 4), &(7 << 32 | 6), &pair.0, &9, &[1; 72], pair.1];
    same(seen, &OccupancyClusters { sizes: 7, launch: one }, &all);
    let both = LaunchOnDevices { flags: 3, launches: vec![by_hand.bytes(), b"b"] };
    same(seen, &both, &[&3, &2, &by_hand, b"b"]);
    let potential = OccupancyBlockSize { function: 1, shared_bytes: 2, limit: -1, flags: 4 };
    same(seen, &potential, &[&1, &2, &u64::MAX, &4]);
    same(seen, &Prints {}, &[]);
    same(seen, &LinkCreate { linker: 1, options: b"12345678" }, &[&1, b"12345678"]);
    let add = LinkAdd { linker: 1, kind: 2, image: 3, name: c"n", options: b"" };
    same(seen, &add, &[&1, &2, &3, &c"n", b""]);
    same(seen, &OfLinker { linker: 1 }, &[&1]);
    same(seen, &LinkOutput { linker: 1, offset: 2 }, &[&1, &2]);
    same(seen, &CodeLog { which: 1, offset: 2 }, &[&1, &2]);

    let array = ArrayCreate { array: 1, size: [2, 3, 4], format: 5, channels: 6, flags: 7 };
    same(seen, &array, &[&1, &2, &3, &4, &5, &6, &7]);
    let levels = vec![8, 9];
    let mipmap = MipmapCreate { mipmapped: 1, size: [2, 3, 4], format: 5, channels: 6, flags: 7, levels };
    same(seen, &mipmap, &[&1, &2, &3, &4, &5, &6, &7, &2, &8, &9]);
    same(seen, &ArrayDestroy { array: 1 }, &[&1]);
    let texture = TextureCreate { handle: 1, value: 2, resource: b"r", texture: b"te", view: b"" };
    same(seen, &texture, &[&1, &2, b"r", b"te", b""]);
    same(seen, &TextureDestroy { handle: 1 }, &[&1]);

    same(seen, &PoolCreate { pool: 1, device: 2, maximum: 3 }, &[&1, &2, &3]);
    same(seen, &PoolDestroy { pool: 1 }, &[&1]);
    same(seen, &PoolAlloc { pool: 1, bytes: 2, stream: 3 }, &[&1, &2, &3]);
    same(seen, &PoolFree { address: 1, stream: 2 }, &[&1, &2]);
    same(seen, &PoolTrim { pool: 1, keep: 2 }, &[&1, &2]);
    same(seen, &PoolGet { pool: 1, attribute: 2 }, &[&1, &2]);
    same(seen, &PoolSet { pool: 1, attribute: 2, value: 3 }, &[&1, &2, &3]);
    same(seen, &PoolSetAccess { pool: 1, device: 2, access: 3 }, &[&1, &2, &3]);
    same(seen, &PoolGetAccess { pool: 1, device: 2 }, &[&1, &2]);
    same(seen, &PoolCurrent { device: 1 }, &[&1]);
    same(seen, &PoolSetCurrent { device: 1, pool: 2 }, &[&1, &2]);
    same(seen, &PoolExport { pool: 1 }, &[&1]);
    same(seen, &PoolMemoryExport { address: 1 }, &[&1]);
    same(seen, &PeerEnable { peer: 1, flags: 2 }, &[&1, &2]);
    same(seen, &PeerDisable { peer: 1 }, &[&1]);

    same(seen, &AddressRange { address: 1, size: 2 }, &[&1, &2]);
    let flags = PieceFlags { compression: 1, rdma: 2, usage: 3 };
    let create = PieceCreate { piece: 1, size: 2, device: 3, handle_types: 4, flags };
    same(seen, &create, &[&1, &2, &3, &4, &0x3_0201]);
    same(seen, &OfPiece { piece: 1 }, &[&1]);
    same(seen, &PieceMap { address: 1, size: 2, offset: 3, piece: 4, flags: 5 }, &[&1, &2, &3, &4, &5]);
    let access = PieceAccess { address: 1, size: 2, access: vec![(3, 4), (5, 6)] };
    same(seen, &access, &[&1, &2, &2, &3, &4, &5, &6]);
    let granularity = PieceGranularity { option: 1, device: 2, handle_types: 3, flags };
    same(seen, &granularity, &[&1, &2, &3, &0x3_0201]);
    same(seen, &TensorMap { kind: 1, rest: parts(&[&2, b"map"]).bytes() }, &[&1, &2, b"map"]);
    same(seen, &MemoryExport { address: 1 }, &[&1]);
    same(seen, &PieceImport { ticket: 1, pieces: vec![2, 3] }, &[&1, &2, &2, &3]);
    same(seen, &OfEvent { event: 1 }, &[&1]);
    same(seen, &EventOpen { ticket: 1, event: 2 }, &[&1, &2]);
    same(seen, &EventFence {}, &[]);

    same(seen, &HostFunc { stream: 1, function: 2, data: 3, kind: 4, named: 5 }, &[&1, &2, &3, &4, &5]);
    same(seen, &CallbackNext { done: 1 }, &[&1]);
    same(seen, &HeldRoom {}, &[]);
    same(seen, &ThreadEnd {}, &[]);
    same(seen, &MemOps { stream: 1, operations: b"op" }, &[&1, b"op"]);
    same(seen, &GraphCreate { exec: 1, image: 2, flags: 3 }, &[&1, &2, &3]);
    same(seen, &GraphSet { exec: 1, place: 2, step: b"step" }, &[&1, &2, b"step"]);
    same(seen, &GraphInStream { exec: 1, stream: 2 }, &[&1, &2]);
    same(seen, &GraphDestroy { exec: 1 }, &[&1]);

    same(seen, &ResourceOfDevice { resource: 1, device: 2, expected: 3 }, &[&1, &2, &3]);
    same(seen, &ResourceOfContext { resource: 1, descriptor: 2, device: 3, expected: 4 }, &[&1, &2, &3, &4]);
    let split = ResourceSplit { resource: 1, flags: 2, least: 3, rest: 4, parts: vec![5, 6], expected: vec![7, 8, 9] };
    same(seen, &split, &[&1, &2, &3, &4, &2, &5, &6, &3, &7, &8, &9]);
    same(seen, &ResourceDescribe { descriptor: 1, resources: vec![2, 3] }, &[&1, &2, &2, &3]);
    same(seen, &MakeGreenContext { context: 1, primary: 2, descriptor: 3, flags: 4 }, &[&1, &2, &3, &4]);
    same(seen, &ContextEvent { context: 1, event: 2 }, &[&1, &2]);

    let missing: Vec<_> = DECLARED.iter().filter(|it| !seen.contains(&it.number)).map(|it| it.name).collect();
    assert_eq!(missing, [""; 0]);
}

#[test]
fn numbers_and_names_are_each_declared_once() {
    let numbers: HashSet<_> = DECLARED.iter().map(|it| it.number).collect();
    let names: HashSet<_> = DECLARED.iter().map(|it| it.name).collect();
    assert_eq!((numbers.len(), names.len()), (DECLARED.len(), DECLARED.len()));
    assert_eq!(declaration(LAUNCH).map(|it| it.name), Some("LAUNCH"));
}

/// Numbers of any size, from random bits, without end.
fn numbers(mut seed: u64) -> impl FnMut() -> u64 {
    move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (seed ^ seed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Small ones as often as large ones.
        mixed >> (mixed % 64)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_command_of_any_content_reads_as_it_was_written(seed in any::<u64>()) {
        for command in DECLARED {
            let mut w = Writer::new();
            (command.sample)(&mut numbers(seed), &mut w);
            prop_assert_eq!(again(command.number, w.bytes()), Some(Ok(w.bytes().to_vec())), "{}", command.name);
            // Neither does it read with a word more, nor with one less, unless it takes what there is.
            if command.number != TENSOR_MAP {
                let mut longer = w.bytes().to_vec();
                longer.extend([0; 8]);
                prop_assert!(again(command.number, &longer).is_some_and(|it| it.is_err()), "{}", command.name);
                if let Some(shorter) = w.bytes().len().checked_sub(8) {
                    prop_assert!(again(command.number, &w.bytes()[..shorter]).is_some_and(|it| it.is_err()));
                }
            }
        }
    }

    #[test]
    fn every_command_of_any_bytes_is_refused_or_reads_as_it_is_written(
        bytes in prop::collection::vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..200),
    ) {
        for command in DECLARED {
            // Bits that mean nothing are gone once it was written.
            if let Some(Ok(once)) = again(command.number, &bytes) {
                prop_assert_eq!(again(command.number, &once), Some(Ok(once.clone())), "{}", command.name);
            }
        }
    }
}
