//! The `rekindle-oci-hook` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    rekindle_oci_hook::main()
}
