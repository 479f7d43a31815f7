// Green contexts: resources of multiprocessors, their parts, what is made of them, and events of whole contexts.
#include "case.h"

static CUdevResource whole;

static void with_resource(void) {
    with_context();
    SET(cuDeviceGetDevResource, device, &whole, CU_DEV_RESOURCE_TYPE_SM);
}

// A green context of the first part of a split.
static CUgreenCtx green_context(void) {
    CUdevResource part;
    CUdevResourceDesc descriptor;
    CUgreenCtx green;
    unsigned count = 1;
    SET(cuDevSmResourceSplitByCount, &part, &count, &whole, NULL, 0, whole.sm.minSmPartitionSize);
    SET(cuDevResourceGenerateDesc, &descriptor, &part, 1);
    SET(cuGreenCtxCreate, &green, descriptor, device, CU_GREEN_CTX_DEFAULT_STREAM);
    return green;
}

GROUP(resources) {
    with_context();
    int processors = 0;
    SET(cuDeviceGetAttribute, &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    TRY("of a device", cuDeviceGetDevResource, device, &whole, CU_DEV_RESOURCE_TYPE_SM);
    YES(cuDeviceGetDevResource, "all multiprocessors", whole.sm.smCount == (unsigned)processors);
    YES(cuDeviceGetDevResource, "of its type", whole.type == CU_DEV_RESOURCE_TYPE_SM);
    YES(cuDeviceGetDevResource, "with a smallest part", whole.sm.minSmPartitionSize > 0);
    TRY("of no type", cuDeviceGetDevResource, device, &whole, CU_DEV_RESOURCE_TYPE_INVALID);
    TRY("to null", cuDeviceGetDevResource, device, NULL, CU_DEV_RESOURCE_TYPE_SM);
    TRY("of no device", cuDeviceGetDevResource, 4711, &whole, CU_DEV_RESOURCE_TYPE_SM);
    CUdevResource of_context;
    TRY("of a context", cuCtxGetDevResource, context, &of_context, CU_DEV_RESOURCE_TYPE_SM);
    YES(cuCtxGetDevResource, "all multiprocessors", of_context.sm.smCount == (unsigned)processors);
    TRY("to null", cuCtxGetDevResource, context, NULL, CU_DEV_RESOURCE_TYPE_SM);
    TRY("of no type", cuCtxGetDevResource, context, &of_context, CU_DEV_RESOURCE_TYPE_INVALID);
}

GROUP(splits) {
    with_resource();
    const unsigned least = whole.sm.minSmPartitionSize;
    unsigned count = 0;
    TRY("counted", cuDevSmResourceSplitByCount, NULL, &count, &whole, NULL, 0, least);
    YES(cuDevSmResourceSplitByCount, "counted, two or more", count >= 2);
    CUdevResource parts[2], rest;
    count = 2;
    TRY("in two", cuDevSmResourceSplitByCount, parts, &count, &whole, &rest, 0, least);
    unsigned all = parts[0].sm.smCount + parts[1].sm.smCount;
    YES(cuDevSmResourceSplitByCount, "in two, as many", count == 2 && parts[0].sm.smCount == parts[1].sm.smCount);
    YES(cuDevSmResourceSplitByCount, "in two, enough", parts[0].sm.smCount >= least);
    if (all < whole.sm.smCount) all += rest.sm.smCount;
    YES(cuDevSmResourceSplitByCount, "in two, all", all == whole.sm.smCount);
    count = 2;
    TRY("without the rest", cuDevSmResourceSplitByCount, parts, &count, &whole, NULL, 0, least);
    count = 2;
    TRY("of more than there are", cuDevSmResourceSplitByCount, parts, &count, &whole, NULL, 0, whole.sm.smCount + 1);
    count = 2;
    TRY("with flags", cuDevSmResourceSplitByCount, parts, &count, &whole, NULL, 0x80, least);
    TRY("without a count", cuDevSmResourceSplitByCount, parts, NULL, &whole, NULL, 0, least);
    CUdevResource none;
    memset(&none, 0, sizeof none);
    count = 2;
    TRY("of nothing", cuDevSmResourceSplitByCount, parts, &count, &none, NULL, 0, 1);
    TRY("of null", cuDevSmResourceSplitByCount, parts, &count, NULL, NULL, 0, 1);
}

GROUP(descriptors) {
    with_resource();
    CUdevResource parts[2];
    unsigned count = 2;
    SET(cuDevSmResourceSplitByCount, parts, &count, &whole, NULL, 0, whole.sm.minSmPartitionSize);
    CUdevResourceDesc descriptor;
    TRY("of one", cuDevResourceGenerateDesc, &descriptor, parts, 1);
    TRY("of two", cuDevResourceGenerateDesc, &descriptor, parts, 2);
    TRY("of a device", cuDevResourceGenerateDesc, &descriptor, &whole, 1);
    // The driver (580) crashes where it gets none.
    CUdevResource none;
    memset(&none, 0, sizeof none);
    TRY("of nothing", cuDevResourceGenerateDesc, &descriptor, &none, 1);
}

GROUP(contexts) {
    with_resource();
    CUdevResource part;
    CUdevResourceDesc descriptor;
    CUgreenCtx green = NULL, other = NULL;
    unsigned count = 1;
    SET(cuDevSmResourceSplitByCount, &part, &count, &whole, NULL, 0, whole.sm.minSmPartitionSize);
    SET(cuDevResourceGenerateDesc, &descriptor, &part, 1);
    TRY("one", cuGreenCtxCreate, &green, descriptor, device, CU_GREEN_CTX_DEFAULT_STREAM);
    TRY("without flags", cuGreenCtxCreate, &other, descriptor, device, 0);
    TRY("to null", cuGreenCtxCreate, NULL, descriptor, device, CU_GREEN_CTX_DEFAULT_STREAM);
    TRY("on no device", cuGreenCtxCreate, &other, descriptor, 4711, CU_GREEN_CTX_DEFAULT_STREAM);
    CUdevResource of_green;
    TRY("of one", cuGreenCtxGetDevResource, green, &of_green, CU_DEV_RESOURCE_TYPE_SM);
    YES(cuGreenCtxGetDevResource, "of one, what it was made of", of_green.sm.smCount == part.sm.smCount);
    TRY("to null", cuGreenCtxGetDevResource, green, NULL, CU_DEV_RESOURCE_TYPE_SM);
    TRY("of no type", cuGreenCtxGetDevResource, green, &of_green, CU_DEV_RESOURCE_TYPE_INVALID);
    CUcontext converted = NULL, again = NULL;
    TRY("one", cuCtxFromGreenCtx, &converted, green);
    SET(cuCtxFromGreenCtx, &again, green);
    YES(cuCtxFromGreenCtx, "one, the same each time", converted == again && converted != NULL);
    TRY("to null", cuCtxFromGreenCtx, NULL, green);
    unsigned long long id = 0, second = 0;
    TRY("one", cuGreenCtxGetId, green, &id);
    TRY("to null", cuGreenCtxGetId, green, NULL);
    TRY("of none", cuGreenCtxGetId, NULL, &second);
    TRY("one", cuCtxSetCurrent, converted);
    TRY("of the current one", cuGreenCtxGetId, NULL, &second);
    YES(cuGreenCtxGetId, "of the current one, the same", id == second);
    CUdevice of;
    TRY("of a green one", cuCtxGetDevice, &of);
    YES(cuCtxGetDevice, "of a green one, its own", of == device);
    TRY("of a green one", cuCtxSynchronize);
    SET(cuCtxSetCurrent, context);
    TRY("one", cuGreenCtxDestroy, green);
    TRY("null", cuGreenCtxDestroy, NULL);
}

GROUP(streams) {
    with_resource();
    CUgreenCtx green = green_context(), of = NULL;
    CUcontext converted = NULL, now = NULL;
    SET(cuCtxFromGreenCtx, &converted, green);
    CUstream stream, blocking;
    TRY("one", cuGreenCtxStreamCreate, &stream, green, CU_STREAM_NON_BLOCKING, 0);
    TRY("a blocking one", cuGreenCtxStreamCreate, &blocking, green, CU_STREAM_DEFAULT, 0);
    TRY("to null", cuGreenCtxStreamCreate, NULL, green, CU_STREAM_NON_BLOCKING, 0);
    TRY("of a green context", cuStreamGetGreenCtx, stream, &of);
    YES(cuStreamGetGreenCtx, "of a green context, that one", of == green);
    TRY("of a green context", cuStreamGetCtx, stream, &now);
    YES(cuStreamGetCtx, "of a green context, what it is converted into", now == converted);
    of = NULL;
    TRY("of a green context", cuStreamGetCtx_v2, stream, &now, &of);
    YES(cuStreamGetCtx_v2, "of a green context, both", of == green && now != NULL && now != converted);
    SET(cuCtxSetCurrent, converted);
    TRY("in a green context", cuStreamCreate, &blocking, CU_STREAM_DEFAULT);
    SET(cuStreamGetGreenCtx, blocking, &of);
    YES(cuStreamCreate, "in a green context, of that", of == green);
    of = NULL;
    TRY("the default one", cuStreamGetGreenCtx, NULL, &of);
    YES(cuStreamGetGreenCtx, "the default one, of the current one", of == green);
    TRY("the thread's", cuStreamGetCtx_v2, CU_STREAM_PER_THREAD, &now, &of);
    SET(cuStreamDestroy_v2, blocking);
    SET(cuStreamDestroy_v2, stream);
    SET(cuCtxSetCurrent, context);
    SET(cuGreenCtxDestroy, green);
}

GROUP(events) {
    with_resource();
    CUgreenCtx green = green_context();
    CUcontext primary;
    SET(cuDevicePrimaryCtxRetain, &primary, device);
    CUevent event, foreign;
    SET(cuEventCreate, &foreign, CU_EVENT_DISABLE_TIMING);
    SET(cuCtxSetCurrent, primary);
    SET(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    CUstream stream;
    SET(cuGreenCtxStreamCreate, &stream, green, CU_STREAM_NON_BLOCKING, 0);
    TRY("one", cuGreenCtxRecordEvent, green, event);
    TRY("one", cuGreenCtxWaitEvent, green, event);
    TRY("one", cuCtxRecordEvent, primary, event);
    TRY("one", cuCtxWaitEvent, primary, event);
    TRY("of all of a context", cuEventSynchronize, event);
    TRY("one of another context", cuGreenCtxRecordEvent, green, foreign);
    TRY("one of another context", cuCtxRecordEvent, primary, foreign);
    TRY("one of another context", cuGreenCtxWaitEvent, green, foreign);
    TRY("one of another context", cuCtxWaitEvent, primary, foreign);
    SET(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("during a capture", cuGreenCtxRecordEvent, green, event);
    CUgraph graph;
    TRY("that a record has invalidated", cuStreamEndCapture, stream, &graph);
    SET(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("during a capture", cuGreenCtxWaitEvent, green, event);
    TRY("that a wait has invalidated", cuStreamEndCapture, stream, &graph);
    SET(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("during a green context's capture", cuCtxWaitEvent, primary, event);
    TRY("that a wait of the primary context leaves", cuStreamEndCapture, stream, &graph);
    SET(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("during a green context's capture", cuCtxRecordEvent, primary, event);
    TRY("that a record of the primary context leaves", cuStreamEndCapture, stream, &graph);
    SET(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("during a green context's capture", cuCtxSynchronize);
    TRY("that a wait for the primary context has met", cuStreamEndCapture, stream, &graph);
    CUstream own;
    SET(cuStreamCreate, &own, CU_STREAM_NON_BLOCKING);
    SET(cuStreamBeginCapture_v2, own, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("during a capture", cuCtxWaitEvent, primary, event);
    TRY("that a wait of its context has invalidated", cuStreamEndCapture, own, &graph);
    SET(cuStreamDestroy_v2, own);
    SET(cuStreamDestroy_v2, stream);
    SET(cuGreenCtxDestroy, green);
}
