// Managed memory of several megabytes, which moves between the CPU and the GPU: passes over all of it and single accesses in
// turn, host callbacks that change it between two kernels, threads that fill one array while the GPU has another, system calls that
// write it, files read into it, arrays that are freed and allocated again, and words of an array that nobody has written yet.
//
//   moving [--iterations N] [--sleep-us N] [--progress FILE]     24, 0, none
//
// Prints a digest, the same in every run with the same numbers.
#include "rounds.h"

#include <initializer_list>
#include <pthread.h>

const uint32_t WORDS = 3 << 19; // 6 MiB, in four arrays
const uint32_t STEP = 512;

__global__ void stir(uint32_t *words, uint32_t n, uint32_t round) {
    uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) * STEP;
    if (i < n) words[i] = words[i] * 1664525u + round + i;
}

// Every page of one is read, and a few words of the other are written.
__global__ void gather(const uint32_t *from, uint32_t *into, uint32_t n) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i * 1024 < n) atomicAdd(&into[i % 64], from[i * 1024]);
}

struct Work {
    uint32_t *words;
    uint32_t round;
};

static void between(void *data) {
    Work *work = (Work *)data;
    for (uint32_t i = 0; i < WORDS; i += 65536) work->words[i] += work->round * 3;
}

static void *produce(void *data) {
    Work *work = (Work *)data;
    for (uint32_t i = 0; i < WORDS; i += STEP) work->words[i] = (uint32_t)mix(work->round * 7919ull + i);
    return nullptr;
}

static uint32_t *array() {
    uint32_t *words;
    CHECK(cudaMallocManaged(&words, WORDS * 4));
    return words;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 24);
    uint32_t *a = array(), *b = array(), *c = array(), *gathered = array();
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    // Memory that nobody has written is zeros, on both sides.
    for (uint32_t i = 0; i < WORDS; i += 300001) REQUIRE(a[i] == 0);
    gather<<<blocks(WORDS / 1024), BLOCK, 0, stream>>>(b, gathered, WORDS);
    CHECK(cudaStreamSynchronize(stream));
    for (uint32_t i = 0; i < 64; i++) REQUIRE(gathered[i] == 0);
    for (uint32_t i = 0; i < WORDS; i++) a[i] = (uint32_t)mix(i);
    int ends[2];
    REQUIRE(pipe(ends) == 0);

    rounds.run([&](uint64_t number) {
        uint32_t round = (uint32_t)number;
        // A thread fills an array while the GPU has another. The GPU takes it only when the thread is done.
        Work fill = {c, round}, change = {a, round};
        pthread_t thread;
        REQUIRE(pthread_create(&thread, nullptr, produce, &fill) == 0);
        stir<<<blocks(WORDS / STEP), BLOCK, 0, stream>>>(a, WORDS, round);
        CHECK(cudaLaunchHostFunc(stream, between, &change));
        stir<<<blocks(WORDS / STEP), BLOCK, 0, stream>>>(a, WORDS, round + 1);
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(pthread_join(thread, nullptr) == 0);
        gather<<<blocks(WORDS / 1024), BLOCK, 0, stream>>>(c, gathered, WORDS);
        CHECK(cudaStreamSynchronize(stream));
        rounds.take(gathered, 64 * 4);

        // Single words here and there, of both sides.
        for (uint64_t i = 0; i < 16; i++) {
            uint32_t at = (uint32_t)(mix(number * 16 + i) % WORDS);
            a[at] += c[at / STEP * STEP];
            rounds.take(&a[at], 4);
        }
        stir<<<blocks(WORDS / STEP), BLOCK>>>(a, WORDS, round + 2);
        // The kernel's own words come back with the copy, and the CPU's go with it.
        uint32_t back[256];
        CHECK(cudaMemcpy(back, a + round * 4096, sizeof back, cudaMemcpyDeviceToHost));
        rounds.take(back, sizeof back);
        CHECK(cudaMemcpy(b + 1000, a, 1 << 20, cudaMemcpyDefault));
        CHECK(cudaMemcpy(b + 500000, back, sizeof back, cudaMemcpyHostToDevice));

        // System calls that write where the GPU has the page, and where the CPU has it.
        uint64_t sent[64];
        for (uint64_t &word : sent) word = mix(number * 99 + (uint64_t)(&word - sent));
        REQUIRE(write(ends[1], sent, sizeof sent) == (ssize_t)sizeof sent);
        REQUIRE(read(ends[0], b + mix(number) % (WORDS - 256), sizeof sent) == (ssize_t)sizeof sent);
        REQUIRE(write(ends[1], b + 1000, 512) == 512);
        REQUIRE(read(ends[0], sent, 512) == 512);
        rounds.take(sent, 512);

        // An array goes, and another comes, perhaps to its place.
        if (round % 4 == 0) {
            CHECK(cudaFree(c));
            c = array();
            REQUIRE(c[WORDS - 1] == 0 && c[round] == 0);
        }
        CHECK(cudaDeviceSynchronize());
    });
    rounds.take(a, WORDS * 4);
    rounds.take(b, WORDS * 4);
    rounds.take(gathered, 64 * 4);
    for (uint32_t *words : {a, b, c, gathered}) CHECK(cudaFree(words));
    return rounds.end();
}
