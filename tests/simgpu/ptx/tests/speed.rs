//! A measurement of kernels' speed. Not a test: run it with `--release -- --ignored --nocapture`.

mod common;

use std::time::Instant;

use common::{Device, Params};
use rekindle_ptx::LaunchConfig;

fn timed(what: &str, instructions: f64, run: impl Fn()) {
    run();
    let start = Instant::now();
    run();
    let seconds = start.elapsed().as_secs_f64();
    let millions = instructions / seconds / 1e6;
    println!("{what:24} {:8.2} ms, about {millions:6.0} M thread instructions/s", seconds * 1e3);
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    let mut d = Device::with_fixture("basic");
    let n = 1 << 20;
    let [a, b, c] = [0; 3].map(|_| d.alloc(n * 4));
    let params = Params::new().with(a).with(b).with(c).with(n as i32);
    timed("vector_add", n as f64 * 21.0, || d.run("vector_add", (n / 256) as u32, 256, &params));
    let params = Params::new().with(a).with(b).with(n as i32);
    timed("reduce", n as f64 * 9.0, || d.run("reduce", 64, 256, &params));

    let mut d = Device::with_fixture("integers");
    let n = 256;
    let [a, b, c] = [0; 3].map(|_| d.alloc(n * n * 4));
    let params = Params::new().with(a).with(b).with(c).with(n as i32);
    let config = LaunchConfig::new([16, 16, 1], [16, 16, 1], params.bytes());
    // Each step of 16 has 16 times three instructions, and about twenty around them.
    let instructions = (n * n * n) as f64 * (3.0 + 20.0 / 16.0);
    timed("multiply", instructions, || d.try_run("multiply", &config).unwrap());
    let params = Params::new().with(a).with(7u32);
    timed("random_numbers", 16384.0 * 150.0, || d.run("random_numbers", 64, 256, &params));
    let pixels = 1 << 16;
    let params = Params::new().with(a).with(256i32).with(256i32);
    d.run("mandelbrot", pixels / 256, 256, &params);
    let steps: f64 = d.read::<i32>(a, pixels as usize).iter().map(|&n| f64::from(n)).sum();
    timed("mandelbrot", steps * 11.0, || d.run("mandelbrot", pixels / 256, 256, &params));
    let params = Params::new().with(a).with(1024i32);
    timed("bitonic", 1024.0 * 55.0 * 15.0, || d.run("bitonic", 1, 256, &params));

    let mut d = Device::with_fixture("grid");
    let n = 1 << 15;
    let data = d.upload(&vec![0i32; n]);
    let params = Params::new().with(data).with(n as i32);
    let mut config = LaunchConfig::new([128, 1, 1], [256, 1, 1], params.bytes());
    config.cooperative = true;
    // The launch has thirty barriers of the whole grid.
    timed("stages", (n * 15 * 60) as f64, || d.try_run("stages", &config).unwrap());
    let none = Params::new().with(d.alloc(8)).with(d.alloc(8));
    let start = Instant::now();
    (0..1000).for_each(|_| d.run("answer_at_once", 1, 256, &none));
    println!("an empty launch takes {:.1} us", start.elapsed().as_secs_f64() * 1e3);
}
