// Device memory: allocated, freed, asked about.
#include "case.h"

GROUP(allocated) {
    with_context();
    CUdeviceptr memory = 0, other = 0;
    TRY("one byte", cuMemAlloc_v2, &memory, 1);
    YES(cuMemAlloc_v2, "one byte, aligned to 256", memory % 256 == 0);
    TRY("no bytes", cuMemAlloc_v2, &other, 0);
    TRY("to null", cuMemAlloc_v2, NULL, 64);
    TRY("more than there can be", cuMemAlloc_v2, &other, (size_t)1 << 46);
    TRY("3 MiB", cuMemAlloc_v2, &other, 3 << 20);
    YES(cuMemAlloc_v2, "3 MiB, apart from the other", other > memory + 1 || other + (3 << 20) <= memory);
    TRY("one", cuMemFree_v2, memory);
    TRY("one again", cuMemFree_v2, memory);
    TRY("null", cuMemFree_v2, 0);
    TRY("its middle", cuMemFree_v2, other + 256);
    TRY("host memory", cuMemFree_v2, (CUdeviceptr)(uintptr_t)&other);
    no_context();
    TRY("without a context", cuMemAlloc_v2, &memory, 64);
    TRY("without a context", cuMemFree_v2, other);
}

GROUP(pitch) {
    with_context();
    CUdeviceptr memory = 0;
    size_t pitch = 0;
    TRY("100 by 10", cuMemAllocPitch_v2, &memory, &pitch, 100, 10, 4);
    YES(cuMemAllocPitch_v2, "100 by 10, rows of at least 100 aligned to 32", pitch >= 100 && pitch % 32 == 0);
    TRY("of a width of 0", cuMemAllocPitch_v2, &memory, &pitch, 0, 10, 4);
    TRY("of a height of 0", cuMemAllocPitch_v2, &memory, &pitch, 100, 0, 4);
    TRY("of elements of 3 bytes", cuMemAllocPitch_v2, &memory, &pitch, 100, 10, 3);
    TRY("to null", cuMemAllocPitch_v2, NULL, &pitch, 100, 10, 4);
    TRY("with a null pitch", cuMemAllocPitch_v2, &memory, NULL, 100, 10, 4);
    TRY("more than there can be", cuMemAllocPitch_v2, &memory, &pitch, (size_t)1 << 30, (size_t)1 << 20, 4);
    no_context();
    TRY("without a context", cuMemAllocPitch_v2, &memory, &pitch, 100, 10, 4);
}

GROUP(asked) {
    with_context();
    size_t free = 0, total = 0, later = 0;
    TRY("in a context", cuMemGetInfo_v2, &free, &total);
    YES(cuMemGetInfo_v2, "some is free, and no more than all", free > 0 && free <= total);
    size_t whole = 0;
    SET(cuDeviceTotalMem_v2, &whole, device);
    YES(cuMemGetInfo_v2, "all of it is what the device has", total == whole);
    CUdeviceptr memory, base = 0;
    // Other processes take and give memory at the same time, but not always.
    int less = 0, back = 0;
    for (int i = 0; i < 100 && !(less && back); i++) {
        size_t meanwhile;
        SET(cuMemGetInfo_v2, &free, &total);
        SET(cuMemAlloc_v2, &memory, 32 << 20);
        SET(cuMemGetInfo_v2, &meanwhile, &total);
        SET(cuMemFree_v2, memory);
        SET(cuMemGetInfo_v2, &later, &total);
        less |= meanwhile + (32 << 20) <= free;
        back |= later >= meanwhile + (32 << 20);
    }
    YES(cuMemGetInfo_v2, "32 MiB less after an allocation", less);
    YES(cuMemGetInfo_v2, "as before after it was freed", back);

    SET(cuMemAlloc_v2, &memory, 1000);
    size_t size = 0;
    TRY("of its middle", cuMemGetAddressRange_v2, &base, &size, memory + 500);
    TELL(cuMemGetAddressRange_v2, "of its middle, is", "%llu before it, %zu long", memory + 500 - base, size);
    TRY("with the base alone", cuMemGetAddressRange_v2, &base, NULL, memory);
    TRY("with the size alone", cuMemGetAddressRange_v2, NULL, &size, memory);
    TRY("of null", cuMemGetAddressRange_v2, &base, &size, 0);
    TRY("of ordinary host memory", cuMemGetAddressRange_v2, &base, &size, (CUdeviceptr)(uintptr_t)&size);
    SET(cuMemFree_v2, memory);
    TRY("of what was freed", cuMemGetAddressRange_v2, &base, &size, memory);
    no_context();
    TRY("without a context", cuMemGetInfo_v2, &free, &total);
    TRY("without a context", cuMemGetAddressRange_v2, &base, &size, memory);
}

// No GPU on which the answers are recorded has an engine that decompresses.
GROUP(decompression) {
    with_context();
    int algorithms = 99, longest = 99;
    TRY("algorithms of decompression", cuDeviceGetAttribute, &algorithms, CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK, device);
    TELL(cuDeviceGetAttribute, "algorithms of decompression, are", "%d", algorithms);
    SET(cuDeviceGetAttribute, &longest, CU_DEVICE_ATTRIBUTE_MEM_DECOMPRESS_MAXIMUM_LENGTH, device);
    TELL(cuDeviceGetAttribute, "longest decompression, is", "%d", longest);
    CUdeviceptr from = device_bytes(256), to = device_bytes(256), actual = device_bytes(256);
    CUmemDecompressParams operation = {.srcNumBytes = 256, .dstNumBytes = 256, .dstActBytes = (cuuint32_t *)actual,
                                       .src = (void *)from, .dst = (void *)to, .algo = CU_MEM_DECOMPRESS_ALGORITHM_LZ4};
    size_t wrong = 7;
    TRY_PTSZ("of one operation", cuMemBatchDecompressAsync, &operation, 1, 0, &wrong, NULL);
    TRY_PTSZ("of one operation, without a place for the index", cuMemBatchDecompressAsync, &operation, 1, 0, NULL, NULL);
    TRY_PTSZ("with flags", cuMemBatchDecompressAsync, &operation, 1, 1, &wrong, NULL);
    TRY_PTSZ("of no operation", cuMemBatchDecompressAsync, &operation, 0, 0, &wrong, NULL);
    TRY_PTSZ("of null", cuMemBatchDecompressAsync, NULL, 1, 0, &wrong, NULL);
    no_context();
    TRY_PTSZ("without a context", cuMemBatchDecompressAsync, &operation, 1, 0, &wrong, NULL);
}
