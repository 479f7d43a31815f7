// Works until it is told to end, and checks every step against the processor: for tests in which a program outlives many
// things, however long these take. Each step changes device memory, a module's global and pinned memory in two streams
// with an event between them, and allocates and frees. A ballast of device memory is written once and compared at the end.
// Its copy in the processor's memory is compared all the time, a word in each step, in every Nth step by a new process too.
//
//   steady [--steps N] [--until FILE] [--words N] [--ballast-kib N] [--pieces N] [--fork-steps N] [--sleep-us N]
//          [--progress FILE]
//          50, none: it ends after N steps; with FILE when that exists, 512, 64, 1: allocations of the ballast, 0 (never), 0, none
//
// Prints "steady ok". A value that is not what the processor computed ends it with status 4. FILE holds the steps done.
#include "app.h"

#include <sys/wait.h>
#include <unistd.h>

__device__ uint64_t sum; // of one word of each step

__host__ __device__ inline uint32_t next(uint32_t value, uint32_t place, uint64_t step) {
    return (uint32_t)mix(value + ((uint64_t)place << 32) + step);
}

__global__ void advance(uint32_t *data, uint32_t words, uint64_t step) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) {
        data[i] = next(data[i], i, step);
    }
    if (i == step % words) {
        sum += data[i];
    }
}

// The second stream's part: what the first has made, into pinned memory that the processor reads.
__global__ void show(const uint32_t *data, uint32_t words, uint32_t *shown) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < words) {
        shown[i] = data[i] ^ i;
    }
}

static uint32_t *ballast_of(size_t words) {
    uint32_t *ballast = (uint32_t *)malloc(words * 4 + 4);
    REQUIRE(ballast);
    for (size_t i = 0; i < words; i++) {
        ballast[i] = (uint32_t)mix(i + 1);
    }
    return ballast;
}

// Whether a word of the ballast is what it was, which is another one in each step.
static bool is_kept(const uint32_t *pattern, size_t words, uint64_t step) {
    size_t i = words ? mix(step) % words : 0;
    return words == 0 || pattern[i] == (uint32_t)mix(i + 1);
}

// A new process, which has the memory of this one, looks too.
static bool is_kept_in_child(const uint32_t *pattern, size_t words, uint64_t step) {
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        _exit(is_kept(pattern, words, step) ? 0 : 4);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    return status == 0;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t steps = options.number("--steps", 50), pause_us = options.number("--sleep-us", 0);
    const char *until = options.text("--until", nullptr), *progress_file = options.text("--progress", nullptr);
    uint32_t words = (uint32_t)options.number("--words", 512);
    size_t ballast_words = options.number("--ballast-kib", 64) * 256;
    size_t pieces = options.number("--pieces", 1);
    uint64_t fork_steps = options.number("--fork-steps", 0);
    options.done();
    REQUIRE(words > 0 && pieces > 0 && ballast_words % pieces == 0);
    size_t piece_words = ballast_words / pieces;

    uint32_t *data, **ballast = (uint32_t **)calloc(pieces, sizeof *ballast), *shown, *expected = (uint32_t *)calloc(words, 4);
    REQUIRE(expected && ballast);
    CHECK(cudaMalloc(&data, words * 4));
    CHECK(cudaMemset(data, 0, words * 4));
    uint32_t *pattern = ballast_of(ballast_words);
    for (size_t i = 0; i < pieces; i++) {
        CHECK(cudaMalloc(&ballast[i], piece_words * 4 + 4));
        CHECK(cudaMemcpy(ballast[i], pattern + i * piece_words, piece_words * 4, cudaMemcpyHostToDevice));
    }
    CHECK(cudaMallocHost(&shown, words * 4));
    cudaStream_t first, second;
    cudaEvent_t made;
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));

    const uint32_t BLOCK = 128, blocks = (words + BLOCK - 1) / BLOCK;
    uint64_t expected_sum = 0;
    for (uint64_t step = 1; until ? access(until, F_OK) != 0 : step <= steps; step++) {
        void *passing;
        CHECK(cudaMalloc(&passing, 1000 * (step % 7 + 1)));
        CHECK(cudaMemsetAsync(passing, (int)step, 1000, second));
        advance<<<blocks, BLOCK, 0, first>>>(data, words, step);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(made, first));
        CHECK(cudaStreamWaitEvent(second, made, 0));
        show<<<blocks, BLOCK, 0, second>>>(data, words, shown);
        CHECK(cudaGetLastError());
        for (uint32_t i = 0; i < words; i++) {
            expected[i] = next(expected[i], i, step);
        }
        expected_sum += expected[step % words];
        CHECK(cudaStreamSynchronize(second));
        for (uint32_t i = 0; i < words; i++) {
            REQUIRE(shown[i] == (expected[i] ^ i));
        }
        CHECK(cudaFree(passing));
        REQUIRE(is_kept(pattern, ballast_words, step));
        REQUIRE(fork_steps == 0 || step % fork_steps != 0 || is_kept_in_child(pattern, ballast_words, step + 1));
        progress(progress_file, step);
        sleep_us(pause_us);
    }

    uint64_t device_sum = 0;
    CHECK(cudaMemcpyFromSymbol(&device_sum, sum, sizeof device_sum));
    REQUIRE(device_sum == expected_sum);
    CHECK(cudaMemcpy(expected, data, words * 4, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < words; i++) {
        REQUIRE(shown[i] == (expected[i] ^ i));
    }
    memset(pattern, 0, ballast_words * 4);
    for (size_t i = 0; i < pieces; i++) {
        CHECK(cudaMemcpy(pattern + i * piece_words, ballast[i], piece_words * 4, cudaMemcpyDeviceToHost));
        CHECK(cudaFree(ballast[i]));
    }
    uint32_t *again = ballast_of(ballast_words);
    REQUIRE(memcmp(pattern, again, ballast_words * 4) == 0);
    CHECK(cudaFree(data));
    CHECK(cudaFreeHost(shown));
    printf("steady ok\n");
    return 0;
}
