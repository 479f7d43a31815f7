// Kernels that launch kernels: a sort that divides its range, with a part for each kernel; a tree of kernels, each of which
// launches the next level in a stream of its own; a sum that is launched for the end of the kernel that launches it and of all its
// descendants; a launch of too many threads, which fails.
//
//   offspring [--iterations N] [--sleep-us N] [--progress FILE]      20, 0, none
//
// Prints "digest D".
// build: devrt c++
#include "rounds.h"

const uint32_t N = 256, SMALL = 16;

__global__ void sort_range(uint32_t *data, int low, int high) {
    while (high - low > (int)SMALL) {
        uint32_t pivot = data[(low + high) / 2];
        int i = low, k = high;
        while (i <= k) {
            while (data[i] < pivot) i++;
            while (data[k] > pivot) k--;
            if (i <= k) {
                uint32_t word = data[i];
                data[i++] = data[k], data[k--] = word;
            }
        }
        cudaStream_t stream;
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        sort_range<<<1, 1, 0, stream>>>(data, low, k);
        cudaStreamDestroy(stream);
        low = i;
    }
    for (int i = low + 1; i <= high; i++) {
        uint32_t word = data[i];
        int k = i;
        for (; k > low && data[k - 1] > word; k--) data[k] = data[k - 1];
        data[k] = word;
    }
}

struct Level {
    uint32_t depth, seed;
};

__global__ void grow(uint32_t *leaves, Level level) {
    uint32_t place = blockIdx.x * blockDim.x + threadIdx.x;
    if (level.depth == 0) {
        atomicAdd(&leaves[level.seed % N], (uint32_t)mix(level.seed + place));
        return;
    }
    if (threadIdx.x < 2) {
        Level next = {level.depth - 1, (uint32_t)mix(level.seed * 2 + threadIdx.x)};
        grow<<<1 + threadIdx.x, 4, 0, cudaStreamFireAndForget>>>(leaves, next);
    }
}

__global__ void sum_up(const uint32_t *leaves, uint32_t *sum) {
    uint32_t total = 0;
    for (uint32_t i = 0; i < N; i++) total = total * 31 + leaves[i];
    *sum ^= total;
}

__global__ void begin(uint32_t *leaves, uint32_t *data, uint32_t *sum, uint32_t round) {
    sum_up<<<1, 1, 0, cudaStreamTailLaunch>>>(leaves, sum);
    grow<<<1, 4>>>(leaves, Level{3, round});
    // There are no such blocks.
    sum_up<<<1, 4096>>>(leaves, sum);
    if (cudaGetLastError() == cudaSuccess) *sum = 0;
    if (round % 4 == 0) sort_range<<<1, 1>>>(data, 0, (int)N - 1);
}

__global__ void stir(uint32_t *data, const uint32_t *sum, uint32_t round) {
    uint32_t i = threadIdx.x;
    data[i] ^= (uint32_t)mix(*sum + i * round);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 20);
    uint32_t *data = randoms<uint32_t>(N, 31), *leaves = zeros<uint32_t>(N), *sum = zeros<uint32_t>(1);
    rounds.run([&](uint64_t round) {
        begin<<<1, 1>>>(leaves, data, sum, (uint32_t)round);
        if (round % 4 != 0) stir<<<1, N>>>(data, sum, (uint32_t)round);
    });
    rounds.take_from_device(data, N);
    rounds.take_from_device(leaves, N);
    rounds.take_from_device(sum, 1);
    return rounds.end();
}
