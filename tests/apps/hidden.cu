// Writes memory that no parameter names: through a pointer that its kernel finds in a table in device memory, at every
// step, and nothing else. A checkpoint that copies while it runs cannot foresee that, and must find it out.
//
//   hidden [--steps N] [--kib N] [--ballast-kib N] [--until FILE] [--sleep-us N] [--progress FILE]
//          60, 256, 64 (at lower addresses, never used), none: it ends after N steps; with FILE when that exists, 0, none
//
// Prints a digest of the memory, and "hidden ok" if each word is what it must be after so many steps.
#include "app.h"

#include <unistd.h>

__global__ void put(uint32_t **table, uint32_t *pointer) { table[3] = pointer; }

__global__ void turn(uint32_t *const *table, uint32_t words) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) {
        table[3][i] = table[3][i] * 1664525u + i;
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t least = options.number("--steps", 60);
    const uint32_t words = (uint32_t)(options.number("--kib", 256) << 8);
    const uint64_t ballast_bytes = options.number("--ballast-kib", 64) << 10;
    const char *until = options.text("--until", nullptr);
    const uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    uint32_t **table, *memory;
    void *ballast;
    CHECK(cudaMalloc(&ballast, ballast_bytes));
    CHECK(cudaMemset(ballast, 7, ballast_bytes));
    CHECK(cudaMalloc(&table, 8 * sizeof *table));
    CHECK(cudaMalloc(&memory, words * sizeof *memory));
    CHECK(cudaMemset(table, 0, 8 * sizeof *table));
    CHECK(cudaMemset(memory, 1, words * sizeof *memory));
    put<<<1, 1>>>(table, memory);
    uint64_t steps = 0;
    while (until ? access(until, F_OK) != 0 : steps < least) {
        turn<<<(words + 255) / 256, 256>>>(table, words);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(progress_file, ++steps);
        sleep_us(pause_us);
    }
    uint32_t *found = (uint32_t *)malloc(words * sizeof *found);
    REQUIRE(found);
    CHECK(cudaMemcpy(found, memory, words * sizeof *found, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < words; i++) {
        uint32_t value = 0x01010101u;
        for (uint64_t step = 0; step < steps; step++) {
            value = value * 1664525u + i;
        }
        REQUIRE(found[i] == value);
    }
    if (!until) {
        printf("digest %016llx\n", (unsigned long long)digest(found, words * sizeof *found));
    }
    printf("hidden ok\n");
    CHECK(cudaFree(memory));
    CHECK(cudaFree(table));
    CHECK(cudaFree(ballast));
    return 0;
}
