// Device resets at any moment: streams are busy, memory is pinned, events are pending; after each, everything is new.
//
//   reset [--rounds N] [--launches N] [--sleep-us N] [--progress FILE]      12, 200, 0, none
//
// Prints "resets N" and "digest D", the same in every run with the same numbers. FILE holds the rounds done.
#include "app.h"

static const uint32_t N = 2048;
__device__ uint32_t launches = 7;

__global__ void stir(uint32_t *data, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] = (data[i] ^ (data[i] >> 15)) * 0x2c1b3c6du + round;
    }
    if (i == 0) {
        launches++;
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t rounds = options.number("--rounds", 12), pause_us = options.number("--sleep-us", 0);
    uint64_t many = options.number("--launches", 200);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    uint64_t state = 0;
    uint32_t host[N];
    for (uint64_t round = 1; round <= rounds; round++) {
        cudaStream_t streams[3];
        cudaEvent_t event;
        uint32_t *data, *pinned, count;
        for (cudaStream_t &stream : streams) {
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        }
        CHECK(cudaEventCreate(&event));
        CHECK(cudaMalloc(&data, N * 4));
        CHECK(cudaHostAlloc(&pinned, N * 4, cudaHostAllocDefault));
        CHECK(cudaMemset(data, (int)round, N * 4));
        CHECK(cudaDeviceSynchronize());
        for (uint32_t i = 0; i < 20; i++) {
            stir<<<N / 128, 128, 0, streams[0]>>>(data, N, i);
        }
        CHECK(cudaMemcpyAsync(pinned, data, N * 4, cudaMemcpyDeviceToHost, streams[0]));
        CHECK(cudaStreamSynchronize(streams[0]));
        CHECK(cudaMemcpyFromSymbol(&count, launches, 4));
        REQUIRE(count == 27);
        memcpy(host, pinned, N * 4);
        state = digest(host, N * 4, state);
        progress(progress_file, round);
        sleep_us(pause_us);
        // And away with it while all are busy.
        for (uint64_t i = 0; i < many; i++) {
            stir<<<N / 128, 128, 0, streams[i % 3]>>>(data, N, 1);
            CHECK(cudaEventRecord(event, streams[i % 3]));
        }
        CHECK(cudaDeviceReset());
    }
    printf("resets %llu\n", (unsigned long long)rounds);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
