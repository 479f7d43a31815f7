//! An archive of a container, as podman exports it.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rekindle_stores::fuzz_archive(data));
