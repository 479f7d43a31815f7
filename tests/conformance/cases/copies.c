// Copies of one dimension: every direction, in streams and without.
#include "case.h"

static char bytes[256], back[256];

static void numbered(void) {
    for (int i = 0; i < 256; i++) bytes[i] = (char)(255 - i);
}

// Whether all 256 bytes came back.
static int came_back(void) {
    SET(cuCtxSynchronize, );
    int same = memcmp(bytes, back, sizeof bytes) == 0;
    memset(back, 0, sizeof back);
    return same;
}

GROUP(there_and_back) {
    with_context();
    numbered();
    CUdeviceptr a = device_bytes(256), b = device_bytes(256);
    CUdeviceptr host = (CUdeviceptr)(uintptr_t)bytes, into = (CUdeviceptr)(uintptr_t)back;
    TRY("256 bytes", cuMemcpyHtoD_v2, a, bytes, 256);
    YES(cuMemcpyHtoD_v2, "256 bytes, arrive", holds(a, bytes, 256));
    TRY("256 bytes", cuMemcpyHtoD_v2_ptds, a, bytes, 256);
    TRY("256 bytes", cuMemcpyDtoD_v2, b, a, 256);
    YES(cuMemcpyDtoD_v2, "256 bytes, arrive", holds(b, bytes, 256));
    TRY("256 bytes", cuMemcpyDtoD_v2_ptds, b, a, 256);
    TRY("256 bytes", cuMemcpyDtoH_v2, back, b, 256);
    YES(cuMemcpyDtoH_v2, "256 bytes, arrive", came_back());
    TRY("256 bytes", cuMemcpyDtoH_v2_ptds, back, b, 256);
    YES(cuMemcpyDtoH_v2_ptds, "256 bytes, arrive", came_back());
    TRY("from the host", cuMemcpy, a, host, 256);
    TRY("on the device", cuMemcpy, b, a, 256);
    TRY("to the host", cuMemcpy, into, b, 256);
    YES(cuMemcpy, "to the host, arrive", came_back());
    TRY("on the host", cuMemcpy, into, host, 256);
    YES(cuMemcpy, "on the host, arrive", came_back());
    TRY("from the host", cuMemcpy_ptds, a, host, 256);
    TRY("to the host", cuMemcpy_ptds, into, a, 256);
    YES(cuMemcpy_ptds, "to the host, arrive", came_back());
    TRY("within one allocation", cuMemcpyDtoD_v2, a + 128, a, 128);
    TRY("on itself", cuMemcpyDtoD_v2, a, a, 256);
    TRY("to itself, further on", cuMemcpyDtoD_v2, a + 1, a, 100);
}

GROUP(in_streams) {
    with_context();
    numbered();
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    CUdeviceptr a = device_bytes(256), b = device_bytes(256);
    CUdeviceptr host = (CUdeviceptr)(uintptr_t)bytes, into = (CUdeviceptr)(uintptr_t)back;
    TRY_PTSZ("256 bytes", cuMemcpyHtoDAsync_v2, a, bytes, 256, stream);
    TRY_PTSZ("256 bytes", cuMemcpyDtoDAsync_v2, b, a, 256, stream);
    TRY_PTSZ("256 bytes", cuMemcpyDtoHAsync_v2, back, b, 256, stream);
    YES(cuMemcpyDtoHAsync_v2, "256 bytes, arrive", came_back());
    TRY_PTSZ("from the host", cuMemcpyAsync, a, host, 256, stream);
    TRY_PTSZ("on the device", cuMemcpyAsync, b, a, 256, stream);
    TRY_PTSZ("to the host", cuMemcpyAsync, into, b, 256, stream);
    YES(cuMemcpyAsync, "to the host, arrive", came_back());
    TRY_PTSZ("in the default stream", cuMemcpyHtoDAsync_v2, a, bytes, 256, NULL);
    TRY_PTSZ("in the default stream", cuMemcpyDtoDAsync_v2, b, a, 256, NULL);
    TRY_PTSZ("in the default stream", cuMemcpyDtoHAsync_v2, back, b, 256, NULL);
    TRY_PTSZ("in the default stream", cuMemcpyAsync, b, a, 256, NULL);
}

GROUP(of_nothing) {
    with_context();
    CUdeviceptr a = device_bytes(256);
    TRY_PTDS("no bytes", cuMemcpyHtoD_v2, a, bytes, 0);
    TRY_PTDS("no bytes", cuMemcpyDtoH_v2, bytes, a, 0);
    TRY_PTDS("no bytes", cuMemcpyDtoD_v2, a, a, 0);
    TRY_PTDS("no bytes", cuMemcpy, a, a, 0);
    TRY_PTSZ("no bytes", cuMemcpyHtoDAsync_v2, a, bytes, 0, NULL);
    TRY_PTSZ("no bytes", cuMemcpyDtoHAsync_v2, bytes, a, 0, NULL);
    TRY_PTSZ("no bytes", cuMemcpyDtoDAsync_v2, a, a, 0, NULL);
    TRY_PTSZ("no bytes", cuMemcpyAsync, a, a, 0, NULL);
}

GROUP(wrong) {
    with_context();
    CUdeviceptr a = device_bytes(256), freed = device_bytes(256);
    SET(cuMemFree_v2, freed);
    TRY_PTDS("to null", cuMemcpyHtoD_v2, 0, bytes, 256);
    TRY_PTDS("from null", cuMemcpyDtoH_v2, bytes, 0, 256);
    TRY_PTDS("from null", cuMemcpyDtoD_v2, a, 0, 256);
    TRY_PTDS("to null", cuMemcpy, 0, a, 256);
    TRY_PTSZ("to null", cuMemcpyHtoDAsync_v2, 0, bytes, 256, NULL);
    TRY_PTSZ("from null", cuMemcpyDtoHAsync_v2, bytes, 0, 256, NULL);
    TRY_PTSZ("from null", cuMemcpyDtoDAsync_v2, a, 0, 256, NULL);
    TRY_PTSZ("to null", cuMemcpyAsync, 0, a, 256, NULL);
    TRY("from a null host", cuMemcpyHtoD_v2, a, NULL, 256);
    TRY("to a null host", cuMemcpyDtoH_v2, NULL, a, 256);
    TRY("to freed memory", cuMemcpyHtoD_v2, freed, bytes, 256);
    TRY("from freed memory", cuMemcpyDtoH_v2, bytes, freed, 256);
    no_context();
    TRY("without a context", cuMemcpyHtoD_v2, a, bytes, 256);
    TRY("without a context", cuMemcpyDtoH_v2, bytes, a, 256);
    TRY("without a context", cuMemcpyDtoD_v2, a, a, 256);
    TRY("without a context", cuMemcpyHtoDAsync_v2, a, bytes, 256, NULL);
    TRY("without a context", cuMemcpyDtoHAsync_v2, bytes, a, 256, NULL);
}

GROUP(between_contexts) {
    with_context();
    CUdeviceptr a = device_bytes(256);
    CUcontext second;
    SET(cuCtxCreate_v2, &second, 0, device);
    CUdeviceptr b = device_bytes(256);
    SET(cuMemsetD8_v2, b, 0, 256);
    TRY("from another context of the device", cuMemcpyDtoD_v2, b, a, 256);
    for (int i = 0; i < 256; i++) bytes[i] = (char)i;
    YES(cuMemcpyDtoD_v2, "from another context of the device, arrive", holds(b, bytes, 256));
    TRY_PTDS("256 bytes", cuMemcpyPeer, b, second, a, context, 256);
    YES(cuMemcpyPeer, "256 bytes, arrive", holds(b, bytes, 256));
    TRY_PTSZ("256 bytes", cuMemcpyPeerAsync, b, second, a, context, 256, NULL);
    YES(cuMemcpyPeerAsync, "256 bytes, arrive", holds(b, bytes, 256));
    TRY_PTDS("no bytes", cuMemcpyPeer, b, second, a, context, 0);
    TRY_PTSZ("no bytes", cuMemcpyPeerAsync, b, second, a, context, 0, NULL);
    TRY_PTDS("from null", cuMemcpyPeer, b, second, 0, context, 256);
    TRY_PTSZ("from null", cuMemcpyPeerAsync, b, second, 0, context, 256, NULL);
    TRY_PTDS("from no context", cuMemcpyPeer, b, second, a, NULL, 256);
    TRY_PTSZ("from no context", cuMemcpyPeerAsync, b, second, a, NULL, 256, NULL);
}
