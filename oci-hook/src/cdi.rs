//! The CDI specification, which defines `--device rekindle.dev/gpu=0` for podman, Docker, containerd and CRI-O.
//!
//! CDI cannot put a folder in front of an image's `LD_LIBRARY_PATH`, so programs find the libraries that are mounted in the
//! loader's default folders. The hooks check the image and have the daemon grant GPUs: they are those of annotated containers,
//! and the device tells them the GPU.

use std::path::Path;

use rekindle_wire::control::GpuInfo;
use serde_json::{Value, json};

use crate::host::Provided;
use crate::spec::{self, SpecError};

/// The version of CDI: the first in which a device's name may begin with a digit, and a mount has a type.
const VERSION: &str = "0.5.0";
/// Vendor and class of the devices.
pub(crate) const KIND: &str = "rekindle.dev/gpu";

/// The specification for these GPUs: a device for each number, each UUID, and for all together.
pub(crate) fn generate(provided: &Provided, hooks: &spec::Hooks, gpus: &[GpuInfo]) -> Result<Value, SpecError> {
    let mut mounts = Vec::new();
    for (place, source, more) in spec::mounts(provided) {
        mounts.push(mount(place, &source, more)?);
    }
    for (place, source) in spec::default_libraries(provided) {
        mounts.push(mount(&place, &source, &[])?);
    }
    let device = |name: &str, gpu: &str| {
        let hook = hook("createRuntime", hooks.create_runtime(&[gpu]));
        json!({ "name": name, "containerEdits": { "hooks": [hook] } })
    };
    let mut devices = vec![device("all", "all")];
    for (number, gpu) in gpus.iter().enumerate() {
        devices.push(device(&number.to_string(), &gpu.uuid));
        devices.push(device(&gpu.uuid, &gpu.uuid));
    }
    Ok(json!({
        "cdiVersion": VERSION,
        "kind": KIND,
        "devices": devices,
        "containerEdits": {
            "env": spec::variables(provided).map(|(name, value)| format!("{name}={value}")),
            "mounts": mounts,
            "hooks": [hook("poststop", hooks.poststop())],
        },
    }))
}

fn hook(stage: &str, hook: Value) -> Value {
    json!({ "hookName": stage, "path": hook["path"], "args": hook["args"] })
}

fn mount(place: &str, source: &Path, more: &[&str]) -> Result<Value, SpecError> {
    let mut mount = spec::bind(place, source, more)?;
    if let Some(mount) = mount.as_object_mut()
        && let (Some(source), Some(place)) = (mount.remove("source"), mount.remove("destination"))
    {
        mount.insert("hostPath".to_owned(), source);
        mount.insert("containerPath".to_owned(), place);
    }
    Ok(mount)
}
