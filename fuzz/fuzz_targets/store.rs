//! The body of a manifest in a store, as JSON.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| rekindle_stores::fuzz_body(data));
