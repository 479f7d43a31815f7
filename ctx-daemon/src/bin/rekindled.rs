//! The `rekindled` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    rekindled::main()
}
