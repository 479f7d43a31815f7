//! The programs of `tests/apps` have the same output on the software GPU as on a real one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::fs;

use support::{compile, on_simgpu, output, root};

fn prints_as_expected(name: &str) {
    let apps = root().join("tests/apps");
    let program = compile(&apps.join(format!("{name}.cu")), &["-O2"]);
    let expected = fs::read_to_string(apps.join("expected").join(format!("{name}.txt"))).unwrap();
    assert_eq!(output(&mut on_simgpu(&program)), expected);
}

macro_rules! apps {
    ($($name:ident)*) => { $(#[test] fn $name() { prints_as_expected(stringify!($name)); })* };
}

apps! { bad firstkernel forkreg globals mapped memory modules peers pools registered streams4 tree twodev }
