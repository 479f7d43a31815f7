// Libraries, which belong to no context, and their kernels.
#include "case.h"

static CUlibrary library;

static void with_library(void) {
    with_context();
    SET(cuLibraryLoadData, &library, code_ptx, NULL, NULL, 0, NULL, NULL, 0);
}

static CUkernel kernel(const char *name) {
    CUkernel found;
    SET(cuLibraryGetKernel, &found, library, name);
    return found;
}

GROUP(loaded) {
    with_driver();
    CUlibrary loaded = NULL;
    TRY("PTX, without a context", cuLibraryLoadData, &loaded, code_ptx, NULL, NULL, 0, NULL, NULL, 0);
    TRY("one", cuLibraryUnload, loaded);
    TRY("a fat binary", cuLibraryLoadData, &loaded, code_fatbin, NULL, NULL, 0, NULL, NULL, 0);
    TRY("null", cuLibraryLoadData, &loaded, NULL, NULL, NULL, 0, NULL, NULL, 0);
    TRY("to null", cuLibraryLoadData, NULL, code_ptx, NULL, NULL, 0, NULL, NULL, 0);
    TRY("text that is no code", cuLibraryLoadData, &loaded, "this is no PTX at all", NULL, NULL, 0, NULL, NULL, 0);
    char ptx[] = "/tmp/conformance-XXXXXX";
    int file = mkstemp(ptx);
    if (write(file, code_ptx, code_ptx_end - code_ptx - 1) < 0) exit(3);
    close(file);
    TRY("PTX", cuLibraryLoadFromFile, &loaded, ptx, NULL, NULL, 0, NULL, NULL, 0);
    unlink(ptx);
    TRY("that is not there", cuLibraryLoadFromFile, &loaded, "/nonexistent/file.ptx", NULL, NULL, 0, NULL, NULL, 0);
    TRY("of null", cuLibraryLoadFromFile, &loaded, NULL, NULL, NULL, 0, NULL, NULL, 0);
    TRY("null", cuLibraryUnload, NULL);
}

GROUP(kernels) {
    with_library();
    CUkernel found = NULL, again = NULL;
    TRY("one", cuLibraryGetKernel, &found, library, "add");
    TRY("one again", cuLibraryGetKernel, &again, library, "add");
    YES(cuLibraryGetKernel, "one again, is the same", found == again);
    TRY("that is not there", cuLibraryGetKernel, &again, library, "missing");
    TRY("of a null name", cuLibraryGetKernel, &again, library, NULL);
    TRY("to null", cuLibraryGetKernel, NULL, library, "add");
    TRY("of null", cuLibraryGetKernel, &again, NULL, "add");
    unsigned count = 0;
    TRY("of the library", cuLibraryGetKernelCount, &count, library);
    TELL(cuLibraryGetKernelCount, "of the library, is", "%u", count);
    TRY("to null", cuLibraryGetKernelCount, NULL, library);
    TRY("of null", cuLibraryGetKernelCount, &count, NULL);
    CUkernel all[32] = {0};
    TRY("all", cuLibraryEnumerateKernels, all, count, library);
    int own = 0;
    for (unsigned i = 0; i < count; i++) {
        CUlibrary of = NULL;
        if (CU(cuKernelGetLibrary)(&of, all[i]) == CUDA_SUCCESS && of == library) own++;
    }
    YES(cuLibraryEnumerateKernels, "all, each of this library", own == (int)count);
    TRY("two", cuLibraryEnumerateKernels, all, 2, library);
    TRY("to null", cuLibraryEnumerateKernels, NULL, count, library);
    TRY("of null", cuLibraryEnumerateKernels, all, count, NULL);
    CUlibrary of = NULL;
    TRY("of one", cuKernelGetLibrary, &of, found);
    YES(cuKernelGetLibrary, "of one, is its", of == library);
    TRY("of null", cuKernelGetLibrary, &of, NULL);
    TRY("to null", cuKernelGetLibrary, NULL, found);
    const char *name = NULL;
    TRY("of one", cuKernelGetName, &name, found);
    TELL(cuKernelGetName, "of one, is", "%s", name ? name : "null");
    TRY("of null", cuKernelGetName, &name, NULL);
    TRY("to null", cuKernelGetName, NULL, found);
    CUfunction made = NULL, same = NULL;
    TRY("of one", cuKernelGetFunction, &made, found);
    TRY("of one again", cuKernelGetFunction, &same, found);
    YES(cuKernelGetFunction, "of one again, is the same", made == same);
    TRY("of null", cuKernelGetFunction, &made, NULL);
    TRY("to null", cuKernelGetFunction, NULL, found);
    CUmodule in = NULL, in_again = NULL;
    TRY("of the library", cuLibraryGetModule, &in, library);
    TRY("of the library again", cuLibraryGetModule, &in_again, library);
    YES(cuLibraryGetModule, "of the library again, is the same", in == in_again);
    CUfunction by_module = NULL;
    TRY("of a library's module", cuModuleGetFunction, &by_module, in, "add");
    TRY("of null", cuLibraryGetModule, &in, NULL);
    TRY("to null", cuLibraryGetModule, NULL, library);
    no_context();
    TRY("without a context", cuKernelGetFunction, &made, found);
    TRY("without a context", cuLibraryGetModule, &in, library);
}

GROUP(globals) {
    with_library();
    CUdeviceptr where = 0;
    size_t size = 0;
    TRY("a number", cuLibraryGetGlobal, &where, &size, library, "number");
    TELL(cuLibraryGetGlobal, "a number, is", "%zu bytes, %d", size, word_at(where));
    TRY("with the size alone", cuLibraryGetGlobal, NULL, &size, library, "table");
    TRY("that is not there", cuLibraryGetGlobal, &where, &size, library, "missing");
    TRY("of a null name", cuLibraryGetGlobal, &where, &size, library, NULL);
    TRY("of null", cuLibraryGetGlobal, &where, &size, NULL, "number");
    TRY("that is not managed", cuLibraryGetManaged, &where, &size, library, "number");
    TRY("that is not there", cuLibraryGetManaged, &where, &size, library, "missing");
    TRY("of null", cuLibraryGetManaged, &where, &size, NULL, "number");
    void *unified = NULL;
    TRY("that is not unified", cuLibraryGetUnifiedFunction, &unified, library, "add");
    TRY("that is not there", cuLibraryGetUnifiedFunction, &unified, library, "missing");
    TRY("of a null name", cuLibraryGetUnifiedFunction, &unified, library, NULL);
    TRY("to null", cuLibraryGetUnifiedFunction, NULL, library, "add");
    TRY("of null", cuLibraryGetUnifiedFunction, &unified, NULL, "add");
    no_context();
    TRY("without a context", cuLibraryGetGlobal, &where, &size, library, "number");
}

GROUP(parameters) {
    with_library();
    CUkernel mixed = kernel("mixed");
    size_t offset = 0, size = 0;
    for (size_t i = 0; i < 6; i++) {
        char what[32];
        snprintf(what, sizeof what, "number %zu of five", i);
        CUresult result = CU(cuKernelGetParamInfo)(mixed, i, &offset, &size);
        TELL(cuKernelGetParamInfo, what, "%s at %zu, %zu bytes", code_name(result), result ? 0 : offset, result ? 0 : size);
    }
    TRY("with a null size", cuKernelGetParamInfo, mixed, 1, &offset, NULL);
    TRY("to null", cuKernelGetParamInfo, mixed, 1, NULL, &size);
    TRY("of null", cuKernelGetParamInfo, NULL, 0, &offset, &size);
}

GROUP(attributes) {
    with_library();
    CUkernel one = kernel("add"), shared = kernel("with_shared"), bounded = kernel("bounded");
    int value = 0;
    TRY("threads", cuKernelGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, bounded, device);
    TELL(cuKernelGetAttribute, "threads, bounded by 128", "%d", value);
    TRY("shared memory", cuKernelGetAttribute, &value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, shared, device);
    TELL(cuKernelGetAttribute, "shared memory, of 32 words", "%d", value);
    TRY("that does not exist", cuKernelGetAttribute, &value, 99, one, device);
    TRY("of no device", cuKernelGetAttribute, &value, CU_FUNC_ATTRIBUTE_NUM_REGS, one, 999);
    TRY("of null", cuKernelGetAttribute, &value, CU_FUNC_ATTRIBUTE_NUM_REGS, NULL, device);
    TRY("to null", cuKernelGetAttribute, NULL, CU_FUNC_ATTRIBUTE_NUM_REGS, one, device);
    TRY("dynamic shared memory", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000, shared, device);
    SET(cuKernelGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared, device);
    TELL(cuKernelSetAttribute, "dynamic shared memory, is", "%d", value);
    TRY("more shared memory than there is", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 30,
        shared, device);
    TRY("one that cannot be set", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_NUM_REGS, 3, one, device);
    TRY("that does not exist", cuKernelSetAttribute, 99, 3, one, device);
    TRY("of no device", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 3, one, 999);
    TRY("of null", cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 3, NULL, device);
    TRY("for L1", cuKernelSetCacheConfig, one, CU_FUNC_CACHE_PREFER_L1, device);
    TRY("that does not exist", cuKernelSetCacheConfig, one, 99, device);
    TRY("of null", cuKernelSetCacheConfig, NULL, CU_FUNC_CACHE_PREFER_L1, device);
    TRY("of no device", cuKernelSetCacheConfig, one, CU_FUNC_CACHE_PREFER_L1, 999);
}
