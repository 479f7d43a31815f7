// Graphs that are captured, launched many times and updated: a chain with a fork and a join, a capture in one thread
// while another allocates and copies, copies from and to pinned memory, memsets, parameters that change.
//
//   graphs [--iterations N] [--words N] [--sleep-us N] [--progress FILE]     60, 4096, 0, none
//
// Prints a digest every ten iterations, the same in every run with the same numbers.
#include "app.h"

#include <pthread.h>

static uint64_t words;

__global__ void stir(uint32_t *out, const uint32_t *in, uint32_t n, const uint32_t *round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = in[i] + 0x9e3779b9u * *round;
        x = (x ^ (x >> 15)) * 0x2c1b3c6du + in[(i * 17u + 1u) % n];
        out[i] = x ^ (x >> 12);
    }
}

__global__ void add(uint32_t *to, const uint32_t *a, const uint32_t *b, uint32_t n, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = a[i] + b[i] * by;
}

__global__ void next(uint32_t *round) { *round += 1; }

// Allocates, fills, copies out and frees, as long as it is told to: none of it harms a capture in another thread.
struct Other {
    pthread_t thread;
    volatile int stop;
    uint64_t rounds;
};

static void *allocate(void *argument) {
    Other *other = (Other *)argument;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    uint32_t back[256];
    while (!other->stop) {
        uint32_t *memory;
        CHECK(cudaMalloc(&memory, sizeof back));
        CHECK(cudaMemsetAsync(memory, (int)(other->rounds & 255), sizeof back, stream));
        CHECK(cudaMemcpyAsync(back, memory, sizeof back, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (uint32_t word : back) REQUIRE(word == (other->rounds & 255) * 0x01010101u);
        CHECK(cudaFree(memory));
        other->rounds++;
    }
    CHECK(cudaStreamDestroy(stream));
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 60);
    words = options.number("--words", 4096);
    const uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    const uint32_t n = (uint32_t)words, blocks = (n + 127) / 128;
    const size_t bytes = n * sizeof(uint32_t);
    uint32_t *a, *b, *c, *d, *round, *pinned, *out;
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    CHECK(cudaMalloc(&c, bytes));
    CHECK(cudaMalloc(&d, bytes));
    CHECK(cudaMalloc(&round, sizeof *round));
    CHECK(cudaMallocHost(&pinned, bytes));
    CHECK(cudaMallocHost(&out, bytes));
    CHECK(cudaMemset(round, 0, sizeof *round));
    CHECK(cudaMemset(d, 0, bytes));
    memset(out, 0, bytes);
    for (uint32_t i = 0; i < n; i++) pinned[i] = (uint32_t)mix(i);
    CHECK(cudaMemcpy(a, pinned, bytes, cudaMemcpyHostToDevice));

    cudaStream_t main, side;
    cudaEvent_t forked, joined;
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&forked, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&joined, cudaEventDisableTiming));

    Other other = {};
    REQUIRE(pthread_create(&other.thread, nullptr, allocate, &other) == 0);
    while (other.rounds == 0) sleep_us(100);
    const uint64_t before = other.rounds;
    CHECK(cudaStreamBeginCapture(main, cudaStreamCaptureModeThreadLocal));
    stir<<<blocks, 128, 0, main>>>(b, a, n, round);
    CHECK(cudaEventRecord(forked, main));
    CHECK(cudaStreamWaitEvent(side, forked, 0));
    CHECK(cudaMemcpyAsync(c, pinned, bytes, cudaMemcpyHostToDevice, side));
    add<<<blocks, 128, 0, side>>>(c, c, a, n, 3);
    CHECK(cudaMemsetAsync(d, 7, bytes / 2, main));
    add<<<blocks, 128, 0, main>>>(b, b, d, n, 5);
    CHECK(cudaEventRecord(joined, side));
    CHECK(cudaStreamWaitEvent(main, joined, 0));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(main, &status));
    REQUIRE(status == cudaStreamCaptureStatusActive);
    while (other.rounds < before + 3) sleep_us(100);
    CHECK(cudaMemcpyAsync(d, b, bytes, cudaMemcpyDeviceToDevice, main));
    add<<<blocks, 128, 0, main>>>(a, b, c, n, 11);
    CHECK(cudaMemcpyAsync(out, a, bytes, cudaMemcpyDeviceToHost, main));
    next<<<1, 1, 0, main>>>(round);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(main, &graph));
    other.stop = 1;
    REQUIRE(pthread_join(other.thread, nullptr) == 0);

    size_t nodes = 0, edges = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CHECK(cudaGraphGetEdges(graph, nullptr, nullptr, nullptr, &edges));
    printf("nodes %zu edges %zu\n", nodes, edges);
    cudaGraphExec_t exec, copy;
    CHECK(cudaGraphInstantiateWithFlags(&exec, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    CHECK(cudaGraphInstantiate(&copy, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphUpload(exec, main));

    for (uint64_t i = 0; i < iterations; i++) {
        // The pinned memory that the graph reads is written between launches; two graphs take turns.
        CHECK(cudaStreamSynchronize(main));
        for (uint32_t k = 0; k < n; k += 5) pinned[k] += out[(k * 3) % n];
        for (int k = 0; k < 3; k++) CHECK(cudaGraphLaunch(k == 1 ? copy : exec, main));
        // The capture of a graph that runs once; what it does depends on the iteration.
        CHECK(cudaStreamBeginCapture(side, cudaStreamCaptureModeGlobal));
        add<<<blocks, 128, 0, side>>>(b, c, d, n, (uint32_t)i);
        CHECK(cudaStreamEndCapture(side, &graph));
        cudaGraphExec_t once;
        CHECK(cudaGraphInstantiate(&once, graph, 0));
        CHECK(cudaEventRecord(forked, main));
        CHECK(cudaStreamWaitEvent(side, forked, 0));
        CHECK(cudaGraphLaunch(once, side));
        CHECK(cudaEventRecord(joined, side));
        CHECK(cudaStreamWaitEvent(main, joined, 0));
        add<<<blocks, 128, 0, main>>>(a, a, b, n, 1);
        CHECK(cudaGraphExecDestroy(once));
        CHECK(cudaGraphDestroy(graph));
        if (i % 10 == 9) {
            CHECK(cudaMemcpyAsync(out, a, bytes, cudaMemcpyDeviceToHost, main));
            CHECK(cudaStreamSynchronize(main));
            printf("%llu %016llx\n", (unsigned long long)i + 1, (unsigned long long)digest(out, bytes));
            fflush(stdout);
        }
        sleep_us(pause_us);
        progress(progress_file, i + 1);
    }
    CHECK(cudaStreamSynchronize(main));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphExecDestroy(copy));
    uint32_t rounds;
    CHECK(cudaMemcpy(&rounds, round, sizeof rounds, cudaMemcpyDeviceToHost));
    printf("rounds %u\n", rounds);
    return 0;
}
