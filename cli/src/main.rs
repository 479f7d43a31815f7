//! The rekindle command line.

fn main() {}
