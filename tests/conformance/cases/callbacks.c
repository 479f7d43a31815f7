// Functions of the host in a stream's order.
#include "case.h"

static int called, in_order = 1, last_status = -1;
static CUstream seen;

static void CUDA_CB count_up(void *data) {
    in_order &= called == (int)(intptr_t)data;
    called++;
}

static void CUDA_CB with_status(CUstream stream, CUresult status, void *data) {
    seen = stream;
    last_status = status;
    called += (int)(intptr_t)data;
}

GROUP(functions) {
    with_module();
    CUstream stream;
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    for (intptr_t i = 0; i < 5; i++) SET(cuLaunchHostFunc, stream, count_up, (void *)i);
    TRY("one", cuLaunchHostFunc, stream, count_up, (void *)5);
    TRY("one", cuLaunchHostFunc_ptsz, stream, count_up, (void *)6);
    SET(cuStreamSynchronize, stream);
    TELL(cuLaunchHostFunc, "seven, are called", "%d times, %s", called, in_order ? "in order" : "out of order");
    // Behind work of the device, and before what follows.
    struct busy busy = hold(stream);
    SET(cuLaunchHostFunc, stream, count_up, (void *)7);
    TELL(cuLaunchHostFunc, "behind work, before its end", "%d", called);
    TRY("behind a function", cuStreamQuery, stream);
    release(&busy);
    TELL(cuLaunchHostFunc, "behind work, after its end", "%d", called);
    called = 0;
    TRY("in the default stream", cuLaunchHostFunc, NULL, count_up, (void *)0);
    TRY("in the default stream", cuLaunchHostFunc_ptsz, NULL, count_up, (void *)1);
    SET(cuCtxSynchronize, );
    TELL(cuLaunchHostFunc, "in the default streams, are called", "%d times", called);
    TRY_PTSZ("null", cuLaunchHostFunc, stream, NULL, NULL);
    no_context();
    TRY_PTSZ("without a context", cuLaunchHostFunc, NULL, count_up, NULL);
}

GROUP(callbacks) {
    with_context();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    TRY("one", cuStreamAddCallback, stream, with_status, (void *)1, 0);
    SET(cuStreamSynchronize, stream);
    TELL(cuStreamAddCallback, "one, is called", "%d times, with %s and %s", called, code_name(last_status),
        seen == stream ? "its stream" : "another stream");
    TRY("one", cuStreamAddCallback_ptsz, stream, with_status, (void *)1, 0);
    SET(cuStreamSynchronize, stream);
    TELL(cuStreamAddCallback_ptsz, "one, is called", "%d times", called);
    TRY_PTSZ("null", cuStreamAddCallback, stream, NULL, NULL, 0);
    TRY_PTSZ("with flags that do not exist", cuStreamAddCallback, stream, with_status, (void *)1, 8);
    SET(cuStreamSynchronize, stream);
    TELL(cuStreamAddCallback, "wrong ones, are not called", "%d times", called);
}
