// cuGetProcAddress: each version of a call, flags for default streams, what is not found.
#include "case.h"

static void look(const char *what, const char *name, int version, cuuint64_t flags, const char *same) {
    void *found = NULL;
    CUdriverProcAddressQueryResult status = -1;
    CUresult result = CU(cuGetProcAddress_v2)(name, &found, version, flags, &status);
    const char *where = found == NULL ? "null" : same == NULL ? "found" : found == symbol(same) ? same : "another";
    TELL(cuGetProcAddress_v2, what, "%s, %s, status %d", code_name(result), where, status);
}

GROUP(versions) {
    with_driver();
    look("cuCtxGetDevice of 2.0", "cuCtxGetDevice", 2000, 0, "cuCtxGetDevice");
    look("cuCtxGetDevice of 12.9", "cuCtxGetDevice", 12090, 0, "cuCtxGetDevice");
    look("cuCtxGetDevice of 13.0", "cuCtxGetDevice", 13000, 0, "cuCtxGetDevice_v2");
    look("cuMemAlloc of 3.2", "cuMemAlloc", 3020, 0, "cuMemAlloc_v2");
    look("cuCtxCreate of 3.2", "cuCtxCreate", 3020, 0, "cuCtxCreate_v2");
    look("cuCtxCreate of 11.4", "cuCtxCreate", 11040, 0, "cuCtxCreate_v3");
    look("cuCtxCreate of 13.0", "cuCtxCreate", 13000, 0, "cuCtxCreate_v4");
    look("cuCtxDestroy of 2.0", "cuCtxDestroy", 2000, 0, "cuCtxDestroy");
    look("cuCtxDestroy of 4.0", "cuCtxDestroy", 4000, 0, "cuCtxDestroy_v2");
    look("cuEventElapsedTime of 2.0", "cuEventElapsedTime", 2000, 0, "cuEventElapsedTime");
    look("cuEventElapsedTime of 13.0", "cuEventElapsedTime", 13000, 0, "cuEventElapsedTime_v2");
    look("cuGetProcAddress of 11.3", "cuGetProcAddress", 11030, 0, "cuGetProcAddress");
    look("cuGetProcAddress of 12.0", "cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2");
    look("cuCtxSynchronize of 13.0", "cuCtxSynchronize", 13000, 0, "cuCtxSynchronize_v2");
    look("cuCtxSynchronize of 12.0", "cuCtxSynchronize", 12000, 0, "cuCtxSynchronize");
    look("a name that has a version", "cuMemAlloc_v2", 13000, 0, NULL);
    look("a version too early", "cuLaunchKernelEx", 11000, 0, NULL);
    look("no such name", "cuNoSuchCall", 13000, 0, NULL);
    look("an empty name", "", 13000, 0, NULL);
    look("a version still to come", "cuInit", 99000, 0, "cuInit");
    look("version 0", "cuInit", 0, 0, NULL);
}

GROUP(default_streams) {
    with_driver();
    cuuint64_t legacy = CU_GET_PROC_ADDRESS_LEGACY_STREAM, thread = CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    look("cuLaunchKernel by default", "cuLaunchKernel", 13000, 0, "cuLaunchKernel");
    look("cuLaunchKernel for the legacy stream", "cuLaunchKernel", 13000, legacy, "cuLaunchKernel");
    look("cuLaunchKernel for a thread's stream", "cuLaunchKernel", 13000, thread, "cuLaunchKernel_ptsz");
    look("cuMemcpyHtoD for a thread's stream", "cuMemcpyHtoD", 13000, thread, "cuMemcpyHtoD_v2_ptds");
    look("cuMemcpyHtoD for a thread's stream before 7.0", "cuMemcpyHtoD", 6000, thread, NULL);
    look("cuMemAlloc for a thread's stream", "cuMemAlloc", 13000, thread, "cuMemAlloc_v2");
    look("cuStreamQuery for a thread's stream", "cuStreamQuery", 13000, thread, "cuStreamQuery_ptsz");
}

GROUP(arguments) {
    with_driver();
    void *found = NULL;
    TRY("without a place for the status", cuGetProcAddress_v2, "cuInit", &found, 13000, 0, NULL);
    YES(cuGetProcAddress_v2, "without a place for the status, found", found == symbol("cuInit"));
    found = NULL;
    TRY("a name", cuGetProcAddress, "cuMemAlloc", &found, 13000, 0);
    YES(cuGetProcAddress, "a name, found", found == symbol("cuMemAlloc_v2"));
    TRY("no such name", cuGetProcAddress, "cuNoSuchCall", &found, 13000, 0);
}

GROUP(tables) {
    with_driver();
    static const unsigned char tls[16] = {
        0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc};
    static const unsigned char none[16] = {1, 2, 3};
    const void *table = NULL;
    CUuuid id;
    memcpy(&id, tls, sizeof id);
    TRY("the current context's", cuGetExportTable, &table, &id);
    YES(cuGetExportTable, "the current context's, says its size", table && *(const size_t *)table == 3 * sizeof(void *));
    memcpy(&id, none, sizeof id);
    TRY("of no such table", cuGetExportTable, &table, &id);
    TRY("to null", cuGetExportTable, NULL, &id);
}
