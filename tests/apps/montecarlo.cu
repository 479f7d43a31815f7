// Estimates pi and the price of a walk with random numbers of integers alone: each thread has its own generator in device
// memory (xorwow, and Philox by counter), and what it draws decides how long it loops.
//
//   montecarlo [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "pi P" to four places, "digest D".
#include "rounds.h"

const uint32_t N = 1024, DRAWS = 16;

struct Generator {
    uint32_t x[5], counter;
};

__device__ uint32_t draw(Generator &g) {
    uint32_t t = g.x[4] ^ g.x[4] >> 2;
    g.x[4] = g.x[3], g.x[3] = g.x[2], g.x[2] = g.x[1], g.x[1] = g.x[0];
    g.x[0] ^= g.x[0] << 4 ^ t ^ t << 1;
    g.counter += 362437;
    return g.x[0] + g.counter;
}

__device__ uint2 philox(uint2 counter, uint32_t key) {
    for (int round = 0; round < 10; round++) {
        uint32_t high = __umulhi(0xd256d193u, counter.x), low = 0xd256d193u * counter.x;
        counter = make_uint2(high ^ key ^ counter.y, low);
        key += 0x9e3779b9u;
    }
    return counter;
}

__global__ void simulate(Generator *generators, unsigned long long *inside, unsigned long long *steps, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    Generator g = generators[i];
    uint32_t hits = 0;
    for (uint32_t k = 0; k < DRAWS; k++) {
        uint64_t x = draw(g), y = draw(g);
        hits += (x * x >> 1) + (y * y >> 1) < 1ull << 63;
    }
    // A walk until it leaves.
    int at = 0;
    uint32_t length = 0;
    while (at > -6 && at < 6 && length < 64) {
        uint2 numbers = philox(make_uint2(length, i), round);
        at += (int)(numbers.x & 1) + (int)(numbers.y & 1) - 1;
        length++;
    }
    generators[i] = g;
    for (uint32_t step = 16; step > 0; step /= 2) {
        hits += __shfl_xor_sync(~0u, hits, step);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(inside, (unsigned long long)hits);
    }
    atomicAdd(steps, (unsigned long long)length);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    Generator *generators = randoms<Generator>(N, 12);
    auto *inside = zeros<unsigned long long>(1), *steps = zeros<unsigned long long>(1);
    uint64_t last = 0;
    rounds.run([&](uint64_t round) {
        simulate<<<N / BLOCK, BLOCK>>>(generators, inside, steps, (uint32_t)round);
        last = round;
    });
    unsigned long long hits;
    CHECK(cudaMemcpy(&hits, inside, 8, cudaMemcpyDeviceToHost));
    printf("pi %.4f\n", 4.0 * (double)hits / (double)(last * N * DRAWS));
    rounds.take_from_device(inside, 1);
    rounds.take_from_device(steps, 1);
    rounds.take_from_device(generators, N);
    return rounds.end();
}
