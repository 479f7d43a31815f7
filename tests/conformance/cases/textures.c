// Textures, surfaces and mipmapped arrays: made, described, destroyed; and copies in batches.
#include "case.h"

static CUarray array_with(unsigned flags) {
    CUDA_ARRAY3D_DESCRIPTOR of = {64, 16, 0, CU_AD_FORMAT_FLOAT, 1, flags};
    CUarray made;
    SET(cuArray3DCreate_v2, &made, &of);
    return made;
}

static CUDA_RESOURCE_DESC of_array(CUarray array) {
    CUDA_RESOURCE_DESC desc;
    memset(&desc, 0, sizeof desc);
    desc.resType = CU_RESOURCE_TYPE_ARRAY;
    desc.res.array.hArray = array;
    return desc;
}

static CUDA_RESOURCE_DESC of_memory(CUdeviceptr memory, size_t bytes) {
    CUDA_RESOURCE_DESC desc;
    memset(&desc, 0, sizeof desc);
    desc.resType = CU_RESOURCE_TYPE_LINEAR;
    desc.res.linear.devPtr = memory;
    desc.res.linear.format = CU_AD_FORMAT_FLOAT;
    desc.res.linear.numChannels = 1;
    desc.res.linear.sizeInBytes = bytes;
    return desc;
}

GROUP(textures) {
    with_context();
    CUDA_RESOURCE_DESC plane = of_array(array_with(0)), told;
    CUDA_TEXTURE_DESC how, told_how;
    CUDA_RESOURCE_VIEW_DESC view;
    memset(&how, 0, sizeof how);
    how.addressMode[0] = CU_TR_ADDRESS_MODE_CLAMP;
    how.filterMode = CU_TR_FILTER_MODE_LINEAR;
    CUtexObject texture = 0, other = 0;
    TRY("of an array", cuTexObjectCreate, &texture, &plane, &how, NULL);
    TRY("of an array", cuTexObjectGetResourceDesc, &told, texture);
    TELL(cuTexObjectGetResourceDesc, "of an array, is", "type %u, the same array: %s", told.resType,
        told.res.array.hArray == plane.res.array.hArray ? "yes" : "no");
    TRY("of an array", cuTexObjectGetTextureDesc, &told_how, texture);
    TELL(cuTexObjectGetTextureDesc, "of an array, is", "mode %u, filter %u", told_how.addressMode[0], told_how.filterMode);
    TRY("of one without a view", cuTexObjectGetResourceViewDesc, &view, texture);
    TRY("to null", cuTexObjectGetResourceDesc, NULL, texture);
    TRY("to null", cuTexObjectGetTextureDesc, NULL, texture);
    TRY("to null", cuTexObjectGetResourceViewDesc, NULL, texture);
    CUDA_RESOURCE_DESC line = of_memory(device_bytes(4096), 4096);
    TRY("of linear memory", cuTexObjectCreate, &other, &line, &how, NULL);
    TRY("of linear memory", cuTexObjectDestroy, other);
    line.res.linear.sizeInBytes = 0;
    TRY("of no bytes", cuTexObjectCreate, &other, &line, &how, NULL);
    TRY("to null", cuTexObjectCreate, NULL, &plane, &how, NULL);
    TRY("of null", cuTexObjectCreate, &other, NULL, &how, NULL);
    TRY("of no description", cuTexObjectCreate, &other, &plane, NULL, NULL);
    TRY("one", cuTexObjectDestroy, texture);
    no_context();
    TRY("without a context", cuTexObjectCreate, &other, &plane, &how, NULL);
    TRY("without a context", cuTexObjectDestroy, texture);
}

GROUP(surfaces) {
    with_context();
    CUDA_RESOURCE_DESC plane = of_array(array_with(CUDA_ARRAY3D_SURFACE_LDST)), plain = of_array(array_with(0)), told;
    CUsurfObject surface = 0, other = 0;
    TRY("of an array", cuSurfObjectCreate, &surface, &plane);
    TRY("of an array", cuSurfObjectGetResourceDesc, &told, surface);
    YES(cuSurfObjectGetResourceDesc, "of an array, is the same", told.res.array.hArray == plane.res.array.hArray);
    TRY("to null", cuSurfObjectGetResourceDesc, NULL, surface);
    TRY("of an array not made for it", cuSurfObjectCreate, &other, &plain);
    CUDA_RESOURCE_DESC line = of_memory(device_bytes(4096), 4096);
    TRY("of linear memory", cuSurfObjectCreate, &other, &line);
    TRY("one", cuSurfObjectDestroy, surface);
    no_context();
    TRY("without a context", cuSurfObjectDestroy, surface);
}

GROUP(mipmapped) {
    with_context();
    CUDA_ARRAY3D_DESCRIPTOR of = {64, 16, 0, CU_AD_FORMAT_FLOAT, 2, 0}, told = {0};
    CUmipmappedArray array = NULL, other = NULL;
    CUarray level = NULL;
    TRY("64 by 16 of 5 levels", cuMipmappedArrayCreate, &array, &of, 5);
    TRY("level 3", cuMipmappedArrayGetLevel, &level, array, 3);
    SET(cuArray3DGetDescriptor_v2, &told, level);
    TELL(cuMipmappedArrayGetLevel, "level 3, is", "%zu by %zu by %zu", told.Width, told.Height, told.Depth);
    TRY("level 5", cuMipmappedArrayGetLevel, &level, array, 5);
    TRY("to null", cuMipmappedArrayGetLevel, NULL, array, 0);
    TRY("of no levels", cuMipmappedArrayCreate, &other, &of, 0);
    TRY("to null", cuMipmappedArrayCreate, NULL, &of, 5);
    TRY("of null", cuMipmappedArrayCreate, &other, NULL, 5);
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs;
    TRY("of one whose memory is there", cuMipmappedArrayGetMemoryRequirements, &needs, array, device);
    CUDA_ARRAY_SPARSE_PROPERTIES sparse;
    TRY("of one that is not sparse", cuMipmappedArrayGetSparseProperties, &sparse, array);
    TRY("one", cuMipmappedArrayDestroy, array);
    TRY("null", cuMipmappedArrayDestroy, NULL);
}

// The first form says which copy was wrong, the second does not.
#define BATCH(what, ...)                                                                                               \
    (fail = 77, TRY(what, cuMemcpyBatchAsync, __VA_ARGS__, &fail, stream),                                             \
        TRY(what, cuMemcpyBatchAsync_ptsz, __VA_ARGS__, &fail, stream),                                                \
        TRY_PTSZ(what, cuMemcpyBatchAsync_v2, __VA_ARGS__, stream))

GROUP(batches) {
    with_context();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUdeviceptr a = device_bytes(256), b = device_bytes(256);
    static char bytes[256], back[256];
    for (int i = 0; i < 256; i++) bytes[i] = (char)(255 - i);
    CUdeviceptr targets[] = {a, b}, sources[] = {(CUdeviceptr)bytes, (CUdeviceptr)bytes};
    size_t sizes[] = {256, 128}, first[] = {0}, late[] = {1}, fail = 0;
    CUmemcpyAttributes how = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM}, none = {0};
    BATCH("two copies", targets, sources, sizes, 2, &how, first, 1);
    SET(cuStreamSynchronize, stream);
    SET(cuMemcpyDtoH_v2, back, a, 256);
    YES(cuMemcpyBatchAsync, "two copies, the first arrives", memcmp(back, bytes, 256) == 0);
    BATCH("none", targets, sources, sizes, 0, &how, first, 1);
    BATCH("whose attributes begin late", targets, sources, sizes, 2, &how, late, 1);
    BATCH("of no order", targets, sources, sizes, 2, &none, first, 1);

    CUDA_MEMCPY3D_BATCH_OP op;
    memset(&op, 0, sizeof op);
    op.src.type = op.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    op.src.op.ptr.ptr = (CUdeviceptr)bytes;
    op.dst.op.ptr.ptr = b;
    op.src.op.ptr.rowLength = op.dst.op.ptr.rowLength = 16;
    op.src.op.ptr.layerHeight = op.dst.op.ptr.layerHeight = 4;
    op.extent.width = 16;
    op.extent.height = 4;
    op.extent.depth = 2;
    op.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    TRY_PTSZ("a box", cuMemcpy3DBatchAsync, 1, &op, &fail, 0, stream);
    TRY_PTSZ("a box", cuMemcpy3DBatchAsync_v2, 1, &op, 0, stream);
    SET(cuMemcpyDtoH_v2, back, b, 128);
    YES(cuMemcpy3DBatchAsync, "a box, arrives", memcmp(back, bytes, 128) == 0);
    op.extent.depth = 0;
    TRY_PTSZ("a box without depth", cuMemcpy3DBatchAsync, 1, &op, &fail, 0, stream);
    TRY_PTSZ("a box without depth", cuMemcpy3DBatchAsync_v2, 1, &op, 0, stream);
    TELL(cuMemcpy3DBatchAsync, "a box without depth, is copy", "%zu", fail);
}
