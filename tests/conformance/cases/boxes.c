// Copies of two and three dimensions, between memory of every kind.
#include "case.h"

static unsigned char bytes[4096], back[4096];

static void numbered(void) {
    for (int i = 0; i < 4096; i++) bytes[i] = (unsigned char)(i * 7);
    memset(back, 0, sizeof back);
}

// Whether 20 by 5 (by 3) bytes of rows 64 apart, in slices of 8 rows, came back, and nothing around them.
static int came_back(int depth) {
    SET(cuCtxSynchronize, );
    int wrong = 0;
    for (int i = 0; i < 4096; i++) {
        int x = i % 64, y = i / 64 % 8, z = i / 512, inside = x < 20 && y < 5 && z < depth;
        wrong += back[i] != (inside ? bytes[i] : 0);
    }
    memset(back, 0, sizeof back);
    return wrong == 0;
}

GROUP(planes) {
    with_context();
    numbered();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUdeviceptr memory;
    SET(cuMemAlloc_v2, &memory, 4096);
    CUDA_ARRAY_DESCRIPTOR of = {.Width = 32, .Height = 8, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1};
    CUarray array;
    SET(cuArrayCreate_v2, &array, &of);
    CUDA_MEMCPY2D in = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = bytes, .srcPitch = 64,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = memory, .dstPitch = 96, .WidthInBytes = 20, .Height = 5};
    CUDA_MEMCPY2D out = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = memory, .srcPitch = 96,
        .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = 64, .WidthInBytes = 20, .Height = 5};
    CUDA_MEMCPY2D into = in, from = out;
    into.dstMemoryType = from.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    into.dstArray = from.srcArray = array;
    TRY_PTDS("to the device", cuMemcpy2D_v2, &in);
    TRY_PTDS("to the host", cuMemcpy2D_v2, &out);
    YES(cuMemcpy2D_v2, "there and back", came_back(1));
    TRY_PTDS("to an array", cuMemcpy2D_v2, &into);
    TRY_PTDS("from an array", cuMemcpy2D_v2, &from);
    YES(cuMemcpy2D_v2, "by an array", came_back(1));
    TRY_PTDS("to the device", cuMemcpy2DUnaligned_v2, &in);
    TRY_PTDS("to the host", cuMemcpy2DUnaligned_v2, &out);
    YES(cuMemcpy2DUnaligned_v2, "there and back", came_back(1));
    TRY_PTSZ("to the device", cuMemcpy2DAsync_v2, &in, stream);
    TRY_PTSZ("to the host", cuMemcpy2DAsync_v2, &out, stream);
    YES(cuMemcpy2DAsync_v2, "there and back", came_back(1));
    CUDA_MEMCPY2D wrong = in;
    wrong.WidthInBytes = 0;
    TRY("of no width", cuMemcpy2D_v2, &wrong);
    wrong = in;
    wrong.srcPitch = 10;
    TRY_PTDS("of rows longer than their pitch", cuMemcpy2D_v2, &wrong);
    TRY_PTDS("of rows longer than their pitch", cuMemcpy2DUnaligned_v2, &wrong);
    TRY_PTSZ("of rows longer than their pitch", cuMemcpy2DAsync_v2, &wrong, stream);
    wrong = in;
    wrong.dstDevice = 0;
    TRY("to null", cuMemcpy2D_v2, &wrong);
    TRY("to null", cuMemcpy2DAsync_v2, &wrong, stream);
    wrong = into;
    wrong.Height = 9;
    TRY("beyond an array", cuMemcpy2D_v2, &wrong);
    wrong = into;
    wrong.dstArray = NULL;
    TRY("to a null array", cuMemcpy2D_v2, &wrong);
    wrong = in;
    wrong.srcMemoryType = 77;
    TRY("of no kind of memory", cuMemcpy2D_v2, &wrong);
    TRY("null", cuMemcpy2D_v2, NULL);
    no_context();
    TRY("without a context", cuMemcpy2D_v2, &in);
}

GROUP(boxes) {
    with_context();
    numbered();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUdeviceptr memory;
    SET(cuMemAlloc_v2, &memory, 8192);
    CUDA_MEMCPY3D in = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = bytes, .srcPitch = 64, .srcHeight = 8,
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = memory, .dstPitch = 96, .dstHeight = 6, .WidthInBytes = 20,
        .Height = 5, .Depth = 3};
    CUDA_MEMCPY3D out = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = memory, .srcPitch = 96, .srcHeight = 6,
        .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = 64, .dstHeight = 8, .WidthInBytes = 20,
        .Height = 5, .Depth = 3};
    TRY_PTDS("to the device", cuMemcpy3D_v2, &in);
    TRY_PTDS("to the host", cuMemcpy3D_v2, &out);
    YES(cuMemcpy3D_v2, "there and back", came_back(3));
    TRY_PTSZ("to the device", cuMemcpy3DAsync_v2, &in, stream);
    TRY_PTSZ("to the host", cuMemcpy3DAsync_v2, &out, stream);
    YES(cuMemcpy3DAsync_v2, "there and back", came_back(3));
    CUDA_ARRAY3D_DESCRIPTOR of = {32, 8, 4, CU_AD_FORMAT_UNSIGNED_INT8, 1, 0};
    CUDA_MEMCPY3D into = in, from = out;
    into.dstMemoryType = from.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    SET(cuArray3DCreate_v2, &into.dstArray, &of);
    from.srcArray = into.dstArray;
    TRY("to an array", cuMemcpy3D_v2, &into);
    TRY("from an array", cuMemcpy3D_v2, &from);
    YES(cuMemcpy3D_v2, "by an array", came_back(3));
    CUDA_MEMCPY3D wrong = in;
    wrong.srcPitch = 10;
    TRY_PTDS("of rows longer than their pitch", cuMemcpy3D_v2, &wrong);
    TRY_PTSZ("of rows longer than their pitch", cuMemcpy3DAsync_v2, &wrong, stream);
    wrong = in;
    wrong.Depth = 0;
    TRY("of no depth", cuMemcpy3D_v2, &wrong);
    wrong = into;
    wrong.Depth = 5;
    TRY("beyond an array", cuMemcpy3D_v2, &wrong);
    TRY("null", cuMemcpy3D_v2, NULL);
}

GROUP(between_contexts) {
    with_context();
    CUcontext second;
    SET(cuCtxCreate_v2, &second, 0, device);
    numbered();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUdeviceptr there;
    SET(cuMemAlloc_v2, &there, 8192);
    SET(cuCtxPushCurrent_v2, context);
    CUdeviceptr here;
    SET(cuMemAlloc_v2, &here, 8192);
    SET(cuMemcpyHtoD_v2, here, bytes, sizeof bytes);
    SET(cuCtxPopCurrent_v2, NULL);
    CUDA_MEMCPY3D_PEER across = {.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = here, .srcContext = context,
        .srcPitch = 64, .srcHeight = 8, .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = there, .dstContext = second,
        .dstPitch = 64, .dstHeight = 8, .WidthInBytes = 20, .Height = 5, .Depth = 3};
    SET(cuMemsetD8_v2, there, 0, 8192);
    TRY_PTDS("of two contexts", cuMemcpy3DPeer, &across);
    SET(cuMemcpyDtoH_v2, back, there, sizeof back);
    YES(cuMemcpy3DPeer, "of two contexts, arrives", came_back(3));
    SET(cuMemsetD8_v2, there, 0, 8192);
    TRY_PTSZ("of two contexts", cuMemcpy3DPeerAsync, &across, stream);
    SET(cuCtxSynchronize, );
    SET(cuMemcpyDtoH_v2, back, there, sizeof back);
    YES(cuMemcpy3DPeerAsync, "of two contexts, arrives", came_back(3));
    across.srcPitch = 10;
    TRY_PTDS("of rows longer than their pitch", cuMemcpy3DPeer, &across);
    TRY_PTSZ("of rows longer than their pitch", cuMemcpy3DPeerAsync, &across, stream);
}
