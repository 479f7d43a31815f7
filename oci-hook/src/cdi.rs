//! The CDI specification: what `--device rekindle.dev/gpu=0` means to podman, Docker, containerd and CRI-O.
//!
//! CDI cannot put a folder in front of an image's `LD_LIBRARY_PATH`, so it is the libraries that are mounted where every
//! loader looks by itself that count. What depends on the image, and what the container may use, is for the hooks: they are the same as those
//! of annotated containers, told which GPU by the device.

use std::path::Path;

use rekindle_wire::control::GpuInfo;
use serde_json::{Value, json};

use crate::host::Provided;
use crate::spec::{self, SpecError};

/// Of CDI: the first that lets a device's name begin with a digit and says a mount's type. Older readers read it too.
const VERSION: &str = "0.5.0";
/// Vendor and class of the devices.
pub(crate) const KIND: &str = "rekindle.dev/gpu";

/// The specification for these GPUs, each by number and by UUID, and all together.
pub(crate) fn generate(provided: &Provided, hooks: &spec::Hooks, gpus: &[GpuInfo]) -> Result<Value, SpecError> {
    let mut mounts = Vec::new();
    for (place, source, more) in spec::mounts(provided) {
        mounts.push(mount(place, &source, more)?);
    }
    for (place, source) in spec::where_loaders_look(provided) {
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
