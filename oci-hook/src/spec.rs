//! The changes to config.json. It is changed as the JSON it is, so that whatever this does not know stays.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::host::{INTERPOSER, Provided};
use crate::image::{Image, ImageError};

/// The annotation that asks for all this.
const ENABLE: &str = "dev.rekindle/enable";

/// Where the container finds the interposer.
const LIB_DIR: &str = "/usr/lib/rekindle";
/// Where it finds the daemon's socket.
const SOCKET_DIR: &str = "/run/rekindle";

/// What is wrong with a config.json.
#[derive(Debug, Error)]
pub(crate) enum SpecError {
    #[error("config.json: {place} is missing")]
    Missing { place: &'static str },
    #[error("config.json: {place} is not {expected}")]
    Type { place: &'static str, expected: &'static str },
    #[error("annotation dev.rekindle/enable is {0:?}: only true and false mean something")]
    Annotation(String),
    #[error("{0} cannot be mounted: the container has a mount of its own at that place")]
    Taken(String),
    #[error("{0} is no UTF-8, as config.json needs")]
    Path(String),
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// Whether the container is annotated.
pub(crate) fn wanted(spec: &Value) -> Result<bool, SpecError> {
    let spec = spec.as_object().ok_or(SpecError::Type { place: "the whole", expected: "an object" })?;
    match spec.get("annotations").and_then(|annotations| annotations.get(ENABLE)) {
        None => Ok(false),
        Some(Value::String(value)) => match value.as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            other => Err(SpecError::Annotation(other.into())),
        },
        Some(other) => Err(SpecError::Annotation(other.to_string())),
    }
}

/// The container's root directory, where config.json says one that is there: relative to `bundle`, as the OCI runtime
/// specification has it.
pub(crate) fn root(spec: &Value, bundle: &Path) -> Option<PathBuf> {
    let path = spec.get("root")?.get("path")?.as_str()?;
    Some(bundle.join(path)).filter(|root| root.is_dir())
}

/// Adds mounts and environment. Adding them twice is adding them once. A driver library that the image brings is covered
/// by the interposer, so that a program with a search path of its own finds the interposer too.
pub(crate) fn add(spec: &mut Value, provided: &Provided, image: Option<&Image>) -> Result<(), SpecError> {
    let interposer = provided.lib_dir.join(INTERPOSER);
    let mut drivers = Default::default();
    if let Some(image) = image {
        image.check(&interposer)?;
        drivers = image.drivers(library_path(spec).split(':'));
    }
    let mounts = array(spec, "mounts", "mounts")?;
    mount(mounts, LIB_DIR, &provided.lib_dir, &[])?;
    // Nothing there is a program. A socket on a read-only mount can be connected to.
    mount(mounts, SOCKET_DIR, &provided.socket_dir, &["noexec"])?;
    for driver in drivers {
        let place = driver.to_str().ok_or_else(|| SpecError::Path(driver.to_string_lossy().into()))?;
        mount(mounts, place, &interposer, &[])?;
    }

    let process = spec.get_mut("process").ok_or(SpecError::Missing { place: "process" })?;
    let env = array(process, "env", "process.env")?;
    prepend(env, "LD_LIBRARY_PATH", LIB_DIR);
    set(env, "REKINDLE_SOCKET", &format!("{SOCKET_DIR}/{}", provided.socket_name));
    Ok(())
}

/// The image's own LD_LIBRARY_PATH.
fn library_path(spec: &Value) -> String {
    let env = spec.get("process").and_then(|process| process.get("env")).and_then(Value::as_array);
    let found = env.and_then(|env| env.iter().find_map(|entry| value(entry, "LD_LIBRARY_PATH")));
    found.unwrap_or_default().to_owned()
}

fn array<'a>(object: &'a mut Value, name: &str, place: &'static str) -> Result<&'a mut Vec<Value>, SpecError> {
    let wrong = SpecError::Type { place, expected: "an array" };
    let Some(object) = object.as_object_mut() else {
        return Err(wrong);
    };
    field(object, name).as_array_mut().ok_or(wrong)
}

/// A field that may be missing or null where it would be an empty array.
fn field<'a>(object: &'a mut Map<String, Value>, name: &str) -> &'a mut Value {
    let field = object.entry(name).or_insert(Value::Null);
    if field.is_null() {
        *field = json!([]);
    }
    field
}

fn mount(mounts: &mut Vec<Value>, destination: &str, source: &Path, more: &[&str]) -> Result<(), SpecError> {
    let source = source.to_str().ok_or_else(|| SpecError::Path(source.to_string_lossy().into()))?;
    let at = |mount: &Value| {
        let place = mount.get("destination").and_then(Value::as_str);
        place.is_some_and(|place| Path::new(place) == Path::new(destination))
    };
    // Private, as podman's own: CRIU cannot dump a mount whose peers it does not see.
    let mut options = vec!["rbind", "rprivate", "ro", "nosuid", "nodev"];
    options.extend(more);
    let ours = json!({
        "destination": destination,
        "type": "bind",
        "source": source,
        "options": options,
    });
    // A container that was exported from another host brings ours of there, with that host's path.
    let like_ours = |there: &Value| ["type", "options"].iter().all(|name| there.get(name) == ours.get(name));
    match mounts.iter_mut().find(|mount| at(mount)) {
        None => mounts.push(ours),
        Some(there) if like_ours(there) => *there = ours,
        Some(_) => return Err(SpecError::Taken(destination.into())),
    }
    Ok(())
}

/// The value of a variable in an entry of `process.env`, if the entry is that variable's.
fn value<'a>(entry: &'a Value, name: &str) -> Option<&'a str> {
    entry.as_str()?.strip_prefix(name)?.strip_prefix('=')
}

/// Puts a folder first in a list of folders, before those that the image brings: its own libcuda may be in one.
fn prepend(env: &mut Vec<Value>, name: &str, dir: &str) {
    let mut found = false;
    for entry in env.iter_mut() {
        let Some(dirs) = value(entry, name) else {
            continue;
        };
        found = true;
        if dirs.split(':').next() != Some(dir) {
            // An empty folder in the list would be the current one.
            let separator = if dirs.is_empty() { "" } else { ":" };
            *entry = json!(format!("{name}={dir}{separator}{dirs}"));
        }
    }
    if !found {
        env.push(json!(format!("{name}={dir}")));
    }
}

fn set(env: &mut Vec<Value>, name: &str, to: &str) {
    env.retain(|entry| value(entry, name).is_none());
    env.push(json!(format!("{name}={to}")));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn provided() -> Provided {
        Provided {
            lib_dir: "/opt/rekindle/lib/rekindle".into(),
            socket_dir: "/run/rekindle".into(),
            socket_name: "rekindled.sock".into(),
        }
    }

    fn annotated() -> Value {
        json!({ "annotations": { ENABLE: "true" }, "process": {} })
    }

    #[test]
    fn only_true_asks_for_it() {
        assert!(wanted(&annotated()).unwrap());
        assert!(!wanted(&json!({})).unwrap());
        assert!(!wanted(&json!({ "annotations": null })).unwrap());
        assert!(!wanted(&json!({ "annotations": { ENABLE: "false" } })).unwrap());
        assert!(!wanted(&json!({ "annotations": { "dev.rekindle/gpus": "all" } })).unwrap());
        for odd in [json!("True"), json!("1"), json!(""), json!(true)] {
            let spec = json!({ "annotations": { ENABLE: odd } });
            assert!(matches!(wanted(&spec), Err(SpecError::Annotation(_))), "{spec}");
        }
        assert!(matches!(wanted(&json!([])), Err(SpecError::Type { .. })));
    }

    #[test]
    fn the_interposer_comes_before_what_the_image_brings() {
        for (before, after) in [
            ("", "/usr/lib/rekindle"),
            ("/usr/local/cuda/compat:/x", "/usr/lib/rekindle:/usr/local/cuda/compat:/x"),
            ("/x:/usr/lib/rekindle", "/usr/lib/rekindle:/x:/usr/lib/rekindle"),
            ("/usr/lib/rekindle:/x", "/usr/lib/rekindle:/x"),
        ] {
            let mut env = vec![json!("A=1"), json!(format!("LD_LIBRARY_PATH={before}")), json!("B=2")];
            prepend(&mut env, "LD_LIBRARY_PATH", LIB_DIR);
            assert_eq!(env, [json!("A=1"), json!(format!("LD_LIBRARY_PATH={after}")), json!("B=2")]);
        }
        // Another variable's name begins like it, and one has no value.
        let mut env = vec![json!("LD_LIBRARY_PATHS=/x"), json!("LD_LIBRARY_PATH")];
        prepend(&mut env, "LD_LIBRARY_PATH", LIB_DIR);
        assert_eq!(env.len(), 3);
    }

    #[test]
    fn twice_is_once() {
        let mut spec = annotated();
        add(&mut spec, &provided(), None).unwrap();
        let once = spec.clone();
        add(&mut spec, &provided(), None).unwrap();
        assert_eq!(spec, once);
    }

    #[test]
    fn an_imported_container_gets_this_hosts_paths() {
        let mut spec = annotated();
        let mut elsewhere = provided();
        elsewhere.lib_dir = "/srv/old/lib/rekindle".into();
        add(&mut spec, &elsewhere, None).unwrap();
        add(&mut spec, &provided(), None).unwrap();
        let mut fresh = annotated();
        add(&mut fresh, &provided(), None).unwrap();
        assert_eq!(spec, fresh);
    }

    #[test]
    fn another_mount_in_the_place_is_refused() {
        let mut spec = annotated();
        spec["mounts"] = json!([{ "destination": "/usr/lib/rekindle/", "source": "/theirs", "type": "bind" }]);
        assert!(matches!(add(&mut spec, &provided(), None), Err(SpecError::Taken(place)) if place == LIB_DIR));
    }

    #[test]
    fn a_config_of_other_shapes_is_an_error_that_names_the_place() {
        for (spec, message) in [
            (json!({ "mounts": 3, "process": {} }), "config.json: mounts is not an array"),
            (json!({ "mounts": [] }), "config.json: process is missing"),
            (json!({ "process": [] }), "config.json: process.env is not an array"),
            (json!({ "process": { "env": "A=1" } }), "config.json: process.env is not an array"),
        ] {
            let error = add(&mut spec.clone(), &provided(), None).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
