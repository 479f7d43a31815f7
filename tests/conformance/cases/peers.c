// Two devices: whether they reach each other, copies between them. Left out where there is one.
#include "case.h"

static CUdevice other;
static CUcontext context_there;

static void with_two(void) {
    with_driver();
    int count = 0;
    SET(cuDeviceGetCount, &count);
    if (count < 2) exit(77);
    SET(cuDeviceGet, &other, 1);
}

static void with_two_contexts(void) {
    with_two();
    SET(cuCtxCreate_v2, &context, 0, device);
    SET(cuCtxCreate_v2, &context_there, 0, other);
}

GROUP(asked) {
    with_two();
    int can = 99, back = 99, rank = 99;
    TRY("of two devices", cuDeviceCanAccessPeer, &can, device, other);
    SET(cuDeviceCanAccessPeer, &back, other, device);
    YES(cuDeviceCanAccessPeer, "of two devices, both ways alike", can == back && (can == 0 || can == 1));
    TRY("of a device with itself", cuDeviceCanAccessPeer, &can, device, device);
    TELL(cuDeviceCanAccessPeer, "of a device with itself, is", "%d", can);
    TRY("of no device", cuDeviceCanAccessPeer, &can, device, 999);
    TRY("to null", cuDeviceCanAccessPeer, NULL, device, other);
    TRY("whether it is supported", cuDeviceGetP2PAttribute, &can, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, device, other);
    YES(cuDeviceGetP2PAttribute, "whether it is supported, as cuDeviceCanAccessPeer", can == back);
    TRY("rank", cuDeviceGetP2PAttribute, &rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, device, other);
    TRY("of a device with itself", cuDeviceGetP2PAttribute, &rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, device, device);
    TRY("that does not exist", cuDeviceGetP2PAttribute, &rank, 99, device, other);
    TRY("of no device", cuDeviceGetP2PAttribute, &rank, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, device, 999);
    TRY("to null", cuDeviceGetP2PAttribute, NULL, CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK, device, other);
}

GROUP(asked_for_atomic_operations) {
    with_two();
    CUatomicOperation operations[CU_ATOMIC_OPERATION_MAX], none = CU_ATOMIC_OPERATION_MAX;
    unsigned capabilities[CU_ATOMIC_OPERATION_MAX], again = 99, count = CU_ATOMIC_OPERATION_MAX, known = 0;
    for (unsigned i = 0; i < count; i++) operations[i] = (CUatomicOperation)i, capabilities[i] = ~0u;
    TRY("of all operations", cuDeviceGetP2PAtomicCapabilities, capabilities, operations, count, device, other);
    for (unsigned i = 0; i < count; i++) known |= capabilities[i];
    YES(cuDeviceGetP2PAtomicCapabilities, "of all operations, only what there is", known < 1 << 7);
    TRY("of one operation", cuDeviceGetP2PAtomicCapabilities, &again, &operations[CU_ATOMIC_OPERATION_CAS], 1, device, other);
    YES(cuDeviceGetP2PAtomicCapabilities, "of one operation, as among all", again == capabilities[CU_ATOMIC_OPERATION_CAS]);
    TRY("of no operation", cuDeviceGetP2PAtomicCapabilities, capabilities, operations, 0, device, other);
    TRY("of one that does not exist", cuDeviceGetP2PAtomicCapabilities, capabilities, &none, 1, device, other);
    TRY("of null", cuDeviceGetP2PAtomicCapabilities, capabilities, NULL, 2, device, other);
    TRY("to null", cuDeviceGetP2PAtomicCapabilities, NULL, operations, 2, device, other);
    TRY("of a device with itself", cuDeviceGetP2PAtomicCapabilities, capabilities, operations, 2, device, device);
    TRY("of no device", cuDeviceGetP2PAtomicCapabilities, capabilities, operations, 2, device, 999);
}

GROUP(copied) {
    with_two_contexts();
    CUdeviceptr there = device_bytes(256);
    SET(cuCtxSetCurrent, context);
    CUdeviceptr here = device_bytes(256);
    unsigned char want[256];
    memset(want, 3, sizeof want);
    SET(cuMemsetD8_v2, here, 3, 256);
    TRY_PTDS("to the other device", cuMemcpyPeer, there, context_there, here, context, 256);
    SET(cuCtxSetCurrent, context_there);
    YES(cuMemcpyPeer, "to the other device, arrives", holds(there, want, 256));
    TRY_PTSZ("to the other device", cuMemcpyPeerAsync, there, context_there, here, context, 256, NULL);
    YES(cuMemcpyPeerAsync, "to the other device, arrives", holds(there, want, 256));
    TRY_PTDS("with addresses alone", cuMemcpy, there, here, 256);
    YES(cuMemcpy, "with addresses alone, arrives", holds(there, want, 256));
    int of = 99;
    TRY("device of memory there", cuPointerGetAttribute, &of, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, there);
    TELL(cuPointerGetAttribute, "device of memory there, is", "%d", of);
}

GROUP(contexts) {
    with_two_contexts();
    CUdevice of = 99;
    SET(cuCtxGetDevice, &of);
    TELL(cuCtxGetDevice, "of a context of the second device", "%d", of);
    TRY("of a context of the first device", cuCtxGetDevice_v2, &of, context);
    TELL(cuCtxGetDevice_v2, "of a context of the first device, is", "%d", of);
    CUstream stream;
    SET(cuStreamCreate, &stream, 0);
    SET(cuCtxSetCurrent, context);
    TRY("of a stream of the second device", cuStreamGetDevice, stream, &of);
    TELL(cuStreamGetDevice, "of a stream of the second device, is", "%d", of);
    CUevent event;
    SET(cuEventCreate, &event, 0);
    SET(cuEventRecord, event, NULL);
    TRY("for an event of the first device", cuStreamWaitEvent, stream, event, 0);
    TRY("of one device in a stream of the other", cuEventRecord, event, stream);
    TRY("of the second device", cuStreamSynchronize, stream);
}

GROUP(access) {
    with_two_contexts();
    SET(cuCtxSetCurrent, context);
    int can = 0;
    SET(cuDeviceCanAccessPeer, &can, device, other);
    if (!can) exit(77);
    TRY("that was not enabled", cuCtxDisablePeerAccess, context_there);
    TRY("with flags", cuCtxEnablePeerAccess, context_there, 1);
    TRY("of null", cuCtxEnablePeerAccess, NULL, 0);
    TRY("of null", cuCtxDisablePeerAccess, NULL);
    TRY("of another device's context", cuCtxEnablePeerAccess, context_there, 0);
    TRY("of another device's context again", cuCtxEnablePeerAccess, context_there, 0);
    TRY("of another device's context", cuCtxDisablePeerAccess, context_there);
    TRY("of another device's context again", cuCtxDisablePeerAccess, context_there);
    no_context();
    TRY("without a context", cuCtxEnablePeerAccess, context_there, 0);
}
