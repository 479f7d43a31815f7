// Settings for core dumps of GPUs, of which no case makes one.
#include "case.h"

static const char *names[] = {"on exceptions", "of the host", "lightweight", "by users", "file", "pipe", "flags"};

GROUP(begin) {
    with_driver();
    size_t size;
    for (int i = CU_COREDUMP_ENABLE_ON_EXCEPTION; i < CU_COREDUMP_MAX; i++) {
        size = 0;
        CUresult result = CU(cuCoredumpGetAttributeGlobal)((CUcoredumpSettings)i, NULL, &size);
        TELL(cuCoredumpGetAttributeGlobal, names[i - 1], "%s, %zu bytes", code_name(result), size);
    }
    static const int truths[] = {CU_COREDUMP_ENABLE_ON_EXCEPTION, CU_COREDUMP_TRIGGER_HOST, CU_COREDUMP_LIGHTWEIGHT,
                                 CU_COREDUMP_ENABLE_USER_TRIGGER};
    for (int i = 0; i < 4; i++) {
        unsigned char truth = 99;
        size = 1;
        CUresult result = CU(cuCoredumpGetAttributeGlobal)((CUcoredumpSettings)truths[i], &truth, &size);
        TELL(cuCoredumpGetAttributeGlobal, names[truths[i] - 1], "%s, is %d", code_name(result), truth);
    }
    char name[1024] = "";
    size = sizeof name;
    TRY("file", cuCoredumpGetAttributeGlobal, CU_COREDUMP_FILE, name, &size);
    size = sizeof name;
    TRY("pipe", cuCoredumpGetAttributeGlobal, CU_COREDUMP_PIPE, name, &size);
    int flags = 99;
    size = sizeof flags;
    SET(cuCoredumpGetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, &size);
    TELL(cuCoredumpGetAttributeGlobal, "flags, are", "%d", flags);
    TRY("that does not exist", cuCoredumpGetAttributeGlobal, CU_COREDUMP_MAX, &flags, &size);
    TRY("of no size", cuCoredumpGetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, NULL);
}

GROUP(global) {
    with_driver();
    unsigned char yes = 1, no = 0, truth = 99;
    size_t size = 1;
    TRY("lightweight", cuCoredumpSetAttributeGlobal, CU_COREDUMP_LIGHTWEIGHT, &yes, &size);
    SET(cuCoredumpGetAttributeGlobal, CU_COREDUMP_LIGHTWEIGHT, &truth, &size);
    TELL(cuCoredumpSetAttributeGlobal, "lightweight, is", "%d", truth);
    TRY("not lightweight", cuCoredumpSetAttributeGlobal, CU_COREDUMP_LIGHTWEIGHT, &no, &size);
    char name[1024] = "mine", told[1024];
    size = strlen(name) + 1;
    TRY("file", cuCoredumpSetAttributeGlobal, CU_COREDUMP_FILE, name, &size);
    size = sizeof told;
    SET(cuCoredumpGetAttributeGlobal, CU_COREDUMP_FILE, told, &size);
    TELL(cuCoredumpSetAttributeGlobal, "file, is", "%s", told);
    int flags = CU_COREDUMP_SKIP_GLOBAL_MEMORY | CU_COREDUMP_SKIP_ABORT, later = 0;
    size = sizeof flags;
    TRY("flags", cuCoredumpSetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, &size);
    SET(cuCoredumpGetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &later, &size);
    TELL(cuCoredumpSetAttributeGlobal, "flags, are", "%d", later);
    size = 0;
    TRY("of a null value", cuCoredumpSetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, NULL, &size);
    TELL(cuCoredumpSetAttributeGlobal, "of a null value, needs", "%zu bytes", size);
    TRY("that does not exist", cuCoredumpSetAttributeGlobal, CU_COREDUMP_MAX, &flags, &size);
    TRY("of no size", cuCoredumpSetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, NULL);
    // A context begins with these.
    with_context();
    size = sizeof later;
    later = 0;
    TRY("flags of a new context", cuCoredumpGetAttribute, CU_COREDUMP_GENERATION_FLAGS, &later, &size);
    TELL(cuCoredumpGetAttribute, "flags of a new context, are", "%d", later);
}

GROUP(of_a_context) {
    with_context();
    unsigned char yes = 1, truth = 99;
    size_t size = 1;
    TRY("on exceptions", cuCoredumpSetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &yes, &size);
    TRY("on exceptions", cuCoredumpGetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &truth, &size);
    TELL(cuCoredumpGetAttribute, "on exceptions, is", "%d", truth);
    SET(cuCoredumpGetAttributeGlobal, CU_COREDUMP_ENABLE_ON_EXCEPTION, &truth, &size);
    TELL(cuCoredumpGetAttributeGlobal, "on exceptions where a context has changed it, is", "%d", truth);
    TRY("by users", cuCoredumpSetAttribute, CU_COREDUMP_ENABLE_USER_TRIGGER, &yes, &size);
    char pipe[] = "pipe";
    size = sizeof pipe;
    TRY("pipe", cuCoredumpSetAttribute, CU_COREDUMP_PIPE, pipe, &size);
    TRY("that does not exist", cuCoredumpGetAttribute, CU_COREDUMP_MAX, &truth, &size);
    TRY("of no size", cuCoredumpGetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &truth, NULL);
    no_context();
    size = 1;
    TRY("without a context", cuCoredumpGetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &truth, &size);
    TRY("without a context", cuCoredumpSetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &yes, &size);
    CUcontext other;
    SET(cuCtxCreate_v2, &other, CU_CTX_COREDUMP_ENABLE, device);
    truth = 99;
    SET(cuCoredumpGetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &truth, &size);
    TELL(cuCoredumpGetAttribute, "of a context whose flags ask for dumps, is", "%d", truth);
    unsigned flags = 0;
    SET(cuCtxGetFlags, &flags);
    YES(cuCtxGetFlags, "of a context for dumps, as it was made", (flags & CU_CTX_COREDUMP_ENABLE) != 0);
}

GROUP(decided_by_the_environment) {
    setenv("CUDA_COREDUMP_FILE", "theirs", 1);
    setenv("CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", "1", 1);
    with_driver();
    char name[1024] = "mine", told[1024] = "";
    size_t size = sizeof told;
    TRY("file of the environment", cuCoredumpGetAttributeGlobal, CU_COREDUMP_FILE, told, &size);
    TELL(cuCoredumpGetAttributeGlobal, "file of the environment, is", "%s", told);
    size = strlen(name) + 1;
    TRY("file of the environment", cuCoredumpSetAttributeGlobal, CU_COREDUMP_FILE, name, &size);
    unsigned char no = 0, truth = 99;
    size = 1;
    TRY("lightweight by the environment", cuCoredumpSetAttributeGlobal, CU_COREDUMP_LIGHTWEIGHT, &no, &size);
    SET(cuCoredumpGetAttributeGlobal, CU_COREDUMP_LIGHTWEIGHT, &truth, &size);
    TELL(cuCoredumpGetAttributeGlobal, "lightweight by the environment, is", "%d", truth);
}

GROUP(pipe_in_use) {
    with_driver();
    // A name in a folder that is not there: the driver finds no place for the pipe.
    char name[] = "/nowhere/pipe", other[] = "/nowhere/other";
    unsigned char yes = 1;
    size_t size = sizeof name;
    TRY("pipe", cuCoredumpSetAttributeGlobal, CU_COREDUMP_PIPE, name, &size);
    size = 1;
    TRY("by users", cuCoredumpSetAttributeGlobal, CU_COREDUMP_ENABLE_USER_TRIGGER, &yes, &size);
    size = sizeof other;
    TRY("pipe, once it is used", cuCoredumpSetAttributeGlobal, CU_COREDUMP_PIPE, other, &size);
}
