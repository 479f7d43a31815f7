// Stream-ordered allocation and its pools.
#include "case.h"

static uint64_t number(CUmemoryPool pool, CUmemPool_attribute attribute) {
    uint64_t value = 0;
    SET(cuMemPoolGetAttribute, pool, attribute, &value);
    return value;
}

static CUmemoryPool make(void) {
    CUmemPoolProps wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    CUmemoryPool pool = NULL;
    SET(cuMemPoolCreate, &pool, &wanted);
    return pool;
}

GROUP(made) {
    with_context();
    CUmemoryPool pool = NULL, first = NULL, now = NULL;
    TRY("one", cuDeviceGetDefaultMemPool, &first, device);
    TRY("to null", cuDeviceGetDefaultMemPool, NULL, device);
    TRY("of no device", cuDeviceGetDefaultMemPool, &now, 999);
    TRY("one", cuDeviceGetMemPool, &now, device);
    YES(cuDeviceGetMemPool, "one, is the default one", now == first);
    TRY("of no device", cuDeviceGetMemPool, &now, 999);
    CUmemPoolProps wanted;
    memset(&wanted, 0, sizeof wanted);
    TRY("of nothing", cuMemPoolCreate, &pool, &wanted);
    wanted.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    TRY("of null", cuMemPoolCreate, &pool, NULL);
    TRY("to null", cuMemPoolCreate, NULL, &wanted);
    TRY("of a device", cuMemPoolCreate, &pool, &wanted);
    wanted.location.id = 999;
    CUmemoryPool none = NULL;
    TRY("of no device", cuMemPoolCreate, &none, &wanted);
    TRY("one", cuDeviceSetMemPool, device, pool);
    SET(cuDeviceGetMemPool, &now, device);
    YES(cuDeviceSetMemPool, "one, is what is there then", now == pool);
    TRY("of no device", cuDeviceSetMemPool, 999, pool);
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    TRY("of a device", cuMemGetDefaultMemPool, &now, &here, CU_MEM_ALLOCATION_TYPE_PINNED);
    YES(cuMemGetDefaultMemPool, "of a device, is the same", now == first);
    TRY("of a device", cuMemGetMemPool, &now, &here, CU_MEM_ALLOCATION_TYPE_PINNED);
    YES(cuMemGetMemPool, "of a device, is what was set", now == pool);
    TRY("of a device", cuMemSetMemPool, &here, CU_MEM_ALLOCATION_TYPE_PINNED, first);
    TRY("of null", cuMemGetMemPool, &now, NULL, CU_MEM_ALLOCATION_TYPE_PINNED);
    TRY("of null", cuMemGetDefaultMemPool, &now, NULL, CU_MEM_ALLOCATION_TYPE_PINNED);
    TRY("of null", cuMemSetMemPool, NULL, CU_MEM_ALLOCATION_TYPE_PINNED, first);
    SET(cuMemSetMemPool, &here, CU_MEM_ALLOCATION_TYPE_PINNED, pool);
    TRY("one", cuMemPoolDestroy, pool);
    SET(cuDeviceGetMemPool, &now, device);
    YES(cuMemPoolDestroy, "one, leaves the default one", now == first);
    TRY("the default one", cuMemPoolDestroy, first);
}

GROUP(attributes) {
    with_context();
    CUmemoryPool pool = make();
    int flag = 99;
    for (int i = CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES; i <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES; i++) {
        char what[32];
        snprintf(what, sizeof what, "reuse %d", i);
        TRY(what, cuMemPoolGetAttribute, pool, i, &flag);
        TELL(cuMemPoolGetAttribute, what, "%d", flag);
        flag = 0;
        TRY(what, cuMemPoolSetAttribute, pool, i, &flag);
        SET(cuMemPoolGetAttribute, pool, i, &flag);
        TELL(cuMemPoolSetAttribute, what, "%d", flag);
    }
    uint64_t value = 5;
    TRY("threshold", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value);
    YES(cuMemPoolSetAttribute, "threshold, is what was set", number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) == 5);
    TRY("high mark", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &value);
    value = 0;
    TRY("high mark to nothing", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &value);
    TRY("what is used", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &value);
    TRY("that does not exist", cuMemPoolGetAttribute, pool, 99, &value);
    TRY("that does not exist", cuMemPoolSetAttribute, pool, 99, &value);
    CUmemAccess_flags access = 99;
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, device}, nowhere = {CU_MEM_LOCATION_TYPE_DEVICE, 999};
    TRY("of its device", cuMemPoolGetAccess, &access, pool, &here);
    TELL(cuMemPoolGetAccess, "of its device", "%d", (int)access);
    TRY("of no device", cuMemPoolGetAccess, &access, pool, &nowhere);
    CUmemAccessDesc give = {here, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    TRY("of its device", cuMemPoolSetAccess, pool, &give, 1);
    give.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    TRY("none of its device", cuMemPoolSetAccess, pool, &give, 1);
    TRY("of nobody", cuMemPoolSetAccess, pool, NULL, 0);
}

GROUP(allocated) {
    with_context();
    CUmemoryPool first;
    SET(cuDeviceGetDefaultMemPool, &first, device);
    CUdeviceptr memory = 0, none = 0;
    TRY_PTSZ("some", cuMemAllocAsync, &memory, 1000, NULL);
    YES(cuMemAllocAsync, "some, aligned to 256", memory % 256 == 0);
    TRY_PTSZ("no bytes", cuMemAllocAsync, &none, 0, NULL);
    TRY_PTSZ("to null", cuMemAllocAsync, NULL, 1000, NULL);
    TRY("more than there is", cuMemAllocAsync, &none, (size_t)1 << 46, NULL);
    CUmemoryPool of = NULL;
    CUcontext owner = context;
    TRY("pool", cuPointerGetAttribute, &of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, memory);
    YES(cuPointerGetAttribute, "pool, is the default one", of == first);
    TRY("context of memory from a pool", cuPointerGetAttribute, &owner, CU_POINTER_ATTRIBUTE_CONTEXT, memory);
    YES(cuPointerGetAttribute, "context of memory from a pool, is none", owner == NULL);
    TRY("some", cuMemFreeAsync, memory, NULL);
    TRY_PTSZ("again", cuMemFreeAsync, memory, NULL);
    SET(cuMemAllocAsync, &memory, 1000, NULL);
    TRY("some", cuMemFreeAsync_ptsz, memory, NULL);
    TRY("null", cuMemFreeAsync, 0, NULL);
    CUmemoryPool pool = make();
    TRY_PTSZ("some", cuMemAllocFromPoolAsync, &memory, 1000, pool, NULL);
    TRY_PTSZ("of no pool", cuMemAllocFromPoolAsync, &none, 1000, NULL, NULL);
    TRY_PTSZ("no bytes", cuMemAllocFromPoolAsync, &none, 0, pool, NULL);
    YES(cuMemPoolGetAttribute, "what is used is counted", number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) >= 1000);
    YES(cuMemPoolGetAttribute, "and what is in reserve", number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) >= 1000);
    TRY("to nothing, of what is used", cuMemPoolTrimTo, pool, 0);
    YES(cuMemPoolTrimTo, "to nothing, of what is used, keeps it", number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) >= 1000);
    TRY("of null", cuMemPoolTrimTo, NULL, 0);
    TRY("of memory from a pool", cuMemFree_v2, memory);
    SET(cuCtxSynchronize);
    YES(cuCtxSynchronize, "gives back what pools need not keep", number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) == 0);
    SET(cuMemAlloc_v2, &memory, 100);
    TRY("of plain memory", cuMemFreeAsync, memory, NULL);
    no_context();
    TRY("without a context", cuMemAllocAsync, &memory, 1000, NULL);
}
