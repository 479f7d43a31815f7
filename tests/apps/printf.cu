// Kernels that print: formats of all kinds, from two streams that are waited for in turn and from a copy that waits,
// between what the program prints itself.
//
//   printf [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints what its kernels print, each line once and in order. FILE holds the iterations done.
#include "app.h"

__device__ unsigned total;

__global__ void say(unsigned iteration, const char *who, double value) {
    unsigned now = atomicAdd(&total, iteration);
    printf("%s says %u of %5d: %#x %-6s| %8.3f %c%% %llu\n", who, iteration, -(int)now, now, "left", value, 'a' + iteration % 26,
           (unsigned long long)now << 33);
}

__global__ void lines(unsigned count) {
    for (unsigned i = 0; i < count; i++) {
        printf("line %u of a long text that does not fit into one piece of whatever carries it to the program\n", i);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 40);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    cudaStream_t streams[2];
    char *names;
    CHECK(cudaMalloc(&names, 16));
    CHECK(cudaMemcpy(names, "first\0\0\0second\0", 16, cudaMemcpyHostToDevice));
    for (int i = 0; i < 2; i++) {
        CHECK(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
    }
    for (uint64_t i = 0; i < iterations; i++) {
        printf("iteration %llu\n", (unsigned long long)i);
        for (int s = 0; s < 2; s++) {
            say<<<1, 1, 0, streams[s]>>>((unsigned)i, names + 8 * s, (double)i / 3);
            CHECK(cudaGetLastError());
            CHECK(cudaStreamSynchronize(streams[s]));
        }
        if (i % 8 == 0) {
            lines<<<1, 1>>>(60);
        }
        unsigned now;
        CHECK(cudaMemcpyFromSymbol(&now, total, 4));
        printf("total %u\n", now);
        // Nobody waits for this one before the next iteration.
        say<<<1, 1, 0, streams[0]>>>((unsigned)i, names + 8, -0.5);
        CHECK(cudaGetLastError());
        progress(file, i + 1);
        sleep_us(sleep);
    }
    CHECK(cudaDeviceSynchronize());
    say<<<1, 1>>>(1000, names, 0);
    CHECK(cudaDeviceSynchronize());
    return 0;
}
