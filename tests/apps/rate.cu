// How many kernels a second one of several clients can launch: what a benchmark of many clients runs.
//
//   rate [--milliseconds N] [--mib N] [--ready FILE] [--go FILE]      1000, 16, none, none
//
// Makes a context and allocates N MiB, writes FILE when that is done, waits until the other FILE is there, and launches
// empty kernels for that time, 200 in a row and a wait after each row. Prints one JSON object: times in nanoseconds, begin
// and end on the machine's clock.
#include "app.h"

#include <unistd.h>

__global__ void empty() {}

int main(int argc, char **argv) {
    Options options(argc, argv);
    double length = (double)options.number("--milliseconds", 1000) * 1e6;
    uint64_t mib = options.number("--mib", 16);
    const char *ready = options.text("--ready", nullptr);
    const char *go = options.text("--go", nullptr);
    options.done();
    const int row = 200;

    double start = now_ns();
    CHECK(cudaFree(nullptr));
    double attached = now_ns();
    void *memory;
    CHECK(cudaMalloc(&memory, mib << 20));
    CHECK(cudaMemset(memory, 1, mib << 20));
    empty<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    double ran = now_ns();
    progress(ready, 1);
    while (go && access(go, F_OK) != 0) {
        sleep_us(1000);
    }

    uint64_t launches = 0;
    double begin = now_ns(), end = begin;
    while (end - begin < length) {
        for (int i = 0; i < row; i++) {
            empty<<<1, 1>>>();
        }
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        launches += row;
        end = now_ns();
    }
    printf("{\"attach_ns\": %.0f, \"first_kernel_ns\": %.0f, \"launches\": %llu, \"begin_ns\": %.0f, \"end_ns\": %.0f}\n",
           attached - start, ran - start, (unsigned long long)launches, begin, end);
    return 0;
}
