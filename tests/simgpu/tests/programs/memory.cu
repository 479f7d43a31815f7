// Memory of every kind: shapes, registered memory, stream-ordered allocation, peers, pageable copies.
#include <cstring>
#include <vector>

#include "check.h"

__global__ void fill(int *at, int n, int value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        at[i] = value + i;
    }
}
__global__ void hold(volatile int *gate) {
    while (*gate == 0) {
    }
}
__constant__ int table[4] = {1, 2, 3, 4};
__global__ void constants(int *out) { out[threadIdx.x] = table[threadIdx.x] * 10; }
__global__ void print(int n) { printf("kernel %d of %s\n", threadIdx.x + n, "a block"); }

static void shapes() {
    const int w = 30, h = 20, d = 3;
    std::vector<unsigned char> src(w * h * d), dst(w * h * d);
    for (size_t i = 0; i < src.size(); i++) {
        src[i] = (unsigned char)(i * 7);
    }
    unsigned char *device;
    size_t pitch;
    OK(cudaMallocPitch(&device, &pitch, w, h));
    REQUIRE(pitch >= w && pitch % 32 == 0);
    OK(cudaMemcpy2D(device, pitch, src.data(), w, w, h, cudaMemcpyHostToDevice));
    OK(cudaMemset2D(device + pitch, pitch, 9, w, 2));
    OK(cudaMemcpy2D(dst.data(), w, device, pitch, w, h, cudaMemcpyDeviceToHost));
    REQUIRE(!memcmp(dst.data(), src.data(), w) && dst[w] == 9 && dst[3 * w - 1] == 9 && dst[3 * w] == src[3 * w]);
    cudaExtent extent = make_cudaExtent(w, h, d);
    cudaPitchedPtr volume;
    OK(cudaMalloc3D(&volume, extent));
    cudaMemcpy3DParms p = {};
    p.srcPtr = make_cudaPitchedPtr(src.data(), w, w, h);
    p.dstPtr = volume;
    p.extent = extent;
    p.kind = cudaMemcpyHostToDevice;
    OK(cudaMemcpy3D(&p));
    p.dstPtr = make_cudaPitchedPtr(dst.data(), w, w, h);
    p.srcPtr = volume;
    p.kind = cudaMemcpyDeviceToHost;
    OK(cudaMemcpy3D(&p));
    REQUIRE(src == dst);
}

static void registered() {
    const int n = 5000;
    std::vector<int> host(n);
    int *device;
    EXPECT(cudaHostGetDevicePointer(&device, host.data(), 0), cudaErrorInvalidValue);
    OK(cudaHostRegister(host.data(), n * 4, cudaHostRegisterDefault));
    EXPECT(cudaHostRegister(host.data() + 10, 4, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
    OK(cudaHostGetDevicePointer(&device, host.data(), 0));
    fill<<<n / 250, 250>>>(device, n, 5);
    OK(cudaDeviceSynchronize());
    REQUIRE(host[0] == 5 && host[n - 1] == n + 4);
    OK(cudaHostUnregister(host.data()));
    EXPECT(cudaHostUnregister(host.data()), cudaErrorHostMemoryNotRegistered);
}

// The bytes of a pageable copy are taken before the call returns, however busy the stream is.
static void pageable() {
    const int n = 100000;
    std::vector<int> host(n, 1), back(n);
    int *device, *gate;
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaMalloc(&device, n * 4));
    OK(cudaMallocHost(&gate, 4));
    *(volatile int *)gate = 0;
    hold<<<1, 1, 0, stream>>>(gate);
    OK(cudaMemcpyAsync(device, host.data(), n * 4, cudaMemcpyHostToDevice, stream));
    memset(host.data(), 0xff, n * 4);
    EXPECT(cudaStreamQuery(stream), cudaErrorNotReady);
    *(volatile int *)gate = 1;
    OK(cudaMemcpyAsync(back.data(), device, n * 4, cudaMemcpyDeviceToHost, stream));
    REQUIRE(back[0] == 1 && back[n - 1] == 1);
    OK(cudaStreamSynchronize(stream));
}

static void stream_ordered() {
    cudaStream_t stream;
    OK(cudaStreamCreate(&stream));
    size_t free, total, after;
    OK(cudaMemGetInfo(&free, &total));
    int *device, host[64];
    for (int round = 0; round < 10; round++) {
        OK(cudaMallocAsync(&device, total / 2, stream));
        fill<<<1, 64, 0, stream>>>(device, 64, round);
        OK(cudaMemcpyAsync(host, device, sizeof host, cudaMemcpyDeviceToHost, stream));
        OK(cudaFreeAsync(device, stream));
        OK(cudaStreamSynchronize(stream));
        REQUIRE(host[63] == round + 63);
    }
    // Without synchronising in between, memory whose free is ahead in the stream can be used again.
    for (int round = 0; round < 10; round++) {
        OK(cudaMallocAsync(&device, total / 2, stream));
        OK(cudaFreeAsync(device, stream));
    }
    OK(cudaStreamSynchronize(stream));
    OK(cudaMemGetInfo(&after, &total));
    REQUIRE(free == after);
    cudaMemPool_t pool;
    uint64_t threshold = 1 << 20, used;
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    OK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    threshold = 0;
    OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    OK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    REQUIRE(threshold == 1 << 20 && used == 0);
}

static void peers() {
    int devices;
    OK(cudaGetDeviceCount(&devices));
    if (devices < 2) {
        return;
    }
    int *here, *there, host[64];
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&there, 256));
    OK(cudaSetDevice(0));
    OK(cudaMalloc(&here, 256));
    fill<<<1, 64>>>(here, 64, 100);
    OK(cudaMemcpyPeer(there, 1, here, 0, 256));
    OK(cudaMemcpy(host, there, 256, cudaMemcpyDefault));
    REQUIRE(host[10] == 110);
    OK(cudaDeviceEnablePeerAccess(1, 0));
    EXPECT(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
    fill<<<1, 64>>>(there, 64, 200);
    OK(cudaMemcpy(host, there, 256, cudaMemcpyDefault));
    REQUIRE(host[10] == 210);
    OK(cudaDeviceDisablePeerAccess(1));
    fill<<<1, 64>>>(there, 64, 300);
    EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
}

static void symbols() {
    int *device, host[4], four[4] = {5, 6, 7, 8};
    OK(cudaMalloc(&device, 16));
    constants<<<1, 4>>>(device);
    OK(cudaMemcpy(host, device, 16, cudaMemcpyDeviceToHost));
    REQUIRE(host[3] == 40);
    OK(cudaMemcpyToSymbol(table, four, 16));
    constants<<<1, 4>>>(device);
    OK(cudaMemcpy(host, device, 16, cudaMemcpyDeviceToHost));
    REQUIRE(host[0] == 50 && host[3] == 80);
}

static void launches() {
    int *device, blocks, grid, block, host[4];
    void *pointer;
    OK(cudaMalloc(&device, 4096 * 4));
    pointer = device;
    int n = 4, value = 30;
    void *arguments[] = {&pointer, &n, &value};
    OK(cudaLaunchCooperativeKernel((void *)fill, dim3(1), dim3(4), arguments, 0, nullptr));
    OK(cudaMemcpy(host, device, 16, cudaMemcpyDeviceToHost));
    REQUIRE(host[3] == 33);
    EXPECT(cudaLaunchCooperativeKernel((void *)fill, dim3(100000), dim3(1024), arguments, 0, nullptr),
           cudaErrorCooperativeLaunchTooLarge);
    cudaGetLastError();
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(4);
    config.blockDim = dim3(1);
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    cluster.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &cluster;
    config.numAttrs = 1;
    OK(cudaLaunchKernelEx(&config, fill, device, 4, 50));
    OK(cudaMemcpy(host, device, 16, cudaMemcpyDeviceToHost));
    REQUIRE(host[3] == 53);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 256, 0));
    REQUIRE(blocks == 8);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, fill, 32, 100 << 10));
    REQUIRE(blocks == 2);
    OK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, fill, 0, 0));
    REQUIRE(block % 32 == 0 && grid > 0);
    cudaFuncAttributes attributes;
    OK(cudaFuncGetAttributes(&attributes, fill));
    REQUIRE(attributes.maxThreadsPerBlock == 1024 && attributes.maxDynamicSharedSizeBytes == 48 << 10);
    OK(cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
    EXPECT(cudaFuncSetAttribute(fill, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10), cudaErrorInvalidValue);
    cudaGetLastError();
    fill<<<1, 4, 227 << 10>>>(device, 4, 60);
    OK(cudaGetLastError());
    OK(cudaDeviceSynchronize());
}

int main() {
    shapes();
    registered();
    pageable();
    stream_ordered();
    symbols();
    launches();
    printf("before\n");
    print<<<1, 2>>>(7);
    OK(cudaDeviceSynchronize());
    printf("after\n");
    peers();
    printf("ok\n");
}
