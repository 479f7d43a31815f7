// What the devices say of themselves, with the environment that the test sets.
#include <cstring>

#include "check.h"

int main() {
    int devices;
    OK(cudaGetDeviceCount(&devices));
    for (int d = 0; d < devices; d++) {
        cudaDeviceProp p;
        char bus[32];
        int back;
        OK(cudaGetDeviceProperties(&p, d));
        OK(cudaDeviceGetPCIBusId(bus, sizeof bus, d));
        OK(cudaDeviceGetByPCIBusId(&back, bus));
        REQUIRE(back == d);
        REQUIRE(p.maxThreadsPerBlock == 1024 && p.warpSize == 32 && p.sharedMemPerBlockOptin == 227 << 10);
        printf("%s %d.%d %zu %s\n", p.name, p.major, p.minor, p.totalGlobalMem, bus);
        OK(cudaSetDevice(d));
        // All of the memory can be taken, and no more.
        size_t free, total, before;
        void *half, *rest, *none;
        OK(cudaMemGetInfo(&before, &total));
        REQUIRE(total == p.totalGlobalMem && before == total);
        OK(cudaMalloc(&half, total / 2));
        OK(cudaMalloc(&rest, total / 2));
        OK(cudaMemGetInfo(&free, &total));
        REQUIRE(free == 0);
        EXPECT(cudaMalloc(&none, 1), cudaErrorMemoryAllocation);
        OK(cudaFree(half));
        OK(cudaMalloc(&none, 1));
        OK(cudaFree(none));
        OK(cudaFree(rest));
        OK(cudaMemGetInfo(&free, &total));
        REQUIRE(free == total);
    }
    EXPECT(cudaSetDevice(devices), cudaErrorInvalidDevice);
}
