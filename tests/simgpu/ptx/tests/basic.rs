//! Everyday kernels.

mod common;

use common::{Device, Params};
use rekindle_ptx::{FaultKind, LaunchConfig};

#[test]
fn vectors_are_added() {
    let mut d = Device::with_fixture("basic");
    let n = 1000;
    let a: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let b: Vec<f32> = (0..n).map(|i| 1.0 / (i + 1) as f32).collect();
    let (pa, pb, pc) = (d.upload(&a), d.upload(&b), d.alloc(n * 4));
    d.run("vector_add", 8, 128, &Params::new().with(pa).with(pb).with(pc).with(n as i32));
    let sum: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(d.read::<f32>(pc, n), sum);
}

#[test]
fn blocks_reduce() {
    let mut d = Device::with_fixture("basic");
    let data: Vec<i32> = (0..10_000).map(|i| i * 7 % 1001 - 300).collect();
    let (input, out) = (d.upload(&data), d.upload(&[0i32]));
    d.run("reduce", 5, 256, &Params::new().with(input).with(out).with(10_000i32));
    assert_eq!(d.read::<i32>(out, 1)[0], data.iter().sum());
}

#[test]
fn dynamic_shared_memory() {
    let mut d = Device::with_fixture("basic");
    let data: Vec<i32> = (0..200).collect();
    let at = d.upload(&data);
    let params = Params::new().with(at);
    let mut config = LaunchConfig::new([2, 1, 1], [100, 1, 1], params.bytes());
    config.dynamic_shared = 400;
    d.try_run("reverse", &config).unwrap();
    let reversed: Vec<i32> = (0..100).rev().chain((100..200).rev()).collect();
    assert_eq!(d.read::<i32>(at, 200), reversed);
    config.dynamic_shared = 100;
    let fault = d.try_run("reverse", &config).unwrap_err();
    assert_eq!(fault.fault.kind, FaultKind::Unmapped);
    assert_eq!(fault.thread, [25, 0, 0]);
}

#[test]
fn warps_shuffle_and_vote() {
    let mut d = Device::with_fixture("basic");
    let data: Vec<i32> = (0..256).map(|i| i * i).collect();
    let (input, out) = (d.upload(&data), d.upload(&[0i32]));
    d.run("warp_sum", 2, 128, &Params::new().with(input).with(out));
    assert_eq!(d.read::<i32>(out, 1)[0], data.iter().sum());

    let [butterfly, prefix, first, votes] = [0; 4].map(|_| d.alloc(64 * 4));
    d.run("warp_moves", 1, 64, &Params::new().with(butterfly).with(prefix).with(first).with(votes));
    let value = |t: usize| t as i32 * 3 + 1;
    for t in 0..64 {
        let half = t / 16 * 16;
        let warp = t / 32 * 32;
        assert_eq!(d.read::<i32>(butterfly, 64)[t], (half..half + 16).map(value).sum());
        assert_eq!(d.read::<i32>(prefix, 64)[t], (warp..=t).map(value).sum());
        assert_eq!(d.read::<i32>(first, 64)[t], value(half + 8));
        let lanes = |f: &dyn Fn(usize) -> bool| (0..32).fold(0u32, |m, l| m | u32::from(f(warp + l)) << l);
        let ballot = lanes(&|t| value(t) % 2 != 0);
        let same = lanes(&|u| value(u) % 5 == value(t) % 5);
        let any = u32::from(warp == 0) << 4;
        assert_eq!(d.read::<u32>(votes, 64)[t], ballot ^ same ^ u32::MAX ^ 1 ^ 1 ^ any);
    }
}

#[test]
fn lanes_that_parted_shuffle_among_themselves() {
    let mut d = Device::with_fixture("basic");
    let out = d.alloc(32 * 4);
    d.run("divergent_shuffle", 1, 32, &Params::new().with(out));
    let got = d.read::<i32>(out, 32);
    for lane in 0..32 {
        let expected = match lane {
            15 => 150,
            0..15 => (lane + 1) * 10,
            16 => 1600,
            _ => (lane - 1) * 100,
        };
        assert_eq!(got[lane as usize], expected + 32, "lane {lane}");
    }
}

#[test]
fn atomics_of_all_kinds() {
    let mut d = Device::with_fixture("basic");
    let i = d.upload(&[0i32, 0, 100, -1]);
    let u = d.upload(&[u32::MAX, 0, 0, 0, 0, 3, 1000]);
    let l = d.upload(&[0u64, 0, 0]);
    let f = d.upload(&[0f32]);
    let e = d.upload(&[0f64]);
    d.run("atomics", 2, 100, &Params::new().with(i).with(u).with(l).with(f).with(e));
    let sum = 199 * 200 / 2;
    assert_eq!(d.read::<i32>(i, 4), [sum, -sum, 5 - 199, 199]);
    let xor = (0..200).fold(0, |a, b| a ^ b);
    assert_eq!(d.read::<u32>(u, 7), [0, 0xffff, xor, 0, 0, 200, 3]);
    assert_eq!(d.read::<u64>(l, 3), [200 << 32, 199 << 33, 77]);
    assert_eq!(d.read::<f32>(f, 1), [100.0]);
    assert_eq!(d.read::<f64>(e, 1), [50.0]);
}

#[test]
fn histograms_in_shared_memory() {
    let mut d = Device::with_fixture("basic");
    let data: Vec<u8> = (0..5000u32).map(|i| (i * i % 251) as u8).collect();
    let (input, out) = (d.upload(&data), d.alloc(64 * 4));
    d.run("shared_histogram", 1, 96, &Params::new().with(input).with(out).with(5000i32));
    let mut bins = vec![0u32; 64];
    data.iter().for_each(|b| bins[usize::from(b % 64)] += 1);
    assert_eq!(d.read::<u32>(out, 64), bins);
}

#[test]
fn structures_by_value() {
    let mut d = Device::with_fixture("basic");
    let data: Vec<f32> = (0..40).map(|i| i as f32).collect();
    let (input, out) = (d.upload(&data), d.alloc(40 * 8));
    let params = Params::new().with(1.5f32).with(0.25f64).with(b'-').with(input).with(out);
    d.run("by_value", 1, 40, &params);
    let expected: Vec<f64> = data.iter().map(|&x| -(f64::from(x * 1.5) + 0.25)).collect();
    assert_eq!(d.read::<f64>(out, 40), expected);
}

#[test]
fn lanes_wait_for_each_other() {
    let mut d = Device::with_fixture("basic");
    let (lock, counter) = (d.upload(&[0i32]), d.upload(&[0i32]));
    d.run("spin_lock", 4, 70, &Params::new().with(lock).with(counter));
    assert_eq!(d.read::<i32>(counter, 1), [280]);
    let (flag, out) = (d.upload(&[0i32]), d.upload(&[0i32; 2]));
    d.run("wait_for_lane", 1, 32, &Params::new().with(flag).with(out));
    assert_eq!(d.read::<i32>(out, 2), [1, 1]);
}

#[test]
fn barriers_reduce() {
    let mut d = Device::with_fixture("basic");
    let out = d.alloc(12);
    d.run("votes_of_block", 1, 333, &Params::new().with(out));
    assert_eq!(d.read::<i32>(out, 3), [166, 1, 1]);
}

#[test]
fn faults_are_told() {
    let mut d = Device::with_fixture("basic");
    let at = d.alloc(64);
    let kind = |kernel: &str, params: &Params| {
        let config = LaunchConfig::new([1, 1, 1], [32, 1, 1], params.bytes());
        d.try_run(kernel, &config).unwrap_err()
    };
    let fault = kind("out_of_bounds", &Params::new().with(at).with(1i64 << 40));
    assert_eq!(fault.fault.kind, FaultKind::Unmapped);
    assert_eq!(fault.fault.addr, at + (4 << 40));
    assert_eq!(kind("misaligned", &Params::new().with(at)).fault.kind, FaultKind::Misaligned);
    let fault = kind("traps", &Params::new());
    assert_eq!((fault.fault.kind, fault.thread), (FaultKind::Trap, [5, 0, 0]));
    assert!(matches!(kind("traps", &Params::new()).line, 1..));
    let fault = kind("out_of_bounds", &Params::new());
    assert!(matches!(fault.fault.kind, FaultKind::InvalidLaunch(_)));
}

#[test]
fn bytes_and_shorts() {
    let mut d = Device::with_fixture("basic");
    let a: Vec<i8> = (0..64).map(|i| (i * 5 - 100) as i8).collect();
    let b: Vec<u16> = (0..64).map(|i| (i * 1021) as u16).collect();
    let (pa, pb, pc, pd) = (d.upload(&a), d.upload(&b), d.alloc(128), d.alloc(64));
    d.run("bytes_and_shorts", 1, 64, &Params::new().with(pa).with(pb).with(pc).with(pd));
    let c: Vec<i16> = a.iter().zip(&b).map(|(&a, &b)| (i32::from(a) * 2 + i32::from(b as i16)) as i16).collect();
    let e: Vec<u8> = a.iter().zip(&b).map(|(&a, &b)| (a >> 1) as u8 ^ (b >> 8) as u8).collect();
    assert_eq!(d.read::<i16>(pc, 64), c);
    assert_eq!(d.read::<u8>(pd, 64), e);
}

#[test]
fn vector_types() {
    let mut d = Device::with_fixture("basic");
    let floats: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let bytes: Vec<u8> = (0..128).map(|i| (i * 3) as u8).collect();
    let (a, b) = (d.upload(&floats), d.upload(&bytes));
    let (c, e, f) = (d.alloc(512), d.alloc(128), d.alloc(512));
    d.run("vectors", 1, 32, &Params::new().with(a).with(c).with(b).with(e).with(f));
    for (i, (from, to)) in floats.chunks(4).zip(d.read::<f32>(c, 128).chunks(4)).enumerate() {
        assert_eq!(to, [from[3], from[2], from[1], from[0]]);
        let of: Vec<i16> = bytes[i * 4..][..4].iter().map(|&b| i16::from(b)).collect();
        assert_eq!(d.read::<i16>(e + i as u64 * 4, 2), [of[0] + of[1], of[2] - of[3]]);
        assert_eq!(d.read::<f64>(f + i as u64 * 16, 2), [f64::from(from[0]), f64::from(from[1])]);
    }
}
