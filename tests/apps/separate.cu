// Two files compiled separately and linked on the device side: a kernel here calls functions of the other file, directly
// and by address, and shares its variables.
//
//   separate [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//
// Prints "values V". FILE holds the iterations done.
#include "separate.h"

__device__ unsigned calls;
static __device__ unsigned hidden = 17;

__global__ void advance(unsigned *values, unsigned turn) {
    unsigned i = threadIdx.x;
    unsigned value = fold(values[i], turn) + table[(i + turn) % 4] + hidden;
    values[i] = chosen(turn)(value);
    if (i == 0) {
        hidden += calls % 5;
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 60);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    const unsigned count = 32;
    unsigned *values, said[count];
    CHECK(cudaMalloc(&values, count * 4));
    CHECK(cudaMemset(values, 1, count * 4));
    for (uint64_t i = 0; i < iterations; i++) {
        advance<<<1, count>>>(values, (unsigned)i);
        CHECK(cudaGetLastError());
        unsigned now[4];
        CHECK(cudaMemcpyFromSymbol(now, table, sizeof now));
        now[i % 4] += (unsigned)i;
        CHECK(cudaMemcpyToSymbol(table, now, sizeof now));
        progress(file, i + 1);
        sleep_us(sleep);
    }
    CHECK(cudaMemcpy(said, values, sizeof said, cudaMemcpyDeviceToHost));
    unsigned counted;
    CHECK(cudaMemcpyFromSymbol(&counted, calls, 4));
    printf("values %016llx of %u calls\n", (unsigned long long)digest(said, sizeof said), counted);
    return 0;
}
