// Clusters of blocks: a sum over the shared memory of all blocks of a cluster, a histogram spread over them, values handed
// round in a ring, behind the cluster's barrier. Sizes are said when compiled, and when launched.
//
//   clusters [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D". FILE holds the iterations done. Needs compute capability 9.0.
// build: cc90
#include "app.h"

#include <cooperative_groups.h>

namespace cg = cooperative_groups;

// Each block hands its part to the next in the ring, and adds what it got to what all have.
__global__ void __cluster_dims__(4, 1, 1) ring(uint32_t *data, uint32_t round) {
    __shared__ uint32_t mine[64], got[64];
    cg::cluster_group cluster = cg::this_cluster();
    const uint32_t rank = cluster.block_rank(), blocks = cluster.num_blocks(), i = threadIdx.x;
    mine[i] = data[blockIdx.x * 64 + i] + round;
    cluster.sync();
    cluster.map_shared_rank(got, (rank + 1) % blocks)[i] = mine[i] * 2654435761u;
    cluster.sync();
    uint32_t all = 0;
    for (uint32_t r = 0; r < blocks; r++) {
        all += cluster.map_shared_rank(mine, r)[(i + r) % 64];
    }
    data[blockIdx.x * 64 + i] = all ^ got[i];
    // What others read must be there until they have.
    cluster.sync();
}

// Bins are spread over the blocks of a cluster, whose size is the launch's.
__global__ void histogram(const uint32_t *data, uint32_t n, uint32_t *bins) {
    extern __shared__ uint32_t part[];
    cg::cluster_group cluster = cg::this_cluster();
    const uint32_t blocks = cluster.num_blocks(), each = 64 / blocks, rank = cluster.block_rank();
    for (uint32_t i = threadIdx.x; i < each; i += blockDim.x) {
        part[i] = 0;
    }
    cluster.sync();
    const uint32_t first = (blockIdx.x / blocks) * blocks * blockDim.x + rank * blockDim.x + threadIdx.x;
    for (uint32_t i = first; i < n; i += gridDim.x * blockDim.x) {
        const uint32_t bin = data[i] >> 26;
        atomicAdd(cluster.map_shared_rank(part, bin / each) + bin % each, 1u);
    }
    cluster.sync();
    for (uint32_t i = threadIdx.x; i < each; i += blockDim.x) {
        atomicAdd(bins + rank * each + i, part[i]);
    }
    cluster.sync();
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 40), sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    const uint32_t n = 1024;
    uint32_t *host = (uint32_t *)malloc(n * 4), *data, *bins;
    for (uint32_t i = 0; i < n; i++) {
        host[i] = (uint32_t)mix(i);
    }
    CHECK(cudaMalloc(&data, n * 4));
    CHECK(cudaMalloc(&bins, 256));
    CHECK(cudaMemcpy(data, host, n * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(bins, 0, 256));
    CHECK(cudaDeviceSynchronize());
    for (uint64_t i = 1; i <= iterations; i++) {
        ring<<<n / 64, 64>>>(data, (uint32_t)i);
        CHECK(cudaGetLastError());
        cudaLaunchAttribute attribute;
        memset(&attribute, 0, sizeof attribute);
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = 1u << i % 4;
        attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(8);
        config.blockDim = dim3(64);
        config.dynamicSmemBytes = 256;
        config.attrs = &attribute;
        config.numAttrs = 1;
        CHECK(cudaLaunchKernelEx(&config, histogram, (const uint32_t *)data, n, bins));
        if (i % 8 == 0) {
            CHECK(cudaDeviceSynchronize());
        }
        progress(file, i);
        sleep_us(sleep);
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(host, data, n * 4, cudaMemcpyDeviceToHost));
    uint64_t state = digest(host, n * 4, 0);
    CHECK(cudaMemcpy(host, bins, 256, cudaMemcpyDeviceToHost));
    uint64_t total = 0;
    for (uint32_t i = 0; i < 64; i++) {
        total += host[i];
    }
    REQUIRE(total == iterations * n);
    printf("digest %016llx\n", (unsigned long long)digest(host, 256, state));
    return 0;
}
