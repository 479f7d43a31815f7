// A process that forks after it has used CUDA, as those that load data do: the child finds no CUDA, is told so by an error,
// and ends as it likes; the parent goes on. And identities: each of several streams has a number of its own, which stays
// the same.
//
//   forked [--rounds N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "forked S", the sum that parent and children have made together. FILE holds the rounds done.
#include "app.h"

#include <sys/wait.h>
#include <unistd.h>

const int STREAMS = 5;

__global__ void add(uint64_t *total, uint64_t what) {
    *total += what;
}

// In the child: a CUDA call is an error and not the end, and so is the next. What it works is the processor's.
static int child(uint64_t round) {
    void *memory = nullptr;
    if (cudaMalloc(&memory, 64) == cudaSuccess || cudaDeviceSynchronize() == cudaSuccess) {
        return 255;
    }
    return (int)(mix(round) % 200);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t rounds = options.number("--rounds", 40), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    uint64_t *total, result = 0;
    CHECK(cudaMalloc(&total, sizeof *total));
    CHECK(cudaMemset(total, 0, sizeof *total));
    cudaStream_t streams[STREAMS];
    unsigned long long ids[STREAMS], id;
    for (int i = 0; i < STREAMS; i++) {
        CHECK(cudaStreamCreate(&streams[i]));
        CHECK(cudaStreamGetId(streams[i], &ids[i]));
        for (int j = 0; j < i; j++) {
            REQUIRE(ids[j] != ids[i]);
        }
    }
    for (uint64_t round = 1; round <= rounds; round++) {
        cudaStream_t stream = streams[round % STREAMS];
        CHECK(cudaStreamGetId(stream, &id));
        REQUIRE(id == ids[round % STREAMS]);
        uint64_t made = round;
        if (round % 8 == 1) {
            fflush(stdout);
            pid_t pid = fork();
            REQUIRE(pid >= 0);
            if (pid == 0) {
                _exit(child(round));
            }
            int status;
            while (waitpid(pid, &status, 0) != pid) {
            }
            REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) != 255);
            made += (uint64_t)WEXITSTATUS(status);
        }
        add<<<1, 1, 0, stream>>>(total, made);
        CHECK(cudaGetLastError());
        CHECK(cudaStreamSynchronize(stream));
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    CHECK(cudaMemcpy(&result, total, sizeof result, cudaMemcpyDeviceToHost));
    printf("forked %llu\n", (unsigned long long)result);
    return 0;
}
