// Events: made, recorded, waited for, and the time between them.
#include "case.h"

GROUP(made) {
    with_context();
    CUevent event = NULL;
    TRY("by default", cuEventCreate, &event, CU_EVENT_DEFAULT);
    TRY("one", cuEventDestroy_v2, event);
    TRY("that blocks, without time", cuEventCreate, &event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING);
    TRY("one, by the first version", cuEventDestroy, event);
    TRY("with flags that do not exist", cuEventCreate, &event, 0x40);
    TRY("for other processes, with time", cuEventCreate, &event, CU_EVENT_INTERPROCESS);
    TRY("to null", cuEventCreate, NULL, 0);
    TRY("null", cuEventDestroy_v2, NULL);
    TRY("null", cuEventDestroy, NULL);
    no_context();
    TRY("without a context", cuEventCreate, &event, 0);
}

GROUP(recorded) {
    with_module();
    CUevent event;
    CUstream stream;
    SET(cuEventCreate, &event, 0);
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    TRY("one never recorded", cuEventQuery, event);
    TRY("one never recorded", cuEventSynchronize, event);
    struct busy busy = hold(stream);
    TRY_PTSZ("behind work", cuEventRecord, event, stream);
    TRY("one behind work", cuEventQuery, event);
    release(&busy);
    TRY("one behind work", cuEventSynchronize, event);
    TRY("one whose work is done", cuEventQuery, event);
    busy = hold(stream);
    TRY_PTSZ("behind work", cuEventRecordWithFlags, event, stream, 0);
    TRY("one recorded again", cuEventQuery, event);
    release(&busy);
    TRY("one recorded again, after its work", cuEventQuery, event);
    TRY_PTSZ("in the default stream", cuEventRecord, event, NULL);
    TRY_PTSZ("in the default stream", cuEventRecordWithFlags, event, NULL, 0);
    TRY_PTSZ("null", cuEventRecord, NULL, stream);
    TRY_PTSZ("null", cuEventRecordWithFlags, NULL, stream, 0);
    TRY_PTSZ("with flags that do not exist", cuEventRecordWithFlags, event, stream, 8);
    TRY("null", cuEventQuery, NULL);
    TRY("null", cuEventSynchronize, NULL);
    CUcontext second;
    SET(cuCtxCreate_v2, &second, 0, device);
    TRY("of one context in a stream of another", cuEventRecord, event, NULL);
}

GROUP(elapsed) {
    with_module();
    CUevent start, end, without, never;
    CUstream stream;
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    SET(cuEventCreate, &start, 0);
    SET(cuEventCreate, &end, 0);
    SET(cuEventCreate, &never, 0);
    SET(cuEventCreate, &without, CU_EVENT_DISABLE_TIMING);
    SET(cuEventRecord, start, stream);
    SET(cuEventRecord, without, stream);
    struct busy busy = hold(stream);
    SET(cuEventRecord, end, stream);
    float ms = -1;
    TRY("before the end", cuEventElapsedTime, &ms, start, end);
    TRY("before the end", cuEventElapsedTime_v2, &ms, start, end);
    release(&busy);
    TRY("after the end", cuEventElapsedTime, &ms, start, end);
    YES(cuEventElapsedTime, "is not negative", ms >= 0);
    TRY("after the end", cuEventElapsedTime_v2, &ms, start, end);
    YES(cuEventElapsedTime_v2, "is not negative", ms >= 0);
    SET(cuEventElapsedTime_v2, &ms, end, start);
    YES(cuEventElapsedTime_v2, "backwards, is not positive", ms <= 0);
    SET(cuEventElapsedTime_v2, &ms, start, start);
    YES(cuEventElapsedTime_v2, "of itself, is nothing", ms == 0);
    TRY("from one without time", cuEventElapsedTime, &ms, without, end);
    TRY("from one without time", cuEventElapsedTime_v2, &ms, without, end);
    TRY("from one never recorded", cuEventElapsedTime, &ms, never, end);
    TRY("from one never recorded", cuEventElapsedTime_v2, &ms, never, end);
    TRY("from null", cuEventElapsedTime, &ms, NULL, end);
    TRY("from null", cuEventElapsedTime_v2, &ms, NULL, end);
    TRY("to a null place", cuEventElapsedTime, NULL, start, end);
    TRY("to a null place", cuEventElapsedTime_v2, NULL, start, end);
}
