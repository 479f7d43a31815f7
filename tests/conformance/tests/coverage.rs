//! Every driver call that `driver.table` declares has a case in which it succeeds, and a case in which it fails.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use rekindle_conformance::{Shown, add, recorded};
use rekindle_cuda_abi::table::{self, Route};

/// Calls that no case makes yet. The list must not grow.
const NOT_YET: &[&str] = &[];

/// Calls that do not fail, since no argument is invalid.
const CANNOT_FAIL: &[&str] = &[
    // The call accepts any number; a launch with too large a number fails.
    "cuFuncSetSharedSize",
    // The driver does not check the offset at which these place a parameter.
    "cuParamSetf",
    "cuParamSeti",
    // The tests cannot pass an invalid linker, since the driver dereferences it.
    "cuLinkDestroy",
    // Nor a callback that is not registered: the driver crashes.
    "cuLogsUnregisterCallback",
    // Their only argument is a pointer to the answer, which the driver writes to without a check.
    "cuModuleGetLoadingMode",
    "cuThreadExchangeStreamCaptureMode",
];

/// Calls that always fail here, with the reason.
const CANNOT_SUCCEED: &[&str] = &[
    // No device under Rekindle has unified function pointers.
    "cuLibraryGetUnifiedFunction",
    // The call needs GPUs later than those on which the answers were recorded.
    "cuTensorMapEncodeIm2colWide",
    // The call always fails since CUDA 12.0.
    "cuProfilerInitialize",
    // No device under Rekindle has an engine that decompresses.
    "cuMemBatchDecompressAsync",
    "cuMemBatchDecompressAsync_ptsz",
    // Rekindle refuses arrays of several planes, sparse arrays and arrays without memory when they are made.
    "cuArrayGetMemoryRequirements",
    "cuArrayGetPlane",
    "cuArrayGetSparseProperties",
    "cuMipmappedArrayGetMemoryRequirements",
    "cuMipmappedArrayGetSparseProperties",
    // These are the first versions of the calls, which drivers no longer support since CUDA 12.
    "cuStreamWaitValue32",
    "cuStreamWaitValue32_ptsz",
    "cuStreamWaitValue64",
    "cuStreamWaitValue64_ptsz",
    "cuStreamWriteValue32",
    "cuStreamWriteValue32_ptsz",
    "cuStreamWriteValue64",
    "cuStreamWriteValue64_ptsz",
    "cuStreamBatchMemOp",
    "cuStreamBatchMemOp_ptsz",
];

fn declared() -> Vec<String> {
    let functions = table::parse(table::TEXT).unwrap();
    functions.into_iter().filter(|f| f.route != Route::Refused).map(|f| f.symbol).collect()
}

#[test]
fn every_declared_call_is_answered_in_success_and_in_failure() {
    let shown = recorded().unwrap();
    let mut missing = Vec::new();
    for call in declared() {
        let Shown { success, failure } = shown.get(&call).copied().unwrap_or_default();
        let listed = |list: &[&str]| list.contains(&call.as_str());
        if listed(NOT_YET) {
            continue;
        }
        if !success && !listed(CANNOT_SUCCEED) {
            missing.push(format!("{call}: no case in which it succeeds"));
        }
        if !failure && !listed(CANNOT_FAIL) {
            missing.push(format!("{call}: no case in which it fails"));
        }
    }
    assert!(missing.is_empty(), "tests/conformance/cases lacks:\n{}", missing.join("\n"));
}

#[test]
fn what_is_listed_as_missing_is_missing() {
    let shown = recorded().unwrap();
    let there = |call: &&&str| shown.get(**call).is_some_and(|s| s.success && s.failure);
    let lists = [NOT_YET, CANNOT_FAIL, CANNOT_SUCCEED];
    let answered: Vec<_> = lists.into_iter().flatten().filter(there).collect();
    assert!(answered.is_empty(), "these calls are answered now, take them off their lists: {answered:?}");
    let declared = declared();
    let unknown: Vec<_> = lists.into_iter().flatten().filter(|call| !declared.contains(&(**call).to_owned())).collect();
    assert!(unknown.is_empty(), "these calls are listed and not declared: {unknown:?}");
}

#[test]
fn answers_are_told_apart() {
    let mut calls = BTreeMap::new();
    add(&mut calls, "cuA, one: SUCCESS\ncuA, two: CUDA_ERROR_INVALID_VALUE\ncuB, busy: CUDA_ERROR_NOT_READY\n");
    assert_eq!(calls["cuA"], Shown { success: true, failure: true });
    assert_eq!(calls["cuB"], Shown { success: true, failure: false });
}
