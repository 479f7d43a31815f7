// Virtual memory management: addresses that are reserved, memory that is made and mapped there.
#include "case.h"

static const size_t GRANULE = 2 << 20;

static CUmemAllocationProp of_device(void) {
    CUmemAllocationProp wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    return wanted;
}

static CUdeviceptr reserved(size_t granules) {
    CUdeviceptr at = 0;
    SET(cuMemAddressReserve, &at, granules * GRANULE, 0, 0, 0);
    return at;
}

static CUmemGenericAllocationHandle made(void) {
    CUmemAllocationProp wanted = of_device();
    CUmemGenericAllocationHandle handle = 0;
    SET(cuMemCreate, &handle, GRANULE, &wanted, 0);
    return handle;
}

static const CUmemAccessDesc ALL_OF_DEVICE = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static CUdeviceptr mapped(CUmemGenericAllocationHandle handle) {
    CUdeviceptr at = reserved(4);
    SET(cuMemMap, at, GRANULE, 0, handle, 0);
    SET(cuMemSetAccess, at, GRANULE, &ALL_OF_DEVICE, 1);
    return at;
}

GROUP(uninitialised) {
    size_t granularity = 0;
    CUdeviceptr at = 0;
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp wanted = of_device();
    TRY("before cuInit", cuMemGetAllocationGranularity, &granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    TRY("before cuInit", cuMemAddressReserve, &at, GRANULE, 0, 0, 0);
    TRY("before cuInit", cuMemCreate, &handle, GRANULE, &wanted, 0);
}

GROUP(granularity) {
    with_driver();
    size_t least = 0, best = 0;
    CUmemAllocationProp wanted = of_device();
    TRY("least", cuMemGetAllocationGranularity, &least, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    TRY("recommended", cuMemGetAllocationGranularity, &best, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    YES(cuMemGetAllocationGranularity, "recommended, is a multiple of the least", least && best % least == 0);
    TRY("to null", cuMemGetAllocationGranularity, NULL, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    TRY("of null", cuMemGetAllocationGranularity, &least, NULL, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    wanted.location.id = 999;
    TRY("of no device", cuMemGetAllocationGranularity, &least, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    wanted = of_device();
    wanted.type = CU_MEM_ALLOCATION_TYPE_INVALID;
    TRY("of no type", cuMemGetAllocationGranularity, &least, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}

GROUP(addresses) {
    with_driver();
    CUdeviceptr at = 0, aligned = 0, again = 0;
    TRY("some", cuMemAddressReserve, &at, 4 * GRANULE, 0, 0, 0);
    YES(cuMemAddressReserve, "some, aligned to 2 MiB", at && at % GRANULE == 0);
    TRY("aligned to 64 MiB", cuMemAddressReserve, &aligned, GRANULE, 32 * GRANULE, 0, 0);
    YES(cuMemAddressReserve, "aligned to 64 MiB, is", aligned && aligned % (32 * GRANULE) == 0);
    TRY("where some are", cuMemAddressReserve, &again, GRANULE, 0, at, 0);
    YES(cuMemAddressReserve, "where some are, is elsewhere", again && (again < at || again >= at + 4 * GRANULE));
    TRY("none", cuMemAddressReserve, &again, 0, 0, 0, 0);
    TRY("an odd size", cuMemAddressReserve, &again, GRANULE + 1, 0, 0, 0);
    TRY("an odd alignment", cuMemAddressReserve, &again, GRANULE, 3 * GRANULE, 0, 0);
    TRY("with flags", cuMemAddressReserve, &again, GRANULE, 0, 0, 1);
    TRY("to null", cuMemAddressReserve, NULL, GRANULE, 0, 0, 0);
    TRY("a part", cuMemAddressFree, at, GRANULE);
    TRY("from the middle", cuMemAddressFree, at + GRANULE, 3 * GRANULE);
    TRY("none", cuMemAddressFree, at, 0);
    TRY("all", cuMemAddressFree, at, 4 * GRANULE);
    TRY("all again", cuMemAddressFree, at, 4 * GRANULE);
    TRY("of null", cuMemAddressFree, 0, GRANULE);
}

GROUP(pieces) {
    with_driver();
    CUmemGenericAllocationHandle handle = 0, none = 0;
    CUmemAllocationProp wanted = of_device(), told;
    memset(&told, 0xff, sizeof told);
    TRY("on a device", cuMemCreate, &handle, GRANULE, &wanted, 0);
    TRY("of one", cuMemGetAllocationPropertiesFromHandle, &told, handle);
    YES(cuMemGetAllocationPropertiesFromHandle, "of one, are what was asked for",
        told.type == wanted.type && told.location.id == wanted.location.id && told.requestedHandleTypes == 0);
    TRY("to null", cuMemGetAllocationPropertiesFromHandle, NULL, handle);
    TRY("one", cuMemRelease, handle);
    TRY("of null", cuMemRelease, 0);
    TRY("of null", cuMemGetAllocationPropertiesFromHandle, &told, 0);
    TRY("of no bytes", cuMemCreate, &none, 0, &wanted, 0);
    TRY("of an odd size", cuMemCreate, &none, GRANULE + 4096, &wanted, 0);
    TRY("with flags", cuMemCreate, &none, GRANULE, &wanted, 1);
    TRY("to null", cuMemCreate, NULL, GRANULE, &wanted, 0);
    TRY("like null", cuMemCreate, &none, GRANULE, NULL, 0);
    TRY("of more than there is", cuMemCreate, &none, (size_t)1 << 46, &wanted, 0);
    wanted.location.id = 999;
    TRY("on no device", cuMemCreate, &none, GRANULE, &wanted, 0);
    wanted = of_device();
    wanted.type = CU_MEM_ALLOCATION_TYPE_INVALID;
    TRY("of no type", cuMemCreate, &none, GRANULE, &wanted, 0);
    wanted = of_device();
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    TRY("that can be a descriptor", cuMemCreate, &none, GRANULE, &wanted, 0);
}

GROUP(mappings) {
    with_context();
    CUdeviceptr at = reserved(4);
    CUmemGenericAllocationHandle handle = made(), other = made(), again = 0;
    TRY("a piece", cuMemMap, at, GRANULE, 0, handle, 0);
    TRY("a piece where one is", cuMemMap, at, GRANULE, 0, other, 0);
    TRY("a piece a second time", cuMemMap, at + GRANULE, GRANULE, 0, handle, 0);
    TRY("with an offset", cuMemMap, at + 2 * GRANULE, GRANULE, GRANULE, other, 0);
    TRY("with flags", cuMemMap, at + 2 * GRANULE, GRANULE, 0, other, 1);
    TRY("an odd size", cuMemMap, at + 2 * GRANULE, GRANULE / 2, 0, other, 0);
    TRY("more than the piece", cuMemMap, at + 2 * GRANULE, 2 * GRANULE, 0, other, 0);
    TRY("no piece", cuMemMap, at + 2 * GRANULE, GRANULE, 0, 0, 0);
    TRY("at no reserved place", cuMemMap, at + 64 * GRANULE, GRANULE, 0, other, 0);
    TRY("for a device", cuMemSetAccess, at, 2 * GRANULE, &ALL_OF_DEVICE, 1);
    unsigned char want[64];
    memset(want, 9, sizeof want);
    SET(cuMemsetD8_v2, at, 9, 64);
    YES(cuMemMap, "a piece a second time, has the same content", holds(at + GRANULE, want, 64));
    TRY("at an address", cuMemRetainAllocationHandle, &again, (void *)(at + 100));
    TRY("at a free address", cuMemRetainAllocationHandle, &again, (void *)(at + 3 * GRANULE));
    TRY("at null", cuMemRetainAllocationHandle, &again, NULL);
    TRY("to null", cuMemRetainAllocationHandle, NULL, (void *)at);
    TRY("once", cuMemRelease, handle);
    TRY("twice, as often as there are handles", cuMemRelease, handle);
    TRY("a part", cuMemUnmap, at, GRANULE / 2);
    TRY("from the middle", cuMemUnmap, at + GRANULE / 2, GRANULE / 2);
    TRY("where something is mapped", cuMemAddressFree, at, 4 * GRANULE);
    TRY("more than is mapped, two pieces at once", cuMemUnmap, at, 3 * GRANULE);
    TRY("again", cuMemUnmap, at, GRANULE);
    TRY("none", cuMemUnmap, at, 0);
}

GROUP(access) {
    with_context();
    CUdeviceptr at = reserved(4);
    SET(cuMemMap, at, GRANULE, 0, made(), 0);
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, device}, nowhere = {CU_MEM_LOCATION_TYPE_DEVICE, 999};
    unsigned long long flags = 99;
    TRY("at first", cuMemGetAccess, &flags, &here, at);
    TELL(cuMemGetAccess, "at first, is", "%llu", flags);
    CUmemAccessDesc access = ALL_OF_DEVICE;
    TRY("for a device", cuMemSetAccess, at, GRANULE, &access, 1);
    TRY("for a device", cuMemGetAccess, &flags, &here, at + 4096);
    TELL(cuMemGetAccess, "for a device, is", "%llu", flags);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    TRY("to read", cuMemSetAccess, at, GRANULE, &access, 1);
    SET(cuMemGetAccess, &flags, &here, at);
    TELL(cuMemGetAccess, "to read, is", "%llu", flags);
    access.flags = 99;
    TRY("of no kind", cuMemSetAccess, at, GRANULE, &access, 1);
    access = ALL_OF_DEVICE;
    access.location.id = 999;
    TRY("for no device", cuMemSetAccess, at, GRANULE, &access, 1);
    access = ALL_OF_DEVICE;
    TRY("for nobody", cuMemSetAccess, at, GRANULE, &access, 0);
    TRY("of null", cuMemSetAccess, at, GRANULE, NULL, 1);
    TRY("to more than is mapped", cuMemSetAccess, at, 2 * GRANULE, &access, 1);
    TRY("to nothing", cuMemSetAccess, at, 0, &access, 1);
    TRY("where nothing is mapped", cuMemGetAccess, &flags, &here, at + GRANULE);
    TRY("of null", cuMemGetAccess, &flags, NULL, at);
    TRY("to null", cuMemGetAccess, NULL, &here, at);
    TRY("for no device", cuMemGetAccess, &flags, &nowhere, at);
}

GROUP(pointers) {
    with_context();
    CUdeviceptr at = mapped(made()), base = 0, start = 0;
    size_t size = 0, length = 0;
    SET(cuMemGetAddressRange_v2, &base, &size, at + 100);
    YES(cuMemGetAddressRange_v2, "of what is mapped, is the mapping", base == at && size == GRANULE);
    SET(cuPointerGetAttribute, &start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at + 100);
    SET(cuPointerGetAttribute, &length, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at + 100);
    YES(cuPointerGetAttribute, "range of what is mapped, is the reservation", start == at && length == 4 * GRANULE);
    int of = 99, kind = 99;
    SET(cuPointerGetAttribute, &of, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at);
    SET(cuPointerGetAttribute, &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
    TELL(cuPointerGetAttribute, "device and kind of what is mapped", "%d %d", of, kind);
    TRY("of what is mapped", cuMemFree_v2, at);
    SET(cuMemUnmap, at, GRANULE);
    TRY("kind of what was unmapped", cuPointerGetAttribute, &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
    TRY("to what was unmapped", cuMemsetD8_v2, at, 0, 16);
}
