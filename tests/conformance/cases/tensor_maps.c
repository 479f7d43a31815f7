// Tensor maps: what may be encoded.
#include "case.h"

// What is asked, to be spoilt one by one.
static CUtensorMap map __attribute__((aligned(64)));
static CUdeviceptr memory;
static cuuint64_t dims[5] = {64, 32, 8, 4, 2}, strides[4] = {128, 4096, 32768, 131072};
static cuuint32_t boxes[5] = {32, 8, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
static int lower[3] = {0, 0, 0}, upper[3] = {0, 0, 0};

static void tiled(const char *what, CUtensorMapDataType type, cuuint32_t rank, CUdeviceptr at,
                  CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle) {
    TRY(what, cuTensorMapEncodeTiled, &map, type, rank, (void *)at, dims, strides, boxes, steps, interleave, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

#define HALF CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, memory
#define PLAIN CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE

GROUP(tiled) {
    with_context();
    memory = device_bytes(1 << 18);
    tiled("two dimensions", HALF, PLAIN);
    tiled("five dimensions", CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 5, memory, PLAIN);
    tiled("with a swizzle", HALF, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_64B);
    tiled("a box wider than the swizzle", HALF, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_32B);
    tiled("no dimensions", CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 0, memory, PLAIN);
    tiled("six dimensions", CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 6, memory, PLAIN);
    tiled("of no type", (CUtensorMapDataType)99, 2, memory, PLAIN);
    tiled("at an odd address", CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, memory + 8, PLAIN);
    tiled("interleaved in two dimensions", HALF, CU_TENSOR_MAP_INTERLEAVE_16B, CU_TENSOR_MAP_SWIZZLE_NONE);
    boxes[0] = 257;
    tiled("a box of 257", HALF, PLAIN);
    boxes[0] = 0;
    tiled("a box of nothing", HALF, PLAIN);
    boxes[0] = 4;
    tiled("a box of 8 bytes", HALF, PLAIN);
    boxes[0] = 32, strides[0] = 120;
    tiled("an odd stride", HALF, PLAIN);
    strides[0] = 128, dims[1] = 0;
    tiled("a dimension of nothing", HALF, PLAIN);
    dims[1] = 32, steps[1] = 9;
    tiled("steps of 9", HALF, PLAIN);
    steps[1] = 1;
    TRY("to null", cuTensorMapEncodeTiled, NULL, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)memory, dims, strides,
        boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

GROUP(replaced) {
    with_context();
    memory = device_bytes(1 << 18);
    tiled("one to change", HALF, PLAIN);
    CUtensorMap before __attribute__((aligned(64))) = map;
    TRY("another", cuTensorMapReplaceAddress, &map, (void *)(memory + 4096));
    YES(cuTensorMapReplaceAddress, "another, changes it", memcmp(&map, &before, sizeof map) != 0);
    TRY("the first again", cuTensorMapReplaceAddress, &map, (void *)memory);
    YES(cuTensorMapReplaceAddress, "the first again, gives what was encoded", memcmp(&map, &before, sizeof map) == 0);
    TRY("an odd one", cuTensorMapReplaceAddress, &map, (void *)(memory + 8));
}

static void im2col(const char *what, cuuint32_t rank, cuuint32_t channels, cuuint32_t pixels) {
    TRY(what, cuTensorMapEncodeIm2col, &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, (void *)memory, dims, strides, lower,
        upper, channels, pixels, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

GROUP(columns) {
    with_context();
    memory = device_bytes(1 << 18);
    im2col("four dimensions", 4, 32, 64);
    im2col("two dimensions", 2, 32, 64);
    im2col("257 channels", 4, 257, 64);
    im2col("1025 pixels", 4, 32, 1025);
    lower[0] = -129;
    im2col("a corner too far away", 4, 32, 64);
    lower[0] = 0;
}

GROUP(wide) {
    with_context();
    memory = device_bytes(1 << 18);
    TRY("two dimensions", cuTensorMapEncodeIm2colWide, &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)memory, dims,
        strides, 0, 0, 64, 64, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_IM2COL_WIDE_MODE_W,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
