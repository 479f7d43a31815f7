//! Code that compilers make of C++ functions, objects and variables.

mod common;

use common::{Device, Params};
use rekindle_ptx::{FaultKind, LaunchConfig, Module};

#[allow(clippy::unwrap_used, reason = "only tests use this")]
fn fixture(name: &str) -> String {
    let path = format!("{}/tests/fixtures/{name}.ptx", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn variables_of_the_module() {
    let mut d = Device::with_fixture("language");
    let offset = d.program.address("offset").unwrap();
    d.write(offset, &[10i32]);
    let (out, ints) = (d.alloc(32), d.alloc(32));
    d.run("constants", 1, 8, &Params::new().with(out).with(ints));
    assert_eq!(d.read::<f32>(out, 8), [10., 20., 30., 40., 10., 20., 30., 40.]);
    assert_eq!(d.read::<i32>(ints, 8), [2, 4, 6, 2, 4, 6, 2, 4]);
    let counter = d.program.address("counter").unwrap();
    assert_eq!(d.read::<i32>(counter, 1), [15]);
}

#[test]
fn functions_by_address() {
    let mut d = Device::with_fixture("language");
    let out = d.alloc(64 * 4);
    d.run("pointers", 1, 64, &Params::new().with(out));
    let expected: Vec<i32> =
        (0..64).map(|t| if t % 2 == 0 { 2 * t + i32::from(b'd') } else { t * t + 1 + i32::from(b's') }).collect();
    assert_eq!(d.read::<i32>(out, 64), expected);
    let chosen = d.program.address("chosen").unwrap();
    d.run("pointer_argument", 1, 64, &Params::new().with(chosen).with(out));
    let squares: Vec<i32> = (1..=64).map(|t| t * t).collect();
    assert_eq!(d.read::<i32>(out, 64), squares);
    d.write(chosen, &[1234u64]);
    let params = Params::new().with(chosen).with(out);
    let config = LaunchConfig::new([1; 3], [32, 1, 1], params.bytes());
    let fault = d.try_run("pointer_argument", &config).unwrap_err();
    assert_eq!((fault.fault.kind, fault.fault.addr), (FaultKind::BadCall, 1234));
}

#[test]
fn virtual_functions() {
    let mut d = Device::with_fixture("language");
    let out = d.alloc(48 * 4);
    d.run("virtuals", 1, 48, &Params::new().with(out));
    let expected: Vec<f32> = (0..48)
        .map(|t| {
            let grown = t % 4;
            if t % 3 == 0 {
                let radius = t as f32 * 2f32.powi(grown);
                3.0 * radius * radius
            } else {
                let side = (t + 2 * grown) as f32;
                side * side
            }
        })
        .collect();
    assert_eq!(d.read::<f32>(out, 48), expected);
}

#[test]
fn recursion() {
    fn fibonacci(n: i32) -> i32 {
        if n < 2 { n } else { fibonacci(n - 1) + fibonacci(n - 2) }
    }
    let mut d = Device::with_fixture("language");
    let out = d.alloc(64 * 4);
    d.run("recursion", 1, 64, &Params::new().with(out));
    let expected: Vec<i32> = (0..64).map(|t| fibonacci(t % 12) * 2 + (t + 1) % 2).collect();
    assert_eq!(d.read::<i32>(out, 64), expected);
    let params = Params::new().with(out);
    let config = LaunchConfig::new([1; 3], [1; 3], params.bytes());
    assert_eq!(d.try_run("endless", &config).unwrap_err().fault.kind, FaultKind::StackOverflow);
}

#[test]
fn structures_go_in_and_out_of_functions() {
    let mut d = Device::with_fixture("language");
    let (out, last) = (d.alloc(32 * 36), d.alloc(32 * 8));
    let values: Vec<i32> = (0..9).map(|i| i * 11).collect();
    let mut params = Params::new();
    for &value in &values {
        params = params.with(value);
    }
    d.run("structures", 1, 32, &params.with(2.5f64).with(out).with(last));
    let (got, lasts) = (d.read::<i32>(out, 32 * 9), d.read::<f64>(last, 32));
    for t in 0..32 {
        for i in 0..9 {
            assert_eq!(got[t * 9 + (i + t) % 9], values[i]);
        }
        assert_eq!(lasts[t], 2.5 * t as f64);
    }
}

#[test]
fn templates() {
    let mut d = Device::with_fixture("language");
    let ints = d.upload(&(0..32).map(|i| i * 3 - 40).collect::<Vec<i32>>());
    let doubles = d.upload(&(0..32).map(|i| f64::from(i) * 0.3).collect::<Vec<f64>>());
    let longs = d.upload(&(0..32).map(|i| i * 1_000_003).collect::<Vec<u64>>());
    d.run("_Z6powersIiEvPT_", 1, 32, &Params::new().with(ints));
    d.run("_Z6powersIdEvPT_", 1, 32, &Params::new().with(doubles));
    d.run("_Z6powersIyEvPT_", 1, 32, &Params::new().with(longs));
    assert_eq!(d.read::<i32>(ints, 32), (0..32).map(|i| (i * 3 - 40i32).wrapping_pow(5)).collect::<Vec<_>>());
    for (i, got) in d.read::<f64>(doubles, 32).into_iter().enumerate() {
        let x = i as f64 * 0.3;
        assert_eq!(got, x * x * x * x * x);
    }
    assert_eq!(d.read::<u64>(longs, 32), (0..32u64).map(|i| (i * 1_000_003).wrapping_pow(5)).collect::<Vec<_>>());
}

#[test]
fn local_arrays() {
    let mut d = Device::with_fixture("language");
    let data: Vec<i32> = (0..40).map(|i| i * i % 53).collect();
    let (input, out) = (d.upload(&data), d.alloc(32 * 4));
    d.run("local_arrays", 1, 32, &Params::new().with(input).with(out).with(40i32));
    let expected: Vec<i32> = (0..32)
        .map(|t| {
            let mut stack: Vec<i32> = Vec::new();
            for v in data.iter().map(|v| v + t) {
                while stack.last().is_some_and(|&top| top % 7 < v % 7) {
                    stack.pop();
                }
                stack.push(v);
            }
            stack.iter().rev().fold(0i32, |sum, &v| sum.wrapping_mul(31).wrapping_add(v))
        })
        .collect();
    assert_eq!(d.read::<i32>(out, 32), expected);
}

#[test]
fn branch_tables() {
    let mut d = Device::with_fixture("language");
    let data: Vec<i32> = (0..96).map(|i| i * 37 - 900).collect();
    let at = d.upload(&data);
    d.run("choose", 1, 96, &Params::new().with(at));
    let expected: Vec<i32> = data
        .iter()
        .enumerate()
        .map(|(t, &x)| match t % 9 {
            0 => x + 1,
            1 => x * 3,
            2 => x - 5,
            3 => x ^ 0x55,
            4 => x << 2,
            5 => -x,
            6 => x / 3,
            7 => x % 10,
            _ => 0,
        })
        .collect();
    assert_eq!(d.read::<i32>(at, 96), expected);
}

#[test]
fn kernels_speak() {
    let d = Device::with_fixture("language");
    d.run("speaks", 1, 32, &Params::new().with(3i32));
    let said = d.printed.lock().unwrap().clone();
    let mut lines: Vec<&str> = said.lines().collect();
    lines.sort_unstable();
    assert_eq!(
        lines,
        [
            "no arguments",
            "thread 0 of 32:  4.50 text x 0xff00000000 -5%",
            "thread 1 of 32:  4.50 text x 0xff00000000 -5%",
        ]
    );
    let params = Params::new().with(20i32);
    let config = LaunchConfig::new([1; 3], [32, 1, 1], params.bytes());
    let fault = d.try_run("asserts", &config).unwrap_err();
    assert_eq!((fault.fault.kind, fault.thread), (FaultKind::Assert, [20, 0, 0]));
    assert!(d.printed.lock().unwrap().contains("Assertion `n > (int)threadIdx.x` failed"));
}

#[test]
fn the_heap_is_told_of() {
    let module = Module::parse(&fixture("language")).unwrap();
    let reaches = |part: &str| module.kernels().iter().find(|k| k.name.contains(part)).unwrap().reaches_malloc;
    assert!(reaches("9allocates"));
    assert!(!reaches("13allocates_not"));
    assert!(!reaches("8pointers"));
    let mut d = Device::with_fixture("language");
    let out = d.alloc(8);
    let params = Params::new().with(out);
    let config = LaunchConfig::new([1; 3], [1; 3], params.bytes());
    let fault = d.try_run("_Z9allocatesPPi", &config).unwrap_err();
    assert!(matches!(fault.fault.kind, FaultKind::Unsupported(_)));
}

#[test]
fn only_the_kernel_that_cannot_run_is_refused() {
    let mut d = Device::with_fixture("refused");
    let refusal = d.program.supported(&d.kernel("tensor")).unwrap_err().clone();
    assert!(refusal.what.contains("wmma"), "{refusal}");
    let out = d.alloc(4);
    d.run("plain", 1, 1, &Params::new().with(out));
    assert_eq!(d.read::<i32>(out, 1), [42]);
    let params = Params::new().with(out).with(out).with(out);
    let config = LaunchConfig::new([1; 3], [32, 1, 1], params.bytes());
    let fault = d.try_run("tensor", &config).unwrap_err();
    assert_eq!(fault.fault.kind, FaultKind::Unsupported(refusal));
}

#[test]
fn modules_tell_what_a_loader_needs() {
    let module = Module::parse(&fixture("basic")).unwrap();
    assert_eq!((module.version(), module.target()), ("9.0", "sm_75"));
    let by_value = module.kernels().iter().find(|k| k.name.contains("8by_value")).unwrap();
    let places: Vec<(u32, u32)> = by_value.params.iter().map(|p| (p.offset, p.size)).collect();
    assert_eq!(places, [(0, 24), (24, 8), (32, 8)]);
    assert_eq!(by_value.param_bytes, 40);
    let shared = |part: &str| module.kernels().iter().find(|k| k.name.contains(part)).unwrap().shared_bytes;
    assert_eq!((shared("6reduce"), shared("16shared_histogram"), shared("7reverse")), (1024, 256, 0));
}
