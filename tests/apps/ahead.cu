// Launches far ahead of the device: more than a thousand are pending on one stream while other threads work on others.
//
//   ahead [--launches N] [--rounds N] [--spin N] [--bursts N] [--sleep-us N] [--progress FILE]    1500, 40, 200, 3, 0, none
//
// Prints "digest D" of both, the same in every run with the same numbers. FILE holds the rounds done by the others.
#include "app.h"

#include <pthread.h>

static uint64_t launches, rounds, bursts, pause_us;
static uint32_t spin;
static const char *progress_file;
static uint64_t done;

__global__ void slow(uint32_t *word, uint32_t turns, uint32_t number) {
    uint32_t x = *word;
    for (uint32_t i = 0; i < turns; i++) {
        x = (x ^ (x >> 13)) * 0x2c1b3c6du + number;
    }
    *word = x;
}

// Far ahead: a burst of launches, and events among them that another stream waits for.
static void *run_ahead(void *argument) {
    uint32_t *result = (uint32_t *)argument, *words;
    cudaStream_t stream, behind;
    cudaEvent_t event;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&behind, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaMalloc(&words, 8));
    CHECK(cudaMemset(words, 1, 8));
    CHECK(cudaDeviceSynchronize());
    for (uint64_t burst = 0; burst < bursts; burst++) {
        for (uint64_t i = 0; i < launches; i++) {
            slow<<<1, 1, 0, stream>>>(words, spin, (uint32_t)i);
            CHECK(cudaGetLastError());
            if (i % 100 == 99) {
                CHECK(cudaEventRecord(event, stream));
                CHECK(cudaStreamWaitEvent(behind, event, 0));
                slow<<<1, 1, 0, behind>>>(words + 1, 1, (uint32_t)i);
            }
        }
        CHECK(cudaStreamSynchronize(behind));
        CHECK(cudaStreamSynchronize(stream));
    }
    CHECK(cudaMemcpy(result, words, 8, cudaMemcpyDeviceToHost));
    return nullptr;
}

static void *work(void *argument) {
    uint32_t *result = (uint32_t *)argument, *word;
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMallocHost(&word, 4));
    *word = 7;
    for (uint64_t i = 1; i <= rounds; i++) {
        slow<<<1, 1, 0, stream>>>(word, 3, (uint32_t)i);
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(stream));
        progress(progress_file, __atomic_add_fetch(&done, 1, __ATOMIC_SEQ_CST));
        sleep_us(pause_us);
    }
    *result = *word;
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    launches = options.number("--launches", 1500);
    rounds = options.number("--rounds", 40);
    spin = (uint32_t)options.number("--spin", 200);
    bursts = options.number("--bursts", 3);
    pause_us = options.number("--sleep-us", 0);
    progress_file = options.text("--progress", nullptr);
    options.done();

    uint32_t results[3] = {0, 0, 0};
    pthread_t ahead, other;
    REQUIRE(pthread_create(&ahead, nullptr, run_ahead, results) == 0);
    REQUIRE(pthread_create(&other, nullptr, work, results + 2) == 0);
    REQUIRE(pthread_join(other, nullptr) == 0);
    REQUIRE(pthread_join(ahead, nullptr) == 0);
    printf("digest %016llx\n", (unsigned long long)digest(results, sizeof results));
    return 0;
}
