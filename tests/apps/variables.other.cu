// The other file of `variables`.
#include "variables.h"

__device__ uint32_t own = 3;
static __managed__ uint32_t words[1000] = {9, 8, 7};
__managed__ uint32_t calls;
__managed__ struct {
    uint32_t *where;
    uint64_t sum;
} total;

__global__ void add(uint32_t round) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < 1000; i += 7) sum += total.where[i];
    total.sum = total.sum * 3 + sum + own;
    own += round;
    calls++;
}

void other_round(uint32_t round) {
    total.where = words;
    words[round % 1000] += round;
    add<<<1, 1>>>(round);
    CHECK(cudaDeviceSynchronize());
    REQUIRE(calls == round);
}

uint32_t *other_words(uint32_t *count) {
    *count = 1000;
    return words;
}

uint32_t other_sum() { return (uint32_t)total.sum + words[17] + words[999]; }
