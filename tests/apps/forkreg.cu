// A fork with registered memory: the child has what was there when it was made, as if nobody had registered anything, and
// the parent's device goes on with the parent's.
//
//   forkreg [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//           20, 5000, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"
#include <sys/wait.h>
#include <unistd.h>

__global__ void add(uint32_t *data, uint32_t n, uint32_t more) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] = data[i] * 5u + more;
    }
}

static bool all(const volatile uint32_t *data, uint32_t n, uint32_t value) {
    for (uint32_t i = 0; i < n; i++) {
        if (data[i] != value) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 20), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 5000);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n > 0);

    uint32_t *data = (uint32_t *)malloc(n * 4), *device;
    CHECK(cudaHostRegister(data, n * 4, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&device, data, 0));
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        for (uint32_t i = 0; i < n; i++) {
            data[i] = (uint32_t)round;
        }
        int ready[2], result;
        REQUIRE(pipe(ready) == 0);
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            // The parent and its device write after this, and the child must not see it.
            char byte;
            bool good = all(data, n, (uint32_t)round) && read(ready[0], &byte, 1) == 1 && all(data, n, (uint32_t)round);
            for (uint32_t i = 0; i < n; i++) {
                data[i] = 77;
            }
            void *nothing;
            good = good && all(data, n, 77) && cudaMalloc(&nothing, 4) != cudaSuccess;
            _exit(good ? 0 : 9);
        }
        data[0]++;
        add<<<(n + 127) / 128, 128>>>(device, n, 3);
        CHECK(cudaDeviceSynchronize());
        REQUIRE(write(ready[1], "x", 1) == 1);
        sleep_us(pause_us);
        REQUIRE(waitpid(child, &result, 0) == child && WIFEXITED(result) && WEXITSTATUS(result) == 0);
        close(ready[0]);
        close(ready[1]);
        REQUIRE(data[0] == ((uint32_t)round + 1) * 5 + 3 && (n == 1 || all(data + 1, n - 1, (uint32_t)round * 5 + 3)));
        state = digest(data, n * 4, state);
        progress(progress_file, round);
    }
    CHECK(cudaHostUnregister(data));
    free(data);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
