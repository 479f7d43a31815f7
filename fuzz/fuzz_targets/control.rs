//! JSON of any content, read as every type of message.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_wire::attach::{Answer, Pinned};
use rekindle_wire::control::{Opening, Reply, Request, WorkerReply, WorkerRequest};

fuzz_target!(|data: &[u8]| {
    if let Ok(opening) = serde_json::from_slice::<Opening>(data) {
        let _ = serde_json::from_value::<Request>(opening.request);
    }
    if let Ok(request) = serde_json::from_slice::<Request>(data) {
        let text = serde_json::to_vec(&request).expect("what was read can be written");
        let again: Request = serde_json::from_slice(&text).expect("what was written can be read");
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
    }
    let _ = serde_json::from_slice::<Reply>(data);
    let _ = serde_json::from_slice::<WorkerRequest>(data);
    let _ = serde_json::from_slice::<WorkerReply>(data);
    let _ = serde_json::from_slice::<Answer>(data);
    let _ = serde_json::from_slice::<Pinned>(data);
});
