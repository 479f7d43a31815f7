// Two processes whose kernels wait for each other: each spins on memory of its own that a thread of its process copies
// from memory that both share, and the other way round.
//
//   meet2 [--rounds N] [--ahead N] [--lead N] [--sleep-us N] [--progress FILE]      60, 3, 0, 0, none
//
// Each synchronises after so many rounds that it enqueued ahead. With a lead the second one enqueues so many before the first.
// Prints "digest D" for both, the same in every run with the same numbers. FILE holds the first one's rounds enqueued.
#include "app.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

__global__ void meet(volatile uint32_t *mine, volatile uint32_t *theirs, uint32_t *sum, uint32_t round) {
    *mine = round;
    __threadfence_system();
    while (*theirs < round) {
    }
    *sum = (*sum ^ round) * 0x9e3779b1u + 1;
}

static uint32_t *shared; // [0], [64]: how far the kernels of each are; [128]: the second one's result; [192]: rounds
static volatile uint32_t *pinned; // [0]: mine, [64]: theirs
static int side;
static int over;

// Carries what each has said to the other.
static void *carry(void *) {
    while (!__atomic_load_n(&over, __ATOMIC_SEQ_CST)) {
        __atomic_store_n(&shared[64 * side], pinned[0], __ATOMIC_SEQ_CST);
        pinned[64] = __atomic_load_n(&shared[64 * (1 - side)], __ATOMIC_SEQ_CST);
        sleep_us(50);
    }
    __atomic_store_n(&shared[64 * side], pinned[0], __ATOMIC_SEQ_CST);
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint32_t rounds = (uint32_t)options.number("--rounds", 60), ahead = (uint32_t)options.number("--ahead", 3);
    uint32_t lead = (uint32_t)options.number("--lead", 0);
    uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(ahead > 0);

    shared = (uint32_t *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    pid_t child = fork();
    REQUIRE(child >= 0);
    side = child == 0;

    CHECK(cudaHostAlloc((void **)&pinned, 4096, cudaHostAllocMapped));
    memset((void *)pinned, 0, 4096);
    pthread_t carrier;
    REQUIRE(pthread_create(&carrier, nullptr, carry, nullptr) == 0);
    cudaStream_t stream;
    uint32_t *sum, result;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&sum, 4));
    CHECK(cudaMemset(sum, side, 4));
    CHECK(cudaDeviceSynchronize());
    for (uint32_t round = 1; round <= rounds; round++) {
        // Without a lead the second one follows the first, whose kernel waits for that.
        while (side == 1 && __atomic_load_n(&shared[192], __ATOMIC_SEQ_CST) + lead < round) {
            sleep_us(50);
        }
        meet<<<1, 1, 0, stream>>>(pinned, pinned + 64, sum, round);
        CHECK(cudaGetLastError());
        if (side == 0) {
            __atomic_store_n(&shared[192], round, __ATOMIC_SEQ_CST);
            progress(progress_file, round);
        }
        if (round % ahead == 0) {
            CHECK(cudaStreamSynchronize(stream));
        }
        if (side == 0 || lead == 0) {
            sleep_us(pause_us);
        }
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&result, sum, 4, cudaMemcpyDeviceToHost));
    __atomic_store_n(&over, 1, __ATOMIC_SEQ_CST);
    REQUIRE(pthread_join(carrier, nullptr) == 0);
    if (side == 1) {
        shared[128] = result;
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    uint32_t results[2] = {result, shared[128]};
    printf("digest %016llx\n", (unsigned long long)digest(results, sizeof results));
    return 0;
}
