//! The context daemon and its workers.

fn main() {}
