// A cooperative launch whose blocks wait for each other.
#include "check.h"

__device__ int arrived;

__device__ void meet(int target) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(&arrived, 1);
        while (atomicAdd(&arrived, 0) < target) {
        }
    }
    __syncthreads();
}

__global__ void rotate(int *a, int *b, int n, int rounds) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    for (int round = 1; round <= rounds; round++) {
        if (i < n) {
            b[i] = a[(i + 1) % n];
        }
        meet(round * (int)gridDim.x);
        int *c = a;
        a = b;
        b = c;
    }
}

int main() {
    const int n = 1024;
    int *a, *b, host[n], rounds = 7, count = n;
    for (int i = 0; i < n; i++) {
        host[i] = i;
    }
    OK(cudaMalloc(&a, sizeof host));
    OK(cudaMalloc(&b, sizeof host));
    OK(cudaMemcpy(a, host, sizeof host, cudaMemcpyHostToDevice));
    void *arguments[] = {&a, &b, &count, &rounds};
    OK(cudaLaunchCooperativeKernel((void *)rotate, dim3(8), dim3(128), arguments, 0, nullptr));
    OK(cudaMemcpy(host, b, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        REQUIRE(host[i] == (i + rounds) % n);
    }
    printf("ok\n");
}
