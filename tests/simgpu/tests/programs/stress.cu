// Many threads at once: launches, copies, allocation, mapping, streams and events made and destroyed, modules reset.
#include <cstdint>
#include <pthread.h>
#include <vector>

#include "check.h"

__global__ void bump(uint32_t *at, uint32_t n) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        at[i] += i + 1;
    }
}
__global__ void watch(volatile uint32_t *at, volatile uint32_t *begun) {
    *begun = 1;
    while (*at != 1) {
    }
}

static void *launches(void *argument) {
    const uint32_t n = 1000, rounds = 100;
    OK(cudaSetDevice((int)(size_t)argument % 2));
    uint32_t *device;
    std::vector<uint32_t> host(n, 0);
    OK(cudaMalloc(&device, n * 4));
    OK(cudaMemset(device, 0, n * 4));
    for (uint32_t round = 0; round < rounds; round++) {
        cudaStream_t stream, other;
        cudaEvent_t event;
        OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        OK(cudaStreamCreate(&other));
        OK(cudaEventCreate(&event));
        OK(cudaEventRecord(event, cudaStreamLegacy));
        OK(cudaStreamWaitEvent(stream, event, 0));
        bump<<<(n + 127) / 128, 128, 0, stream>>>(device, n);
        OK(cudaEventRecord(event, stream));
        OK(cudaStreamWaitEvent(other, event, 0));
        bump<<<(n + 127) / 128, 128, 0, other>>>(device, n);
        OK(cudaStreamDestroy(stream));
        OK(cudaEventDestroy(event));
        OK(cudaStreamSynchronize(other));
        OK(cudaStreamDestroy(other));
    }
    OK(cudaMemcpy(host.data(), device, n * 4, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < n; i++) {
        REQUIRE(host[i] == 2 * rounds * (i + 1));
    }
    OK(cudaFree(device));
    return nullptr;
}

static void *allocations(void *argument) {
    OK(cudaSetDevice((int)(size_t)argument % 2));
    std::vector<void *> blocks;
    uint64_t random = 7 + (size_t)argument;
    for (int round = 0; round < 300; round++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        if (blocks.size() > 20 || (random >> 60 < 6 && !blocks.empty())) {
            size_t at = (random >> 33) % blocks.size();
            OK(cudaFree(blocks[at]));
            blocks.erase(blocks.begin() + (long)at);
        } else {
            void *block;
            OK(cudaMalloc(&block, 1 + (random >> 40) % (4 << 20)));
            REQUIRE((size_t)block % 256 == 0);
            blocks.push_back(block);
        }
    }
    for (void *block : blocks) {
        OK(cudaFree(block));
    }
    return nullptr;
}

static void *mappings(void *argument) {
    int device = (int)(size_t)argument % 2;
    OK(cudaSetDevice(device));
    CUmemAllocationProp property = {};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    CUmemAccessDesc access = {property.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const size_t size = 2 << 20;
    CUdeviceptr base;
    OK(cuMemAddressReserve(&base, 8 * size, 0, 0, 0));
    for (int round = 0; round < 100; round++) {
        CUmemGenericAllocationHandle piece;
        CUdeviceptr at = base + (round % 8) * size;
        uint32_t host = 0;
        OK(cuMemCreate(&piece, size, &property, 0));
        OK(cuMemMap(at, size, 0, piece, 0));
        OK(cuMemRelease(piece));
        OK(cuMemSetAccess(at, size, &access, 1));
        bump<<<1, 32, 0, cudaStreamPerThread>>>((uint32_t *)at, 32);
        OK(cudaStreamSynchronize(cudaStreamPerThread));
        OK(cuMemcpyDtoH(&host, at + 4, 4));
        REQUIRE(host == 2);
        OK(cuMemUnmap(at, size));
    }
    OK(cuMemAddressFree(base, 8 * size));
    return nullptr;
}

// Memory that is unmapped while a kernel uses it is missed by the kernel alone.
static void unmapped_in_use() {
    CUmemAllocationProp property = {};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    CUmemAccessDesc access = {property.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle piece;
    CUdeviceptr at;
    volatile uint32_t *begun;
    OK(cudaSetDevice(0));
    OK(cudaMallocHost((void **)&begun, 4));
    *begun = 0;
    OK(cuMemAddressReserve(&at, 2 << 20, 0, 0, 0));
    OK(cuMemCreate(&piece, 2 << 20, &property, 0));
    OK(cuMemMap(at, 2 << 20, 0, piece, 0));
    OK(cuMemSetAccess(at, 2 << 20, &access, 1));
    watch<<<1, 32>>>((uint32_t *)at, (uint32_t *)begun);
    while (*begun == 0) {
    }
    OK(cuMemUnmap(at, 2 << 20));
    EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
}

int main() {
    pthread_t threads[9];
    void *(*bodies[3])(void *) = {launches, allocations, mappings};
    for (size_t i = 0; i < 9; i++) {
        REQUIRE(pthread_create(&threads[i], nullptr, bodies[i % 3], (void *)(i / 3)) == 0);
    }
    for (pthread_t thread : threads) {
        REQUIRE(pthread_join(thread, nullptr) == 0);
    }
    size_t free, total;
    OK(cudaSetDevice(0));
    OK(cudaMemGetInfo(&free, &total));
    printf("%zu left\n", total - free);
    unmapped_in_use();
    printf("ok\n");
}
