// What an autotuner does: launches that fail at once, with an error that is told once and leaves everything as it was,
// among others that work; also while a callback holds the stream up.
//
//   autotune [--rounds N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "failed N worked N" and "digest D", the same in every run with the same numbers. FILE holds the rounds done.
#include "app.h"

static const uint32_t N = 4096;

__global__ void stir(uint32_t *data, uint32_t n, uint32_t round) {
    extern __shared__ uint32_t part[];
    part[threadIdx.x % 16] = round;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        data[i] = (data[i] ^ (data[i] >> 15)) * 0x2c1b3c6du + part[i % 16];
    }
}

static void wait_for(void *open) {
    while (!__atomic_load_n((int *)open, __ATOMIC_SEQ_CST)) {
        sleep_us(100);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t rounds = options.number("--rounds", 40), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    cudaStream_t stream;
    uint32_t *data;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&data, N * 4));
    CHECK(cudaMemset(data, 3, N * 4));
    CHECK(cudaDeviceSynchronize());
    const uint32_t threads[] = {64, 2048, 256, 1024, 0, 32};
    const uint32_t shared[] = {64, 1024, 48 << 10, 1 << 20, 200 << 10};
    uint64_t failed = 0, worked = 0;
    for (uint64_t round = 1; round <= rounds; round++) {
        int open = 0;
        if (round % 2 == 0) {
            CHECK(cudaLaunchHostFunc(stream, wait_for, &open));
        }
        for (uint32_t t : threads) {
            for (uint32_t s : shared) {
                const bool good = t > 0 && t <= 1024 && s <= (48u << 10);
                stir<<<1, t, s, stream>>>(data, N, (uint32_t)round);
                const cudaError_t error = cudaGetLastError();
                REQUIRE((error == cudaSuccess) == good);
                REQUIRE(good || error == cudaErrorInvalidConfiguration || error == cudaErrorInvalidValue);
                REQUIRE(cudaGetLastError() == cudaSuccess);
                (good ? worked : failed)++;
            }
        }
        __atomic_store_n(&open, 1, __ATOMIC_SEQ_CST);
        CHECK(cudaStreamSynchronize(stream));
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    uint32_t *host = (uint32_t *)malloc(N * 4);
    CHECK(cudaMemcpy(host, data, N * 4, cudaMemcpyDeviceToHost));
    printf("failed %llu worked %llu\n", (unsigned long long)failed, (unsigned long long)worked);
    printf("digest %016llx\n", (unsigned long long)digest(host, N * 4));
    return 0;
}
