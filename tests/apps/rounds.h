// What most programs here have in common: rounds of GPU work on memory that lives through all of them, and a digest of
// the results at the end. Options: --iterations N --sleep-us N --progress FILE.
#pragma once

#include "app.h"

const uint32_t BLOCK = 128;

// Blocks of BLOCK threads for n threads.
inline uint32_t blocks(size_t n) {
    return (uint32_t)((n + BLOCK - 1) / BLOCK);
}

static __global__ void fill_randomly(uint32_t *words, size_t n, uint64_t seed) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        words[i] = (uint32_t)mix(seed * 0x9e3779b97f4a7c15ull + i);
    }
}

// Device memory of n elements, zero.
template <typename T> T *zeros(size_t n) {
    T *data;
    CHECK(cudaMalloc(&data, n * sizeof(T)));
    CHECK(cudaMemset(data, 0, n * sizeof(T)));
    return data;
}

// The same, of pseudo-random bits.
template <typename T> T *randoms(size_t n, uint64_t seed) {
    T *data = zeros<T>(n);
    size_t words = n * sizeof(T) / 4;
    fill_randomly<<<blocks(words), BLOCK>>>((uint32_t *)data, words, seed);
    CHECK(cudaGetLastError());
    return data;
}

// A copy on the device of memory of the host.
template <typename T> T *uploaded(const T *from, size_t n) {
    T *data;
    CHECK(cudaMalloc(&data, n * sizeof(T)));
    CHECK(cudaMemcpy(data, from, n * sizeof(T), cudaMemcpyHostToDevice));
    return data;
}

class Rounds {
    uint64_t iterations, pause_us;
    const char *progress_file;
    uint64_t state = 0;

  public:
    Rounds(int argc, char **argv, uint64_t normally) {
        Options options(argc, argv);
        iterations = options.number("--iterations", normally);
        pause_us = options.number("--sleep-us", 0);
        progress_file = options.text("--progress", nullptr);
        options.done();
    }

    // Calls body(round) with 1, 2, ...; what it launches need not have ended when it returns.
    template <typename Body> void run(Body body) {
        for (uint64_t round = 1; round <= iterations; round++) {
            body(round);
            CHECK(cudaGetLastError());
            progress(progress_file, round);
            sleep_us(pause_us);
        }
    }

    // Takes results into the digest.
    void take(const void *data, size_t bytes) { state = digest(data, bytes, state); }

    template <typename T> void take_from_device(const T *data, size_t n) {
        T *copy = (T *)malloc(n * sizeof(T));
        CHECK(cudaMemcpy(copy, data, n * sizeof(T), cudaMemcpyDeviceToHost));
        take(copy, n * sizeof(T));
        free(copy);
    }

    int end() const {
        CHECK(cudaDeviceSynchronize());
        printf("digest %016llx\n", (unsigned long long)state);
        return 0;
    }
};
