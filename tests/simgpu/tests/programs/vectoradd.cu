// The smallest whole program: memory, copies, one kernel.
#include <vector>

#include "check.h"

__global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        c[i] = a[i] + b[i];
    }
}

int main() {
    const int n = 100000;
    std::vector<float> a(n), b(n), c(n);
    for (int i = 0; i < n; i++) {
        a[i] = (float)i;
        b[i] = 2.0f * i;
    }
    float *da, *db, *dc;
    OK(cudaMalloc(&da, n * 4));
    OK(cudaMalloc(&db, n * 4));
    OK(cudaMalloc(&dc, n * 4));
    OK(cudaMemcpy(da, a.data(), n * 4, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(db, b.data(), n * 4, cudaMemcpyHostToDevice));
    add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
    OK(cudaGetLastError());
    OK(cudaMemcpy(c.data(), dc, n * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        REQUIRE(c[i] == 3.0f * i);
    }
    OK(cudaFree(da));
    OK(cudaDeviceReset());
    printf("ok\n");
}
