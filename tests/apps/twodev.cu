// Two devices: a buffer and a stream on each, kernels on both, copies between them, and an event of one that the
// other's stream waits for.
//
//   twodev [--first D] [--second D] [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//          0, 1, 100, 4096, 0, none; with --second 0 it runs on a machine of one device, with the same output
//
// Prints "devices ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

__device__ uint32_t launches; // one for each device

__global__ void stir(uint32_t *own, const uint32_t *other, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = own[i] * 0x85ebca6bu + other[(i * 5u + round) % n];
        own[i] = x ^ (x >> 13);
    }
    if (i == 0) {
        atomicAdd(&launches, 1u);
    }
}

struct Side {
    int device;
    uint32_t *own, *received;
    cudaStream_t stream;
    cudaEvent_t stirred, sent;

    void prepare(int on, uint32_t n, const uint32_t *start) {
        device = on;
        CHECK(cudaSetDevice(device));
        CHECK(cudaMalloc(&own, n * 4));
        CHECK(cudaMalloc(&received, n * 4));
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&stirred, cudaEventDisableTiming));
        CHECK(cudaEventCreateWithFlags(&sent, cudaEventDisableTiming));
        CHECK(cudaMemcpy(own, start, n * 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(received, 0, n * 4));
        CHECK(cudaDeviceSynchronize()); // a memset does not wait, and the stream does not wait for it
        CHECK(cudaEventRecord(sent, stream));
    }
    // Stirs in what was received last.
    void run(uint32_t n, uint32_t round, cudaEvent_t arrived) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamWaitEvent(stream, arrived, 0));
        stir<<<(n + 127) / 128, 128, 0, stream>>>(own, received, n, round);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(stirred, stream));
    }
    // Sends what is here to `to`, once `to` has read what it received before.
    void send(Side *to, uint32_t n) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaStreamWaitEvent(stream, to->stirred, 0));
        CHECK(cudaMemcpyPeerAsync(to->received, to->device, own, device, n * 4, stream));
        CHECK(cudaEventRecord(sent, stream));
    }
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    int first = (int)options.number("--first", 0), second = (int)options.number("--second", 1);
    uint64_t iterations = options.number("--iterations", 100), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 4096);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n > 0);

    int count, device;
    CHECK(cudaGetDeviceCount(&count));
    REQUIRE(first < count && second < count);

    uint32_t *host = (uint32_t *)malloc(n * 4);
    Side a, b;
    for (uint32_t i = 0; i < n; i++) {
        host[i] = (uint32_t)mix(i);
    }
    a.prepare(first, n, host);
    for (uint32_t i = 0; i < n; i++) {
        host[i] = (uint32_t)mix(~(uint64_t)i);
    }
    b.prepare(second, n, host);

    // A pointer tells its device, and the current device is what was set last.
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, a.own));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == first);
    CHECK(cudaPointerGetAttributes(&attributes, b.own));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == second);
    CHECK(cudaGetDevice(&device));
    REQUIRE(device == second);
    printf("devices ok\n");
    fflush(stdout);

    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        a.run(n, (uint32_t)round, b.sent);
        b.run(n, (uint32_t)round, a.sent);
        a.send(&b, n);
        b.send(&a, n);
        if (round % 10 == 0) {
            // The blocking copy, and what it brought.
            CHECK(cudaStreamSynchronize(a.stream));
            CHECK(cudaStreamSynchronize(b.stream));
            CHECK(cudaMemcpyPeer(b.received, b.device, a.own, a.device, n * 4));
            CHECK(cudaMemcpy(host, b.received, n * 4, cudaMemcpyDeviceToHost));
            state = digest(host, n * 4, state);
        }
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    uint32_t counts[2];
    Side *sides[2] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        CHECK(cudaSetDevice(sides[i]->device));
        CHECK(cudaStreamSynchronize(sides[i]->stream));
        CHECK(cudaMemcpy(host, sides[i]->own, n * 4, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpyFromSymbol(&counts[i], launches, 4));
        state = digest(host, n * 4, state);
    }
    REQUIRE(first == second ? counts[0] == 2 * iterations : counts[0] == iterations && counts[1] == iterations);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
