// How much of a kernel fits on a device: blocks of several sizes, the best block size with and without a function that
// says how much shared memory it takes, clusters. The answers depend on the device, so they are compared with those of
// the first iteration, and with what must hold between them.
//
//   occupancy [--iterations N] [--sleep-us N] [--progress FILE]      50, 0, none
//
// Prints "grid-stride sum S", the same in every run. FILE holds the iterations done.
#include "driver.h"

extern "C" __global__ void __launch_bounds__(512) stride(unsigned *sum, unsigned count) {
    extern __shared__ unsigned room[];
    unsigned mine = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
        mine += i;
    }
    if (threadIdx.x == 0) {
        room[0] = 0;
    }
    __syncthreads();
    atomicAdd(&room[0], mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(sum, room[0]);
    }
}

static size_t four_bytes_for_each(int threads) { return (size_t)threads * 4; }

struct Answers {
    int blocks[4];
    int none, grid, block, grid_with, block_with, grid_below, block_below, clusters, cluster_size;
    size_t available;
};

static Answers ask(CUfunction function) {
    Answers a;
    memset(&a, 0, sizeof a);
    const int sizes[4] = {32, 128, 256, 512};
    for (int i = 0; i < 4; i++) {
        CU(cuOccupancyMaxActiveBlocksPerMultiprocessor, &a.blocks[i], function, sizes[i], 4 * sizes[i]);
        REQUIRE(a.blocks[i] >= 1 && (i == 0 || a.blocks[i] <= a.blocks[i - 1]));
    }
    // More than a block can have.
    CU(cuOccupancyMaxActiveBlocksPerMultiprocessor, &a.none, function, 2048, 0);
    REQUIRE(a.none == 0);
    FAILS(CUDA_ERROR_INVALID_VALUE, cuOccupancyMaxActiveBlocksPerMultiprocessor, &a.none, function, 0, 0);
    CU(cuOccupancyMaxPotentialBlockSize, &a.grid, &a.block, function, nullptr, 16, 0);
    CU(cuOccupancyMaxPotentialBlockSize, &a.grid_with, &a.block_with, function, four_bytes_for_each, 0, 0);
    CU(cuOccupancyMaxPotentialBlockSizeWithFlags, &a.grid_below, &a.block_below, function, four_bytes_for_each, 0, 100, 0);
    REQUIRE(a.block <= 512 && a.block_with <= 512 && a.block_below <= 100);
    CU(cuOccupancyAvailableDynamicSMemPerBlock, &a.available, function, 2, 256);
    REQUIRE(a.available > 0);
    CUlaunchAttribute cluster;
    memset(&cluster, 0, sizeof cluster);
    cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = 2;
    cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
    CUlaunchConfig config;
    memset(&config, 0, sizeof config);
    config.gridDimX = 64;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = 128;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CU(cuOccupancyMaxActiveClusters, &a.clusters, function, &config);
    config.numAttrs = 0;
    CU(cuOccupancyMaxPotentialClusterSize, &a.cluster_size, function, &config);
    REQUIRE(a.clusters >= 1 && a.cluster_size >= 1);
    return a;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 50);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    unsigned *sum;
    CHECK(cudaMalloc(&sum, 4));
    CHECK(cudaMemset(sum, 0, 4));
    cudaFunction_t found;
    CHECK(cudaGetFuncBySymbol(&found, (const void *)stride));
    CUfunction function = (CUfunction)found;
    const Answers first = ask(function);
    for (uint64_t i = 0; i < iterations; i++) {
        const Answers now = ask(function);
        REQUIRE(memcmp(&now, &first, sizeof now) == 0);
        stride<<<now.grid, now.block, 16>>>(sum, 10000);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(file, i + 1);
        sleep_us(sleep);
    }
    unsigned said;
    CHECK(cudaMemcpy(&said, sum, 4, cudaMemcpyDeviceToHost));
    printf("grid-stride sum %u\n", said);
    return 0;
}
