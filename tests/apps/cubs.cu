// CUB: device-wide sort, scans, reductions, selection and histograms with temporary memory of one's own, and
// the block-wide collectives inside a kernel.
//
//   cubs [--iterations N] [--sleep-us N] [--progress FILE]      9, 0, none
//
// Prints "digest D".
// build: c++ ptx
#include "rounds.h"

#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_histogram.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/device/device_select.cuh>

const uint32_t N = 4096;

struct Third {
    __device__ bool operator()(uint32_t x) const { return x % 3 == 0; }
};

// Asks how much temporary memory it takes, and does it.
template <typename Call> void with_memory(Call call) {
    static char *memory;
    static size_t have;
    size_t need = 0;
    CHECK(call(nullptr, need));
    if (need > have) {
        CHECK(cudaFree(memory));
        CHECK(cudaMalloc(&memory, have = need));
    }
    CHECK(call(memory, need));
}

// Sorts 4 of each thread's, and scans them.
__global__ void in_blocks(uint32_t *data) {
    using Sort = cub::BlockRadixSort<uint32_t, BLOCK, 4>;
    using Scan = cub::BlockScan<uint32_t, BLOCK>;
    __shared__ union {
        typename Sort::TempStorage sort;
        typename Scan::TempStorage scan;
    } memory;
    uint32_t *mine = data + (blockIdx.x * BLOCK + threadIdx.x) * 4, items[4];
    for (uint32_t i = 0; i < 4; i++) {
        items[i] = mine[i];
    }
    Sort(memory.sort).Sort(items, 4, 28);
    __syncthreads();
    uint32_t all;
    Scan(memory.scan).ExclusiveSum(items, items, all);
    for (uint32_t i = 0; i < 4; i++) {
        mine[i] = items[i] ^ all;
    }
}

__global__ void stir(uint32_t *data, uint64_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = (uint32_t)mix(data[i] + round * N + i);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 9);
    uint32_t *data = randoms<uint32_t>(N, 17), *sorted = zeros<uint32_t>(N), *runs = zeros<uint32_t>(N), *count = zeros<uint32_t>(2);
    int *bins = zeros<int>(64);
    uint64_t *sums = zeros<uint64_t>(N), *total = zeros<uint64_t>(1);
    rounds.run([&](uint64_t round) {
        stir<<<N / BLOCK, BLOCK>>>(data, round);
        with_memory([&](void *m, size_t &n) { return cub::DeviceRadixSort::SortKeys(m, n, data, sorted, (int)N); });
        with_memory([&](void *m, size_t &n) { return cub::DeviceScan::ExclusiveSum(m, n, sorted, sums, (int)N); });
        with_memory([&](void *m, size_t &n) { return cub::DeviceReduce::Sum(m, n, sums, total, (int)N); });
        with_memory([&](void *m, size_t &n) {
            return cub::DeviceSelect::If(m, n, data, runs, count, (int)N, Third());
        });
        with_memory([&](void *m, size_t &n) {
            return cub::DeviceHistogram::HistogramEven(m, n, data, bins, 65, 0u, 0xffffffc0u, (int)N);
        });
        in_blocks<<<N / BLOCK / 4, BLOCK>>>(data);
        if (round % 4 == 0) {
            rounds.take_from_device(total, 1);
            rounds.take_from_device(count, 1);
            rounds.take_from_device(bins, 64);
        }
    });
    rounds.take_from_device(sorted, N);
    rounds.take_from_device(sums, N);
    rounds.take_from_device(runs, N / 8);
    rounds.take_from_device(data, N);
    return rounds.end();
}
