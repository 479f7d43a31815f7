// Stream capture: begun, forked, joined, ended, asked about; what it forbids, in which thread.
#include "case.h"
#include <pthread.h>

static CUstream stream, other;
static CUdeviceptr memory;
static void *parameters[] = {&memory, NULL};
static int one = 1;

static void prepare(void) {
    with_module();
    SET(cuStreamCreate, &stream, CU_STREAM_DEFAULT);
    SET(cuStreamCreate, &other, CU_STREAM_NON_BLOCKING);
    memory = device_bytes(4096);
    parameters[1] = &one;
}

static CUresult launch(CUstream in) {
    return CU(cuLaunchKernel)(function("add"), 1, 1, 1, 1, 1, 1, 0, in, parameters, NULL);
}

static int status_of(CUstream of) {
    CUstreamCaptureStatus status = 99;
    return CU(cuStreamIsCapturing)(of, &status) == CUDA_SUCCESS ? (int)status : -1;
}

static void begin(CUstream in, CUstreamCaptureMode mode) { SET(cuStreamBeginCapture_v2, in, mode); }

// Kinds of nodes, and edges by the places of their nodes.
static void show(const char *what, CUgraph graph) {
    CUgraphNode nodes[32], from[32], to[32];
    CUgraphEdgeData data[32];
    size_t count = 32, edges = 32;
    SET(cuGraphGetNodes, graph, nodes, &count);
    SET(cuGraphGetEdges_v2, graph, from, to, data, &edges);
    char text[400] = "";
    for (size_t i = 0; i < count; i++) {
        CUgraphNodeType type;
        SET(cuGraphNodeGetType, nodes[i], &type);
        sprintf(text + strlen(text), "%d ", type);
    }
    for (size_t i = 0; i < edges; i++) {
        int a = -1, b = -1;
        for (size_t k = 0; k < count; k++) {
            if (nodes[k] == from[i]) a = (int)k;
            if (nodes[k] == to[i]) b = (int)k;
        }
        sprintf(text + strlen(text), "%s%d-%d/%d%d", i ? " " : "edges ", a, b, data[i].from_port, data[i].type);
    }
    TELL(cuGraphGetEdges_v2, what, "%s", text);
}

static void finish(const char *what, CUstream in) {
    CUgraph graph = (CUgraph)1;
    if (TRY(what, cuStreamEndCapture, in, &graph) == CUDA_SUCCESS) {
        show(what, graph);
        SET(cuGraphDestroy, graph);
    } else {
        YES(cuStreamEndCapture, "that fails, gives null", graph == NULL);
    }
}

GROUP(begun) {
    prepare();
    CUgraph graph;
    TRY("global", cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("again", cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("of nothing", cuStreamEndCapture, stream, &graph);
    TRY("once more", cuStreamEndCapture, stream, &graph);
    TRY("global", cuStreamBeginCapture_v2_ptsz, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("again", cuStreamBeginCapture_v2_ptsz, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("of nothing", cuStreamEndCapture_ptsz, stream, &graph);
    TRY("once more", cuStreamEndCapture_ptsz, stream, &graph);
    TRY("by the first version", cuStreamBeginCapture, stream);
    TRY("again", cuStreamBeginCapture, stream);
    SET(cuStreamEndCapture, stream, &graph);
    TRY("by the first version", cuStreamBeginCapture_ptsz, stream);
    TRY("again", cuStreamBeginCapture_ptsz, stream);
    SET(cuStreamEndCapture, stream, &graph);
    TRY("in a mode that does not exist", cuStreamBeginCapture_v2, stream, 7);
    TRY("in the default stream", cuStreamBeginCapture_v2, NULL, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("in the thread's stream", cuStreamBeginCapture_v2, CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("in the thread's stream", cuStreamEndCapture, CU_STREAM_PER_THREAD, &graph);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("to null", cuStreamEndCapture, stream, NULL);
    begin(other, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("while it captures", cuStreamDestroy_v2, other);
    CUdeviceptr more;
    TRY("after the capturing stream has gone", cuMemAlloc_v2, &more, 64);
}

GROUP(into_a_graph) {
    prepare();
    CUgraph graph, ended = NULL;
    CUgraphNode first;
    SET(cuGraphCreate, &graph, 0);
    SET(cuGraphAddEmptyNode, &first, graph, NULL, 0);
    TRY("behind a node", cuStreamBeginCaptureToGraph, stream, graph, &first, NULL, 1, CU_STREAM_CAPTURE_MODE_GLOBAL);
    SET(cuLaunchKernel, function("nothing"), 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    TRY("again", cuStreamBeginCaptureToGraph, stream, graph, &first, NULL, 1, CU_STREAM_CAPTURE_MODE_GLOBAL);
    SET(cuStreamEndCapture, stream, &ended);
    YES(cuStreamEndCapture, "into a graph, gives that", ended == graph);
    show("into a graph", graph);
    TRY("at its beginning", cuStreamBeginCaptureToGraph_ptsz, stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("again", cuStreamBeginCaptureToGraph_ptsz, stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
    SET(cuStreamEndCapture, stream, &ended);
    TRY("null", cuStreamBeginCaptureToGraph, stream, NULL, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static void CUDA_CB called(void *data) { (void)data; }

GROUP(commands) {
    prepare();
    CUdeviceptr target = device_bytes(4096);
    static char host[4096];
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("captured", cuMemcpyHtoDAsync_v2, target, host, 64, stream);
    TRY("captured", cuMemcpyDtoHAsync_v2, host, target, 64, stream);
    TRY("captured", cuMemcpyDtoDAsync_v2, target, memory, 64, stream);
    TRY("captured", cuMemsetD32Async, target, 1, 16, stream);
    TRY("of nothing, captured", cuMemcpyDtoDAsync_v2, target, memory, 0, stream);
    TRY("captured", cuLaunchHostFunc, stream, called, NULL);
    TRY("captured", cuStreamWriteValue32_v2, stream, memory, 1, 0);
    CUdeviceptr given = 0;
    TRY("captured", cuMemAllocAsync, &given, 4096, stream);
    TRY("captured", cuMemFreeAsync, given, stream);
    TRY("of other memory, captured", cuMemFreeAsync, memory, stream);
    TELL(cuLaunchKernel, "captured", "%s", code_name(launch(stream)));
    finish("of commands", stream);
    YES(cuStreamEndCapture, "of commands, has done nothing", word_at(memory) == 0x03020100);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("without blocks, captured", cuLaunchKernel, function("nothing"), 0, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
    TELL(cuStreamIsCapturing, "after a launch that is wrong, is", "%d", status_of(stream));
    TRY("after that", cuMemsetD32Async, target, 1, 16, stream);
    finish("of a launch that is wrong", stream);
    CUdeviceptr to = target, from = memory;
    size_t size = 64, index = 0, fail;
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("captured", cuMemcpyBatchAsync, &to, &from, &size, 1, &attributes, &index, 1, &fail, stream);
    finish("of a batch", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("captured", cuStreamAddCallback, stream, (CUstreamCallback)called, NULL, 0);
    finish("of a callback", stream);
}

GROUP(forks) {
    prepare();
    CUevent event, outside;
    SET(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    SET(cuEventCreate, &outside, CU_EVENT_DISABLE_TIMING);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    launch(stream);
    TRY("captured", cuEventRecord, event, stream);
    TRY("captured", cuStreamWaitEvent, other, event, 0);
    TELL(cuStreamIsCapturing, "of a fork, is", "%d", status_of(other));
    launch(other);
    launch(stream);
    SET(cuEventRecord, event, other);
    SET(cuStreamWaitEvent, stream, event, 0);
    launch(stream);
    finish("of a fork that is joined", stream);
    TELL(cuStreamIsCapturing, "of a fork, after the end, is", "%d", status_of(other));
    TRY("last recorded in a capture that is over", cuEventQuery, event);
    TRY("last recorded in a capture that is over", cuEventSynchronize, event);
    TRY("last recorded in a capture that is over", cuStreamWaitEvent, stream, event, 0);
    SET(cuEventRecord, event, stream);
    TRY("recorded anew", cuEventSynchronize, event);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    SET(cuEventRecord, event, stream);
    SET(cuStreamWaitEvent, other, event, 0);
    launch(other);
    finish("of a fork that is not joined", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    SET(cuEventRecord, event, stream);
    SET(cuStreamWaitEvent, other, event, 0);
    finish("of a fork without work", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    SET(cuEventRecord, event, stream);
    SET(cuStreamWaitEvent, other, event, 0);
    finish("in the fork", other);
    TELL(cuStreamIsCapturing, "after that, is", "%d", status_of(stream));
    finish("after that", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("never recorded, captured", cuStreamWaitEvent, stream, outside, 0);
    SET(cuStreamEndCapture, stream, NULL);
    SET(cuEventRecord, outside, other);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("recorded outside, captured", cuStreamWaitEvent, stream, outside, 0);
    finish("that waited for outside", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    begin(other, CU_STREAM_CAPTURE_MODE_RELAXED);
    SET(cuEventRecord, event, stream);
    TRY("of another capture", cuStreamWaitEvent, other, event, 0);
    finish("that would merge", stream);
    finish("that would merge", other);
    begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    SET(cuEventRecord, event, stream);
    TRY("last recorded in a capture", cuEventQuery, event);
    TELL(cuStreamIsCapturing, "after that, is", "%d", status_of(stream));
    finish("whose event was asked for", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    SET(cuEventRecord, event, stream);
    TRY("last recorded in a capture", cuEventSynchronize, event);
    finish("whose event was waited for", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("external", cuStreamWaitEvent, stream, outside, CU_EVENT_WAIT_EXTERNAL);
    TRY("external", cuEventRecordWithFlags, outside, stream, CU_EVENT_RECORD_EXTERNAL);
    TRY("external, outside", cuEventRecordWithFlags, outside, other, CU_EVENT_RECORD_EXTERNAL);
    TRY("external, outside", cuStreamWaitEvent, other, outside, CU_EVENT_WAIT_EXTERNAL);
    finish("of external events", stream);
}

GROUP(asked) {
    prepare();
    CUstreamCaptureStatus status = 99;
    cuuint64_t id = 0;
    CUgraph graph = NULL;
    const CUgraphNode *nodes;
    const CUgraphEdgeData *edges;
    size_t count = 99;
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    launch(stream);
    launch(stream);
    SET(cuStreamGetCaptureInfo_v3, stream, &status, &id, &graph, &nodes, &edges, &count);
    TELL(cuStreamGetCaptureInfo_v3, "while it captures, is", "%d, %zu nodes, %s", status, count, id > 0 ? "an id" : "no id");
    CUgraphNode node;
    TRY("to a graph that is captured", cuGraphAddEmptyNode, &node, graph, nodes, count);
    TRY("by one", cuStreamUpdateCaptureDependencies, stream, &node, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    launch(stream);
    TRY("by one", cuStreamUpdateCaptureDependencies_ptsz, stream, &node, 1, CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
    launch(stream);
    TRY("to none", cuStreamUpdateCaptureDependencies_v2, stream, NULL, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    TRY("to none", cuStreamUpdateCaptureDependencies_v2_ptsz, stream, NULL, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
    launch(stream);
    TRY("with flags that do not exist", cuStreamUpdateCaptureDependencies, stream, NULL, 0, 5);
    TRY("with flags that do not exist", cuStreamUpdateCaptureDependencies_v2, stream, NULL, NULL, 0, 5);
    TRY_PTSZ("of one that does not capture", cuStreamUpdateCaptureDependencies, other, NULL, 0, 1);
    TRY_PTSZ("of one that does not capture", cuStreamUpdateCaptureDependencies_v2, other, NULL, NULL, 0, 1);
    TRY("that is captured", cuGraphDestroy, graph);
    TRY("of a graph that is captured", cuGraphDestroyNode, node);
    finish("of updated dependencies", stream);
    begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("while a blocking stream captures", cuStreamIsCapturing, NULL, &status);
    TELL(cuStreamIsCapturing, "after that, is", "%d", status_of(stream));
    SET(cuStreamEndCapture, stream, NULL);
    begin(other, CU_STREAM_CAPTURE_MODE_RELAXED);
    TRY("while another stream captures", cuStreamIsCapturing, NULL, &status);
    SET(cuStreamEndCapture, other, NULL);
}

// A call while a stream captures: its answer, what becomes of the capture.
#define WHILE(name, mode, call, ...)                                                                                         \
    do {                                                                                                               \
        begin(stream, mode);                                                                                           \
        TRY("while " name " is on", call, __VA_ARGS__);                                                                          \
        TELL(cuStreamIsCapturing, "in " name ", after " #call ", is", "%d", status_of(stream));                                     \
        CU(cuStreamEndCapture)(stream, NULL);                                                                          \
    } while (0)
#define IN_ALL_MODES(call, ...)                                                                                        \
    do {                                                                                                               \
        WHILE("a global capture", CU_STREAM_CAPTURE_MODE_GLOBAL, call, __VA_ARGS__);                                                       \
        WHILE("a thread-local capture", CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, call, __VA_ARGS__);                                                 \
        WHILE("a relaxed capture", CU_STREAM_CAPTURE_MODE_RELAXED, call, __VA_ARGS__);                                                      \
    } while (0)

GROUP(forbidden) {
    prepare();
    CUdeviceptr more = 0;
    void *host = NULL;
    size_t pitch, is_free, total;
    int value;
    CUevent event;
    SET(cuEventCreate, &event, 0);
    IN_ALL_MODES(cuMemAlloc_v2, &more, 4096);
    IN_ALL_MODES(cuMemFree_v2, more);
    IN_ALL_MODES(cuMemAllocPitch_v2, &more, &pitch, 64, 64, 4);
    IN_ALL_MODES(cuMemHostAlloc, &host, 4096, 0);
    IN_ALL_MODES(cuMemFreeHost, host);
    IN_ALL_MODES(cuEventQuery, event);
    IN_ALL_MODES(cuEventSynchronize, event);
    IN_ALL_MODES(cuStreamQuery, stream);
    IN_ALL_MODES(cuStreamSynchronize, stream);
    IN_ALL_MODES(cuStreamQuery, other);
    IN_ALL_MODES(cuStreamSynchronize, other);
    IN_ALL_MODES(cuStreamQuery, NULL);
    IN_ALL_MODES(cuStreamSynchronize, NULL);
    IN_ALL_MODES(cuCtxSynchronize, );
    IN_ALL_MODES(cuMemsetD8_v2, memory, 0, 64);
    IN_ALL_MODES(cuMemcpyHtoD_v2, memory, &value, 4);
    IN_ALL_MODES(cuMemcpyDtoH_v2, &value, memory, 4);
    IN_ALL_MODES(cuMemcpyDtoD_v2, memory, memory + 64, 4);
    IN_ALL_MODES(cuMemGetInfo_v2, &is_free, &total);
    IN_ALL_MODES(cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function("nothing"));
    IN_ALL_MODES(cuEventRecord, event, other);
    IN_ALL_MODES(cuEventRecord, event, NULL);
    IN_ALL_MODES(cuLaunchKernel, function("nothing"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    IN_ALL_MODES(cuLaunchKernel, function("nothing"), 1, 1, 1, 1, 1, 1, 0, other, NULL, NULL);
    IN_ALL_MODES(cuMemPoolTrimTo, NULL, 0);
    // Nothing is forbidden to others by a stream that does not block.
    begin(other, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("beside one that does not block", cuMemsetD8_v2, memory, 0, 64);
    TRY("beside one that does not block", cuMemcpyHtoD_v2, memory, &value, 4);
    TRY("in the default stream, beside one that does not block", cuStreamSynchronize, NULL);
    finish("beside which a stream was waited for", other);
}

static CUresult answered;
static CUstreamCaptureMode thread_mode;

static void *allocates(void *unused) {
    CUdeviceptr more;
    SET(cuCtxSetCurrent, context);
    SET(cuThreadExchangeStreamCaptureMode, &thread_mode);
    answered = CU(cuMemAlloc_v2)(&more, 64);
    return unused;
}

static void *ends(void *unused) {
    CUgraph graph;
    SET(cuCtxSetCurrent, context);
    answered = CU(cuStreamEndCapture)(stream, &graph);
    return unused;
}

static void *launches(void *unused) {
    SET(cuCtxSetCurrent, context);
    answered = launch(stream);
    return unused;
}

static void in_thread(void *(*work)(void *)) {
    pthread_t thread;
    pthread_create(&thread, NULL, work, NULL);
    pthread_join(thread, NULL);
}

GROUP(threads) {
    prepare();
    static const char *names[] = {"global", "thread-local", "relaxed"};
    for (int capture = 0; capture < 3; capture++) {
        for (int mode = 0; mode < 3; mode++) {
            begin(stream, capture);
            thread_mode = mode;
            in_thread(allocates);
            TELL(cuMemAlloc_v2, "in a thread beside a capture", "%s beside %s, %s, then %d", names[mode], names[capture],
                code_name(answered), status_of(stream));
            CU(cuStreamEndCapture)(stream, NULL);
        }
        begin(stream, capture);
        in_thread(launches);
        TELL(cuLaunchKernel, "by another thread", "%s, %s, then %d", names[capture], code_name(answered), status_of(stream));
        in_thread(ends);
        TELL(cuStreamEndCapture, "by another thread", "%s, %s, then %d", names[capture], code_name(answered), status_of(stream));
        CU(cuStreamEndCapture)(stream, NULL);
    }
    for (int mode = 0; mode < 3; mode++) {
        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
        CUstreamCaptureMode own = mode;
        SET(cuThreadExchangeStreamCaptureMode, &own);
        CUdeviceptr more;
        CUresult result = CU(cuMemAlloc_v2)(&more, 64);
        TELL(cuMemAlloc_v2, "beside the thread's own capture", "%s, %s, then %d", names[mode], code_name(result),
            status_of(stream));
        SET(cuThreadExchangeStreamCaptureMode, &own);
        CU(cuStreamEndCapture)(stream, NULL);
    }
}

GROUP(invalid) {
    prepare();
    CUdeviceptr more;
    CUstreamCaptureStatus status = 99;
    cuuint64_t id = 77;
    begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CU(cuMemAlloc_v2)(&more, 64);
    TELL(cuLaunchKernel, "in an invalid capture", "%s", code_name(launch(stream)));
    CUevent event;
    SET(cuEventCreate, &event, 0);
    TRY("in an invalid capture", cuEventRecord, event, stream);
    TRY("in an invalid capture", cuStreamSynchronize, stream);
    TRY("in an invalid capture", cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    TRY("in an invalid capture", cuMemAlloc_v2, &more, 64);
    TRY("of an invalid capture", cuStreamGetCaptureInfo, stream, &status, &id);
    TELL(cuStreamGetCaptureInfo, "of an invalid capture, is", "%d, id %d", status, (int)id);
    finish("that is invalid", stream);
    TRY("after that", cuMemAlloc_v2, &more, 64);
}
