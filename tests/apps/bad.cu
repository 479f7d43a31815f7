// What programs do wrong, and what the driver then says, call by call: an error that is reported once, that leaves the
// context usable, or that ends it. Run directly on a driver it prints what must be printed.
//
//   bad [--sticky 0|1]      1; with 0 it leaves out the write out of bounds at the end
#include "app.h"

__global__ void store(uint32_t *out, uint32_t value) { *out = value; }
__global__ void shared_store(uint32_t *out) {
    extern __shared__ uint32_t room[];
    room[threadIdx.x] = threadIdx.x;
    __syncthreads();
    *out = room[0];
}

static void show(const char *what, cudaError_t error) {
    printf("%s: %d %s\n", what, (int)error, cudaGetErrorName(error));
    fflush(stdout);
}

// The call's own answer, what is reported last, and that it is reported once.
static void show_last(const char *what) {
    cudaError_t first = cudaGetLastError();
    printf("%s: %d %s, then %d\n", what, (int)first, cudaGetErrorName(first), (int)cudaGetLastError());
    fflush(stdout);
}

static void alive(uint32_t *device) {
    uint32_t host = 0;
    store<<<1, 1>>>(device, 42);
    show("launch after it", cudaGetLastError());
    show("copy after it", cudaMemcpy(&host, device, 4, cudaMemcpyDeviceToHost));
    printf("alive %u\n", host);
    fflush(stdout);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    bool sticky = options.number("--sticky", 1) != 0;
    options.done();

    uint32_t *device, host[4] = {};
    void *never;
    CHECK(cudaMalloc(&device, 4096));

    store<<<1, 2048>>>(device, 1);
    show_last("2048 threads in a block");
    store<<<1, dim3(1, 1, 128)>>>(device, 1);
    show_last("128 threads deep");
    store<<<0, 1>>>(device, 1);
    show_last("no blocks");
    shared_store<<<1, 32, 1 << 20>>>(device);
    show_last("1 MiB of shared memory");
    show("1 MiB of shared memory allowed",
         cudaFuncSetAttribute(shared_store, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 20));
    show_last("and reported");
    alive(device);

    show("free of no allocation", cudaFree((void *)0x123456000));
    show_last("and reported");
    show("free inside an allocation", cudaFree((char *)device + 256));
    show_last("and reported");
    show("allocation of 1 PiB", cudaMalloc(&never, 1ull << 50));
    show_last("and reported");
    show("copy past an allocation's end",
         cudaMemcpy((char *)device + (1ull << 36), host, sizeof host, cudaMemcpyHostToDevice));
    show_last("and reported");
    show("no such device", cudaSetDevice(9999));
    show_last("and reported");
    cudaEvent_t event, other;
    float ms;
    CHECK(cudaEventCreate(&event));
    CHECK(cudaEventCreate(&other));
    show("time between events never recorded", cudaEventElapsedTime(&ms, event, other));
    show_last("and reported");
    cudaPointerAttributes attributes;
    show("attributes of a plain pointer", cudaPointerGetAttributes(&attributes, host));
    show("size of no symbol", cudaGetSymbolSize((size_t *)host, (const void *)host));
    show_last("and reported");
    alive(device);

    if (sticky) {
        store<<<1, 1>>>((uint32_t *)0x10, 1);
        show("write out of bounds, launch", cudaGetLastError());
        show("synchronise", cudaDeviceSynchronize());
        show("last error", cudaGetLastError());
        show("last error again", cudaGetLastError());
        show("allocation", cudaMalloc(&never, 256));
        show("copy", cudaMemcpy(host, device, 4, cudaMemcpyDeviceToHost));
        store<<<1, 1>>>(device, 1);
        show("launch", cudaGetLastError());
        show("free", cudaFree(device));
    }
    printf("end\n");
    return 0;
}
