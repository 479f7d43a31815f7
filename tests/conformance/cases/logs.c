// The log of errors that a program can read.
#include "case.h"

static int told;

static void hear(void *data, CUlogLevel level, char *message, size_t length) {
    told += *(int *)data == 5 && level == CU_LOG_LEVEL_ERROR && length == strlen(message) && length > 0;
}

GROUP(heard) {
    with_context();
    CUlogsCallbackHandle handle = NULL;
    int five = 5;
    TRY("a function", cuLogsRegisterCallback, hear, &five, &handle);
    TRY("null", cuLogsRegisterCallback, NULL, &five, &handle);
    // What a driver says of a failure is its own affair.
    (void)told;
    TRY("one", cuLogsUnregisterCallback, handle);
    // One again: the driver crashes.
}

GROUP(dumped) {
    with_context();
    CUlogIterator iterator = 77;
    TRY("now", cuLogsCurrent, &iterator, 0);
    TRY("with flags", cuLogsCurrent, &iterator, 1);
    TRY("to null", cuLogsCurrent, NULL, 0);
    // The driver logs its refusals, too.
    SET(cuLogsCurrent, &iterator, 0);
    char text[30000];
    size_t size = sizeof text;
    TRY("nothing new", cuLogsDumpToMemory, &iterator, text, &size, 0);
    TELL(cuLogsDumpToMemory, "nothing new, is", "%zu", size);
    size = sizeof text;
    TRY("all", cuLogsDumpToMemory, NULL, text, &size, 0);
    YES(cuLogsDumpToMemory, "all, ends in a NUL", text[size] == 0);
    TRY("with flags", cuLogsDumpToMemory, &iterator, text, &size, 1);
    TRY("to null", cuLogsDumpToMemory, &iterator, NULL, &size, 0);
    char path[] = "/tmp/logs.XXXXXX";
    close(mkstemp(path));
    TRY("to a file", cuLogsDumpToFile, &iterator, path, 0);
    TRY("to a file, with flags", cuLogsDumpToFile, &iterator, path, 1);
    TRY("to a file in no folder", cuLogsDumpToFile, &iterator, "/nowhere/at/all", 0);
    TRY("to a file of no name", cuLogsDumpToFile, &iterator, NULL, 0);
    unlink(path);
}

GROUP(green) {
    with_context();
    CUstream stream;
    CUcontext of = NULL;
    CUgreenCtx green = (CUgreenCtx)1;
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    TRY_PTSZ("one", cuStreamGetCtx_v2, stream, &of, &green);
    YES(cuStreamGetCtx_v2, "one, of the context and no green one", of == context && green == NULL);
    green = (CUgreenCtx)1;
    TRY("one", cuStreamGetGreenCtx, stream, &green);
    YES(cuStreamGetGreenCtx, "one, of none", green == NULL);
    TRY("to null", cuStreamGetGreenCtx, stream, NULL);
    no_context();
    TRY_PTSZ("the default stream, without a context", cuStreamGetCtx_v2, NULL, &of, &green);
    TRY("the default stream, without a context", cuStreamGetGreenCtx, NULL, &green);
}
