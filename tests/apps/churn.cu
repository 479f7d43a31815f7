// Stream-ordered memory that comes and goes without a synchronisation: far more in all than there is, in a stream that
// is full of launches, and in one whose commands wait for a long host callback. A stream gets its own memory again.
//
//   churn [--loops N] [--behind N] [--rounds N] [--spin N] [--sleep-us N] [--progress FILE]      3000, 80, 12, 400, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the rounds done.
#include "app.h"

static const size_t LARGE = 64 << 20, SMALLER = 40 << 20;

// Writes the first and the last word of memory, and folds what it finds there afterwards into a result.
__global__ void touch(uint32_t *memory, size_t words, uint32_t *result, uint32_t number, uint32_t spin) {
    uint32_t x = number;
    for (uint32_t i = 0; i < spin; i++) {
        x = (x ^ (x >> 13)) * 0x2c1b3c6du + number;
    }
    memory[0] = x;
    memory[words - 1] = x * 3;
    result[0] = (result[0] ^ memory[0] ^ memory[words - 1]) * 0x85ebca6bu + number;
}

// Folds words that a memset and a copy have left at the end of memory.
__global__ void fold(const uint32_t *words, uint32_t *result) {
    for (uint32_t i = 0; i < 16; i++) {
        result[0] = (result[0] ^ words[i]) * 0x2c1b3c6du + i;
    }
}

// A long callback: until the thread that enqueues behind it is ready, or for a second where it is made to wait.
static void gate(void *argument) {
    for (int i = 0; i < 2000 && !__atomic_load_n((int *)argument, __ATOMIC_SEQ_CST); i++) {
        sleep_us(500);
    }
}

static void check_pool(cudaMemPool_t pool) {
    uint64_t reserved;
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemHigh, &reserved));
    // A block of each size, and what the driver adds.
    REQUIRE(reserved <= 512 << 20);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t loops = options.number("--loops", 3000), behind = options.number("--behind", 80);
    uint64_t rounds = options.number("--rounds", 12), pause_us = options.number("--sleep-us", 0);
    uint32_t spin = (uint32_t)options.number("--spin", 400);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    cudaStream_t stream;
    cudaMemPool_t pool;
    uint32_t *result, *memory, *source;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cudaMalloc(&result, 4));
    CHECK(cudaMalloc(&source, 4096));
    CHECK(cudaMemset(result, 1, 4));
    CHECK(cudaMemset(source, 5, 4096));
    CHECK(cudaDeviceSynchronize());
    // The driver loads a kernel when it is first launched, and may wait for the device then: never behind a gate.
    touch<<<1, 1, 0, stream>>>(source, 4, result, 0, 0);
    fold<<<1, 1, 0, stream>>>(source, result);
    CHECK(cudaDeviceSynchronize());

    for (uint64_t i = 0; i < loops; i++) {
        size_t bytes = i % 7 ? LARGE : SMALLER;
        CHECK(cudaMallocAsync(&memory, bytes, stream));
        touch<<<1, 1, 0, stream>>>(memory, bytes / 4, result, (uint32_t)i, spin);
        CHECK(cudaGetLastError());
        CHECK(cudaFreeAsync(memory, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    check_pool(pool);

    for (uint64_t round = 1; round <= rounds; round++) {
        int open = 0;
        CHECK(cudaLaunchHostFunc(stream, gate, &open));
        for (uint64_t i = 0; i < behind; i++) {
            size_t bytes = i % 2 ? SMALLER + (i % 3 << 20) : LARGE;
            CHECK(cudaMallocAsync(&memory, bytes, stream));
            touch<<<1, 1, 0, stream>>>(memory, bytes / 4, result, (uint32_t)(round * behind + i), 1);
            CHECK(cudaGetLastError());
            // What is at the end of the larger block is beyond the smaller one that gets its place.
            char *end = (char *)memory + bytes - 64;
            CHECK(cudaMemsetAsync(end, (int)i, 64, stream));
            CHECK(cudaMemcpyAsync(end + 16, source, 16, cudaMemcpyDeviceToDevice, stream));
            fold<<<1, 1, 0, stream>>>((uint32_t *)end, result);
            CHECK(cudaGetLastError());
            CHECK(cudaFreeAsync(memory, stream));
        }
        progress(progress_file, round);
        __atomic_store_n(&open, 1, __ATOMIC_SEQ_CST);
        CHECK(cudaStreamSynchronize(stream));
        sleep_us(pause_us);
    }
    check_pool(pool);
    uint32_t out;
    CHECK(cudaMemcpy(&out, result, 4, cudaMemcpyDeviceToHost));
    printf("digest %016llx\n", (unsigned long long)digest(&out, 4));
    return 0;
}
