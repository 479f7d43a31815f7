// Content that wanders through device memory: in each step two of several buffers change places, on the device. One more buffer is freed
// in some steps and allocated again.
//
//   shuffled [--steps N] [--until FILE] [--buffers N] [--kib N] [--sleep-us N] [--progress FILE]
//            50, none: it ends after N steps; with FILE when that exists, 6, 2048, 0, none
//
// Prints "shuffled ok". A word that is not what it was ends it with status 4.
#include "app.h"

#include <unistd.h>

static uint32_t word(uint64_t content, uint64_t i) { return (uint32_t)mix((content << 40) + i + 1); }

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t steps = options.number("--steps", 50), pause_us = options.number("--sleep-us", 0);
    const char *until = options.text("--until", nullptr), *progress_file = options.text("--progress", nullptr);
    size_t count = options.number("--buffers", 6), words = options.number("--kib", 2048) * 256;
    options.done();
    REQUIRE(count > 1 && count < 100 && words > 0);

    uint32_t *buffers[100], *between, *passing;
    uint64_t contents[100];
    uint32_t *host = (uint32_t *)malloc(words * 4);
    REQUIRE(host);
    for (size_t n = 0; n < count; n++) {
        contents[n] = n;
        for (size_t i = 0; i < words; i++) {
            host[i] = word(n, i);
        }
        CHECK(cudaMalloc(&buffers[n], words * 4));
        CHECK(cudaMemcpy(buffers[n], host, words * 4, cudaMemcpyHostToDevice));
    }
    CHECK(cudaMalloc(&between, words * 4));
    CHECK(cudaMalloc(&passing, words * 4));

    for (uint64_t step = 1; until ? access(until, F_OK) != 0 : step <= steps; step++) {
        size_t a = step % count, b = (step * 7 + 3) % count;
        CHECK(cudaMemcpy(between, buffers[a], words * 4, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpy(buffers[a], buffers[b], words * 4, cudaMemcpyDeviceToDevice));
        CHECK(cudaMemcpy(buffers[b], between, words * 4, cudaMemcpyDeviceToDevice));
        uint64_t content = contents[a];
        contents[a] = contents[b];
        contents[b] = content;
        if (step % 3 == 0) {
            CHECK(cudaFree(passing));
            CHECK(cudaMalloc(&passing, words * 4));
        }
        CHECK(cudaMemcpy(passing, buffers[step % count], words * 4, cudaMemcpyDeviceToDevice));
        uint32_t seen;
        size_t i = (size_t)(mix(step) % words);
        CHECK(cudaMemcpy(&seen, passing + i, 4, cudaMemcpyDeviceToHost));
        REQUIRE(seen == word(contents[step % count], i));
        progress(progress_file, step);
        sleep_us(pause_us);
    }

    for (size_t n = 0; n < count; n++) {
        CHECK(cudaMemcpy(host, buffers[n], words * 4, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < words; i++) {
            REQUIRE(host[i] == word(contents[n], i));
        }
        CHECK(cudaFree(buffers[n]));
    }
    CHECK(cudaFree(between));
    CHECK(cudaFree(passing));
    printf("shuffled ok\n");
    return 0;
}
