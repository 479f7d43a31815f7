// Two files linked on the device side, with managed variables that both use.
//
//   joined [--iterations N] [--sleep-us N] [--progress FILE]     30, 0, none
//
// Prints a digest, the same in every run with the same numbers.
#include "joined.h"

__managed__ uint32_t shared_words[64] = {1, 1, 2, 3, 5, 8};
static __managed__ uint32_t hidden = 4;

__global__ void advance() {
    shared_words[threadIdx.x] = fold(shared_words[threadIdx.x], hidden);
    __syncthreads();
    if (threadIdx.x == 0) hidden += folds;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    REQUIRE(shared_words[5] == 8 && hidden == 4 && folds == 0);
    rounds.run([&](uint64_t round) {
        shared_words[round % 64] += hidden;
        advance<<<1, 64>>>();
        CHECK(cudaDeviceSynchronize());
        REQUIRE(folds == 64 * round);
        rounds.take(shared_words, sizeof shared_words);
    });
    rounds.take(&hidden, sizeof hidden);
    return rounds.end();
}
