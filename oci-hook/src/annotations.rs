//! What a container's annotations ask for.

use rekindle_wire::control::ContainerLimits;
use serde_json::Value;
use thiserror::Error;

/// Asks for all GPUs, or says that none are wanted whatever else is said.
const ENABLE: &str = "dev.rekindle/enable";
/// Asks for some: `all`, or numbers and UUIDs with commas between them.
const GPUS: &str = "dev.rekindle/gpus";
/// What all processes of the container may have together: memory of each GPU.
const GPU_MEMORY: &str = "dev.rekindle/gpu-memory-mib";
/// Pinned host memory.
const PINNED_MEMORY: &str = "dev.rekindle/pinned-memory-mib";
/// Processes that use a GPU.
const WORKERS: &str = "dev.rekindle/workers";

/// How they are checkpointed: `auto`, `stop`, `clone`, `cow` or `recopy`. The daemon knows which there are.
const PROTOCOL: &str = "dev.rekindle/protocol";

/// An annotation that means nothing.
#[derive(Debug, Error)]
pub(crate) enum AnnotationError {
    #[error("annotation {name} is {value}: {expected}")]
    Value { name: &'static str, value: String, expected: &'static str },
    #[error("config.json: the whole is not an object")]
    Shape,
}

/// The GPUs that are asked for; none where the container is none of ours.
pub(crate) fn gpus(spec: &Value) -> Result<Option<Vec<String>>, AnnotationError> {
    if !spec.is_object() {
        return Err(AnnotationError::Shape);
    }
    let enabled = match text(spec, ENABLE)? {
        None => None,
        Some("true") => Some(true),
        Some("false") => Some(false),
        Some(other) => return Err(value(ENABLE, other, "only true and false mean something")),
    };
    let listed = text(spec, GPUS)?.map(|list| {
        let names: Vec<_> = list.split(',').map(str::trim).map(str::to_owned).collect();
        let expected = "say all, or numbers or UUIDs of GPUs with commas between them";
        if names.iter().any(String::is_empty) { Err(value(GPUS, list, expected)) } else { Ok(names) }
    });
    let listed = listed.transpose()?;
    Ok(match (enabled, listed) {
        (Some(false), _) | (None, None) => None,
        (_, Some(names)) => Some(names),
        (Some(true), None) => Some(vec!["all".to_owned()]),
    })
}

/// Whether the GPUs are named one by one, and not only that there be some.
pub(crate) fn lists_gpus(spec: &Value) -> bool {
    text(spec, GPUS).is_ok_and(|list| list.is_some())
}

/// The limits that are asked for.
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

/// The protocol that is asked for.
pub(crate) fn protocol(spec: &Value) -> Result<Option<String>, AnnotationError> {
    Ok(text(spec, PROTOCOL)?.map(str::to_owned))
}

fn text<'a>(spec: &'a Value, name: &'static str) -> Result<Option<&'a str>, AnnotationError> {
    match spec.get("annotations").and_then(|annotations| annotations.get(name)) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(AnnotationError::Value { name, value: other.to_string(), expected: "it must be a text" }),
    }
}

fn value(name: &'static str, value: &str, expected: &'static str) -> AnnotationError {
    AnnotationError::Value { name, value: format!("{value:?}"), expected }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn asked(annotations: Value) -> Result<Option<Vec<String>>, AnnotationError> {
        gpus(&json!({ "annotations": annotations }))
    }

    #[test]
    fn gpus_are_asked_for_by_name_or_all_together() {
        let list = |names: &[&str]| Some(names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>());
        assert_eq!(asked(json!({ ENABLE: "true" })).unwrap(), list(&["all"]));
        assert_eq!(asked(json!({ GPUS: "1, GPU-ab" })).unwrap(), list(&["1", "GPU-ab"]));
        assert_eq!(asked(json!({ ENABLE: "true", GPUS: "0" })).unwrap(), list(&["0"]));
        for none in
            [json!(null), json!({}), json!({ ENABLE: "false", GPUS: "0" }), json!({ "dev.rekindle/other": "x" })]
        {
            assert_eq!(asked(none).unwrap(), None);
        }
        assert_eq!(gpus(&json!({})).unwrap(), None);
        for odd in [json!("True"), json!("1"), json!(""), json!(true)] {
            assert!(asked(json!({ ENABLE: odd })).is_err(), "{odd}");
        }
        assert!(asked(json!({ GPUS: "" })).is_err() && asked(json!({ GPUS: "0,,1" })).is_err());
        assert!(gpus(&json!([])).is_err());
    }

    #[test]
    fn a_protocol_is_a_text_which_the_daemon_judges() {
        let protocol = |annotations: Value| super::protocol(&json!({ "annotations": annotations }));
        assert_eq!(protocol(json!({})).unwrap(), None);
        assert_eq!(protocol(json!({ PROTOCOL: "cow" })).unwrap().as_deref(), Some("cow"));
        assert!(protocol(json!({ PROTOCOL: 3 })).is_err());
    }

    #[test]
    fn limits_are_whole_numbers() {
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
