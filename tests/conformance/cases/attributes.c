// Attributes of functions, and how many of their blocks fit.
#include "case.h"

GROUP(asked) {
    with_module();
    CUfunction one = function("add"), shared = function("with_shared"), bounded = function("bounded");
    int value = 0;
    TRY("threads", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, bounded);
    TELL(cuFuncGetAttribute, "threads, bounded by 128", "%d", value);
    SET(cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, one);
    TELL(cuFuncGetAttribute, "threads, without a bound", "%d", value);
    TRY("shared memory", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, shared);
    TELL(cuFuncGetAttribute, "shared memory, of 32 words", "%d", value);
    TRY("local memory", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, one);
    TELL(cuFuncGetAttribute, "local memory, of none", "%d", value);
    TRY("registers", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_NUM_REGS, one);
    YES(cuFuncGetAttribute, "registers, some", value > 0);
    TRY("PTX version", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_PTX_VERSION, one);
    TELL(cuFuncGetAttribute, "PTX version, is", "%d", value);
    TRY("binary version", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_BINARY_VERSION, one);
    TRY("constant memory", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, one);
    TRY("dynamic shared memory", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, one);
    TELL(cuFuncGetAttribute, "dynamic shared memory, at first", "%d", value);
    TRY("carveout", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, one);
    TELL(cuFuncGetAttribute, "carveout, at first", "%d", value);
    TRY("that does not exist", cuFuncGetAttribute, &value, 99, one);
    TRY("of null", cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_NUM_REGS, NULL);
    TRY("to null", cuFuncGetAttribute, NULL, CU_FUNC_ATTRIBUTE_NUM_REGS, one);
    CUfunctionLoadingState state = 99;
    TRY("of one", cuFuncIsLoaded, &state, one);
    TRY("of null", cuFuncIsLoaded, &state, NULL);
    TRY("to null", cuFuncIsLoaded, NULL, one);
    TRY("one", cuFuncLoad, one);
    SET(cuFuncIsLoaded, &state, one);
    TELL(cuFuncLoad, "one, is", "%d", state);
    TRY("null", cuFuncLoad, NULL);
}

GROUP(changed) {
    with_module();
    CUfunction one = function("add"), shared = function("with_shared");
    int value = 0;
    TRY("dynamic shared memory", cuFuncSetAttribute, shared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000);
    SET(cuFuncGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared);
    TELL(cuFuncSetAttribute, "dynamic shared memory, is", "%d", value);
    TRY("more shared memory than there is", cuFuncSetAttribute, shared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        1 << 30);
    TRY("less than nothing", cuFuncSetAttribute, shared, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, -5);
    TRY("carveout", cuFuncSetAttribute, one, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50);
    TRY("a carveout of more than all", cuFuncSetAttribute, one, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 500);
    TRY("one that cannot be set", cuFuncSetAttribute, one, CU_FUNC_ATTRIBUTE_NUM_REGS, 3);
    TRY("that does not exist", cuFuncSetAttribute, one, 99, 3);
    TRY("of null", cuFuncSetAttribute, NULL, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 3);
    TRY("for L1", cuFuncSetCacheConfig, one, CU_FUNC_CACHE_PREFER_L1);
    TRY("that does not exist", cuFuncSetCacheConfig, one, 99);
    TRY("of null", cuFuncSetCacheConfig, NULL, CU_FUNC_CACHE_PREFER_L1);
    TRY("of four bytes", cuFuncSetSharedMemConfig, one, CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE);
    TRY("that does not exist", cuFuncSetSharedMemConfig, one, 99);
    TRY("of null", cuFuncSetSharedMemConfig, NULL, CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE);
}

GROUP(occupancy) {
    with_module();
    CUfunction one = function("nothing"), bounded = function("bounded");
    int blocks = 0, more = 0;
    size_t bytes = 0;
    TRY("of 256 threads", cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, one, 256, 0);
    YES(cuOccupancyMaxActiveBlocksPerMultiprocessor, "of 256 threads, at least one", blocks >= 1);
    SET(cuOccupancyMaxActiveBlocksPerMultiprocessor, &more, one, 128, 0);
    YES(cuOccupancyMaxActiveBlocksPerMultiprocessor, "of 128 threads, no fewer", more >= blocks);
    TRY("of more threads than its bound", cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, bounded, 256, 0);
    TELL(cuOccupancyMaxActiveBlocksPerMultiprocessor, "of more threads than its bound, is", "%d", blocks);
    TRY("of no threads", cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, one, 0, 0);
    TRY("of null", cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, NULL, 256, 0);
    TRY("to null", cuOccupancyMaxActiveBlocksPerMultiprocessor, NULL, one, 256, 0);
    TRY("of 256 threads", cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &blocks, one, 256, 0,
        CU_OCCUPANCY_DEFAULT);
    TRY("of 256 threads, without caching", cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &blocks, one, 256, 0,
        CU_OCCUPANCY_DISABLE_CACHING_OVERRIDE);
    TRY("with flags that do not exist", cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &blocks, one, 256, 0, 8);
    TRY("of null", cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &blocks, NULL, 256, 0, 0);
    TRY("of two blocks", cuOccupancyAvailableDynamicSMemPerBlock, &bytes, one, 2, 256);
    YES(cuOccupancyAvailableDynamicSMemPerBlock, "of two blocks, some", bytes > 0);
    TRY("of null", cuOccupancyAvailableDynamicSMemPerBlock, &bytes, NULL, 2, 256);
}
