//! The `rekindle` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    rekindle::main()
}
