// Atomic operations of every kind and width, on device and shared memory, by thread, block and system scope, with results
// and without. Floating point sums are of values that add up exactly in any order.
//
//   atomics [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
#include "rounds.h"

#include <cuda_fp16.h>

const uint32_t N = 2048, SLOTS = 32;

struct Results {
    uint32_t add[SLOTS], sub[SLOTS], min[SLOTS], max[SLOTS], both[SLOTS], any[SLOTS], odd[SLOTS], up[SLOTS], down[SLOTS];
    int32_t smallest[SLOTS], largest[SLOTS];
    unsigned long long add64[SLOTS], min64[SLOTS], max64[SLOTS], both64[SLOTS], any64[SLOTS], odd64[SLOTS], squares[SLOTS];
    long long smallest64[SLOTS], largest64[SLOTS];
    float sum[SLOTS];
    double sum64[SLOTS];
    __half2 halves[SLOTS];
    unsigned short counters[SLOTS];
    uint32_t owner[SLOTS], handed[SLOTS], by_block[SLOTS];
};

__global__ void prepare(Results *r) {
    uint32_t i = threadIdx.x;
    r->min[i] = r->both[i] = ~0u;
    r->smallest[i] = INT32_MAX, r->largest[i] = INT32_MIN;
    r->min64[i] = r->both64[i] = ~0ull;
    r->smallest64[i] = INT64_MAX, r->largest64[i] = INT64_MIN;
    r->down[i] = 5;
    r->halves[i] = __floats2half2_rn(0, 0);
    r->counters[i] = 0;
}

__global__ void work(Results *r, uint64_t round) {
    __shared__ uint32_t block[SLOTS];
    __shared__ unsigned long long block64[SLOTS];
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, s = i % SLOTS;
    if (threadIdx.x < SLOTS) {
        block[threadIdx.x] = 0;
        block64[threadIdx.x] = 0;
    }
    __syncthreads();
    uint64_t x = mix(round * N + i);
    uint32_t low = (uint32_t)x;
    atomicAdd(&r->add[s], low);
    atomicSub(&r->sub[s], low >> 3);
    atomicMin(&r->min[s], low);
    atomicMax(&r->max[s], low);
    atomicAnd(&r->both[s], low | 0xffff0000u >> (s & 15));
    atomicOr(&r->any[s], 1u << (low & 31));
    atomicXor(&r->odd[s], low);
    atomicInc(&r->up[s], 1000);
    atomicDec(&r->down[s], 777);
    atomicMin(&r->smallest[s], (int32_t)low);
    atomicMax(&r->largest[s], (int32_t)low);
    atomicAdd(&r->add64[s], (unsigned long long)x);
    atomicMin(&r->min64[s], (unsigned long long)x);
    atomicMax(&r->max64[s], (unsigned long long)x);
    atomicAnd(&r->both64[s], (unsigned long long)x | 0xffffull << (s & 31));
    atomicOr(&r->any64[s], 1ull << (x & 63));
    atomicXor(&r->odd64[s], (unsigned long long)x);
    atomicMin(&r->smallest64[s], (long long)x);
    atomicMax(&r->largest64[s], (long long)x);
    atomicAdd(&r->sum[s], (float)(low & 15));
    atomicAdd(&r->sum64[s], (double)(low & 1023) * 0.25);
    if (round % 16 == 1) {
        atomicAdd(&r->halves[s], __floats2half2_rn((float)(low & 3), (float)(low >> 2 & 1)));
    }
    // Compare and swap in a loop, of 64 and of 16 bits.
    unsigned long long seen = r->squares[s], wanted;
    do {
        wanted = seen;
        seen = atomicCAS(&r->squares[s], wanted, wanted + (unsigned long long)(low & 255) * (low & 255));
    } while (seen != wanted);
    unsigned short narrow = r->counters[s], expected;
    do {
        expected = narrow;
        narrow = atomicCAS(&r->counters[s], expected, (unsigned short)(expected + 3));
    } while (narrow != expected);
    // Whoever comes first has it; what is exchanged is handed on, so the sum of all that was seen and left is known.
    atomicCAS(&r->owner[s], 0, s + 1);
    atomicAdd(&r->handed[s], i + 1);
    uint32_t before = atomicExch(&block[s], i + 1);
    atomicSub_block(&r->handed[s], 0u);
    atomicAdd_system(&r->handed[s], 0u - before);
    atomicAdd_block(&block64[s], (unsigned long long)(low >> 4));
    __syncthreads();
    if (threadIdx.x < SLOTS) {
        atomicAdd(&r->handed[threadIdx.x], 0u - block[threadIdx.x]);
        atomicMax_system(&r->by_block[threadIdx.x], (uint32_t)block64[threadIdx.x]);
    }
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    Results *results = zeros<Results>(1);
    prepare<<<1, SLOTS>>>(results);
    rounds.run([&](uint64_t round) { work<<<N / BLOCK, BLOCK>>>(results, round); });
    Results host;
    CHECK(cudaMemcpy(&host, results, sizeof host, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < SLOTS; i++) {
        REQUIRE(host.handed[i] == 0 && host.owner[i] == i + 1);
    }
    rounds.take(&host, sizeof host);
    return rounds.end();
}
