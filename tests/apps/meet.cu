// Kernels that wait for each other: on two devices, on two streams of each, in rounds that are enqueued ahead. A kernel
// ends only when its partner on the other device runs too, so whoever stops in between must let the other come.
//
//   meet [--first D] [--second D] [--rounds N] [--ahead N] [--sleep-us N] [--progress FILE]      0, 1, 60, 4, 0, none
//
// Prints "met N" and "digest D", the same in every run with the same numbers. FILE holds the rounds enqueued.
#include "app.h"

// Says that this side has come to `round`, and waits for the other.
__global__ void meet(volatile uint32_t *mine, volatile uint32_t *theirs, uint32_t *sum, uint32_t round) {
    *mine = round;
    __threadfence_system();
    while (*theirs < round) {
    }
    *sum = (*sum ^ round) * 0x9e3779b1u + 1;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    int devices[2] = {(int)options.number("--first", 0), (int)options.number("--second", 1)};
    uint32_t rounds = (uint32_t)options.number("--rounds", 60), ahead = (uint32_t)options.number("--ahead", 4);
    uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(ahead > 0);

    volatile uint32_t *flags;
    CHECK(cudaSetDevice(devices[0]));
    CHECK(cudaHostAlloc((void **)&flags, 4096, cudaHostAllocPortable | cudaHostAllocMapped));
    memset((void *)flags, 0, 4096);
    cudaStream_t streams[2];
    uint32_t *sums[2];
    for (int side = 0; side < 2; side++) {
        CHECK(cudaSetDevice(devices[side]));
        CHECK(cudaStreamCreateWithFlags(&streams[side], cudaStreamNonBlocking));
        CHECK(cudaMalloc(&sums[side], 4));
        CHECK(cudaMemset(sums[side], 0, 4));
        CHECK(cudaDeviceSynchronize());
    }
    for (uint32_t round = 1; round <= rounds; round++) {
        for (int turn = 0; turn < 2; turn++) {
            const int side = (int)(turn ^ (round & 1));
            CHECK(cudaSetDevice(devices[side]));
            meet<<<1, 1, 0, streams[side]>>>(flags + 64 * side, flags + 64 * (1 - side), sums[side], round);
            CHECK(cudaGetLastError());
            sleep_us(pause_us); // the first one waits all this time
        }
        progress(progress_file, round);
        if (round % ahead == 0) {
            CHECK(cudaStreamSynchronize(streams[round / ahead % 2]));
        }
    }
    uint32_t results[2];
    for (int side = 0; side < 2; side++) {
        CHECK(cudaSetDevice(devices[side]));
        CHECK(cudaStreamSynchronize(streams[side]));
        CHECK(cudaMemcpy(&results[side], sums[side], 4, cudaMemcpyDeviceToHost));
    }
    printf("met %u\n", (unsigned)flags[0]);
    printf("digest %016llx\n", (unsigned long long)digest(results, sizeof results));
    return 0;
}
