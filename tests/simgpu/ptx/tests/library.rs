//! Block algorithms, ordered atomics, asynchronous copies.

mod common;

use common::{Device, Params};

#[test]
fn block_algorithms() {
    let mut d = Device::with_fixture("library");
    let data: Vec<i32> = (0..512).map(|i| i * 7919 % 1009 - 500).collect();
    let input = d.upload(&data);
    let [sorted, scanned, total] = [0; 3].map(|_| d.alloc(2048));
    let params = Params::new().with(input).with(sorted).with(scanned).with(total);
    d.run("block_algorithms", 1, 128, &params);
    let mut expected = data.clone();
    expected.sort_unstable();
    assert_eq!(d.read::<i32>(sorted, 512), expected);
    let mut sum = 0;
    expected.iter_mut().for_each(|v| {
        sum += *v;
        *v = sum;
    });
    assert_eq!(d.read::<i32>(scanned, 512), expected);
    assert_eq!(d.read::<f64>(total, 1), [f64::from(data[..128].iter().sum::<i32>())]);
}

#[test]
fn groups_reduce_and_scan() {
    let mut d = Device::with_fixture("library");
    let data: Vec<i32> = (0..64).map(|i| i * i % 23).collect();
    let (input, out) = (d.upload(&data), d.alloc(1024));
    d.run("groups", 1, 64, &Params::new().with(input).with(out));
    let got = d.read::<i32>(out, 256);
    for t in 0..64 {
        let warp = &data[t / 32 * 32..][..32];
        assert_eq!(got[t], warp.iter().sum());
        assert_eq!(got[t + 64], warp[..=t % 32].iter().sum());
        let same = warp.iter().filter(|v| *v % 4 == data[t] % 4);
        assert_eq!(got[t + 128], same.clone().count() as i32);
        assert_eq!(Some(&got[t + 192]), same.min());
    }
}

#[test]
fn blocks_take_turns() {
    let mut d = Device::with_fixture("library");
    let (turn, log) = (d.upload(&[0i32]), d.upload(&[0i32; 24]));
    d.run("ordered", 24, 1, &Params::new().with(turn).with(log));
    assert_eq!(d.read::<i32>(log, 24), (0..24).rev().collect::<Vec<_>>());
}

#[test]
fn asynchronous_copies() {
    let mut d = Device::with_fixture("library");
    let data: Vec<i32> = (0..256).map(|i| i * 3).collect();
    let (input, out) = (d.upload(&data), d.alloc(1024));
    d.run("copies", 1, 256, &Params::new().with(input).with(out));
    let reversed: Vec<i32> = data.iter().rev().copied().collect();
    assert_eq!(d.read::<i32>(out, 256), reversed);
    d.run("barriers", 1, 256, &Params::new().with(input).with(out));
    let mut values = reversed;
    for i in 0..3 {
        values = (0..256).map(|t| values[(t + 1) % 256] + i).collect();
    }
    assert_eq!(d.read::<i32>(out, 256), values);
}
