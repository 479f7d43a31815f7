// Addresses of functions of four modules, which are loaded lazily and first used in another order than they are loaded in:
// pointers in device memory and in variables, virtual functions of objects that kernels make. Each module comes into use
// some rounds after the one before, and later two more kernels of each; from then on all are used in each round.
//
//   firstuse [--iterations N] [--sleep-us N] [--progress FILE]      80, 0, none
//
// Prints "values V". FILE holds the iterations done.
//
// build: apart
#define MODULE 0
#include "firstuse.h"

extern const Part part1, part2, part3;

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 80);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    const Part *parts[4] = {&part0, &part1, &part2, &part3};
    // When each comes into use, and when its other kernels do.
    const uint64_t begin[4] = {6, 14, 2, 10}, more[4] = {30, 18, 26, 22};
    Memory memories[4];
    for (Memory &m : memories) {
        CHECK(cudaMalloc(&m.room, COUNT * 16));
        CHECK(cudaMalloc(&m.shapes, COUNT * 8));
        CHECK(cudaMalloc(&m.kept, COUNT * 8));
        CHECK(cudaMalloc(&m.later, COUNT * 8));
        CHECK(cudaMalloc(&m.values, COUNT * 4));
        CHECK(cudaMemset(m.values, 0, COUNT * 4));
    }
    for (uint64_t i = 1; i <= iterations; i++) {
        for (int n = 0; n < 4; n++) {
            const Part &part = *parts[n];
            if (i == begin[n]) {
                part.make(memories[n]);
            }
            if (i >= begin[n]) {
                part.use(memories[n], (unsigned)i);
            }
            if (i == more[n]) {
                part.prepare(memories[n]);
            }
            if (i >= more[n]) {
                part.late(memories[n], (unsigned)i);
            }
        }
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(file, i);
        sleep_us(sleep);
    }
    uint64_t state = 0;
    for (const Memory &m : memories) {
        unsigned said[COUNT];
        CHECK(cudaMemcpy(said, m.values, sizeof said, cudaMemcpyDeviceToHost));
        state = digest(said, sizeof said, state);
    }
    printf("values %016llx\n", (unsigned long long)state);
    return 0;
}
