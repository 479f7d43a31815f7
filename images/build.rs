//! Generates the protobuf messages with the pure Rust compiler, so that a build needs no `protoc`.

fn main() {
    println!("cargo::rerun-if-changed=proto/image.proto");
    protobuf_codegen::Codegen::new()
        .pure()
        .include("proto")
        .input("proto/image.proto")
        .customize(protobuf_codegen::Customize::default().lite_runtime(true))
        .cargo_out_dir("proto")
        .run_from_script();
}
