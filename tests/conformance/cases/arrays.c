// Arrays: made, described, copied to and from.
#include "case.h"

static char bytes[256], back[256];

static CUarray plane(size_t width, size_t height) {
    CUDA_ARRAY_DESCRIPTOR of = {.Width = width, .Height = height, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1};
    CUarray made;
    SET(cuArrayCreate_v2, &made, &of);
    return made;
}

// Whether the first bytes came back.
static int came_back(size_t count) {
    SET(cuCtxSynchronize, );
    int same = memcmp(bytes, back, count) == 0;
    memset(back, 0, sizeof back);
    return same;
}

GROUP(made) {
    with_context();
    CUarray array = NULL, other = NULL;
    CUDA_ARRAY_DESCRIPTOR of = {.Width = 64, .Height = 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 2}, told = {0};
    TRY("64 by 16", cuArrayCreate_v2, &array, &of);
    TRY("64 by 16", cuArrayGetDescriptor_v2, &told, array);
    TELL(cuArrayGetDescriptor_v2, "64 by 16, is", "%zu by %zu, format %u, %u channels", told.Width, told.Height, told.Format,
        told.NumChannels);
    of.Height = 0;
    TRY("a line of 64", cuArrayCreate_v2, &other, &of);
    SET(cuArrayGetDescriptor_v2, &told, other);
    TELL(cuArrayGetDescriptor_v2, "a line of 64, is", "%zu by %zu", told.Width, told.Height);
    of.NumChannels = 3;
    TRY("of three channels", cuArrayCreate_v2, &other, &of);
    of.NumChannels = 1;
    of.Width = 0;
    TRY("of no width", cuArrayCreate_v2, &other, &of);
    of.Width = 64;
    of.Format = 0x30;
    TRY("of no format", cuArrayCreate_v2, &other, &of);
    of.Format = CU_AD_FORMAT_FLOAT;
    TRY("to null", cuArrayCreate_v2, NULL, &of);
    TRY("of null", cuArrayCreate_v2, &other, NULL);
    TRY("of null", cuArrayGetDescriptor_v2, &told, NULL);
    TRY("to null", cuArrayGetDescriptor_v2, NULL, array);
    TRY("one", cuArrayDestroy, array);
    TRY("null", cuArrayDestroy, NULL);
    no_context();
    TRY("without a context", cuArrayCreate_v2, &other, &of);
}

GROUP(made_of_three) {
    with_context();
    CUarray array = NULL;
    CUDA_ARRAY3D_DESCRIPTOR told = {0};
    static const struct {
        const char *what;
        CUDA_ARRAY3D_DESCRIPTOR of;
    } kinds[] = {
        {"a line", {64, 0, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0}},
        {"a plane", {64, 32, 0, CU_AD_FORMAT_SIGNED_INT16, 4, 0}},
        {"a box", {16, 8, 4, CU_AD_FORMAT_FLOAT, 1, 0}},
        {"a box for surfaces", {16, 8, 4, CU_AD_FORMAT_UNSIGNED_INT32, 1, CUDA_ARRAY3D_SURFACE_LDST}},
        {"three layers of lines", {64, 0, 3, CU_AD_FORMAT_HALF, 1, CUDA_ARRAY3D_LAYERED}},
        {"three layers of planes", {16, 8, 3, CU_AD_FORMAT_FLOAT, 4, CUDA_ARRAY3D_LAYERED}},
        {"a cube", {16, 16, 6, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}},
        {"two cubes", {16, 16, 12, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP | CUDA_ARRAY3D_LAYERED}},
        {"a cube that is not square", {16, 8, 6, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}},
        {"a cube of five faces", {16, 16, 5, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP}},
        {"no width", {0, 8, 4, CU_AD_FORMAT_FLOAT, 1, 0}},
        {"three channels", {16, 8, 4, CU_AD_FORMAT_FLOAT, 3, 0}},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (TRY(kinds[i].what, cuArray3DCreate_v2, &array, &kinds[i].of) != CUDA_SUCCESS) continue;
        TRY(kinds[i].what, cuArray3DGetDescriptor_v2, &told, array);
        TELL(cuArray3DGetDescriptor_v2, kinds[i].what, "%zu by %zu by %zu, format %u, %u channels, flags %u", told.Width,
            told.Height, told.Depth, told.Format, told.NumChannels, told.Flags);
        SET(cuArrayDestroy, array);
    }
    TRY("of null", cuArray3DGetDescriptor_v2, &told, NULL);
    TRY("to null", cuArray3DCreate_v2, NULL, &kinds[0].of);
    array = plane(64, 4);
    TRY("to null", cuArray3DGetDescriptor_v2, NULL, array);
    // Of arrays that are not of the kind that has them.
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs;
    TRY("of one whose memory is there", cuArrayGetMemoryRequirements, &needs, array, device);
    TRY("of null", cuArrayGetMemoryRequirements, &needs, NULL, device);
    CUDA_ARRAY_SPARSE_PROPERTIES sparse;
    TRY("of one that is not sparse", cuArrayGetSparseProperties, &sparse, array);
    TRY("of null", cuArrayGetSparseProperties, &sparse, NULL);
    CUarray part;
    TRY("of one without planes", cuArrayGetPlane, &part, array, 0);
    TRY("of null", cuArrayGetPlane, &part, NULL, 0);
}

GROUP(lines) {
    with_context();
    for (int i = 0; i < 256; i++) bytes[i] = (char)(255 - i);
    CUarray one = plane(256, 0), two = plane(256, 0);
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUdeviceptr memory = device_bytes(256);
    TRY_PTDS("256 bytes", cuMemcpyHtoA_v2, one, 0, bytes, 256);
    TRY_PTDS("256 bytes", cuMemcpyAtoH_v2, back, one, 0, 256);
    YES(cuMemcpyAtoH_v2, "256 bytes, come back", came_back(256));
    TRY_PTDS("256 bytes", cuMemcpyAtoA_v2, two, 0, one, 0, 256);
    TRY_PTDS("256 bytes", cuMemcpyAtoD_v2, memory, two, 0, 256);
    YES(cuMemcpyAtoD_v2, "256 bytes, arrive", holds(memory, bytes, 256));
    SET(cuMemcpyHtoD_v2, memory, bytes, 256);
    TRY_PTDS("128 bytes to its middle", cuMemcpyDtoA_v2, one, 128, memory, 128);
    SET(cuMemcpyAtoH_v2, back, one, 128, 128);
    YES(cuMemcpyDtoA_v2, "128 bytes to its middle, arrive", came_back(128));
    TRY_PTSZ("256 bytes", cuMemcpyHtoAAsync_v2, one, 0, bytes, 256, stream);
    TRY_PTSZ("256 bytes", cuMemcpyAtoHAsync_v2, back, one, 0, 256, stream);
    YES(cuMemcpyAtoHAsync_v2, "256 bytes, come back", came_back(256));
    TRY_PTDS("beyond its end", cuMemcpyHtoA_v2, one, 128, bytes, 256);
    TRY_PTDS("beyond its end", cuMemcpyAtoH_v2, back, one, 128, 256);
    TRY_PTDS("beyond its end", cuMemcpyAtoA_v2, one, 128, two, 0, 256);
    TRY_PTDS("beyond its end", cuMemcpyAtoD_v2, memory, one, 128, 256);
    TRY_PTDS("beyond its end", cuMemcpyDtoA_v2, one, 128, memory, 256);
    TRY_PTSZ("beyond its end", cuMemcpyHtoAAsync_v2, one, 128, bytes, 256, stream);
    TRY_PTSZ("beyond its end", cuMemcpyAtoHAsync_v2, back, one, 128, 256, stream);
    TRY("from null memory", cuMemcpyDtoA_v2, one, 0, 0, 256);
    TRY("from null", cuMemcpyAtoD_v2, memory, NULL, 0, 256);
}

// The forms before CUDA 3.2 are for contexts that were made by the first form of cuCtxCreate.
GROUP(first_forms) {
    with_driver();
    TRY("in its first form", cuCtxCreate, &context, 0, device);
    unsigned version = 0;
    SET(cuCtxGetApiVersion, context, &version);
    TELL(cuCtxGetApiVersion, "of the first form", "%u", version);
    CUDA_ARRAY_DESCRIPTOR_v1 of = {64, 16, CU_AD_FORMAT_FLOAT, 1}, told;
    CUDA_ARRAY3D_DESCRIPTOR_v1 deep = {32, 8, 4, CU_AD_FORMAT_UNSIGNED_INT8, 2, 0}, told_deep;
    CUarray array = NULL, other = NULL;
    TRY("64 by 16", cuArrayCreate, &array, &of);
    TRY("of null", cuArrayCreate, &other, NULL);
    TRY("to null", cuArrayCreate, NULL, &of);
    TRY("to null", cuArrayGetDescriptor, NULL, array);
    TRY("64 by 16", cuArrayGetDescriptor, &told, array);
    TELL(cuArrayGetDescriptor, "64 by 16, is", "%u by %u, format %u, %u channels", told.Width, told.Height, told.Format,
         told.NumChannels);
    TRY("32 by 8 by 4", cuArray3DCreate, &other, &deep);
    TRY("of null", cuArray3DCreate, &other, NULL);
    TRY("to null", cuArray3DGetDescriptor, NULL, other);
    TRY("32 by 8 by 4", cuArray3DGetDescriptor, &told_deep, other);
    TELL(cuArray3DGetDescriptor, "32 by 8 by 4, is", "%u by %u by %u, format %u, %u channels", told_deep.Width,
         told_deep.Height, told_deep.Depth, told_deep.Format, told_deep.NumChannels);
    if (array) SET(cuArrayDestroy, array);
    if (other) SET(cuArrayDestroy, other);
}

GROUP(first_forms_in_a_later_context) {
    with_context();
    CUDA_ARRAY_DESCRIPTOR_v1 of = {64, 16, CU_AD_FORMAT_FLOAT, 1}, told;
    CUDA_ARRAY3D_DESCRIPTOR_v1 deep = {32, 8, 4, CU_AD_FORMAT_UNSIGNED_INT8, 2, 0}, told_deep;
    CUDA_ARRAY_DESCRIPTOR now = {64, 16, CU_AD_FORMAT_FLOAT, 1};
    CUarray array = NULL, other = NULL;
    SET(cuArrayCreate_v2, &array, &now);
    TRY("in a later context", cuArrayCreate, &other, &of);
    TRY("of null in a later context", cuArrayCreate, &other, NULL);
    TRY("to null in a later context", cuArrayCreate, NULL, &of);
    TRY("in a later context", cuArray3DCreate, &other, &deep);
    TRY("in a later context", cuArrayGetDescriptor, &told, array);
    TRY("to null in a later context", cuArrayGetDescriptor, NULL, array);
    TRY("of null in a later context", cuArrayGetDescriptor, &told, NULL);
    TRY("in a later context", cuArray3DGetDescriptor, &told_deep, array);
    SET(cuArrayDestroy, array);
}

// Copies of block-compressed arrays count blocks: of 4 by 4 elements, of 8 bytes (BC1, BC4) or 16.
static CUDA_MEMCPY2D to_array(CUarray array, size_t width, size_t rows) {
    CUDA_MEMCPY2D copy;
    memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = CU_MEMORYTYPE_HOST, copy.srcHost = bytes;
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY, copy.dstArray = array;
    copy.WidthInBytes = copy.srcPitch = width, copy.Height = rows;
    return copy;
}

static CUDA_MEMCPY2D from_array(CUarray array, size_t width, size_t rows) {
    CUDA_MEMCPY2D copy;
    memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY, copy.srcArray = array;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST, copy.dstHost = back;
    copy.WidthInBytes = copy.dstPitch = width, copy.Height = rows;
    return copy;
}

// Copies to an array and back, and says whether the bytes came back.
static void there_and_back(const char *what, CUDA_MEMCPY2D to, CUDA_MEMCPY2D from) {
    char line[80];
    snprintf(line, sizeof line, "to %s", what);
    TRY(line, cuMemcpy2D_v2, &to);
    snprintf(line, sizeof line, "from %s", what);
    TRY(line, cuMemcpy2D_v2, &from);
    snprintf(line, sizeof line, "from %s, comes back", what);
    YES(cuMemcpy2D_v2, line, came_back(to.WidthInBytes * to.Height));
}

GROUP(block_compressed) {
    with_context();
    for (int i = 0; i < 256; i++) bytes[i] = (char)(255 - i);
    static const struct {
        const char *what;
        CUarray_format format;
        unsigned channels;
        size_t block;
    } kinds[] = {
        {"BC1", CU_AD_FORMAT_BC1_UNORM, 4, 8},       {"BC2", CU_AD_FORMAT_BC2_UNORM, 4, 16},
        {"BC3", CU_AD_FORMAT_BC3_UNORM, 4, 16},      {"BC4", CU_AD_FORMAT_BC4_UNORM, 1, 8},
        {"BC4 with a sign", CU_AD_FORMAT_BC4_SNORM, 1, 8}, {"BC5", CU_AD_FORMAT_BC5_UNORM, 2, 16},
        {"BC6H", CU_AD_FORMAT_BC6H_UF16, 3, 16},     {"BC7", CU_AD_FORMAT_BC7_UNORM, 4, 16},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        CUDA_ARRAY_DESCRIPTOR of = {32, 16, kinds[i].format, kinds[i].channels}, told = {0};
        CUarray array = NULL;
        if (TRY(kinds[i].what, cuArrayCreate_v2, &array, &of) != CUDA_SUCCESS) continue;
        SET(cuArrayGetDescriptor_v2, &told, array);
        TELL(cuArrayGetDescriptor_v2, kinds[i].what, "%zu by %zu, %u channels", told.Width, told.Height, told.NumChannels);
        // 8 by 4 blocks, two rows of them in a copy.
        size_t row = 8 * kinds[i].block;
        CUDA_MEMCPY2D to = to_array(array, row, 2), from = from_array(array, row, 2);
        to.dstY = from.srcY = 2;
        there_and_back(kinds[i].what, to, from);
        to.dstY = 3;
        TRY("beyond a compressed array's end", cuMemcpy2D_v2, &to);
        SET(cuArrayDestroy, array);
    }
    CUDA_ARRAY_DESCRIPTOR of = {32, 16, CU_AD_FORMAT_BC1_UNORM, 2};
    CUarray array;
    TRY("BC1 of two channels", cuArrayCreate_v2, &array, &of);
}

GROUP(normalised) {
    with_context();
    for (int i = 0; i < 256; i++) bytes[i] = (char)(255 - i);
    static const struct {
        const char *what;
        CUarray_format format;
        unsigned channels;
        size_t element;
    } kinds[] = {
        {"one of 8 bits", CU_AD_FORMAT_UNORM_INT8X1, 1, 1},   {"four of 8 bits", CU_AD_FORMAT_UNORM_INT8X4, 4, 4},
        {"two of 16 bits", CU_AD_FORMAT_UNORM_INT16X2, 2, 4}, {"four of 16 bits with a sign", CU_AD_FORMAT_SNORM_INT16X4, 4, 8},
        {"10, 10, 10 and 2 bits", CU_AD_FORMAT_UNORM_INT_101010_2, 4, 4},
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        CUDA_ARRAY_DESCRIPTOR of = {16, 2, kinds[i].format, kinds[i].channels};
        CUarray array = NULL;
        if (TRY(kinds[i].what, cuArrayCreate_v2, &array, &of) != CUDA_SUCCESS) continue;
        size_t row = 16 * kinds[i].element;
        there_and_back(kinds[i].what, to_array(array, row, 2), from_array(array, row, 2));
        SET(cuArrayDestroy, array);
    }
}

// What arrays without memory of their own would need is not offered under Rekindle.
GROUP(sparse) {
    with_context();
    int sparse = 99, deferred = 99;
    TRY("sparse arrays", cuDeviceGetAttribute, &sparse, CU_DEVICE_ATTRIBUTE_SPARSE_CUDA_ARRAY_SUPPORTED, device);
    TRY("arrays whose memory comes later", cuDeviceGetAttribute, &deferred,
        CU_DEVICE_ATTRIBUTE_DEFERRED_MAPPING_CUDA_ARRAY_SUPPORTED, device);
    CUarray array = NULL;
    CUDA_ARRAY3D_DESCRIPTOR of = {1024, 1024, 0, CU_AD_FORMAT_UNSIGNED_INT8, 4, CUDA_ARRAY3D_SPARSE};
    CUresult made = CU(cuArray3DCreate_v2)(&array, &of);
    YES(cuArray3DCreate_v2, "a sparse one, is made if the attribute says so", (made == CUDA_SUCCESS) == (sparse == 1));
    if (made == CUDA_SUCCESS) SET(cuArrayDestroy, array);
    of.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
    made = CU(cuArray3DCreate_v2)(&array, &of);
    YES(cuArray3DCreate_v2, "one whose memory comes later, is made if the attribute says so",
        (made == CUDA_SUCCESS) == (deferred == 1));
    if (made == CUDA_SUCCESS) SET(cuArrayDestroy, array);
}
