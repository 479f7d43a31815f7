// Contexts: made, current, primary, their flags and limits.
#include "case.h"

GROUP(made) {
    with_driver();
    CUcontext first = NULL, second = NULL, current = NULL, popped = NULL;
    TRY("the first", cuCtxCreate_v2, &first, 0, device);
    TRY("of the first", cuCtxGetCurrent, &current);
    YES(cuCtxCreate_v2, "is current", first && current == first);
    TRY("scheduling flags that exclude each other", cuCtxCreate_v2, &second, CU_CTX_SCHED_SPIN | CU_CTX_SCHED_YIELD, device);
    TRY("flags that do not exist", cuCtxCreate_v2, &second, 0x40000000, device);
    TRY("to null", cuCtxCreate_v2, NULL, 0, device);
    TRY("of no device", cuCtxCreate_v2, &second, 0, 999);
    TRY("to null", cuCtxGetCurrent, NULL);

    TRY("without affinities", cuCtxCreate_v3, &second, NULL, 0, CU_CTX_SCHED_YIELD, device);
    TRY("of no device", cuCtxCreate_v3, &popped, NULL, 0, 0, 999);
    SET(cuCtxGetCurrent, &current);
    YES(cuCtxCreate_v3, "is current", current == second);
    TRY("the second", cuCtxPopCurrent_v2, &popped);
    YES(cuCtxPopCurrent_v2, "the second, is what was current", popped == second);
    SET(cuCtxGetCurrent, &current);
    YES(cuCtxPopCurrent_v2, "the second, leaves the first", current == first);
    TRY("again", cuCtxPushCurrent_v2, second);
    TRY("null", cuCtxPushCurrent_v2, NULL);
    TRY("without a place for it", cuCtxPopCurrent_v2, NULL);
    TRY("the first", cuCtxPopCurrent_v2, &popped);
    TRY("with nothing left", cuCtxPopCurrent_v2, &popped);
    SET(cuCtxGetCurrent, &current);
    YES(cuCtxPopCurrent_v2, "with nothing left, none is current", current == NULL);
    TRY("one", cuCtxSetCurrent, second);
    TRY("none", cuCtxSetCurrent, NULL);
    TRY("the first", cuCtxDestroy_v2, first);
    TRY("null", cuCtxDestroy_v2, NULL);
    TRY("the second, by the first version", cuCtxPushCurrent, second);
    TRY("null", cuCtxPushCurrent, NULL);
    TRY("the second, by the first version", cuCtxPopCurrent, &popped);
    YES(cuCtxPopCurrent, "the second, by the first version, is it", popped == second);
    TRY("with nothing left", cuCtxPopCurrent, &popped);
    TRY("the second, by the first version", cuCtxDestroy, second);
    TRY("null", cuCtxDestroy, NULL);

    CUctxCreateParams none = {0};
    TRY("without parameters", cuCtxCreate_v4, &first, NULL, CU_CTX_SCHED_AUTO, device);
    TRY("with empty parameters", cuCtxCreate_v4, &second, &none, 0, device);
    TRY("flags that do not exist", cuCtxCreate_v4, &popped, NULL, 0x40000000, device);
    TRY("of no device", cuCtxCreate_v4, &popped, NULL, 0, 999);
}

GROUP(destroyed_while_current) {
    with_context();
    TRY("the current one", cuCtxDestroy_v2, context);
    CUcontext current = NULL;
    TRY("after its end", cuCtxGetCurrent, &current);
    YES(cuCtxGetCurrent, "after its end, none", current == NULL);
    CUdeviceptr memory;
    TRY("after its context's end", cuMemAlloc_v2, &memory, 64);
}

GROUP(device_of_context) {
    with_driver();
    CUdevice found = -1;
    TRY("without a context", cuCtxGetDevice, &found);
    TRY("without a context", cuCtxGetDevice_v2, &found, NULL);
    CUcontext first, second;
    SET(cuCtxCreate_v2, &first, 0, device);
    SET(cuCtxCreate_v2, &second, 0, device);
    TRY("of the current one", cuCtxGetDevice, &found);
    YES(cuCtxGetDevice, "of the current one, is its", found == device);
    found = -1;
    TRY("of one that is not current", cuCtxGetDevice_v2, &found, first);
    YES(cuCtxGetDevice_v2, "of one that is not current, is its", found == device);
    TRY("of null, the current one", cuCtxGetDevice_v2, &found, NULL);
    TRY("to null", cuCtxGetDevice, NULL);
    TRY("to null", cuCtxGetDevice_v2, NULL, first);

    unsigned long long id = 0, other = 0;
    TRY("of one", cuCtxGetId, first, &id);
    TRY("of null, the current one", cuCtxGetId, NULL, &other);
    YES(cuCtxGetId, "differs from another's", id != other);
    TRY("to null", cuCtxGetId, first, NULL);
    unsigned version = 0;
    TRY("of one", cuCtxGetApiVersion, first, &version);
    YES(cuCtxGetApiVersion, "of one, at least 3.0", version >= 3000);
    TRY("of null, the current one", cuCtxGetApiVersion, NULL, &version);
    TRY("to null", cuCtxGetApiVersion, first, NULL);
    TRY("of work that is none", cuCtxSynchronize, );
    TRY("of one that is not current", cuCtxSynchronize_v2, first);
    TRY("of null, the current one", cuCtxSynchronize_v2, NULL);
    no_context();
    TRY("without a context", cuCtxSynchronize, );
    TRY("without a context", cuCtxSynchronize_v2, NULL);
    TRY("without a context", cuCtxGetId, NULL, &id);
    TRY("without a context", cuCtxGetApiVersion, NULL, &version);
}

GROUP(flags) {
    with_driver();
    unsigned flags = 99;
    TRY("without a context", cuCtxGetFlags, &flags);
    TRY("without a context", cuCtxSetFlags, 0);
    static const unsigned asked[] = {CU_CTX_SCHED_AUTO, CU_CTX_SCHED_SPIN, CU_CTX_SCHED_YIELD, CU_CTX_SCHED_BLOCKING_SYNC,
        CU_CTX_MAP_HOST, CU_CTX_LMEM_RESIZE_TO_MAX};
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        CUcontext made;
        SET(cuCtxCreate_v2, &made, asked[i], device);
        SET(cuCtxGetFlags, &flags);
        char what[32];
        snprintf(what, sizeof what, "of one made with %u", asked[i]);
        // Mapping host memory is always on, and not told.
        TELL(cuCtxGetFlags, what, "%u", flags & ~CU_CTX_MAP_HOST);
        SET(cuCtxDestroy_v2, made);
    }
    SET(cuCtxCreate_v2, &context, 0, device);
    TRY("to null", cuCtxGetFlags, NULL);
    TRY("blocking", cuCtxSetFlags, CU_CTX_SCHED_BLOCKING_SYNC);
    TRY("of the current one", cuCtxGetFlags, &flags);
    TELL(cuCtxGetFlags, "after it was set to block", "%u", flags & ~CU_CTX_MAP_HOST);
    TRY("that do not exist", cuCtxSetFlags, 0x40000000);
    TRY("that exclude each other", cuCtxSetFlags, CU_CTX_SCHED_SPIN | CU_CTX_SCHED_YIELD);
}

GROUP(limits) {
    with_driver();
    size_t value = 0;
    TRY("without a context", cuCtxGetLimit, &value, CU_LIMIT_STACK_SIZE);
    TRY("without a context", cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 1024);
    SET(cuCtxCreate_v2, &context, 0, device);
    TRY("stack", cuCtxGetLimit, &value, CU_LIMIT_STACK_SIZE);
    TELL(cuCtxGetLimit, "stack, at first", "%zu", value);
    TRY("printf", cuCtxGetLimit, &value, CU_LIMIT_PRINTF_FIFO_SIZE);
    TRY("heap", cuCtxGetLimit, &value, CU_LIMIT_MALLOC_HEAP_SIZE);
    TELL(cuCtxGetLimit, "heap, at first", "%zu", value);
    TRY("that does not exist", cuCtxGetLimit, &value, 99);
    TRY("to null", cuCtxGetLimit, NULL, CU_LIMIT_STACK_SIZE);
    TRY("stack", cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 4096);
    SET(cuCtxGetLimit, &value, CU_LIMIT_STACK_SIZE);
    YES(cuCtxSetLimit, "stack, is at least that", value >= 4096);
    TRY("printf", cuCtxSetLimit, CU_LIMIT_PRINTF_FIFO_SIZE, 2 << 20);
    SET(cuCtxGetLimit, &value, CU_LIMIT_PRINTF_FIFO_SIZE);
    YES(cuCtxSetLimit, "printf, is at least that", value >= 2 << 20);
    TRY("heap", cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 16 << 20);
    SET(cuCtxGetLimit, &value, CU_LIMIT_MALLOC_HEAP_SIZE);
    YES(cuCtxSetLimit, "heap, is at least that", value >= 16 << 20);
    TRY("that does not exist", cuCtxSetLimit, 99, 1);
}

GROUP(configurations) {
    with_driver();
    CUfunc_cache cache = 99;
    CUsharedconfig shared = 99;
    TRY("without a context", cuCtxGetCacheConfig, &cache);
    TRY("without a context", cuCtxSetCacheConfig, CU_FUNC_CACHE_PREFER_L1);
    TRY("without a context", cuCtxGetSharedMemConfig, &shared);
    TRY("without a context", cuCtxSetSharedMemConfig, CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE);
    TRY("without a context", cuCtxResetPersistingL2Cache, );
    int least = 0, greatest = 0;
    TRY("without a context", cuCtxGetStreamPriorityRange, &least, &greatest);
    SET(cuCtxCreate_v2, &context, 0, device);
    TRY("at first", cuCtxGetCacheConfig, &cache);
    TELL(cuCtxGetCacheConfig, "at first, is", "%u", cache);
    TRY("for L1", cuCtxSetCacheConfig, CU_FUNC_CACHE_PREFER_L1);
    SET(cuCtxGetCacheConfig, &cache);
    TELL(cuCtxGetCacheConfig, "for L1, is", "%u", cache);
    TRY("that does not exist", cuCtxSetCacheConfig, 99);
    TRY("to null", cuCtxGetCacheConfig, NULL);
    TRY("at first", cuCtxGetSharedMemConfig, &shared);
    TELL(cuCtxGetSharedMemConfig, "at first, is", "%u", shared);
    TRY("four bytes", cuCtxSetSharedMemConfig, CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE);
    TRY("that does not exist", cuCtxSetSharedMemConfig, 99);
    TRY("to null", cuCtxGetSharedMemConfig, NULL);
    TRY("in a context", cuCtxResetPersistingL2Cache, );
    TRY("both", cuCtxGetStreamPriorityRange, &least, &greatest);
    TELL(cuCtxGetStreamPriorityRange, "both, are", "%d %d", least, greatest);
    TRY("neither", cuCtxGetStreamPriorityRange, NULL, NULL);
}

GROUP(primary) {
    with_driver();
    unsigned flags = 99;
    int active = 99;
    TRY("at first", cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxGetState, "at first, is", "flags %u, active %d", flags, active);
    TRY("blocking, before it is active", cuDevicePrimaryCtxSetFlags, device, CU_CTX_SCHED_BLOCKING_SYNC);
    TRY("yielding, before it is active", cuDevicePrimaryCtxSetFlags_v2, device, CU_CTX_SCHED_YIELD);
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxGetState, "with flags, is", "flags %u, active %d", flags & ~CU_CTX_MAP_HOST, active);
    TRY("never retained", cuDevicePrimaryCtxRelease_v2, device);
    CUcontext first = NULL, again = NULL, current = NULL;
    TRY("the first time", cuDevicePrimaryCtxRetain, &first, device);
    TRY("the second time", cuDevicePrimaryCtxRetain, &again, device);
    YES(cuDevicePrimaryCtxRetain, "the second time, is the same", first == again);
    SET(cuCtxGetCurrent, &current);
    YES(cuDevicePrimaryCtxRetain, "does not become current", current == NULL);
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxGetState, "retained, is", "flags %u, active %d", flags & ~CU_CTX_MAP_HOST, active);
    TRY("while it is active", cuDevicePrimaryCtxSetFlags_v2, device, CU_CTX_SCHED_SPIN);
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxGetState, "with other flags, is", "flags %u, active %d", flags & ~CU_CTX_MAP_HOST, active);
    TRY("that do not exist", cuDevicePrimaryCtxSetFlags_v2, device, 0x40000000);
    TRY("that do not exist", cuDevicePrimaryCtxSetFlags, device, 0x40000000);
    TRY("the primary one", cuCtxDestroy_v2, first);
    SET(cuCtxSetCurrent, first);
    CUdevice found = -1;
    TRY("of the primary one", cuCtxGetDevice, &found);
    TRY("the first time", cuDevicePrimaryCtxRelease_v2, device);
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxGetState, "released once, is", "active %d", active);
    TRY("the last time, by the first version", cuDevicePrimaryCtxRelease, device);
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxGetState, "released, is", "active %d", active);
    TRY("once too often", cuDevicePrimaryCtxRelease, device);
    TRY("once too often", cuDevicePrimaryCtxRelease_v2, device);
    CUdeviceptr memory;
    TRY("in a primary context that is not active", cuMemAlloc_v2, &memory, 64);
    SET(cuDevicePrimaryCtxRetain, &again, device);
    YES(cuDevicePrimaryCtxRetain, "after its end, has the same handle", first == again);
    TRY("in a primary context that is active again", cuMemAlloc_v2, &memory, 64);
    TRY("of no device", cuDevicePrimaryCtxRetain, &again, 999);
    TRY("to null", cuDevicePrimaryCtxRetain, NULL, device);
    TRY("of no device", cuDevicePrimaryCtxRelease, 999);
    TRY("of no device", cuDevicePrimaryCtxRelease_v2, 999);
    TRY("of no device", cuDevicePrimaryCtxGetState, 999, &flags, &active);
    TRY("of no device", cuDevicePrimaryCtxSetFlags, 999, 0);
    TRY("of no device", cuDevicePrimaryCtxSetFlags_v2, 999, 0);
}

GROUP(primary_reset) {
    with_driver();
    TRY("one that is not active", cuDevicePrimaryCtxReset_v2, device);
    TRY("one that is not active", cuDevicePrimaryCtxReset, device);
    TRY("of no device", cuDevicePrimaryCtxReset, 999);
    TRY("of no device", cuDevicePrimaryCtxReset_v2, 999);
    SET(cuDevicePrimaryCtxRetain, &context, device);
    SET(cuCtxSetCurrent, context);
    CUdeviceptr memory = device_bytes(64);
    TRY("one that holds memory", cuDevicePrimaryCtxReset_v2, device);
    unsigned flags;
    int active = 99;
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxReset_v2, "leaves it", "active %d", active);
    TRY("of memory that a reset took", cuMemFree_v2, memory);
    SET(cuDevicePrimaryCtxRetain, &context, device);
    TRY("by the first version", cuDevicePrimaryCtxReset, device);
    SET(cuDevicePrimaryCtxGetState, device, &flags, &active);
    TELL(cuDevicePrimaryCtxReset, "leaves it", "active %d", active);
}
