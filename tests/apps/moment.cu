// Iterates, and says at the start of each iteration that it may be checkpointed there.
//
//   moment [--iterations N] [--steps N] [--sleep-us N] [--until FILE] [--moments N]      40, 16, 500, none, any number
//
// An iteration is so many kernels, each of which counts in a buffer behind a mark, by which a test finds the count in an
// image: at the start of an iteration it is a multiple of the steps. With FILE it iterates until that is there. Once N
// checkpoints have begun it says nothing any more.
#include "app.h"

#include "../../include/rekindle.h"

#include <unistd.h>

struct Buffer {
    uint64_t mark[4];
    uint64_t count;
};

__global__ void step(Buffer *buffer) { buffer->count++; }

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 40);
    uint64_t steps = options.number("--steps", 16);
    uint64_t sleep = options.number("--sleep-us", 500);
    const char *until = options.text("--until", nullptr);
    uint64_t moments = options.number("--moments", UINT64_MAX);
    options.done();

    REQUIRE(rekindle_checkpoint() == 0); // nobody waits for a program that has no GPU yet
    Buffer host = {{0x6d6f6d656e74206fULL, 0x662074686520676fULL, 0x6f64206b696e6421ULL, 0x52656b696e646c65ULL}, 0}, *buffer;
    CHECK(cudaMalloc(&buffer, sizeof host));
    CHECK(cudaMemcpy(buffer, &host, sizeof host, cudaMemcpyHostToDevice));
    uint64_t iteration = 0;
    for (; until ? access(until, F_OK) != 0 : iteration < iterations; iteration++) {
        if (iteration == 2) {
            printf("ready\n");
            fflush(stdout);
        }
        if (moments) {
            moments -= rekindle_checkpoint();
        }
        for (uint64_t i = 0; i < steps; i++) {
            step<<<1, 1>>>(buffer);
            CHECK(cudaDeviceSynchronize());
            sleep_us(sleep);
        }
    }
    CHECK(cudaMemcpy(&host, buffer, sizeof host, cudaMemcpyDeviceToHost));
    REQUIRE(host.count == iteration * steps);
    printf("counted all\n");
    return 0;
}
