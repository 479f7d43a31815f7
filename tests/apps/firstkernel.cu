// From a process start to the first kernel's result, and nothing else: what a benchmark of start-up runs.
//
//   firstkernel
//
// Prints "ok".
#include "app.h"

__global__ void answer(uint32_t *out) { *out = 42 + threadIdx.x; }

int main() {
    uint32_t *device, host = 0;
    CHECK(cudaMalloc(&device, 4));
    answer<<<1, 1>>>(device);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&host, device, 4, cudaMemcpyDeviceToHost));
    REQUIRE(host == 42);
    printf("ok\n");
    return 0;
}
