// Copies from device to shared memory that go on while a block computes: pipelines of two stages by the primitives,
// cp.async of each size with zero filling, and groups' memcpy_async.
//
//   asynccopy [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
// build: cc80
#include "rounds.h"

#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda_pipeline.h>

namespace cg = cooperative_groups;

const uint32_t PARTS = 6, N = BLOCK * PARTS, GRID = 4;

// The next part arrives while this one is worked on.
__global__ void staged(uint32_t *out, const uint32_t *in) {
    __shared__ uint32_t stages[2][BLOCK];
    const uint32_t *mine = in + blockIdx.x * N;
    uint32_t t = threadIdx.x, sum = 0;
    __pipeline_memcpy_async(&stages[0][t], &mine[t], 4);
    __pipeline_commit();
    for (uint32_t part = 0; part < PARTS; part++) {
        if (part + 1 < PARTS) {
            __pipeline_memcpy_async(&stages[(part + 1) & 1][t], &mine[(part + 1) * BLOCK + t], 4);
        }
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        const uint32_t *stage = stages[part & 1];
        sum = sum * 31 + stage[t] + stage[(t * 5 + part) % BLOCK];
        out[blockIdx.x * N + part * BLOCK + t] = (uint32_t)mix(sum);
        __syncthreads();
    }
}

// 8 and 16 bytes at a time; the last bytes of some are zeros.
__global__ void wide(uint32_t *data) {
    __shared__ uint4 fours[BLOCK];
    __shared__ uint2 twos[BLOCK];
    uint32_t t = threadIdx.x, *mine = data + blockIdx.x * N;
    __pipeline_memcpy_async(&fours[t], (uint4 *)mine + t, 16, (t & 3) * 4);
    __pipeline_memcpy_async(&twos[t], (uint2 *)mine + t, 8, t & 1 ? 4 : 0);
    __pipeline_commit();
    __pipeline_wait_prior(0);
    __syncthreads();
    uint4 four = fours[(t + 1) % BLOCK];
    uint2 two = twos[(t + 2) % BLOCK];
    mine[t] += four.x ^ four.y ^ four.z ^ four.w ^ two.x * 3 ^ two.y;
}

__global__ void by_group(uint32_t *data) {
    extern __shared__ uint32_t copy[];
    cg::thread_block block = cg::this_thread_block();
    uint32_t *mine = data + blockIdx.x * N, t = threadIdx.x;
    cg::memcpy_async(block, copy, mine, sizeof(uint32_t) * N);
    cg::wait(block);
    for (uint32_t i = t; i < N; i += BLOCK) {
        mine[i] = copy[i] + copy[(i * 7 + 1) % N];
    }
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    uint32_t *a = randoms<uint32_t>(N * GRID, 16), *b = zeros<uint32_t>(N * GRID);
    rounds.run([&](uint64_t) {
        staged<<<GRID, BLOCK>>>(b, a);
        wide<<<GRID, BLOCK>>>(b);
        by_group<<<GRID, BLOCK, N * 4>>>(b);
        uint32_t *other = a;
        a = b, b = other;
    });
    rounds.take_from_device(a, N * GRID);
    return rounds.end();
}
