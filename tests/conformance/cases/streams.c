// Streams: made, asked, waited for; the default ones; the state of captures that do not run.
#include "case.h"

GROUP(made) {
    with_context();
    CUstream stream = NULL, other = NULL;
    TRY("by default", cuStreamCreate, &stream, CU_STREAM_DEFAULT);
    TRY("that does not block", cuStreamCreate, &other, CU_STREAM_NON_BLOCKING);
    TRY("with flags that do not exist", cuStreamCreate, &other, 8);
    TRY("to null", cuStreamCreate, NULL, 0);
    unsigned flags = 99;
    TRY_PTSZ("of one by default", cuStreamGetFlags, stream, &flags);
    TELL(cuStreamGetFlags, "of one by default, are", "%u", flags);
    SET(cuStreamGetFlags, other, &flags);
    TELL(cuStreamGetFlags, "of one that does not block, are", "%u", flags);
    TRY_PTSZ("of the default stream", cuStreamGetFlags, NULL, &flags);
    TRY_PTSZ("to null", cuStreamGetFlags, stream, NULL);
    TRY("one", cuStreamDestroy_v2, stream);
    TRY("another, by the first version", cuStreamDestroy, other);
    TRY("the default stream", cuStreamDestroy_v2, NULL);
    TRY("the default stream", cuStreamDestroy, NULL);
    TRY("the legacy stream", cuStreamDestroy_v2, CU_STREAM_LEGACY);
    TRY("the thread's stream", cuStreamDestroy_v2, CU_STREAM_PER_THREAD);
    no_context();
    TRY("without a context", cuStreamCreate, &stream, 0);
}

GROUP(priorities) {
    with_context();
    int least = 0, greatest = 0, priority = 99;
    SET(cuCtxGetStreamPriorityRange, &least, &greatest);
    CUstream stream = NULL;
    TRY("the greatest", cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, greatest);
    TRY_PTSZ("of one with the greatest", cuStreamGetPriority, stream, &priority);
    YES(cuStreamGetPriority, "of one with the greatest, is that", priority == greatest);
    SET(cuStreamCreateWithPriority, &stream, 0, greatest - 100);
    SET(cuStreamGetPriority, stream, &priority);
    YES(cuStreamCreateWithPriority, "beyond the greatest, is the greatest", priority == greatest);
    SET(cuStreamCreateWithPriority, &stream, 0, least + 100);
    SET(cuStreamGetPriority, stream, &priority);
    YES(cuStreamCreateWithPriority, "beyond the least, is the least", priority == least);
    TRY("with flags that do not exist", cuStreamCreateWithPriority, &stream, 8, 0);
    TRY("to null", cuStreamCreateWithPriority, NULL, 0, 0);
    TRY_PTSZ("of the default stream", cuStreamGetPriority, NULL, &priority);
    TELL(cuStreamGetPriority, "of the default stream, is", "%d", priority);
    TRY_PTSZ("to null", cuStreamGetPriority, stream, NULL);
    no_context();
    TRY("without a context", cuStreamCreateWithPriority, &stream, 0, 0);
}

GROUP(asked) {
    with_context();
    CUstream stream, other;
    SET(cuStreamCreate, &stream, 0);
    SET(cuStreamCreate, &other, 0);
    unsigned long long id = 0, another = 0, of_default = 0;
    TRY_PTSZ("of one", cuStreamGetId, stream, &id);
    SET(cuStreamGetId, other, &another);
    TRY("of the default stream", cuStreamGetId, NULL, &of_default);
    YES(cuStreamGetId, "all differ", id != another && id != of_default && another != of_default);
    SET(cuStreamGetId, CU_STREAM_LEGACY, &another);
    YES(cuStreamGetId, "of the default stream, is the legacy stream's", another == of_default);
    unsigned long long of_thread = 0;
    SET(cuStreamGetId, CU_STREAM_PER_THREAD, &of_thread);
    YES(cuStreamGetId, "of the thread's stream, differs", of_thread != of_default && of_thread != id);
    SET(cuStreamGetId_ptsz, NULL, &another);
    YES(cuStreamGetId_ptsz, "of the default stream, is the thread's", another == of_thread);
    TRY_PTSZ("to null", cuStreamGetId, stream, NULL);
    CUcontext of = NULL;
    TRY_PTSZ("of one", cuStreamGetCtx, stream, &of);
    YES(cuStreamGetCtx, "of one, is its context", of == context);
    of = NULL;
    TRY_PTSZ("of the default stream", cuStreamGetCtx, NULL, &of);
    YES(cuStreamGetCtx, "of the default stream, is the current one", of == context);
    TRY_PTSZ("to null", cuStreamGetCtx, stream, NULL);
    CUdevice on = -1;
    TRY_PTSZ("of one", cuStreamGetDevice, stream, &on);
    YES(cuStreamGetDevice, "of one, is its context's", on == device);
    TRY_PTSZ("of the default stream", cuStreamGetDevice, NULL, &on);
    TRY_PTSZ("to null", cuStreamGetDevice, stream, NULL);
    no_context();
    TRY_PTSZ("of the default stream without a context", cuStreamGetCtx, NULL, &of);
    TRY_PTSZ("of the default stream without a context", cuStreamGetDevice, NULL, &on);
    TRY_PTSZ("of the default stream without a context", cuStreamGetId, NULL, &id);
}

GROUP(waited_for) {
    with_module();
    CUstream stream;
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    TRY_PTSZ("of nothing", cuStreamQuery, stream);
    TRY_PTSZ("of nothing", cuStreamSynchronize, stream);
    TRY_PTSZ("the default stream", cuStreamQuery, NULL);
    TRY_PTSZ("the default stream", cuStreamSynchronize, NULL);
    struct busy busy = hold(stream);
    TRY_PTSZ("while it works", cuStreamQuery, stream);
    CUevent event;
    SET(cuEventCreate, &event, 0);
    SET(cuEventRecord, event, stream);
    CUstream behind;
    SET(cuStreamCreate, &behind, CU_STREAM_NON_BLOCKING);
    TRY_PTSZ("for work of another", cuStreamWaitEvent, behind, event, 0);
    TRY("while it waits for another", cuStreamQuery, behind);
    release(&busy);
    TRY_PTSZ("after its work", cuStreamQuery, stream);
    TRY("after what it waited for", cuStreamSynchronize, behind);
    TRY_PTSZ("for no event", cuStreamWaitEvent, behind, NULL, 0);
    TRY_PTSZ("with flags that do not exist", cuStreamWaitEvent, behind, event, 8);
    CUevent never;
    SET(cuEventCreate, &never, 0);
    TRY_PTSZ("for an event that was never recorded", cuStreamWaitEvent, behind, never, 0);
    TRY("after an event that was never recorded", cuStreamQuery, behind);
    no_context();
    TRY_PTSZ("without a context", cuStreamQuery, NULL);
    TRY_PTSZ("without a context", cuStreamSynchronize, NULL);
}

GROUP(default_streams) {
    with_module();
    CUstream blocking, free;
    SET(cuStreamCreate, &blocking, CU_STREAM_DEFAULT);
    SET(cuStreamCreate, &free, CU_STREAM_NON_BLOCKING);
    struct busy busy = hold(blocking);
    TRY("the legacy stream, behind one that blocks", cuStreamQuery, CU_STREAM_LEGACY);
    TRY("one that does not block", cuStreamQuery, free);
    release(&busy);
    TRY("the legacy stream, at the end", cuStreamSynchronize, CU_STREAM_LEGACY);
    TRY("the thread's stream, at the end", cuStreamSynchronize, CU_STREAM_PER_THREAD);
}

GROUP(captures) {
    with_context();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUstreamCaptureStatus status = 99;
    cuuint64_t id = 0;
    TRY_PTSZ("of one", cuStreamIsCapturing, stream, &status);
    TELL(cuStreamIsCapturing, "of one, is", "%d", status);
    TRY_PTSZ("of the default stream", cuStreamIsCapturing, NULL, &status);
    TRY_PTSZ("to null", cuStreamIsCapturing, stream, NULL);
    status = 99;
    TRY_PTSZ("of one", cuStreamGetCaptureInfo, stream, &status, &id);
    TELL(cuStreamGetCaptureInfo, "of one, is", "%d", status);
    TRY_PTSZ("to null", cuStreamGetCaptureInfo, stream, NULL, &id);
    CUgraph graph;
    const CUgraphNode *nodes;
    const CUgraphEdgeData *edges;
    size_t count;
    status = 99;
    TRY_PTSZ("of one", cuStreamGetCaptureInfo_v2, stream, &status, &id, &graph, &nodes, &count);
    TELL(cuStreamGetCaptureInfo_v2, "of one, is", "%d", status);
    TRY_PTSZ("with the status alone", cuStreamGetCaptureInfo_v2, stream, &status, NULL, NULL, NULL, NULL);
    TRY_PTSZ("to null", cuStreamGetCaptureInfo_v2, stream, NULL, NULL, NULL, NULL, NULL);
    status = 99;
    TRY_PTSZ("of one", cuStreamGetCaptureInfo_v3, stream, &status, &id, &graph, &nodes, &edges, &count);
    TELL(cuStreamGetCaptureInfo_v3, "of one, is", "%d", status);
    TRY_PTSZ("to null", cuStreamGetCaptureInfo_v3, stream, NULL, NULL, NULL, NULL, NULL, NULL);
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    TRY("for relaxed", cuThreadExchangeStreamCaptureMode, &mode);
    TELL(cuThreadExchangeStreamCaptureMode, "for relaxed, was", "%d", mode);
    TRY("back", cuThreadExchangeStreamCaptureMode, &mode);
    TELL(cuThreadExchangeStreamCaptureMode, "back, was", "%d", mode);
    mode = 99;
    TRY("for one that does not exist", cuThreadExchangeStreamCaptureMode, &mode);
}
