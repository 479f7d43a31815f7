// A kernel that does not end until the program lets it: when it is told to by a file, or at once without one.
//
//   never [--until FILE]      none
//
// Prints "launched" when the kernel runs, and "ended" at last.
#include "app.h"

__global__ void never_ends(volatile uint32_t *words) {
    words[0] = 1;
    __threadfence_system();
    while (!words[1]) {
    }
    words[2] = words[1] + 1;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *until = options.text("--until", nullptr);
    options.done();

    volatile uint32_t *words;
    cudaStream_t stream;
    CHECK(cudaHostAlloc((void **)&words, 4096, cudaHostAllocMapped));
    memset((void *)words, 0, 4096);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    never_ends<<<1, 1, 0, stream>>>(words);
    CHECK(cudaGetLastError());
    while (!words[0]) {
        sleep_us(1000);
    }
    printf("launched\n");
    fflush(stdout);
    for (;;) {
        FILE *file = until ? fopen(until, "r") : nullptr;
        if (file || !until) {
            break;
        }
        sleep_us(10000);
    }
    words[1] = 41;
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(words[2] == 42);
    printf("ended\n");
    return 0;
}
