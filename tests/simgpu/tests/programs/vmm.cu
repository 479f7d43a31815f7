// Virtual memory management, with the driver's own functions.
#include <cstdint>
#include <cstring>

#include "check.h"

__global__ void increment(uint32_t *at) { at[threadIdx.x]++; }
__global__ void read(const uint32_t *at, uint32_t *out) { *out = *at; }

static const CUdeviceptr WINDOW = 0x200000000000;
static const size_t MIB = 1 << 20;

int main(int argc, char **argv) {
    const char *fault = argc > 1 ? argv[1] : "";
    CUcontext context;
    CUdevice device;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));

    CUmemAllocationProp property = {};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    property.location.id = 0;
    size_t granularity, free, total, now;
    OK(cuMemGetAllocationGranularity(&granularity, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    REQUIRE(granularity == 2 * MIB);

    // A hint is honoured where it is free.
    CUdeviceptr base, other;
    OK(cuMemAddressReserve(&base, 1ull << 40, 0, WINDOW, 0));
    REQUIRE(base == WINDOW);
    OK(cuMemAddressReserve(&other, 64 * MIB, 0, WINDOW, 0));
    REQUIRE(other != WINDOW && other != 0);

    OK(cuMemGetInfo(&free, &total));
    CUmemGenericAllocationHandle piece, same;
    EXPECT(cuMemCreate(&piece, 3 * MIB, &property, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemCreate(&piece, 4 * MIB, &property, 0));
    OK(cuMemGetInfo(&now, &total));
    REQUIRE(free - now == 4 * MIB);
    EXPECT(cuMemMap(base, 2 * MIB, 2 * MIB, piece, 0), CUDA_ERROR_NOT_SUPPORTED);
    EXPECT(cuMemMap(base + 4096, 4 * MIB, 0, piece, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemMap(base, 4 * MIB, 0, piece, 0));
    EXPECT(cuMemMap(base + 2 * MIB, 4 * MIB, 0, piece, 0), CUDA_ERROR_INVALID_VALUE);

    // The same piece at two addresses.
    OK(cuMemMap(other, 4 * MIB, 0, piece, 0));
    CUmemAccessDesc access = {};
    access.location = property.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    unsigned long long flags;
    uint32_t host[32] = {41};
    EXPECT(cuMemcpyHtoD(base, host, sizeof host), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemSetAccess(base, 4 * MIB, &access, 1));
    OK(cuMemGetAccess(&flags, &property.location, base));
    REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(cuMemSetAccess(base, 6 * MIB, &access, 1), CUDA_ERROR_INVALID_VALUE);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    OK(cuMemSetAccess(other, 4 * MIB, &access, 1));
    OK(cuMemcpyHtoD(base, host, sizeof host));
    increment<<<1, 32>>>((uint32_t *)base);
    memset(host, 0, sizeof host);
    OK(cuMemcpyDtoH(host, other, sizeof host));
    REQUIRE(host[0] == 42 && host[31] == 1);

    // A piece lives as long as it is held or mapped.
    OK(cuMemRetainAllocationHandle(&same, (void *)(other + 4096)));
    REQUIRE(same == piece);
    OK(cuMemRelease(piece));
    OK(cuMemRelease(piece));
    EXPECT(cuMemRelease(piece), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemUnmap(base, 4 * MIB));
    EXPECT(cuMemAddressFree(other, 64 * MIB), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemGetInfo(&now, &total));
    REQUIRE(free - now == 4 * MIB);

    if (!strcmp(fault, "unmapped")) {
        increment<<<1, 32>>>((uint32_t *)base);
    } else if (!strcmp(fault, "reserved")) {
        increment<<<1, 32>>>((uint32_t *)(base + (1ull << 39)));
    } else if (!strcmp(fault, "readonly")) {
        read<<<1, 1>>>((uint32_t *)other, (uint32_t *)other);
    }
    if (*fault) {
        EXPECT(cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
        EXPECT(cuMemcpyDtoH(host, other, 4), CUDA_ERROR_ILLEGAL_ADDRESS);
        EXPECT(cuMemAlloc(&base, 4), CUDA_ERROR_ILLEGAL_ADDRESS);
        printf("700\n");
        return 0;
    }
    OK(cuMemUnmap(other, 4 * MIB));
    OK(cuMemGetInfo(&now, &total));
    REQUIRE(free == now);
    EXPECT(cuMemcpyDtoH(host, other, 4), CUDA_ERROR_INVALID_VALUE);

    // Through a descriptor.
    property.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    int descriptor;
    OK(cuMemCreate(&piece, 2 * MIB, &property, 0));
    OK(cuMemExportToShareableHandle(&descriptor, piece, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cuMemImportFromShareableHandle(&same, (void *)(size_t)descriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    EXPECT(cuMemExportToShareableHandle(&descriptor, same, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
           CUDA_ERROR_INVALID_VALUE);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    OK(cuMemMap(base, 2 * MIB, 0, piece, 0));
    OK(cuMemMap(other, 2 * MIB, 0, same, 0));
    OK(cuMemSetAccess(base, 2 * MIB, &access, 1));
    OK(cuMemSetAccess(other, 2 * MIB, &access, 1));
    OK(cuMemsetD32(base, 77, 2 * MIB / 4));
    OK(cuMemcpyDtoH(host, other + 2 * MIB - 4, 4));
    REQUIRE(host[0] == 77);
    OK(cuMemUnmap(base, 2 * MIB));
    OK(cuMemUnmap(other, 2 * MIB));
    OK(cuMemAddressFree(base, 1ull << 40));
    OK(cuMemAddressFree(other, 64 * MIB));
    printf("ok\n");
}
