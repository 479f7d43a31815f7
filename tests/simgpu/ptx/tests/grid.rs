//! Blocks that wait for each other, and for the host.

mod common;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use common::{BASE, Device, Params};
use rekindle_ptx::{Env, Fault, FaultKind, LaunchConfig, Memory, Span, launch};

#[test]
fn cooperative_grids_synchronise() {
    let mut d = Device::with_fixture("grid");
    let n = 512;
    let data = d.upload(&vec![1i32; n]);
    let params = Params::new().with(data).with(n as i32);
    let mut config = LaunchConfig::new([8, 1, 1], [64, 1, 1], params.bytes());
    assert_eq!(d.try_run("stages", &config).unwrap_err().fault.kind, FaultKind::Trap);
    d.write(data, &vec![1i32; n]);
    config.cooperative = true;
    d.try_run("stages", &config).unwrap();
    assert_eq!(d.read::<i32>(data, n), vec![n as i32; n]);
}

#[test]
fn groups_of_threads() {
    let mut d = Device::with_fixture("grid");
    let data: Vec<i32> = (0..96).collect();
    let (input, out) = (d.upload(&data), d.upload(&vec![0i32; 128]));
    d.run("tiles", 1, 96, &Params::new().with(input).with(out));
    let got = d.read::<i32>(out, 128);
    for (tile, sum) in data.chunks(8).map(|tile| tile.iter().sum::<i32>()).enumerate() {
        assert_eq!(got[tile], sum);
    }
    assert_eq!(got[100], 32);
}

#[test]
fn blocks_wait_for_later_ones() {
    let mut d = Device::with_fixture("grid");
    let (flags, out) = (d.upload(&[0i32; 20]), d.upload(&[0i32; 20]));
    d.run("chain", 20, 1, &Params::new().with(flags).with(out));
    assert_eq!(d.read::<i32>(out, 1), [(0..20).sum()]);
}

#[test]
fn kernels_answer_the_host() {
    let mut d = Device::with_fixture("grid");
    let (question, reply) = (d.upload(&[0i32]), d.upload(&[0i32]));
    let host = |addr| {
        let span = d.resolve(addr, true).unwrap();
        // SAFETY: the device's memory lives as long as the test.
        unsafe { AtomicI32::from_ptr(span.host.add((addr - BASE) as usize).cast()) }
    };
    let (question_word, reply_word) = (host(question), host(reply));
    std::thread::scope(|scope| {
        scope.spawn(|| d.run("answer", 1, 1, &Params::new().with(question).with(reply)));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(reply_word.load(Ordering::Relaxed), 0);
        question_word.store(41, Ordering::Relaxed);
        while reply_word.load(Ordering::Relaxed) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(reply_word.load(Ordering::Relaxed), 42);
    });
}

#[test]
fn endless_kernels_can_be_cancelled() {
    let mut d = Device::with_fixture("basic");
    let flag = d.upload(&[0i32]);
    let cancel = AtomicBool::new(false);
    let params = Params::new().with(flag);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let config = LaunchConfig::new([100, 1, 1], [64, 1, 1], params.bytes());
            launch(&d.program, &d.kernel("forever"), &config, &d, &Env::new(&cancel))
        });
        std::thread::sleep(Duration::from_millis(30));
        cancel.store(true, Ordering::Relaxed);
        assert_eq!(run.join().unwrap().unwrap_err().fault.kind, FaultKind::Cancelled);
    });
}

#[test]
fn clocks_go_with_time() {
    let mut d = Device::with_fixture("grid");
    let took = d.alloc(8);
    d.run("delay", 1, 1, &Params::new().with(20_000_000i64).with(took));
    assert!((20_000_000..60_000_000_000).contains(&d.read::<i64>(took, 1)[0]));
}

/// Memory that moves to another place in the host at a safe point.
struct Moving {
    places: [[AtomicI32; 2]; 2],
    turns: AtomicU64,
}

// SAFETY: both places live as long as this does.
unsafe impl Memory for Moving {
    fn resolve(&self, addr: u64, _write: bool) -> Result<Span, Fault> {
        if addr.wrapping_sub(BASE) >= 8 {
            return Err(Fault { kind: FaultKind::Unmapped, addr });
        }
        let place = &self.places[usize::from(self.turns.load(Ordering::Relaxed) > 5)];
        Ok(Span { base: BASE, len: 8, host: place.as_ptr().cast_mut().cast(), writable: true })
    }

    fn safe_point(&self) -> u64 {
        u64::from(self.turns.fetch_add(1, Ordering::Relaxed) >= 5)
    }
}

#[test]
fn memory_may_move_while_a_kernel_runs() {
    let d = Device::with_fixture("grid");
    let new = || AtomicI32::new(0);
    let memory = Moving { places: [[new(), new()], [AtomicI32::new(6), new()]], turns: AtomicU64::new(0) };
    let params = Params::new().with(BASE).with(BASE + 4);
    let config = LaunchConfig::new([1; 3], [1; 3], params.bytes());
    let cancel = AtomicBool::new(false);
    launch(&d.program, &d.kernel("answer"), &config, &memory, &Env::new(&cancel)).unwrap();
    assert_eq!(memory.places[0][1].load(Ordering::Relaxed), 0);
    assert_eq!(memory.places[1][1].load(Ordering::Relaxed), 7);
}

#[test]
fn launches_share_memory() {
    let mut d = Device::with_fixture("basic");
    let n = 20_000;
    let data = d.upload(&vec![1i32; n]);
    let out = d.upload(&[0i32]);
    let params = Params::new().with(data).with(out);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| d.run("warp_sum", n as u32 / 32, 32, &params));
        }
    });
    assert_eq!(d.read::<i32>(out, 1), [2 * n as i32]);
}
