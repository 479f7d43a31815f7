// Four threads with two streams each: kernels, asynchronous copies each way from pinned and pageable memory, and events
// that make one stream wait for the other. What a thread copies in depends on what it copied out before, so a lost or
// repeated command, or a byte of the wrong moment, changes the digest.
//
//   streams4 [--iterations N] [--words N] [--sleep-us N] [--threads N] [--progress FILE]     200, 4096, 0, 4, none
//
// Prints "thread K DIGEST" for each, the same in every run with the same numbers. --sleep-us is slept between
// iterations; FILE holds the number of iterations that the first thread has done, times the number of threads.
#include "app.h"

#include <pthread.h>

static uint64_t iterations, words, pause_us, threads;
static const char *progress_file;

// One round of integer mixing; each word takes one other along.
__global__ void stir(uint32_t *out, const uint32_t *in, const uint32_t *added, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = in[i] + 0x9e3779b9u * round;
        uint32_t y = in[(i * 17u + round) % n] ^ added[i & 255u];
        x = (x ^ (x >> 15)) * 0x2c1b3c6du + y;
        out[i] = x ^ (x >> 12);
    }
}

// Sums of what a block's threads read, in order, through shared memory.
__global__ void fold(uint32_t *sums, const uint32_t *in, uint32_t n) {
    __shared__ uint32_t part[64];
    uint32_t sum = 0;
    for (uint32_t i = blockIdx.x * 64 + threadIdx.x; i < n; i += gridDim.x * 64) {
        sum = sum * 31u + in[i];
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    for (uint32_t half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            part[threadIdx.x] = part[threadIdx.x] * 31u + part[threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = part[0];
    }
}

struct Work {
    pthread_t thread;
    uint32_t number;
    uint64_t result;
};

static void *work(void *argument) {
    Work *self = (Work *)argument;
    const uint32_t n = (uint32_t)words, blocks = (n + 127) / 128, ADDED = 256, SUMS = 16;
    cudaStream_t main, side;
    cudaEvent_t copied, stirred;
    CHECK(cudaStreamCreateWithFlags(&main, cudaStreamNonBlocking));
    CHECK(cudaStreamCreate(&side));
    CHECK(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&stirred, cudaEventDisableTiming));

    uint32_t *a, *b, *added, *sums, *pinned_in, *pinned_out;
    CHECK(cudaMalloc(&a, n * 4));
    CHECK(cudaMalloc(&b, n * 4));
    CHECK(cudaMalloc(&added, ADDED * 4));
    CHECK(cudaMalloc(&sums, SUMS * 4));
    CHECK(cudaHostAlloc(&pinned_in, ADDED * 4, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&pinned_out, SUMS * 4, cudaHostAllocDefault));
    uint32_t *pageable = (uint32_t *)malloc(n * 4);
    for (uint32_t i = 0; i < n; i++) {
        pageable[i] = (uint32_t)mix(i + ((uint64_t)self->number << 32));
    }
    CHECK(cudaMemcpyAsync(a, pageable, n * 4, cudaMemcpyHostToDevice, main));
    CHECK(cudaEventRecord(stirred, main));

    uint64_t state = self->number;
    for (uint64_t round = 1; round <= iterations; round++) {
        for (uint32_t i = 0; i < ADDED; i++) {
            pinned_in[i] = (uint32_t)mix(state + i);
        }
        // In on the side stream, not before the last round's kernel has read what this overwrites.
        CHECK(cudaStreamWaitEvent(side, stirred, 0));
        CHECK(cudaMemcpyAsync(added, pinned_in, ADDED * 4, cudaMemcpyHostToDevice, side));
        CHECK(cudaEventRecord(copied, side));
        // The main stream waits for that copy.
        CHECK(cudaStreamWaitEvent(main, copied, 0));
        stir<<<blocks, 128, 0, main>>>(b, a, added, n, (uint32_t)round);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(stirred, main));
        stir<<<blocks, 128, 0, main>>>(a, b, added, n, (uint32_t)round + 7);
        CHECK(cudaGetLastError());
        fold<<<SUMS, 64, 0, main>>>(sums, a, n);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(stirred, main));
        CHECK(cudaMemcpyAsync(pinned_out, sums, SUMS * 4, cudaMemcpyDeviceToHost, main));
        if (round % 3 == 0) {
            // Out to pageable memory, and back in after a change by the CPU.
            CHECK(cudaMemcpyAsync(pageable, a, n * 4, cudaMemcpyDeviceToHost, main));
            CHECK(cudaStreamSynchronize(main));
            state = digest(pageable, n * 4, state);
            pageable[state % n] += (uint32_t)round;
            CHECK(cudaMemcpyAsync(a, pageable, n * 4, cudaMemcpyHostToDevice, main));
        } else if (round % 3 == 1) {
            CHECK(cudaStreamSynchronize(main));
        } else {
            while (cudaStreamQuery(main) == cudaErrorNotReady) {
                sleep_us(50);
            }
        }
        state = digest(pinned_out, SUMS * 4, state);
        if (self->number == 0) {
            progress(progress_file, round * threads);
        }
        sleep_us(pause_us);
    }
    CHECK(cudaMemcpyAsync(pageable, a, n * 4, cudaMemcpyDeviceToHost, main));
    CHECK(cudaStreamSynchronize(side));
    CHECK(cudaStreamSynchronize(main));
    self->result = digest(pageable, n * 4, state);

    CHECK(cudaStreamDestroy(main));
    CHECK(cudaStreamDestroy(side));
    CHECK(cudaEventDestroy(copied));
    CHECK(cudaEventDestroy(stirred));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    CHECK(cudaFree(added));
    CHECK(cudaFree(sums));
    CHECK(cudaFreeHost(pinned_in));
    CHECK(cudaFreeHost(pinned_out));
    free(pageable);
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    iterations = options.number("--iterations", 200);
    words = options.number("--words", 4096);
    pause_us = options.number("--sleep-us", 0);
    threads = options.number("--threads", 4);
    progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(words >= 256 && words < 1u << 28 && threads > 0);

    Work *works = (Work *)calloc(threads, sizeof *works);
    for (uint32_t i = 0; i < threads; i++) {
        works[i].number = i;
        REQUIRE(pthread_create(&works[i].thread, nullptr, work, &works[i]) == 0);
    }
    for (uint32_t i = 0; i < threads; i++) {
        REQUIRE(pthread_join(works[i].thread, nullptr) == 0);
        printf("thread %u %016llx\n", i, (unsigned long long)works[i].result);
    }
    return 0;
}
