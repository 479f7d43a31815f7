//! The changes to config.json, made in its JSON, so that unknown fields stay.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rekindle_builds::BuildId;
use serde_json::{Map, Value, json};
use thiserror::Error;

use crate::host::{self, HostArgs, HostError, INTERPOSER, NVML, Provided, SOCKET_VARIABLE};
use crate::image::{Image, ImageError};

/// The interposer's folder in the container.
pub(crate) const LIB_DIR: &str = "/usr/lib/rekindle";
/// The folder of the daemon's socket in the container.
const SOCKET_DIR: &str = "/run/rekindle";
/// The folder in which Triton looks for a driver before it asks the loader's cache.
const TRITON_VARIABLE: &str = "TRITON_LIBCUDA_PATH";

/// A config.json that the hook cannot change.
#[derive(Debug, Error)]
pub(crate) enum SpecError {
    #[error("config.json: {place} is missing")]
    Missing { place: &'static str },
    #[error("config.json: {place} is not {expected}")]
    Type { place: &'static str, expected: &'static str },
    #[error("{0} cannot be mounted: the container has a mount of its own at that place")]
    Taken(String),
    #[error(
        "the container was checkpointed with build {id} of Rekindle's libraries, which is not in {}: add it with `rekindle builds add PATH`, where PATH is the container's archive, or a directory with its image or with that build",
        builds.display()
    )]
    Build { id: BuildId, builds: PathBuf },
    #[error("{0} is no UTF-8, as config.json needs")]
    Path(String),
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// The container's root directory if config.json names one that exists; the path is relative to `bundle`, as in the OCI runtime
/// specification.
pub(crate) fn root(spec: &Value, bundle: &Path) -> Option<PathBuf> {
    let path = spec.get("root")?.get("path")?.as_str()?;
    Some(bundle.join(path)).filter(|root| root.is_dir())
}

/// The hooks at the OCI runtime's own stages, which are this program again.
#[derive(Debug)]
pub(crate) struct Hooks {
    /// This program.
    pub(crate) path: String,
    /// Its arguments about this host.
    pub(crate) host: Vec<String>,
}

/// The program's name in the arguments of its hooks, by which it finds them again.
const PROGRAM: &str = "rekindle-oci-hook";
const CREATE_RUNTIME: &str = "create-runtime";
const POSTSTOP: &str = "poststop";
/// The option that names a GPU.
pub(crate) const GPU: &str = "--gpu";

impl Hooks {
    /// Those of a program at `path`, or at its present path. Their arguments state what differs from the defaults on this host.
    pub(crate) fn new(args: &HostArgs, path: Option<PathBuf>) -> Result<Self, HostError> {
        let path = match path {
            Some(path) => path,
            None => host::this_program()?,
        };
        let mut host: Vec<OsString> = Vec::new();
        if let Some(lib_dir) = &args.lib_dir {
            host.extend(["--lib-dir".into(), lib_dir.into()]);
        }
        if args.socket.as_os_str() != host::DEFAULT_SOCKET {
            host.extend(["--socket".into(), args.socket.as_os_str().into()]);
        }
        let host = host.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
        Ok(Self { path: path.to_string_lossy().into_owned(), host })
    }

    /// The hook at `createRuntime`, with the container's GPUs if annotations do not name them.
    pub(crate) fn create_runtime(&self, gpus: &[&str]) -> Value {
        self.hook(CREATE_RUNTIME, gpus.iter().flat_map(|gpu| [GPU, gpu]))
    }

    /// The hook at `poststop`.
    pub(crate) fn poststop(&self) -> Value {
        self.hook(POSTSTOP, [])
    }

    fn hook<'a>(&'a self, stage: &'a str, more: impl IntoIterator<Item = &'a str>) -> Value {
        let host = self.host.iter().map(String::as_str);
        let args: Vec<_> = [PROGRAM, stage].into_iter().chain(more).chain(host).collect();
        json!({ "path": self.path, "args": args })
    }
}

/// Whether a hook is this program at a stage, with or without GPUs as arguments.
fn is_ours(hook: &Value, stage: &str, with_gpus: bool) -> bool {
    let args: Vec<_> = hook.get("args").and_then(Value::as_array).into_iter().flatten().map(Value::as_str).collect();
    args.starts_with(&[Some(PROGRAM), Some(stage)]) && args.contains(&Some(GPU)) == with_gpus
}

/// Whether CDI devices have added hooks of this program.
pub(crate) fn has_device_hooks(spec: &Value) -> bool {
    let hooks = spec.get("hooks").and_then(|hooks| hooks.get("createRuntime")).and_then(Value::as_array);
    hooks.into_iter().flatten().any(|hook| is_ours(hook, CREATE_RUNTIME, true))
}

/// The mounts: place, source, more options.
pub(crate) fn mounts(provided: &Provided) -> [(&'static str, PathBuf, &'static [&'static str]); 2] {
    // The second has no programs. A process can connect to a socket on a read-only mount.
    [(LIB_DIR, provided.lib_dir.clone(), &[]), (SOCKET_DIR, provided.socket_dir.clone(), &["noexec"])]
}

/// The default folders of loaders, on Debian and on Red Hat.
const DEFAULT_DIRS: [&str; 2] = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64"];

/// The libraries in those folders, with their sources. Programs need them whose environment is not that of config.json, for
/// example those that `podman exec` starts.
pub(crate) fn default_libraries(provided: &Provided) -> Vec<(String, PathBuf)> {
    let libraries = host::libraries(&provided.lib_dir);
    let in_dir = |dir: &'static str| {
        let place = move |name: &String| {
            let source = provided.lib_dir.join(name);
            // The target of links, since CRIU would mount the link itself.
            (format!("{dir}/{name}"), source.canonicalize().unwrap_or(source))
        };
        libraries.iter().map(place).collect::<Vec<_>>()
    };
    DEFAULT_DIRS.into_iter().flat_map(in_dir).collect()
}

/// The variables by which the interposer finds the daemon, and Triton the interposer: Triton asks the loader's cache, in which
/// the image does not have the interposer.
pub(crate) fn variables(provided: &Provided) -> [(&'static str, String); 2] {
    [(SOCKET_VARIABLE, format!("{SOCKET_DIR}/{}", provided.socket_name)), (TRITON_VARIABLE, LIB_DIR.to_owned())]
}

/// The places of the container's mounts.
pub(crate) fn destinations(spec: &Value) -> Vec<&str> {
    let mounts = spec.get("mounts").and_then(Value::as_array).into_iter().flatten();
    mounts.filter_map(|mount| mount.get("destination")?.as_str()).collect()
}

/// Adds mounts, environment and hooks. A second call changes nothing. The interposer is mounted over a driver library of the
/// image, so that programs with a search path of their own find the interposer too.
pub(crate) fn add(
    spec: &mut Value,
    provided: &Provided,
    hooks: &Hooks,
    image: Option<&Image>,
) -> Result<(), SpecError> {
    let provided = &Provided { lib_dir: lib_dir_for(spec, &provided.lib_dir)?, ..provided.clone() };
    let interposer = provided.lib_dir.join(INTERPOSER);
    let mut covered = Vec::new();
    if let Some(image) = image {
        image.check(&interposer)?;
        for name in [INTERPOSER, NVML] {
            let own = image.own(name, library_path(spec).split(':'));
            covered.extend(own.into_iter().map(|place| (place, provided.lib_dir.join(name))));
        }
    }
    let mounts = array(spec, "mounts", "mounts")?;
    for (place, source, more) in self::mounts(provided) {
        mount(mounts, place, &source, more)?;
    }
    for (place, source) in default_libraries(provided) {
        // A file of the image at this place is covered below, at the target of its links.
        if image.is_none_or(|image| !image.has(&place)) {
            mount(mounts, &place, &source, &[])?;
        }
    }
    for (place, ours) in covered {
        let place = place.to_str().ok_or_else(|| SpecError::Path(place.to_string_lossy().into()))?;
        mount(mounts, place, &ours, &[])?;
    }

    let process = spec.get_mut("process").ok_or(SpecError::Missing { place: "process" })?;
    let env = array(process, "env", "process.env")?;
    prepend(env, "LD_LIBRARY_PATH", LIB_DIR);
    for (name, here) in variables(provided) {
        env.retain(|entry| value(entry, name).is_none());
        env.push(json!(format!("{name}={here}")));
    }

    let Some(whole) = spec.as_object_mut() else {
        return Err(SpecError::Type { place: "the whole", expected: "an object" });
    };
    let stages = whole.entry("hooks").or_insert(Value::Null);
    if stages.is_null() {
        *stages = json!({});
    }
    for (stage, place, name, hook) in [
        ("createRuntime", "hooks.createRuntime", CREATE_RUNTIME, hooks.create_runtime(&[])),
        ("poststop", "hooks.poststop", POSTSTOP, hooks.poststop()),
    ] {
        let list = array(stages, stage, place)?;
        list.retain(|it| !is_ours(it, name, false));
        list.push(hook);
    }
    Ok(())
}

/// The folder of the interposer for a container: that of the build which a container that is restored has mapped already, or else
/// that which new containers are given.
fn lib_dir_for(spec: &Value, new: &Path) -> Result<PathBuf, SpecError> {
    let mounts = spec.get("mounts").and_then(Value::as_array).into_iter().flatten();
    let mut ours = mounts.filter(|it| it.get("destination").and_then(Value::as_str) == Some(LIB_DIR));
    let source = ours.find_map(|it| it.get("source")?.as_str()).map(Path::new);
    let Some(id) = source.and_then(Path::file_name).and_then(|name| name.to_str()?.parse::<BuildId>().ok()) else {
        return Ok(new.to_owned());
    };
    // Builds lie side by side.
    let builds = new.parent().unwrap_or(new);
    let build = builds.join(id.to_string());
    if build.join(INTERPOSER).is_file() { Ok(build) } else { Err(SpecError::Build { id, builds: builds.to_owned() }) }
}

/// The image's own LD_LIBRARY_PATH.
pub(crate) fn library_path(spec: &Value) -> String {
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

/// A bind mount, read-only.
pub(crate) fn bind(destination: &str, source: &Path, more: &[&str]) -> Result<Value, SpecError> {
    let source = source.to_str().ok_or_else(|| SpecError::Path(source.to_string_lossy().into()))?;
    // Private, as podman's own mounts: CRIU cannot dump a mount whose peers it does not see.
    let mut options = vec!["rbind", "rprivate", "ro", "nosuid", "nodev"];
    options.extend(more);
    Ok(json!({ "destination": destination, "type": "bind", "source": source, "options": options }))
}

fn mount(mounts: &mut Vec<Value>, destination: &str, source: &Path, more: &[&str]) -> Result<(), SpecError> {
    let at = |mount: &Value| {
        let place = mount.get("destination").and_then(Value::as_str);
        place.is_some_and(|place| Path::new(place) == Path::new(destination))
    };
    let ours = bind(destination, source, more)?;
    // A container that was exported from another host has this mount with that host's path.
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

/// Puts a folder first in a list of folders, before the image's own, which may have another libcuda.
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

    fn hooks() -> Hooks {
        Hooks { path: "/usr/bin/rekindle-oci-hook".to_owned(), host: Vec::new() }
    }

    fn plain() -> Value {
        json!({ "process": {} })
    }

    #[test]
    fn the_interposers_folder_comes_first_in_the_library_path() {
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
    fn a_second_call_of_add_changes_nothing() {
        let mut spec = plain();
        add(&mut spec, &provided(), &hooks(), None).unwrap();
        let once = spec.clone();
        add(&mut spec, &provided(), &hooks(), None).unwrap();
        assert_eq!(spec, once);
    }

    #[test]
    fn an_imported_container_gets_the_paths_of_this_host() {
        let mut spec = plain();
        let mut elsewhere = provided();
        elsewhere.lib_dir = "/srv/old/lib/rekindle".into();
        add(&mut spec, &elsewhere, &hooks(), None).unwrap();
        add(&mut spec, &provided(), &hooks(), None).unwrap();
        let mut fresh = plain();
        add(&mut fresh, &provided(), &hooks(), None).unwrap();
        assert_eq!(spec, fresh);
    }

    #[test]
    fn a_restored_container_keeps_its_build_and_a_build_that_is_not_here_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let [old, new] = ["0b", "1c"].map(|name| dir.path().join(name.repeat(16)));
        let of = |build: &Path| Provided { lib_dir: build.to_owned(), ..provided() };
        for build in [&old, &new] {
            std::fs::create_dir(build).unwrap();
            std::fs::write(build.join(INTERPOSER), "").unwrap();
        }
        let mut restored = plain();
        add(&mut restored, &of(&old), &hooks(), None).unwrap();
        let before = restored.clone();
        // After an upgrade, and on a host where it lies elsewhere.
        add(&mut restored, &of(&new), &hooks(), None).unwrap();
        assert_eq!(restored, before);
        restored["mounts"][0]["source"] = json!(format!("/srv/builds/{}", "0b".repeat(16)));
        add(&mut restored, &of(&new), &hooks(), None).unwrap();
        assert_eq!(restored, before);
        std::fs::remove_dir_all(&old).unwrap();
        let error = add(&mut restored, &of(&new), &hooks(), None).unwrap_err();
        assert!(matches!(&error, SpecError::Build { id, .. } if id.to_string() == "0b".repeat(16)), "{error}");
        let mut fresh = plain();
        add(&mut fresh, &of(&new), &hooks(), None).unwrap();
        assert_eq!(fresh["mounts"][0]["source"], json!(new));
    }

    #[test]
    fn another_mount_at_the_interposers_place_is_an_error() {
        let mut spec = plain();
        spec["mounts"] = json!([{ "destination": "/usr/lib/rekindle/", "source": "/theirs", "type": "bind" }]);
        assert!(
            matches!(add(&mut spec, &provided(), &hooks(), None), Err(SpecError::Taken(place)) if place == LIB_DIR)
        );
    }

    #[test]
    fn a_field_of_a_wrong_type_is_an_error_that_names_it() {
        for (spec, message) in [
            (json!({ "mounts": 3, "process": {} }), "config.json: mounts is not an array"),
            (json!({ "mounts": [] }), "config.json: process is missing"),
            (json!({ "process": [] }), "config.json: process.env is not an array"),
            (json!({ "process": { "env": "A=1" } }), "config.json: process.env is not an array"),
        ] {
            let error = add(&mut spec.clone(), &provided(), &hooks(), None).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
