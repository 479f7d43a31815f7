// Reductions of many kinds over one array: sums of integers and of doubles in a fixed order, minimum with its place, by
// trees in shared memory, by warps, and by the last block of a grid to come.
//
//   reduction [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 16384, GRID = 16;

struct Best {
    uint32_t value, place;
};

__device__ Best better(Best a, Best b) {
    return b.value < a.value || (b.value == a.value && b.place < a.place) ? b : a;
}

__device__ uint32_t blocks_done;

// The last block to come reduces what all have left behind.
__global__ void all_kinds(const uint32_t *in, double *partial, Best *bests, unsigned long long *sum, double *total, Best *best) {
    __shared__ double doubles[BLOCK];
    __shared__ Best places[BLOCK / 32];
    __shared__ bool last;
    uint32_t t = threadIdx.x;
    double real = 0;
    uint64_t whole = 0;
    Best mine = {~0u, 0};
    for (uint32_t i = blockIdx.x * BLOCK + t; i < N; i += GRID * BLOCK) {
        real = __dadd_rn(real, __dmul_rn((double)in[i], 1e-3));
        whole += in[i];
        mine = better(mine, Best{in[i], i});
    }
    doubles[t] = real;
    for (uint32_t step = 16; step > 0; step /= 2) {
        mine = better(mine, Best{__shfl_down_sync(~0u, mine.value, step), __shfl_down_sync(~0u, mine.place, step)});
        whole += __shfl_down_sync(~0u, (unsigned long long)whole, step);
    }
    if (t % 32 == 0) {
        places[t / 32] = mine;
        atomicAdd(sum, (unsigned long long)whole);
    }
    for (uint32_t half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            doubles[t] = __dadd_rn(doubles[t], doubles[t + half]);
        }
    }
    if (t == 0) {
        partial[blockIdx.x] = doubles[0];
        Best of_block = places[0];
        for (uint32_t i = 1; i < BLOCK / 32; i++) {
            of_block = better(of_block, places[i]);
        }
        bests[blockIdx.x] = of_block;
        __threadfence();
        last = atomicAdd(&blocks_done, 1) == GRID - 1;
    }
    __syncthreads();
    if (last && t == 0) {
        double all = 0;
        Best of_all = {~0u, 0};
        for (uint32_t i = 0; i < GRID; i++) {
            all = __dadd_rn(all, ((volatile double *)partial)[i]);
            of_all = better(of_all, Best{((volatile Best *)bests)[i].value, ((volatile Best *)bests)[i].place});
        }
        *total = all;
        *best = of_all;
        blocks_done = 0;
    }
}

__global__ void change(uint32_t *data, const unsigned long long *sum, const double *total, const Best *best) {
    uint32_t i = blockIdx.x * BLOCK + threadIdx.x;
    if (i % 61 == *sum % 61 || i == best->place) {
        data[i] = (uint32_t)mix(data[i] + *sum + (uint64_t)__double_as_longlong(*total) + best->value);
    }
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    uint32_t *data = randoms<uint32_t>(N, 10);
    double *partial = zeros<double>(GRID), *total = zeros<double>(1);
    Best *bests = zeros<Best>(GRID), *best = zeros<Best>(1);
    auto *sum = zeros<unsigned long long>(1);
    rounds.run([&](uint64_t) {
        CHECK(cudaMemsetAsync(sum, 0, 8));
        all_kinds<<<GRID, BLOCK>>>(data, partial, bests, sum, total, best);
        change<<<N / BLOCK, BLOCK>>>(data, sum, total, best);
    });
    rounds.take_from_device(data, N);
    rounds.take_from_device(sum, 1);
    rounds.take_from_device(total, 1);
    rounds.take_from_device(best, 1);
    return rounds.end();
}
