// A process tree: a CUDA process, a second CUDA process that it started before it used CUDA itself, and a process
// without CUDA. A token goes round through pipes and is changed at each stop, on the GPU or on the CPU.
//
//   tree [--rounds N] [--words N] [--sleep-us N] [--progress FILE]      100, 1024, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the number of rounds done.
// `--role worker` and `--role relay` are the two others; they read tokens on descriptor 0 and answer on 1.
#include "app.h"

#include <sys/wait.h>
#include <unistd.h>

static uint64_t rounds, words, pause_us;

// Each token changes the whole buffer.
__global__ void turn(uint64_t *buffer, uint32_t n, uint64_t token) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        buffer[i] = mix(buffer[i] + token + i);
    }
}

struct Gpu {
    uint64_t *buffer;
    uint64_t turns = 0;

    explicit Gpu(int seed) {
        CHECK(cudaMalloc(&buffer, words * 8));
        CHECK(cudaMemset(buffer, seed, words * 8));
    }
    uint64_t change(uint64_t token) {
        uint64_t out;
        turn<<<((uint32_t)words + 127) / 128, 128>>>(buffer, (uint32_t)words, token);
        CHECK(cudaGetLastError());
        CHECK(cudaMemcpy(&out, buffer + token % words, 8, cudaMemcpyDeviceToHost));
        return out ^ ++turns;
    }
    uint64_t all() {
        uint64_t *host = (uint64_t *)malloc(words * 8);
        CHECK(cudaMemcpy(host, buffer, words * 8, cudaMemcpyDeviceToHost));
        uint64_t result = digest(host, words * 8);
        free(host);
        return result;
    }
};

// A token is 8 bytes, which a pipe does not tear. False at the end of the pipe.
static bool receive(int fd, uint64_t *token) { return read(fd, token, 8) == 8; }
static void send(int fd, uint64_t token) { REQUIRE(write(fd, &token, 8) == 8); }

struct Child {
    pid_t pid;
    int to, from;

    // Starts this program again in another role.
    void start(int argc, char **argv, const char *role) {
        int in[2], out[2];
        REQUIRE(pipe(in) == 0 && pipe(out) == 0);
        pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            char **arguments = (char **)calloc((size_t)argc + 3, sizeof *arguments);
            memcpy(arguments, argv, (size_t)argc * sizeof *arguments);
            arguments[argc] = (char *)"--role";
            arguments[argc + 1] = (char *)role;
            dup2(in[0], 0);
            dup2(out[1], 1);
            for (int fd = 3; fd < 32; fd++) {
                close(fd);
            }
            execv("/proc/self/exe", arguments);
            _exit(4);
        }
        close(in[0]);
        close(out[1]);
        to = in[1];
        from = out[0];
    }
    uint64_t change(uint64_t token) {
        send(to, token);
        REQUIRE(receive(from, &token));
        return token;
    }
    uint64_t finish() {
        uint64_t last = 0;
        int status;
        close(to);
        REQUIRE(receive(from, &last));
        REQUIRE(waitpid(pid, &status, 0) == pid && status == 0);
        return last;
    }
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    rounds = options.number("--rounds", 100);
    words = options.number("--words", 1024);
    pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    const char *role = options.text("--role", "parent");
    options.done();
    REQUIRE(words > 0 && words < 1u << 28);

    uint64_t token = 1;
    if (strcmp(role, "relay") == 0) {
        uint64_t passed = 0;
        while (receive(0, &token)) {
            send(1, mix(token + ++passed));
        }
        send(1, passed);
        return 0;
    }
    if (strcmp(role, "worker") == 0) {
        Gpu gpu(2);
        while (receive(0, &token)) {
            send(1, gpu.change(token));
        }
        send(1, gpu.all());
        return 0;
    }

    Child worker, relay;
    worker.start(argc, argv, "worker");
    relay.start(argc, argv, "relay");
    Gpu gpu(1);
    for (uint64_t round = 1; round <= rounds; round++) {
        token = worker.change(relay.change(gpu.change(token)));
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    uint64_t ends[4] = {token, gpu.all(), worker.finish(), relay.finish()};
    printf("digest %016llx\n", (unsigned long long)digest(ends, sizeof ends));
    return 0;
}
