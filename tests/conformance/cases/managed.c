// Managed memory: allocated, described, moved, attached.
#include "case.h"

static CUmemLocation at_device(void) { return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}; }
static CUmemLocation at_host(void) { return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST, .id = 0}; }

// Ends a group where the device has none.
static void with_managed(void) {
    with_context();
    int offered = 0;
    SET(cuDeviceGetAttribute, &offered, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, device);
    if (!offered) exit(77);
}

GROUP(allocated) {
    with_managed();
    CUdeviceptr memory = 0, other = 0, none = 5;
    TRY("global", cuMemAllocManaged, &memory, 1000, CU_MEM_ATTACH_GLOBAL);
    TRY("of the host", cuMemAllocManaged, &other, 5 << 20, CU_MEM_ATTACH_HOST);
    YES(cuMemAllocManaged, "aligned to 256", memory % 256 == 0 && other % 256 == 0);
    memset((void *)(uintptr_t)memory, 7, 1000);
    memset((void *)(uintptr_t)other, 8, 5 << 20);
    TRY("of a single stream", cuMemAllocManaged, &none, 64, CU_MEM_ATTACH_SINGLE);
    TRY("with no flags", cuMemAllocManaged, &none, 64, 0);
    TRY("with both flags", cuMemAllocManaged, &none, 64, CU_MEM_ATTACH_GLOBAL | CU_MEM_ATTACH_HOST);
    TRY("no bytes", cuMemAllocManaged, &none, 0, CU_MEM_ATTACH_GLOBAL);
    TELL(cuMemAllocManaged, "no bytes, is", "%llu", (unsigned long long)none);
    TRY("to null", cuMemAllocManaged, NULL, 64, CU_MEM_ATTACH_GLOBAL);
    CUdeviceptr base = 0;
    size_t size = 0;
    TRY("of its middle", cuMemGetAddressRange_v2, &base, &size, memory + 500);
    TELL(cuMemGetAddressRange_v2, "of its middle, is", "%d, %zu long", base == memory, size);
    TRY("managed, its middle", cuMemFree_v2, memory + 256);
    TRY("managed", cuMemFreeHost, (void *)(uintptr_t)memory);
    TRY("managed", cuMemFree_v2, memory);
    TRY("managed, again", cuMemFree_v2, memory);
    TRY("managed, large", cuMemFree_v2, other);
    no_context();
    TRY("without a context", cuMemAllocManaged, &none, 64, CU_MEM_ATTACH_GLOBAL);
}

GROUP(used) {
    with_managed();
    CUdeviceptr memory, plain = device_bytes(4096);
    SET(cuMemAllocManaged, &memory, 1 << 20, CU_MEM_ATTACH_GLOBAL);
    unsigned char *bytes = (unsigned char *)(uintptr_t)memory;
    memset(bytes, 1, 1 << 20);
    TRY("managed", cuMemsetD8_v2, memory + 16, 5, 32);
    SET(cuCtxSynchronize, );
    TELL(cuMemsetD8_v2, "managed, holds", "%d %d %d %d", bytes[15], bytes[16], bytes[47], bytes[48]);
    TRY("from managed memory to a device", cuMemcpyHtoD_v2, plain, bytes, 64);
    TRY("from managed memory to a device", cuMemcpyDtoD_v2, plain + 64, memory, 64);
    TRY("from a device to managed memory", cuMemcpyDtoH_v2, bytes + 1024, plain, 64);
    TRY("from managed memory to itself", cuMemcpy, memory + 2048, memory, 64);
    SET(cuCtxSynchronize, );
    YES(cuMemcpyDtoH_v2, "from a device to managed memory, arrives", !memcmp(bytes + 1024, bytes, 64));
    YES(cuMemcpy, "from managed memory to itself, arrives", !memcmp(bytes + 2048, bytes, 64));
    CUdeviceptr there = 0;
    TRY("managed", cuMemHostGetDevicePointer_v2, &there, bytes, 0);
    unsigned flags = 0;
    TRY("managed", cuMemHostGetFlags, &flags, bytes);
    TELL(cuMemHostGetFlags, "managed, are", "%u", flags);
    TRY("managed", cuMemHostRegister_v2, bytes, 4096, 0);
}

GROUP(pointers) {
    with_managed();
    CUdeviceptr memory;
    SET(cuMemAllocManaged, &memory, 1000, CU_MEM_ATTACH_GLOBAL);
    CUdeviceptr at = memory + 500, there = 0;
    unsigned managed = 0, type = 0;
    int ordinal = -7;
    void *here = NULL;
    TRY("managed, of managed memory", cuPointerGetAttribute, &managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at);
    TELL(cuPointerGetAttribute, "managed, of managed memory, is", "%u", managed & 0xff);
    TRY("type, of managed memory", cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
    TELL(cuPointerGetAttribute, "type, of managed memory, is", "%u", type);
    TRY("device pointer, of managed memory", cuPointerGetAttribute, &there, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at);
    TRY("host pointer, of managed memory", cuPointerGetAttribute, &here, CU_POINTER_ATTRIBUTE_HOST_POINTER, at);
    YES(cuPointerGetAttribute, "both pointers, of managed memory, the same", there == at && here == (void *)(uintptr_t)at);
    TRY("device, of managed memory", cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at);
    TELL(cuPointerGetAttribute, "device, of managed memory, is", "%d", ordinal);
}

static int number_of(CUdeviceptr memory, size_t bytes, CUmem_range_attribute attribute) {
    int value = -77;
    SET(cuMemRangeGetAttribute, &value, sizeof value, attribute, memory, bytes);
    return value;
}

GROUP(advised) {
    with_managed();
    CUdeviceptr memory;
    const size_t bytes = 64 << 10;
    SET(cuMemAllocManaged, &memory, bytes, CU_MEM_ATTACH_GLOBAL);
    TELL(cuMemRangeGetAttribute, "read mostly, at first", "%d", number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY));
    TELL(cuMemRangeGetAttribute, "preferred location, at first", "%d",
         number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION));
    TRY("read mostly", cuMemAdvise_v2, memory, bytes / 2, CU_MEM_ADVISE_SET_READ_MOSTLY, at_device());
    TELL(cuMemAdvise_v2, "read mostly, a half, is", "%d", number_of(memory, bytes / 2, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY));
    TELL(cuMemAdvise_v2, "read mostly, of both halves, is", "%d", number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY));
    TRY("not read mostly", cuMemAdvise_v2, memory, bytes, CU_MEM_ADVISE_UNSET_READ_MOSTLY, at_device());
    TRY("a preferred device", cuMemAdvise, memory, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, device);
    TELL(cuMemAdvise, "a preferred device, is", "%d %d", number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION),
         number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE));
    TRY("the CPU preferred", cuMemAdvise, memory, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_DEVICE_CPU);
    TELL(cuMemAdvise, "the CPU preferred, is", "%d %d", number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION),
         number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION_TYPE));
    TRY("no preference", cuMemAdvise, memory, bytes, CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, device);
    TRY("accessed by a device", cuMemAdvise_v2, memory, bytes, CU_MEM_ADVISE_SET_ACCESSED_BY, at_device());
    int who[3] = {-7, -7, -7};
    TRY("accessed by", cuMemRangeGetAttribute, who, sizeof who, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, memory, bytes);
    TELL(cuMemRangeGetAttribute, "accessed by, is", "%d %d %d", who[0], who[1], who[2]);
    TRY("not accessed by a device", cuMemAdvise_v2, memory, bytes, CU_MEM_ADVISE_UNSET_ACCESSED_BY, at_device());
    TRY("that does not exist", cuMemAdvise_v2, memory, bytes, 99, at_device());
    TRY("of no bytes", cuMemAdvise_v2, memory, 0, CU_MEM_ADVISE_SET_READ_MOSTLY, at_device());
    TRY("a device that does not exist", cuMemAdvise, memory, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, 77);
    TRY("of ordinary memory", cuMemAdvise, (CUdeviceptr)(uintptr_t)who, 4, CU_MEM_ADVISE_SET_READ_MOSTLY, device);
    int value = 0;
    TRY("of two bytes", cuMemRangeGetAttribute, &value, 2, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, bytes);
    TRY("that does not exist", cuMemRangeGetAttribute, &value, 4, 99, memory, bytes);
    TRY("of no bytes", cuMemRangeGetAttribute, &value, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, 0);
    TRY("to null", cuMemRangeGetAttribute, NULL, 4, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, memory, bytes);
    void *places[2] = {&value, who};
    size_t sizes[2] = {4, 8};
    CUmem_range_attribute both[2] = {CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY};
    TRY("two", cuMemRangeGetAttributes, places, sizes, both, 2, memory, bytes);
    TELL(cuMemRangeGetAttributes, "two, are", "%d, %d %d", value, who[0], who[1]);
    TRY("none", cuMemRangeGetAttributes, places, sizes, both, 0, memory, bytes);
}

GROUP(moved) {
    with_managed();
    CUdeviceptr memory;
    CUstream stream;
    const size_t bytes = 64 << 10;
    SET(cuMemAllocManaged, &memory, bytes, CU_MEM_ATTACH_GLOBAL);
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    memset((void *)(uintptr_t)memory, 9, bytes);
    TRY_PTSZ("to the device", cuMemPrefetchAsync, memory, bytes, device, stream);
    TELL(cuMemPrefetchAsync, "to the device, is", "%d", number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION));
    TRY_PTSZ("to the host", cuMemPrefetchAsync_v2, memory, bytes, at_host(), 0, stream);
    TELL(cuMemPrefetchAsync_v2, "to the host, is", "%d %d",
         number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION),
         number_of(memory, bytes, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION_TYPE));
    TRY_PTSZ("with flags that do not exist", cuMemPrefetchAsync_v2, memory, bytes, at_host(), 5, stream);
    TRY_PTSZ("of no bytes", cuMemPrefetchAsync, memory, 0, device, stream);
    TRY_PTSZ("of more than there is", cuMemPrefetchAsync_v2, memory, bytes + 1, at_device(), 0, stream);
    TRY("to a device that does not exist", cuMemPrefetchAsync, memory, bytes, 77, stream);
    CUdeviceptr parts[2] = {memory, memory + bytes / 2};
    size_t sizes[2] = {bytes / 2, bytes / 2}, starts[2] = {0, 1};
    CUmemLocation places[2] = {at_device(), at_host()};
    TRY_PTSZ("two places", cuMemPrefetchBatchAsync, parts, sizes, 2, places, starts, 2, 0, stream);
    TELL(cuMemPrefetchBatchAsync, "two places, are", "%d %d",
         number_of(memory, bytes / 2, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION),
         number_of(memory + bytes / 2, bytes / 2, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION));
    TRY_PTSZ("none", cuMemPrefetchBatchAsync, parts, sizes, 0, places, starts, 2, 0, stream);
    starts[0] = 1;
    TRY("no first place", cuMemPrefetchBatchAsync, parts, sizes, 2, places, starts, 1, 0, stream);
    starts[0] = 0;
    TRY_PTSZ("both", cuMemDiscardBatchAsync, parts, sizes, 2, 0, stream);
    TRY_PTSZ("none", cuMemDiscardBatchAsync, parts, sizes, 0, 0, stream);
    TRY_PTSZ("both", cuMemDiscardAndPrefetchBatchAsync, parts, sizes, 2, places, starts, 1, 0, stream);
    TRY_PTSZ("none", cuMemDiscardAndPrefetchBatchAsync, parts, sizes, 0, places, starts, 1, 0, stream);
    SET(cuStreamSynchronize, stream);
}

GROUP(attached) {
    with_managed();
    CUdeviceptr memory, plain = device_bytes(64);
    CUstream stream;
    SET(cuMemAllocManaged, &memory, 8192, CU_MEM_ATTACH_GLOBAL);
    SET(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    TRY_PTSZ("to a stream", cuStreamAttachMemAsync, stream, memory, 0, CU_MEM_ATTACH_SINGLE);
    TRY_PTSZ("to the host, all of it", cuStreamAttachMemAsync, stream, memory, 8192, CU_MEM_ATTACH_HOST);
    TRY_PTSZ("to all", cuStreamAttachMemAsync, stream, memory, 0, CU_MEM_ATTACH_GLOBAL);
    // Without flags: the driver crashes.
    TRY_PTSZ("device memory", cuStreamAttachMemAsync, stream, plain, 0, CU_MEM_ATTACH_GLOBAL);
    TRY("to the default stream", cuStreamAttachMemAsync, NULL, memory, 0, CU_MEM_ATTACH_SINGLE);
    SET(cuStreamSynchronize, stream);
}

static const char with_variables[] =
    ".version 7.0\n.target sm_75\n.address_size 64\n"
    ".visible .global .attribute(.managed) .align 4 .u32 mine = 5;\n"
    ".visible .global .align 4 .u32 plain = 7;\n"
    ".visible .entry both() {\n.reg .u32 %a, %b;\n"
    "ld.global.u32 %a, [mine];\nld.global.u32 %b, [plain];\nadd.u32 %a, %a, %b;\n"
    "st.global.u32 [mine], %a;\nst.global.u32 [plain], %a;\nret;\n}\n";

GROUP(variables_without_a_context) {
    with_driver();
    int offered = 0;
    SET(cuDeviceGetAttribute, &offered, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, device);
    if (!offered) exit(77);
    CUlibrary library;
    CUdeviceptr mine = 0;
    size_t size = 0;
    unsigned value = 9;
    SET(cuLibraryLoadData, &library, with_variables, NULL, NULL, 0, NULL, NULL, 0);
    TRY("without a context", cuLibraryGetManaged, &mine, &size, library, "mine");
    TELL(cuLibraryGetManaged, "without a context, is", "%zu long", size);
    TRY("managed, of a variable without a context", cuPointerGetAttribute, &value, CU_POINTER_ATTRIBUTE_IS_MANAGED, mine);
    TELL(cuPointerGetAttribute, "managed, of a variable without a context, is", "%u", value & 0xff);
}

GROUP(variables) {
    with_managed();
    CUlibrary library, other;
    CUmodule loaded;
    CUkernel kernel;
    CUdeviceptr mine = 0, same = 0, second = 0, plain = 0;
    size_t size = 0;
    SET(cuLibraryLoadData, &library, with_variables, NULL, NULL, 0, NULL, NULL, 0);
    TRY("of a library", cuLibraryGetManaged, &mine, &size, library, "mine");
    TELL(cuLibraryGetManaged, "of a library, is", "%zu long", size);
    TRY("of a library, only its size", cuLibraryGetManaged, NULL, &size, library, "mine");
    TRY("of a library, that is not managed", cuLibraryGetManaged, &same, &size, library, "plain");
    TRY("of a library, to nowhere", cuLibraryGetManaged, NULL, NULL, library, "mine");
    TRY("of a library, managed", cuLibraryGetGlobal, &same, &size, library, "mine");
    TELL(cuLibraryGetGlobal, "of a library, managed, is", "%d, %zu long", same == mine, size);
    SET(cuLibraryGetModule, &loaded, library);
    TRY("of a library, managed", cuModuleGetGlobal_v2, &same, &size, loaded, "mine");
    TELL(cuModuleGetGlobal_v2, "of a library, managed, is", "%d, %zu long", same == mine, size);
    SET(cuLibraryGetGlobal, &plain, &size, library, "plain");
    volatile unsigned *word = (unsigned *)(uintptr_t)mine;
    TELL(cuLibraryGetManaged, "of a library, begins with", "%u", *word);
    *word = 30;
    SET(cuLibraryGetKernel, &kernel, library, "both");
    SET(cuLaunchKernel, (CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    SET(cuCtxSynchronize, );
    TELL(cuLibraryGetManaged, "of a library, holds after a kernel", "%u, and the other %d", *word, word_at(plain));

    unsigned value = 9;
    CUdeviceptr there = 0;
    void *here = NULL;
    TRY("managed, of a variable", cuPointerGetAttribute, &value, CU_POINTER_ATTRIBUTE_IS_MANAGED, mine);
    TELL(cuPointerGetAttribute, "managed, of a variable, is", "%u", value & 0xff);
    TRY("type, of a variable", cuPointerGetAttribute, &value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, mine);
    TELL(cuPointerGetAttribute, "type, of a variable, is", "%u", value);
    TRY("host pointer, of a variable", cuPointerGetAttribute, &here, CU_POINTER_ATTRIBUTE_HOST_POINTER, mine);
    TRY("device pointer, of a variable", cuPointerGetAttribute, &there, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, mine);
    YES(cuPointerGetAttribute, "both pointers, of a variable, the same", there == mine && here == (void *)(uintptr_t)mine);
    TRY("a managed variable", cuMemFree_v2, mine);
    TRY("a managed variable", cuMemAdvise_v2, mine, 4, CU_MEM_ADVISE_SET_READ_MOSTLY, at_device());
    TRY_PTSZ("a managed variable, to the host", cuMemPrefetchAsync_v2, mine, 4, at_host(), 0, NULL);
    TRY("a managed variable", cuMemsetD32_v2, mine, 77, 1);
    SET(cuCtxSynchronize, );
    TELL(cuMemsetD32_v2, "a managed variable, holds", "%u", *word);

    SET(cuLibraryLoadData, &other, with_variables, NULL, NULL, 0, NULL, NULL, 0);
    TRY("of another library", cuLibraryGetManaged, &second, &size, other, "mine");
    TELL(cuLibraryGetManaged, "of another library, is", "the same %d, holds %u", second == mine, *(unsigned *)(uintptr_t)second);
    SET(cuLibraryUnload, library);
    SET(cuModuleLoadData, &loaded, with_variables);
    TRY("of a module, managed", cuModuleGetGlobal_v2, &mine, &size, loaded, "mine");
    TELL(cuModuleGetGlobal_v2, "of a module, managed, holds", "%u", *(unsigned *)(uintptr_t)mine);
    SET(cuModuleUnload, loaded);
}
