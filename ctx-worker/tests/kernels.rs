//! Tests of the kernels that workers load: `build` compiles each `.ptx` from its `.cu`, and `hash.ptx` computes bit for bit the same
//! as `rekindle_images::content`. The software GPU's interpreter executes it here.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "only tests use this")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use rekindle_images::content::{CHUNK, ContentHash, ContentKey, DIGEST, Schedule, THREADS};
use rekindle_ptx::{CODE_WINDOW, Env, Fault, FaultKind, LaunchConfig, Memory, Module, Program, Span, launch};

const BASE: u64 = 0x2000_0000_0000;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")
}

#[test]
fn what_is_committed_is_what_the_script_makes() {
    // Set by scripts/test; other environments may lack the compiler.
    let Some(nvcc) = std::env::var_os("REKINDLE_NVCC") else { return };
    let made = tempfile::tempdir().unwrap();
    let built = Command::new(folder().join("build")).arg(made.path()).env("REKINDLE_NVCC", nvcc).status().unwrap();
    assert!(built.success());
    for name in ["hash.ptx", "heap.ptx"] {
        let same = std::fs::read(made.path().join(name)).unwrap() == std::fs::read(folder().join(name)).unwrap();
        assert!(same, "run ctx-worker/kernels/build, and commit {name}");
    }
}

/// A flat memory with the kernels.
struct Gpu {
    cells: Vec<u128>,
    used: usize,
    program: Program,
}

// SAFETY: nothing is unmapped while the device exists, and kernels only use atomic accesses.
unsafe impl Memory for Gpu {
    fn resolve(&self, addr: u64, _write: bool) -> Result<Span, Fault> {
        if addr.wrapping_sub(BASE) >= self.used as u64 {
            return Err(Fault { kind: FaultKind::Unmapped, addr });
        }
        let host = self.cells.as_ptr().cast::<u8>().cast_mut();
        Ok(Span { base: BASE, len: self.used as u64, host, writable: true })
    }
}

impl Gpu {
    fn new(bytes: usize) -> Self {
        let text = std::fs::read_to_string(folder().join("hash.ptx")).unwrap();
        let program = Module::parse(&text).unwrap().link(CODE_WINDOW, &|_| None).unwrap();
        Self { cells: vec![0; bytes / 16 + 1], used: 0, program }
    }

    fn bytes(&mut self, at: u64, length: usize) -> &mut [u8] {
        let offset = (at - BASE) as usize;
        assert!(offset + length <= self.used);
        // SAFETY: within the cells, and any bytes are cells.
        unsafe { std::slice::from_raw_parts_mut(self.cells.as_mut_ptr().cast::<u8>().add(offset), length) }
    }

    /// Allocates memory at an address with this offset from an alignment of 16.
    fn alloc(&mut self, length: usize, off: usize) -> u64 {
        let at = self.used.next_multiple_of(16) + off;
        self.used = at + length;
        assert!(self.used <= self.cells.len() * 16);
        BASE + at as u64
    }

    fn put(&mut self, bytes: &[u8], off: usize) -> u64 {
        let at = self.alloc(bytes.len(), off);
        self.bytes(at, bytes.len()).copy_from_slice(bytes);
        at
    }

    fn run(&self, kernel: &str, blocks: usize, params: &[u8]) {
        let cancel = AtomicBool::new(false);
        let config = LaunchConfig::new([blocks as u32, 1, 1], [THREADS, 1, 1], params);
        launch(&self.program, kernel, &config, self, &Env::new(&cancel)).unwrap();
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Contents, with the offsets of them and of their copies from an alignment.
type Pieces = Vec<(Vec<u8>, usize, usize)>;

/// Hashes pieces, and copies them if `copy` is set. Returns the hashes and the copies.
fn on_the_gpu(schedule: &Schedule, pieces: &Pieces, copy: bool, blocks: usize) -> (Vec<ContentHash>, Vec<Vec<u8>>) {
    let total: usize = pieces.iter().map(|(content, ..)| content.len()).sum();
    let chunks: usize = pieces.iter().map(|(content, ..)| content.len().div_ceil(CHUNK)).sum();
    let mut gpu = Gpu::new(2 * total + 32768 + chunks * DIGEST + pieces.len() * 192);
    let key = gpu.put(&schedule.bytes(), 0);
    let (mut table, mut first, mut targets) = (Vec::new(), 0, Vec::new());
    for (content, off, target_off) in pieces {
        let source = gpu.put(content, *off);
        let target = gpu.alloc(content.len(), *target_off);
        table.extend(words(&[source, target, content.len() as u64, first]));
        first += content.len().div_ceil(CHUNK) as u64;
        targets.push(target);
    }
    let table = gpu.put(&table, 0);
    let digests = gpu.alloc(chunks * DIGEST, 0);
    let hashes = gpu.alloc(16 * pieces.len(), 0);
    let mut params = schedule.column_bytes();
    params.extend(words(&[key, table, pieces.len() as u64, first, digests]));
    if chunks > 0 {
        gpu.run(if copy { "rekindle_copy_hash" } else { "rekindle_hash" }, blocks, &params);
    }
    gpu.run("rekindle_finish", pieces.len(), &words(&[key, table, digests, hashes]));
    let hashes = gpu.bytes(hashes, 16 * pieces.len()).as_chunks::<16>().0.to_vec();
    let copies = targets.iter().zip(pieces).map(|(at, (content, ..))| gpu.bytes(*at, content.len()).to_vec());
    (hashes.into_iter().map(ContentHash::from_le_bytes).collect(), copies.collect())
}

fn agree(pieces: &Pieces, key: [u8; 16], copy: bool, blocks: usize) {
    let schedule = ContentKey::from_bytes(key).schedule();
    let (hashes, copies) = on_the_gpu(&schedule, pieces, copy, blocks);
    for (i, (content, ..)) in pieces.iter().enumerate() {
        assert_eq!(hashes[i], schedule.hash(content), "piece {i} of {} bytes", content.len());
        assert!(if copy { copies[i] == *content } else { copies[i].iter().all(|b| *b == 0) });
    }
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

#[test]
fn every_size_around_a_boundary_hashes_alike() {
    let sizes = [0, 1, 15, 16, 17, 2047, 2048, 2049, 4 * 2048 - 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 100, 0];
    let pieces: Pieces = sizes.iter().map(|size| (noise(*size, *size as u64 + 5), 0, 0)).collect();
    for (copy, blocks) in [(false, 1), (true, 3), (false, 40)] {
        agree(&pieces, [3; 16], copy, blocks);
    }
    // More columns of digests than threads in the last step.
    agree(&vec![(noise(130 * CHUNK, 9), 0, 0)], [9; 16], true, 7);
}

#[test]
fn every_alignment_hashes_alike() {
    let pieces: Pieces = (0..16).map(|off| (noise(CHUNK + 33, off as u64 + 1), off, (off * 7) % 16)).collect();
    agree(&pieces, [5; 16], true, 4);
}

#[test]
fn bytes_of_all_ones_hash_alike() {
    agree(&vec![(vec![0xff; 2 * CHUNK + 7], 0, 0), (vec![0; CHUNK], 0, 0)], [0xff; 16], false, 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_content_hashes_alike(
        sizes in proptest::collection::vec((0_usize..3 * CHUNK / 2, 0_usize..16, 0_usize..16), 1..4),
        seed: u64, key: [u8; 16], copy: bool, blocks in 1_usize..9,
    ) {
        let pieces = sizes.iter().map(|(size, off, to)| (noise(*size, seed ^ *size as u64), *off, *to)).collect();
        agree(&pieces, key, copy, blocks);
    }
}
