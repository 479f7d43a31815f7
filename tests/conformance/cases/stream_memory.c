// Words of memory that streams write and wait for, and attributes of streams.
#include "case.h"

#define ONE(call)                                                                                                      \
    TRY_PTSZ("on the device", call, stream, memory, 5, 0);                                                             \
    TRY_PTSZ("at an odd address", call, stream, memory + 1, 5, 0);                                                     \
    TRY_PTSZ("at null", call, stream, 0, 5, 0)

GROUP(words) {
    with_context();
    CUstream stream;
    CUdeviceptr memory = device_bytes(64);
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    // What is waited for has been written before.
    ONE(cuStreamWriteValue32);
    ONE(cuStreamWaitValue32);
    ONE(cuStreamWriteValue32_v2);
    ONE(cuStreamWaitValue32_v2);
    ONE(cuStreamWriteValue64);
    ONE(cuStreamWaitValue64);
    ONE(cuStreamWriteValue64_v2);
    ONE(cuStreamWaitValue64_v2);
    SET(cuCtxSynchronize, );
    TELL(cuStreamWriteValue64_v2, "writes", "%d", word_at(memory));
    TRY("at least less", cuStreamWaitValue32_v2, stream, memory, 4, CU_STREAM_WAIT_VALUE_GEQ);
    TRY("one of its bits", cuStreamWaitValue32_v2, stream, memory, 4, CU_STREAM_WAIT_VALUE_AND);
    TRY("with flags that do not exist", cuStreamWaitValue32_v2, stream, memory, 4, 8);
    SET(cuStreamSynchronize, stream);
}

GROUP(batches) {
    with_context();
    CUstream stream;
    CUdeviceptr memory = device_bytes(64);
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CUstreamBatchMemOpParams ops[2];
    memset(ops, 0, sizeof ops);
    ops[0].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    ops[0].writeValue.address = memory;
    ops[0].writeValue.value = 77;
    ops[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    ops[1].waitValue.address = memory;
    ops[1].waitValue.value = 77;
    ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    TRY_PTSZ("a write and a wait", cuStreamBatchMemOp, stream, 2, ops, 0);
    TRY_PTSZ("a write and a wait", cuStreamBatchMemOp_v2, stream, 2, ops, 0);
    SET(cuStreamSynchronize, stream);
    TELL(cuStreamBatchMemOp_v2, "writes", "%d", word_at(memory));
    TRY_PTSZ("too many", cuStreamBatchMemOp, stream, 257, ops, 0);
    TRY_PTSZ("too many", cuStreamBatchMemOp_v2, stream, 257, ops, 0);
    TRY_PTSZ("with flags", cuStreamBatchMemOp_v2, stream, 2, ops, 1);
}

GROUP(attributes) {
    with_context();
    CUstream one, other;
    SET(cuStreamCreate, &one, CU_STREAM_NON_BLOCKING);
    SET(cuStreamCreate, &other, CU_STREAM_NON_BLOCKING);
    CUstreamAttrValue value;
    memset(&value, 0, sizeof value);
    const CUstreamAttrID how = CU_STREAM_ATTRIBUTE_SYNCHRONIZATION_POLICY, none = (CUstreamAttrID)99;
    TRY_PTSZ("how to wait", cuStreamGetAttribute, one, how, &value);
    TELL(cuStreamGetAttribute, "how to wait, at first", "%d", (int)value.syncPolicy);
    value.syncPolicy = CU_SYNC_POLICY_BLOCKING_SYNC;
    TRY_PTSZ("how to wait", cuStreamSetAttribute, one, how, &value);
    TRY_PTSZ("to another stream", cuStreamCopyAttributes, other, one);
    memset(&value, 0, sizeof value);
    SET(cuStreamGetAttribute, other, how, &value);
    TELL(cuStreamCopyAttributes, "to another stream, how to wait", "%d", (int)value.syncPolicy);
    TRY_PTSZ("one that does not exist", cuStreamGetAttribute, one, none, &value);
    TRY_PTSZ("one that does not exist", cuStreamSetAttribute, one, none, &value);
    no_context();
    TRY_PTSZ("without a context", cuStreamCopyAttributes, NULL, NULL);
}
