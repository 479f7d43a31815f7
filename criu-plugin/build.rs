//! How the plugin is linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // CRIU closes its plugins before it resumes or kills the tasks; what Rust keeps for threads must stay mapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Not a reason for CRIU to refuse every dump on the host: a symbol is missed when it is called, not when it loads.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,lazy");
    // For the test that plays CRIU: the plugin finds CRIU's symbols in the program that has loaded it.
    println!("cargo:rustc-link-arg-tests=-rdynamic");
}
