// Times between events: what was measured before a checkpoint stays so, and what goes across it makes sense.
//
//   timing [--rounds N] [--spin N] [--sleep-us N] [--progress FILE]      60, 2000, 0, none
//
// Prints "times ok N": the number of measurements that held, the same in every run with the same numbers. FILE holds
// the rounds done.
#include "app.h"

__global__ void slow(uint32_t *word, uint32_t turns) {
    uint32_t x = *word;
    for (uint32_t i = 0; i < turns; i++) {
        x = (x ^ (x >> 13)) * 0x2c1b3c6du + i;
    }
    *word = x;
}

static float between(cudaEvent_t start, cudaEvent_t end) {
    float ms = -1;
    CHECK(cudaEventElapsedTime(&ms, start, end));
    return ms;
}

static bool near(float a, float b, float more) {
    float off = a > b ? a - b : b - a;
    return off <= more + 0.001f * (a > b ? a : b);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t rounds = options.number("--rounds", 60), pause_us = options.number("--sleep-us", 0);
    uint32_t spin = (uint32_t)options.number("--spin", 2000);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    cudaStream_t stream;
    cudaEvent_t first, second, last, now, untimed;
    uint32_t *word;
    CHECK(cudaMalloc(&word, 4));
    CHECK(cudaMemset(word, 1, 4));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t *events[4] = {&first, &second, &last, &now};
    for (cudaEvent_t *event : events) {
        CHECK(cudaEventCreate(event));
    }
    CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
    CHECK(cudaDeviceSynchronize());

    CHECK(cudaEventRecord(first, stream));
    slow<<<1, 1, 0, stream>>>(word, spin);
    CHECK(cudaEventRecord(second, stream));
    CHECK(cudaEventRecord(last, stream));
    CHECK(cudaEventRecord(untimed, stream));
    CHECK(cudaStreamSynchronize(stream));
    const float once = between(first, second);
    REQUIRE(once >= 0);
    float sum = between(first, last);
    uint64_t held = 0;
    for (uint64_t round = 1; round <= rounds; round++) {
        slow<<<1, 1, 0, stream>>>(word, spin);
        CHECK(cudaEventRecord(now, stream));
        CHECK(cudaEventSynchronize(now));
        float step = between(last, now), all = between(first, now);
        REQUIRE(step >= 0);
        sum += step;
        // What lies between two of before is what it was; and parts come to the whole.
        REQUIRE(near(between(first, second), once, 0.05f));
        REQUIRE(near(sum, all, 1.0f));
        float none;
        REQUIRE(cudaEventElapsedTime(&none, first, untimed) == cudaErrorInvalidResourceHandle);
        cudaGetLastError();
        held += 3;
        cudaEvent_t swapped = last;
        last = now;
        now = swapped;
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    printf("times ok %llu\n", (unsigned long long)held);
    return 0;
}
