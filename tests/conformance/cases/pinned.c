// Page-locked and registered host memory.
#include "case.h"

#include <sys/mman.h>

GROUP(allocated) {
    with_context();
    void *memory = NULL, *other = NULL;
    TRY("one byte", cuMemAllocHost_v2, &memory, 1);
    TRY("no bytes", cuMemAllocHost_v2, &other, 0);
    TRY("to null", cuMemAllocHost_v2, NULL, 64);
    TRY("one", cuMemFreeHost, memory);
    TRY("null", cuMemFreeHost, NULL);
    static const unsigned flags[] = {0, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_WRITECOMBINED, 7};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        char what[32];
        unsigned told = 99;
        snprintf(what, sizeof what, "with flags %u", flags[i]);
        TRY(what, cuMemHostAlloc, &memory, 4096, flags[i]);
        TRY(what, cuMemHostGetFlags, &told, memory);
        // With unified addressing all of it is mapped and portable.
        TELL(cuMemHostGetFlags, what, "%u", told & CU_MEMHOSTALLOC_WRITECOMBINED);
        memset(memory, 7, 4096);
        CUdeviceptr there = 0;
        TRY(what, cuMemHostGetDevicePointer_v2, &there, memory, 0);
        YES(cuMemHostGetDevicePointer_v2, "at the same address", there == (CUdeviceptr)(uintptr_t)memory);
        SET(cuMemFreeHost, memory);
    }
    TRY("with flags that do not exist", cuMemHostAlloc, &memory, 4096, 0x100);
    TRY("no bytes", cuMemHostAlloc, &other, 0, 0);
    TRY("to null", cuMemHostAlloc, NULL, 64, 0);
    SET(cuMemHostAlloc, &memory, 4096, 0);
    CUdeviceptr there = 0;
    unsigned told = 0;
    TRY("of its middle", cuMemHostGetDevicePointer_v2, &there, (char *)memory + 100, 0);
    YES(cuMemHostGetDevicePointer_v2, "of its middle, there", there == (CUdeviceptr)(uintptr_t)memory + 100);
    TRY("with flags that do not exist", cuMemHostGetDevicePointer_v2, &there, memory, 8);
    TRY("to null", cuMemHostGetDevicePointer_v2, NULL, memory, 0);
    TRY("of ordinary memory", cuMemHostGetDevicePointer_v2, &there, &told, 0);
    TRY("of its middle", cuMemHostGetFlags, &told, (char *)memory + 100);
    TRY("of ordinary memory", cuMemHostGetFlags, &told, &told);
    TRY("to null", cuMemHostGetFlags, NULL, memory);
    TRY("its middle", cuMemFreeHost, (char *)memory + 64);
    TRY("ordinary memory", cuMemFreeHost, &told);
    TRY("one", cuMemFreeHost, memory);
    no_context();
    TRY("without a context", cuMemAllocHost_v2, &memory, 64);
    TRY("without a context", cuMemHostAlloc, &memory, 64, 0);
}

GROUP(registered) {
    with_context();
    size_t size = 4 << 12;
    char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 5, size);
    TRY("pages", cuMemHostRegister_v2, memory, size, 0);
    TRY("pages again", cuMemHostRegister_v2, memory, size, 0);
    TRY("a part of them", cuMemHostRegister_v2, memory + 4096, 4096, 0);
    CUdeviceptr target;
    SET(cuMemAlloc_v2, &target, size);
    TRY("from registered pages", cuMemcpyHtoDAsync_v2, target, memory, size, NULL);
    YES(cuMemcpyHtoDAsync_v2, "from registered pages, arrives", holds(target, memory, size));
    TRY("a part of them", cuMemHostUnregister, memory + 4096);
    TRY("pages", cuMemHostUnregister, memory);
    TRY("pages again", cuMemHostUnregister, memory);
    TRY("ordinary memory", cuMemHostUnregister, &target);
    TRY("portable and mapped", cuMemHostRegister_v2, memory, size, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    SET(cuMemHostUnregister, memory);
    TRY("no bytes", cuMemHostRegister_v2, memory, 0, 0);
    TRY("null", cuMemHostRegister_v2, NULL, size, 0);
    TRY("with flags that do not exist", cuMemHostRegister_v2, memory, size, 0x100);
    TRY("a few bytes", cuMemHostRegister_v2, memory + 10, 100, 0);
    TRY("a few bytes", cuMemHostUnregister, memory + 10);
    no_context();
    TRY("without a context", cuMemHostRegister_v2, memory, size, 0);
}

// The form before CUDA 3.2 is for contexts that were made by the first form of cuCtxCreate.
GROUP(first_forms) {
    with_driver();
    void *memory = NULL;
    SET(cuCtxCreate, &context, 0, device);
    TRY("a page", cuMemAllocHost, &memory, 4096);
    TRY("no bytes", cuMemAllocHost, &memory, 0);
    TRY("to null", cuMemAllocHost, NULL, 64);
    if (memory) SET(cuMemFreeHost, memory);
}

GROUP(first_forms_in_a_later_context) {
    with_context();
    void *memory = NULL, *pages = NULL;
    if (posix_memalign(&pages, 4096, 8192)) exit(4);
    TRY("in a later context", cuMemAllocHost, &memory, 4096);
    TRY("to null in a later context", cuMemAllocHost, NULL, 64);
    TRY("pages", cuMemHostRegister, pages, 8192, 0);
    TRY("null", cuMemHostRegister, NULL, 8192, 0);
    SET(cuMemHostUnregister, pages);
}
