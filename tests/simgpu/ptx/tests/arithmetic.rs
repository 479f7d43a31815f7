//! Integers, floating point numbers and conversions, compared with the host's.

mod common;

use common::{Device, Params};
use rekindle_ptx::LaunchConfig;

/// Pseudo-random numbers, and some at the edges.
fn words(count: usize) -> Vec<u32> {
    let edges = [0, 1, 2, 31, 32, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 0x8080_8080, 255];
    let mut state = 12345u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state ^ state >> 13
    };
    (0..count).map(|i| edges.get(i).copied().unwrap_or_else(&mut next)).collect()
}

fn longs(count: usize) -> Vec<u64> {
    let words = words(count + 7);
    let mix = |i: usize| u64::from(words[i + 7]) << 32 | u64::from(words[i]);
    (0..count).map(mix).collect()
}

fn singles(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 - count as f32 / 2.0) * 0.37 + 0.013).collect()
}

fn doubles(count: usize) -> Vec<f64> {
    (0..count).map(|i| (i as f64 - count as f64 / 2.0) * 0.37 + 0.013).collect()
}

#[test]
fn integers_of_32_bits() {
    let mut d = Device::with_fixture("integers");
    let input = words(257);
    let (at, out) = (d.upload(&input), d.alloc(256 * 24 * 4));
    d.run("words", 1, 256, &Params::new().with(at).with(out));
    let got = d.read::<u32>(out, 256 * 24);
    for t in 0..256 {
        let (a, b) = (input[t], input[t + 1]);
        let (ia, ib) = (a as i32, b as i32);
        let divisor = b | 1;
        let bytes = |x: u32| x.to_le_bytes();
        let dot: i32 =
            (0..4).map(|k| i32::from(bytes(a)[k] as i8) * i32::from(bytes(b)[k] as i8)).fold(100, i32::wrapping_add);
        let wide = |a: u32, b: u32| u64::from(a) << 32 | u64::from(b);
        let expected = [
            a.count_ones(),
            a.leading_zeros(),
            if a == 0 { 0 } else { a.trailing_zeros() + 1 },
            a.reverse_bits(),
            u32::from_le_bytes([bytes(a)[0], bytes(b)[0], bytes(a)[1], bytes(b)[1]]),
            ((u64::from(a) * u64::from(b)) >> 32) as u32,
            ((i64::from(ia) * i64::from(ib)) >> 32) as u32,
            (wide(b, a) << 13 >> 32) as u32,
            (wide(b, a) >> 13) as u32,
            a / divisor,
            a % divisor,
            ia.wrapping_div(divisor as i32) as u32,
            ia.wrapping_rem(divisor as i32) as u32,
            (ia >> (b % 32)) as u32,
            a << (b % 32),
            ia.abs_diff(ib).wrapping_add(7),
            dot as u32,
            a.abs_diff(b).wrapping_add(1),
            ia.min(ib) as u32,
            a.max(b),
            u32::from_le_bytes(std::array::from_fn(|k| bytes(a)[k].wrapping_add(bytes(b)[k]))),
            ((i64::from(ia) + i64::from(ib) + 1) >> 1) as u32,
            (a & b) ^ (a | !b),
            ia.unsigned_abs(),
        ];
        assert_eq!(got[t * 24..][..24], expected, "{a:#x} {b:#x}");
    }
}

#[test]
fn integers_of_64_bits() {
    let mut d = Device::with_fixture("integers");
    let input = longs(258);
    let (at, out) = (d.upload(&input), d.alloc(256 * 14 * 8));
    d.run("longs", 1, 256, &Params::new().with(at).with(out));
    let got = d.read::<u64>(out, 256 * 14);
    for t in 0..256 {
        let (a, b) = (input[t], input[t + 1]);
        let (ia, divisor) = (a as i64, b | 1);
        let expected = [
            a.wrapping_add(b),
            a.wrapping_sub(b),
            a.wrapping_mul(b),
            a / divisor,
            a % divisor,
            ia.wrapping_div(divisor as i64) as u64,
            ia.wrapping_rem(divisor as i64) as u64,
            ((u128::from(a) * u128::from(b)) >> 64) as u64,
            ((i128::from(ia) * i128::from(b as i64)) >> 64) as u64,
            u64::from(a.count_ones()),
            u64::from(a.leading_zeros()),
            a.reverse_bits(),
            (ia >> (b % 64)) as u64,
            a << (b % 64),
        ];
        assert_eq!(got[t * 14..][..14], expected, "{a:#x} {b:#x}");
    }
}

#[test]
fn integers_of_128_bits() {
    let mut d = Device::with_fixture("integers");
    let input = longs(130);
    let (at, out) = (d.upload(&input), d.alloc(128 * 32));
    d.run("wide", 1, 128, &Params::new().with(at).with(out));
    let got = d.read::<u64>(out, 128 * 4);
    for t in 0..128 {
        let a = u128::from(input[t]) << 64 | u128::from(input[t + 1]);
        let b = u128::from(input[t + 2]);
        let sum = a.wrapping_add(b * 3).wrapping_sub(b << 7);
        let product = a.wrapping_mul(b);
        let expected = [sum as u64, (sum >> 64) as u64, product as u64, (product >> 64) as u64];
        assert_eq!(got[t * 4..][..4], expected);
    }
}

#[test]
fn random_numbers() {
    fn philox(mut c: [u32; 4], mut k: [u32; 2]) -> [u32; 4] {
        for _ in 0..10 {
            let (p, q) = (0xD251_1F53u64 * u64::from(c[0]), 0xCD9E_8D57u64 * u64::from(c[2]));
            c = [(q >> 32) as u32 ^ c[1] ^ k[0], q as u32, (p >> 32) as u32 ^ c[3] ^ k[1], p as u32];
            k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
        }
        c
    }
    let hash = |mut x: u32| {
        x ^= x >> 16;
        x = x.wrapping_mul(0x7feb_352d);
        x ^= x >> 15;
        x = x.wrapping_mul(0x846c_a68b);
        x ^ x >> 16
    };
    let mut d = Device::with_fixture("integers");
    let out = d.alloc(512 * 16);
    d.run("random_numbers", 4, 128, &Params::new().with(out).with(99u32));
    for (i, four) in d.read::<u32>(out, 2048).chunks(4).enumerate() {
        assert_eq!(four, philox([i as u32, 0, 0, 0], [99, hash(99)]));
    }
}

#[test]
fn sorting() {
    let mut d = Device::with_fixture("integers");
    let mut data: Vec<i32> = words(1024).into_iter().map(|w| w as i32).collect();
    let at = d.upload(&data);
    d.run("bitonic", 1, 256, &Params::new().with(at).with(1024i32));
    data.sort_unstable();
    assert_eq!(d.read::<i32>(at, 1024), data);
}

#[test]
fn products_of_matrices() {
    let mut d = Device::with_fixture("integers");
    let n = 48;
    let (a, b) = (singles(n * n), singles(n * n).into_iter().rev().collect::<Vec<_>>());
    let (pa, pb, pc) = (d.upload(&a), d.upload(&b), d.alloc(n * n * 4));
    let params = Params::new().with(pa).with(pb).with(pc).with(n as i32);
    let config = LaunchConfig::new([3, 3, 1], [16, 16, 1], params.bytes());
    d.try_run("multiply", &config).unwrap();
    let got = d.read::<f32>(pc, n * n);
    for row in 0..n {
        for column in 0..n {
            let sum = (0..n).fold(0f32, |sum, k| a[row * n + k].mul_add(b[k * n + column], sum));
            assert_eq!(got[row * n + column], sum);
        }
    }
}

/// The error function, by its series.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

fn close(got: f64, expected: f64, relative: f64, what: &str) {
    let error = (got - expected).abs();
    assert!(error <= relative * expected.abs().max(1e-3), "{what}: {got} instead of {expected}");
}

#[test]
fn functions_of_singles() {
    let mut d = Device::with_fixture("math");
    let input = singles(256);
    let (at, out) = (d.upload(&input), d.alloc(256 * 24 * 4));
    d.run("singles", 1, 256, &Params::new().with(at).with(out));
    let got = d.read::<f32>(out, 256 * 24);
    for (t, &single) in input.iter().enumerate() {
        let x = f64::from(single);
        let a = x.abs();
        let expected = [
            x.sin(),
            x.cos(),
            x.tan(),
            x.exp(),
            (a + 1e-3).ln(),
            a.sqrt(),
            1.0 / (a + 1.0).sqrt(),
            1.0 / (x + 100.0),
            erf(x),
            a.powf(1.5),
            x.tanh(),
            x.cbrt(),
            x.atan2(2.0),
            x % 3.0,
            x.floor(),
            x.ceil(),
            x.round_ties_even(),
            x.trunc(),
            a.ln_1p(),
            (x / 8.0).exp2(),
            x.hypot(3.0),
            x.min(1.0),
            3f64.copysign(x),
            x / 7.0,
        ];
        for (k, &value) in expected.iter().enumerate() {
            close(f64::from(got[t * 24 + k]), value, 2e-6, &format!("function {k} of {x}"));
        }
        assert_eq!(got[t * 24 + 5], single.abs().sqrt());
        assert_eq!(got[t * 24 + 23], single / 7.0);
    }
}

#[test]
fn functions_of_doubles() {
    let mut d = Device::with_fixture("math");
    let input = doubles(256);
    let (at, out) = (d.upload(&input), d.alloc(256 * 20 * 8));
    d.run("doubles", 1, 256, &Params::new().with(at).with(out));
    let got = d.read::<f64>(out, 256 * 20);
    for (t, &x) in input.iter().enumerate() {
        let a = x.abs();
        let expected = [
            x.sin(),
            x.cos(),
            x.tan(),
            x.exp(),
            (a + 1e-3).ln(),
            a.sqrt(),
            1.0 / (a + 1.0).sqrt(),
            1.0 / (x + 100.0),
            f64::NAN,
            a.powf(1.5),
            x.tanh(),
            x.cbrt(),
            x.atan2(2.0),
            x % 3.0,
            x.floor(),
            x.round_ties_even(),
            a.ln_1p(),
            x.hypot(3.0),
            x / 7.0,
        ];
        for (k, &value) in expected.iter().enumerate().filter(|(_, v)| !v.is_nan()) {
            close(got[t * 20 + k], value, 1e-14, &format!("function {k} of {x}"));
        }
        // The series loses digits where its terms are large.
        close(got[t * 20 + 8], erf(x), if a < 3.0 { 1e-12 } else { 1e-5 }, "erf");
        assert_eq!(got[t * 20 + 5], a.sqrt());
        assert_eq!(got[t * 20 + 18], x / 7.0);
    }
}

#[test]
fn fast_functions() {
    let mut d = Device::with_fixture("math");
    let input = singles(64);
    let (at, out) = (d.upload(&input), d.alloc(64 * 24));
    d.run("fast", 1, 64, &Params::new().with(at).with(out));
    let got = d.read::<f32>(out, 64 * 6);
    for (t, &x) in input.iter().enumerate() {
        let expected = [x.sin(), x.exp(), (x.abs() + 1.0).ln(), x / 3.0, 1.0 / (x + 50.0), x.clamp(0.0, 1.0)];
        for (k, &value) in expected.iter().enumerate() {
            close(f64::from(got[t * 6 + k]), f64::from(value), 1e-5, &format!("function {k} of {x}"));
        }
    }
}

#[test]
fn directed_rounding() {
    let mut d = Device::with_fixture("math");
    let (single, double) = (singles(65), doubles(65));
    let (a, b) = (d.upload(&single), d.upload(&double));
    let (out, wide) = (d.alloc(64 * 48), d.alloc(64 * 80));
    d.run("rounding", 1, 64, &Params::new().with(a).with(b).with(out).with(wide));
    let (got, gotten) = (d.read::<f32>(out, 64 * 12), d.read::<f64>(wide, 64 * 10));
    for t in 0..64 {
        let (x, y) = (f64::from(single[t]), f64::from(single[t + 1]));
        // In double precision these are exact, or nearly so.
        let exact = [x + y, x * y, x.mul_add(y, x), x / y, x.abs().sqrt(), double[t]];
        for (k, &value) in exact.iter().enumerate() {
            let (up, down) = (got[t * 12 + 2 * k], got[t * 12 + 2 * k + 1]);
            assert!(f64::from(down) <= value && value <= f64::from(up), "{k}: {down} {value} {up}");
            assert!(up == down || down.next_up() == up, "{k}: {down} {up}");
        }
        let (u, v) = (double[t], double[t + 1]);
        let nearest = [u + v, u * v, u.mul_add(v, u), u / v, u.abs().sqrt()];
        for (k, &value) in nearest.iter().enumerate() {
            let (up, down) = (gotten[t * 10 + 2 * k], gotten[t * 10 + 2 * k + 1]);
            assert!(value == up || value == down, "{k}: {down} {value} {up}");
            assert!(up == down || down.next_up() == up, "{k}: {down} {up}");
        }
    }
}

#[test]
fn conversions() {
    let mut d = Device::with_fixture("math");
    let mut input = doubles(96);
    input.extend([0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9, 3e9, -3e9, 1e19, -1e19, 1e300, f64::NAN, f64::INFINITY]);
    let n = input.len();
    let (at, out) = (d.upload(&input), d.upload(&vec![0i64; n * 16]));
    d.run("conversions", 1, n as u32, &Params::new().with(at).with(out));
    let got = d.read::<i64>(out, n * 16);
    for (t, &x) in input.iter().enumerate() {
        let f = x as f32;
        let row = &got[t * 16..][..16];
        let name = format!("{x}");
        assert_eq!(row[0], i64::from(x as i32), "{name}");
        assert_eq!(row[1], i64::from(f as u32), "{name}");
        if !x.is_nan() {
            assert_eq!(row[2], x as i64, "{name}");
            assert_eq!(row[3], x.abs() as u64 as i64, "{name}");
            assert_eq!(row[9], x.round_ties_even() as i64, "{name}");
        }
        assert_eq!(row[5], i64::from(x as i32 as u8), "{name}");
        assert_eq!(row[6], i64::from(f.round_ties_even() as i32), "{name}");
        assert_eq!(row[7], i64::from(f.ceil() as i32), "{name}");
        assert_eq!(row[8], i64::from(f.floor() as i32), "{name}");
        assert_eq!(row[10], i64::from((x as i32 as f32).to_bits() as i32), "{name}");
        if x.abs() < 1e12 {
            assert_eq!(row[11] as u64, ((x * 1e6) as i64 as f64).to_bits(), "{name}");
            assert_eq!(row[12] as i32 as u32, ((x.abs() * 1e12) as u64 as f32).to_bits(), "{name}");
        }
        assert_eq!(row[13], i64::from(x as i32 as i8), "{name}");
    }
}

#[test]
fn numbers_of_16_bits() {
    let mut d = Device::with_fixture("half");
    let input: Vec<f32> = (0..65).map(|i| (i as f32 - 31.5) * 0.75).collect();
    let (at, out) = (d.upload(&input), d.alloc(64 * 40));
    d.run("halves", 1, 64, &Params::new().with(at).with(out));
    let got = d.read::<f32>(out, 640);
    for t in 0..64 {
        // These inputs are exact in half precision, results are within its half a step.
        let (a, b) = (input[t], input[t + 1]);
        let expected = [
            a + b,
            a * b,
            a.mul_add(b, a),
            a / b,
            f32::from(u8::from(a < b)),
            a.mul_add(b, a),
            2f32.mul_add(b, 2.0),
            a.abs().sqrt(),
            a.round_ties_even(),
            -a,
        ];
        for (k, &value) in expected.iter().enumerate() {
            close(f64::from(got[t * 10 + k]), f64::from(value), 0.001, &format!("{k} of {a} {b}"));
        }
    }
    d.run("brains", 1, 64, &Params::new().with(at).with(out));
    let got = d.read::<f32>(out, 256);
    for t in 0..64 {
        let (a, b) = (input[t], input[t + 1]);
        let expected = [a + b, a * b, f32::from(u8::from(a > b)), a.max(b)];
        for (k, &value) in expected.iter().enumerate() {
            close(f64::from(got[t * 4 + k]), f64::from(value), 0.005, &format!("{k} of {a} {b}"));
        }
    }
}
