//! Spans in the JSON of OTLP 1.x: `ExportTraceServiceRequest`. Numbers of 64 bits are strings, trace and span hexadecimal.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::span::{Program, Span, Value};

/// `STATUS_CODE_ERROR`.
const ERROR: u32 = 2;
/// `SPAN_KIND_INTERNAL`.
const INTERNAL: u32 = 1;

/// Encodes spans; those of one program stand together.
pub(super) fn encode(spans: &[Span], host: &str) -> Vec<u8> {
    let mut programs: BTreeMap<Program, Vec<Json>> = BTreeMap::new();
    for span in spans {
        programs.entry(span.program).or_default().push(of_span(span));
    }
    let programs: Vec<_> = programs
        .into_iter()
        .map(|(program, spans)| {
            let scope = json!({ "name": "rekindle", "version": env!("CARGO_PKG_VERSION") });
            json!({ "resource": resource(program, host), "scopeSpans": [{ "scope": scope, "spans": spans }] })
        })
        .collect();
    json!({ "resourceSpans": programs }).to_string().into_bytes()
}

fn resource(program: Program, host: &str) -> Json {
    let (name, pid) = match program {
        Program::Daemon => ("rekindled", std::process::id()),
        Program::Command(pid) => ("rekindle", pid.unsigned_abs()),
        Program::Worker(pid) => ("rekindle-worker", pid.unsigned_abs()),
    };
    let mut attributes = vec![
        attribute("service.name", &name.into()),
        attribute("host.name", &host.into()),
        attribute("process.pid", &u64::from(pid).into()),
    ];
    // Others may be of another release.
    if program == Program::Daemon {
        attributes.push(attribute("service.version", &env!("CARGO_PKG_VERSION").into()));
    }
    json!({ "attributes": attributes })
}

fn of_span(span: &Span) -> Json {
    let attributes: Vec<_> = span.attributes.iter().map(|(name, value)| attribute(name, value)).collect();
    let mut json = json!({
        "traceId": format!("{:032x}", span.place.trace),
        "spanId": format!("{:016x}", span.place.span),
        "name": span.name,
        "kind": INTERNAL,
        "startTimeUnixNano": span.start.to_string(),
        "endTimeUnixNano": span.end.to_string(),
        "attributes": attributes,
    });
    if let Some(parent) = span.parent {
        json["parentSpanId"] = format!("{parent:016x}").into();
    }
    if let Some(failure) = &span.failure {
        json["status"] = json!({ "code": ERROR, "message": failure });
    }
    json
}

fn attribute(name: &str, value: &Value) -> Json {
    let value = match value {
        Value::Text(text) => json!({ "stringValue": text }),
        Value::Number(number) => json!({ "intValue": number.to_string() }),
    };
    json!({ "key": name, "value": value })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_wire::control::TraceParent;

    #[test]
    fn the_encoding_is_that_of_otlp() {
        let span = |program, span, parent| Span {
            program,
            place: TraceParent::first(0x1a, span),
            parent,
            name: "copy",
            start: 1_700_000_000_000_000_001,
            end: 1_700_000_000_000_000_002,
            attributes: vec![("rekindle.bytes", 5_u64.into()), ("rekindle.protocol", "cow".into())],
            failure: parent.map(|_| "disk full".to_owned()),
        };
        let spans =
            [span(Program::Worker(9), 3, Some(2)), span(Program::Daemon, 2, None), span(Program::Worker(9), 4, None)];
        let json: Json = serde_json::from_slice(&encode(&spans, "here")).unwrap();
        let [daemon, worker] = json["resourceSpans"].as_array().unwrap().as_slice() else { panic!("{json}") };
        let name = json!({ "key": "service.name", "value": { "stringValue": "rekindle-worker" } });
        let pid = json!({ "key": "process.pid", "value": { "intValue": "9" } });
        assert_eq!(worker["resource"]["attributes"][0], name);
        assert_eq!(worker["resource"]["attributes"][2], pid);
        assert_eq!(worker["scopeSpans"][0]["spans"].as_array().unwrap().len(), 2);
        let expected = json!({
            "traceId": "0000000000000000000000000000001a", "spanId": "0000000000000003",
            "parentSpanId": "0000000000000002", "name": "copy", "kind": 1,
            "startTimeUnixNano": "1700000000000000001", "endTimeUnixNano": "1700000000000000002",
            "attributes": [
                { "key": "rekindle.bytes", "value": { "intValue": "5" } },
                { "key": "rekindle.protocol", "value": { "stringValue": "cow" } },
            ],
            "status": { "code": 2, "message": "disk full" },
        });
        assert_eq!(worker["scopeSpans"][0]["spans"][0], expected);
        let root = &daemon["scopeSpans"][0]["spans"][0];
        assert!(root.get("parentSpanId").is_none() && root.get("status").is_none(), "{root}");
    }
}
