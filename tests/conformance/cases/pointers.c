// What is known of an address.
#include "case.h"

static void tell(const char *of, CUdeviceptr at, CUdeviceptr base, CUcontext owner) {
    char what[64];
    CUresult result;
    CUmemorytype type = 99;
    result = CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);
    snprintf(what, sizeof what, "type of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %u", code_name(result), result ? 0 : type);
    CUcontext of_context = NULL;
    result = CU(cuPointerGetAttribute)(&of_context, CU_POINTER_ATTRIBUTE_CONTEXT, at);
    snprintf(what, sizeof what, "context of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %s", code_name(result), of_context == owner ? "its own" : "another");
    CUdeviceptr there = 0;
    result = CU(cuPointerGetAttribute)(&there, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at);
    snprintf(what, sizeof what, "device pointer of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %s", code_name(result), there == at ? "the same" : "another");
    void *here = NULL;
    result = CU(cuPointerGetAttribute)(&here, CU_POINTER_ATTRIBUTE_HOST_POINTER, at);
    snprintf(what, sizeof what, "host pointer of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %s", code_name(result), here == (void *)(uintptr_t)at ? "the same" : "another");
    int ordinal = 99;
    result = CU(cuPointerGetAttribute)(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at);
    snprintf(what, sizeof what, "device of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %d", code_name(result), result ? 0 : ordinal);
    CUdeviceptr start = 0;
    result = CU(cuPointerGetAttribute)(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at);
    snprintf(what, sizeof what, "start of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %s", code_name(result), start == base ? "its base" : "another");
    size_t size = 0;
    result = CU(cuPointerGetAttribute)(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at);
    snprintf(what, sizeof what, "size of %s", of);
    TELL(cuPointerGetAttribute, what, "%s %zu", code_name(result), size);
    unsigned managed = 99, mapped = 99;
    result = CU(cuPointerGetAttribute)(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, at);
    snprintf(what, sizeof what, "managed, %s", of);
    TELL(cuPointerGetAttribute, what, "%s %u", code_name(result), result ? 0 : managed & 0xff);
    result = CU(cuPointerGetAttribute)(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, at);
    snprintf(what, sizeof what, "mapped, %s", of);
    TELL(cuPointerGetAttribute, what, "%s %u", code_name(result), result ? 0 : mapped & 0xff);
}

GROUP(kinds) {
    with_module();
    CUdeviceptr memory;
    SET(cuMemAlloc_v2, &memory, 1000);
    tell("device memory", memory, memory, context);
    tell("its middle", memory + 500, memory, context);
    void *pinned;
    SET(cuMemHostAlloc, &pinned, 1000, 0);
    CUdeviceptr host = (CUdeviceptr)(uintptr_t)pinned;
    tell("pinned memory", host, host, context);
    CUdeviceptr global;
    size_t size;
    SET(cuModuleGetGlobal_v2, &global, &size, module, "table");
    CUmemorytype type = 99;
    TRY("type of a global", cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, global);
    TELL(cuPointerGetAttribute, "type of a global, is", "%u", type);
    CUdeviceptr ordinary = (CUdeviceptr)(uintptr_t)&size;
    tell("ordinary memory", ordinary, ordinary, NULL);
    SET(cuMemFree_v2, memory);
    tell("what was freed", memory, memory, context);
    tell("null", 0, 0, NULL);
}

GROUP(ids) {
    with_context();
    CUdeviceptr first = device_bytes(64), second = device_bytes(64);
    unsigned long long a = 0, b = 0, again = 0;
    TRY("id of one", cuPointerGetAttribute, &a, CU_POINTER_ATTRIBUTE_BUFFER_ID, first);
    SET(cuPointerGetAttribute, &b, CU_POINTER_ATTRIBUTE_BUFFER_ID, second);
    SET(cuPointerGetAttribute, &again, CU_POINTER_ATTRIBUTE_BUFFER_ID, first + 1);
    YES(cuPointerGetAttribute, "id of one, differs from another's", a != b);
    YES(cuPointerGetAttribute, "id of one, is the same for all of it", a == again);
    SET(cuMemFree_v2, first);
    first = device_bytes(64);
    SET(cuPointerGetAttribute, &again, CU_POINTER_ATTRIBUTE_BUFFER_ID, first);
    YES(cuPointerGetAttribute, "id of one, is not used again", a != again);
}

GROUP(synchronous) {
    with_context();
    CUdeviceptr memory = device_bytes(64), other = device_bytes(64);
    unsigned on = 1, off = 0, is = 99;
    SET(cuPointerGetAttribute, &is, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
    TELL(cuPointerSetAttribute, "synchronous, at first", "%u", is & 0xff);
    TRY("synchronous", cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory + 8);
    SET(cuPointerGetAttribute, &is, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
    TELL(cuPointerSetAttribute, "synchronous, is", "%u", is & 0xff);
    SET(cuPointerGetAttribute, &is, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, other);
    TELL(cuPointerSetAttribute, "synchronous, another is", "%u", is & 0xff);
    SET(cuMemsetD8_v2, memory, 7, 64);
    SET(cuMemcpyDtoD_v2, other, memory, 64);
    TRY("synchronous, no more", cuPointerSetAttribute, &off, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
    SET(cuPointerGetAttribute, &is, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
    TELL(cuPointerSetAttribute, "synchronous, no more, is", "%u", is & 0xff);
    TRY("that cannot be set", cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory);
    TRY("from null", cuPointerSetAttribute, NULL, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
    TRY("of null", cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 0);
    SET(cuMemFree_v2, memory);
    TRY("of what was freed", cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, memory);
}

GROUP(arguments) {
    with_context();
    CUdeviceptr memory = device_bytes(64);
    unsigned word = 0;
    TRY("that does not exist", cuPointerGetAttribute, &word, 99, memory);
    TRY("number 0", cuPointerGetAttribute, &word, 0, memory);
    TRY("to null", cuPointerGetAttribute, NULL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory);
    no_context();
    TRY("without a context", cuPointerGetAttribute, &word, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory);
}

GROUP(several) {
    with_context();
    CUdeviceptr memory = device_bytes(64);
    CUmemorytype type = 99;
    CUcontext of = (CUcontext)1;
    CUdeviceptr there = 1;
    int ordinal = 99;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_CONTEXT,
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void *data[] = {&type, &of, &there, &ordinal};
    TRY("of device memory", cuPointerGetAttributes, 4, attributes, data, memory);
    TELL(cuPointerGetAttributes, "of device memory, are", "type %u, %s, %s, device %d", type,
        of == context ? "its context" : "another", there == memory ? "the same" : "another", ordinal);
    CUdeviceptr ordinary = (CUdeviceptr)(uintptr_t)&type;
    TRY("of ordinary memory", cuPointerGetAttributes, 4, attributes, data, ordinary);
    TELL(cuPointerGetAttributes, "of ordinary memory, are", "type %u, %s, %s, device %d", type, of ? "a context" : "none",
        there ? "a pointer" : "none", ordinal);
    TRY("of null attributes", cuPointerGetAttributes, 4, NULL, data, memory);
    TRY("to null", cuPointerGetAttributes, 4, attributes, NULL, memory);
    attributes[0] = 99;
    TRY("that do not exist", cuPointerGetAttributes, 4, attributes, data, memory);
    TRY("none", cuPointerGetAttributes, 0, attributes, data, memory);
}
