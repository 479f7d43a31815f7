//! A container's annotations.

use rekindle_wire::control::ContainerLimits;
use serde_json::Value;
use thiserror::Error;

/// `true` asks for all GPUs; `false` for none, whatever other annotations say.
const ENABLE: &str = "dev.rekindle/enable";
/// Asks for GPUs: `all`, or numbers and UUIDs, separated by commas.
const GPUS: &str = "dev.rekindle/gpus";
/// The limit on memory of each GPU, for all processes of the container together.
const GPU_MEMORY: &str = "dev.rekindle/gpu-memory-mib";
/// The limit on pinned host memory.
const PINNED_MEMORY: &str = "dev.rekindle/pinned-memory-mib";
/// The limit on processes that use a GPU.
const WORKERS: &str = "dev.rekindle/workers";

/// The protocol of checkpoints: `auto`, `stop`, `clone`, `cow` or `recopy`. The daemon checks the value.
const PROTOCOL: &str = "dev.rekindle/protocol";

/// `true` lets instances of one image of the container share GPU memory that they only read.
const SHARE: &str = "dev.rekindle/share";

/// A wrong annotation.
#[derive(Debug, Error)]
pub(crate) enum AnnotationError {
    #[error("annotation {name} is {value}: {expected}")]
    Value { name: &'static str, value: String, expected: &'static str },
    #[error("config.json: the whole is not an object")]
    Shape,
}

/// The GPUs that the annotations ask for; `None` for a container that does not use Rekindle.
pub(crate) fn gpus(spec: &Value) -> Result<Option<Vec<String>>, AnnotationError> {
    if !spec.is_object() {
        return Err(AnnotationError::Shape);
    }
    let enabled = yes_or_no(spec, ENABLE)?;
    let listed = text(spec, GPUS)?.map(|list| {
        let names: Vec<_> = list.split(',').map(str::trim).map(str::to_owned).collect();
        let expected = "it must be all, or numbers or UUIDs of GPUs, separated by commas";
        if names.iter().any(String::is_empty) { Err(value(GPUS, list, expected)) } else { Ok(names) }
    });
    let listed = listed.transpose()?;
    Ok(match (enabled, listed) {
        (Some(false), _) | (None, None) => None,
        (_, Some(names)) => Some(names),
        (Some(true), None) => Some(vec!["all".to_owned()]),
    })
}

/// Whether the annotations list GPUs.
pub(crate) fn lists_gpus(spec: &Value) -> bool {
    text(spec, GPUS).is_ok_and(|list| list.is_some())
}

/// The limits that the annotations set.
pub(crate) fn limits(spec: &Value) -> Result<ContainerLimits, AnnotationError> {
    let number = |name| {
        let parse = |text: &str| {
            let number = text.parse::<u64>().ok().filter(|number| *number > 0);
            number.ok_or_else(|| value(name, text, "it must be a whole number from 1 on"))
        };
        text(spec, name)?.map(parse).transpose()
    };
    let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(1 << 20));
    Ok(ContainerLimits {
        device_memory: bytes(number(GPU_MEMORY)?),
        pinned_memory: bytes(number(PINNED_MEMORY)?),
        workers: number(WORKERS)?.map(|it| u32::try_from(it).unwrap_or(u32::MAX)),
    })
}

/// The protocol that the annotations set.
pub(crate) fn protocol(spec: &Value) -> Result<Option<String>, AnnotationError> {
    Ok(text(spec, PROTOCOL)?.map(str::to_owned))
}

/// Whether the annotations let instances share memory.
pub(crate) fn share(spec: &Value) -> Result<bool, AnnotationError> {
    Ok(yes_or_no(spec, SHARE)? == Some(true))
}

fn yes_or_no(spec: &Value, name: &'static str) -> Result<Option<bool>, AnnotationError> {
    match text(spec, name)? {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(other) => Err(value(name, other, "only true and false mean something")),
    }
}

fn text<'a>(spec: &'a Value, name: &'static str) -> Result<Option<&'a str>, AnnotationError> {
    match spec.get("annotations").and_then(|annotations| annotations.get(name)) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(AnnotationError::Value { name, value: other.to_string(), expected: "it must be a string" }),
    }
}

fn value(name: &'static str, value: &str, expected: &'static str) -> AnnotationError {
    AnnotationError::Value { name, value: format!("{value:?}"), expected }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parsed(annotations: Value) -> Result<Option<Vec<String>>, AnnotationError> {
        gpus(&json!({ "annotations": annotations }))
    }

    #[test]
    fn annotations_ask_for_listed_gpus_or_all() {
        let list = |names: &[&str]| Some(names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>());
        assert_eq!(parsed(json!({ ENABLE: "true" })).unwrap(), list(&["all"]));
        assert_eq!(parsed(json!({ GPUS: "1, GPU-ab" })).unwrap(), list(&["1", "GPU-ab"]));
        assert_eq!(parsed(json!({ ENABLE: "true", GPUS: "0" })).unwrap(), list(&["0"]));
        for none in
            [json!(null), json!({}), json!({ ENABLE: "false", GPUS: "0" }), json!({ "dev.rekindle/other": "x" })]
        {
            assert_eq!(parsed(none).unwrap(), None);
        }
        assert_eq!(gpus(&json!({})).unwrap(), None);
        for odd in [json!("True"), json!("1"), json!(""), json!(true)] {
            assert!(parsed(json!({ ENABLE: odd })).is_err(), "{odd}");
        }
        assert!(parsed(json!({ GPUS: "" })).is_err() && parsed(json!({ GPUS: "0,,1" })).is_err());
        assert!(gpus(&json!([])).is_err());
    }

    #[test]
    fn memory_is_shared_only_where_the_annotation_says_so() {
        let share = |annotations: Value| super::share(&json!({ "annotations": annotations }));
        assert!(!share(json!({})).unwrap() && !share(json!({ SHARE: "false" })).unwrap());
        assert!(share(json!({ SHARE: "true" })).unwrap());
        assert!(share(json!({ SHARE: "yes" })).is_err() && share(json!({ SHARE: true })).is_err());
    }

    #[test]
    fn a_protocol_must_be_a_string() {
        let protocol = |annotations: Value| super::protocol(&json!({ "annotations": annotations }));
        assert_eq!(protocol(json!({})).unwrap(), None);
        assert_eq!(protocol(json!({ PROTOCOL: "cow" })).unwrap().as_deref(), Some("cow"));
        assert!(protocol(json!({ PROTOCOL: 3 })).is_err());
    }

    #[test]
    fn limits_must_be_whole_numbers() {
        let limits = |annotations: Value| super::limits(&json!({ "annotations": annotations }));
        assert_eq!(limits(json!({})).unwrap(), ContainerLimits::default());
        let got = limits(json!({ GPU_MEMORY: "3", PINNED_MEMORY: "2", WORKERS: "1" })).unwrap();
        assert_eq!((got.device_memory, got.pinned_memory, got.workers), (Some(3 << 20), Some(2 << 20), Some(1)));
        for odd in ["-1", "0", "1.5", "", "1G"] {
            let error = limits(json!({ GPU_MEMORY: odd })).unwrap_err().to_string();
            assert!(error.contains(GPU_MEMORY) && error.contains("whole number"), "{error}");
        }
    }
}
