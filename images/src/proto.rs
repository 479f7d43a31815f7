//! The messages of `proto/image.proto`, generated.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "the compiler of protobuf writes this code"
)]

include!(concat!(env!("OUT_DIR"), "/proto/mod.rs"));
