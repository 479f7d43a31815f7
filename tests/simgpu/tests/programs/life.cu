// How processes end and multiply while the device works.
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

__global__ void forever(volatile int *never) {
    while (*never == 0) {
    }
}
__device__ int counter;
__global__ void bump() { counter++; }

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    int *never, host;
    OK(cudaMalloc(&never, 4));
    OK(cudaMemset(never, 0, 4));
    if (!strcmp(what, "exit")) {
        // Kernels that never end do not keep the process.
        cudaStream_t stream;
        OK(cudaStreamCreate(&stream));
        forever<<<1, 32, 0, stream>>>(never);
        forever<<<4, 32>>>(never);
        OK(cudaGetLastError());
    } else if (!strcmp(what, "fork")) {
        pid_t child = fork();
        if (child == 0) {
            int count = 0;
            bool bad = cuInit(0) != CUDA_ERROR_NOT_INITIALIZED || cuDeviceGetCount(&count) != CUDA_ERROR_NOT_INITIALIZED ||
                       cudaMemset(never, 1, 4) != cudaErrorInitializationError;
            _exit(bad);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        bump<<<1, 1>>>();
        OK(cudaMemcpyFromSymbol(&host, counter, 4));
        REQUIRE(host == 1);
    } else if (!strcmp(what, "reset")) {
        // A reset ends what was there; the next use begins anew. But not after a fault: that ends the process's use of CUDA.
        bump<<<1, 1>>>();
        bump<<<1, 1>>>();
        OK(cudaMemcpyFromSymbol(&host, counter, 4));
        REQUIRE(host == 2);
        OK(cudaDeviceReset());
        bump<<<1, 1>>>();
        OK(cudaMemcpyFromSymbol(&host, counter, 4));
        REQUIRE(host == 1);
        size_t free, total;
        OK(cudaMalloc(&never, 1 << 20));
        OK(cudaDeviceReset());
        OK(cudaMemGetInfo(&free, &total));
        REQUIRE(free == total);
        forever<<<1, 1>>>((int *)8);
        EXPECT(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
        OK(cudaDeviceReset());
        EXPECT(cudaMemcpyFromSymbol(&host, counter, 4), cudaErrorDevicesUnavailable);
    }
    printf("ok\n");
}
