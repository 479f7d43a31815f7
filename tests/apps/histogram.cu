// Histograms: of bytes, counted in each block's shared memory first; of words by 11 bits, in device memory; and the data
// equalised by what was counted.
//
//   histogram [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 16384, GRID = 8;

__global__ void count_bytes(unsigned long long *counts, const unsigned char *data) {
    __shared__ uint32_t mine[256];
    for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
        mine[i] = 0;
    }
    __syncthreads();
    const uchar4 *fours = (const uchar4 *)data;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < N / 4; i += gridDim.x * blockDim.x) {
        uchar4 four = fours[i];
        atomicAdd(&mine[four.x], 1);
        atomicAdd(&mine[four.y], 1);
        atomicAdd(&mine[four.z], 1);
        atomicAdd(&mine[four.w], 1);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < 256; i += blockDim.x) {
        atomicAdd(&counts[i], (unsigned long long)mine[i]);
    }
}

__global__ void count_words(uint32_t *counts, const uint32_t *data) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&counts[data[i] >> 21], 1);
}

// How many bytes of all are smaller, as a byte. One block of 256.
__global__ void tabulate(unsigned char *table, const unsigned long long *counts) {
    __shared__ unsigned long long sums[256];
    uint32_t t = threadIdx.x;
    sums[t] = counts[t];
    for (uint32_t step = 1; step < 256; step *= 2) {
        __syncthreads();
        unsigned long long below = t >= step ? sums[t - step] : 0;
        __syncthreads();
        sums[t] += below;
    }
    __syncthreads();
    table[t] = (unsigned char)((sums[t] - counts[t]) * 255 / sums[255]);
}

__global__ void equalise(unsigned char *data, const unsigned char *table, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = (unsigned char)(table[data[i]] ^ (i * round >> 9));
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    auto *data = randoms<unsigned char>(N, 13), *table = zeros<unsigned char>(256);
    auto *counts = zeros<unsigned long long>(256);
    uint32_t *coarse = zeros<uint32_t>(2048);
    rounds.run([&](uint64_t round) {
        count_bytes<<<GRID, BLOCK>>>(counts, data);
        count_words<<<N / 4 / BLOCK, BLOCK>>>(coarse, (uint32_t *)data);
        tabulate<<<1, 256>>>(table, counts);
        equalise<<<N / BLOCK, BLOCK>>>(data, table, (uint32_t)round);
    });
    rounds.take_from_device(counts, 256);
    rounds.take_from_device(coarse, 2048);
    rounds.take_from_device(data, N);
    return rounds.end();
}
