//! The OCI hook that gives a container the interposer.

fn main() {}
