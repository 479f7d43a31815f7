// An assertion of a kernel's that fails: what it says, and that its error stays.
//
//   asserts [--iterations N] [--sleep-us N] [--progress FILE]      20, 0, none
//
// Prints what the kernel printed before it failed, and the errors after it; the assertion's words go to stderr. FILE
// holds the iterations done.
#include "app.h"

#include <cassert>

__global__ void check(unsigned iteration, unsigned fails) {
    if (threadIdx.x == 1) {
        printf("checked %u\n", iteration);
        assert(iteration != fails);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 20);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    for (uint64_t i = 0; i < iterations; i++) {
        check<<<1, 2>>>((unsigned)i, 1000);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(file, i + 1);
        sleep_us(sleep);
    }
    check<<<1, 2>>>(1000, 1000);
    CHECK(cudaGetLastError());
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
    void *nothing;
    printf("%s\n", cudaGetErrorName(cudaMalloc(&nothing, 1)));
    return 0;
}
