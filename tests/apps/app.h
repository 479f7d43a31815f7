// What every program here shares: errors, options, a few pure functions. Nothing that needs the C++ library, because
// programs are linked against an old C library only (see `build`).
#pragma once

#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <unistd.h>

// A CUDA error ends the program with status 3, named: a test sees which call failed and how.
#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t check_error = (call);                                                                              \
        if (check_error != cudaSuccess) {                                                                              \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s: %s (%d: %s)\n", __FILE__, __LINE__, #call, cudaGetErrorName(check_error),      \
                    (int)check_error, cudaGetErrorString(check_error));                                                \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

// Something other than CUDA that must hold; status 4.
#define REQUIRE(condition)                                                                                             \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                              \
            exit(4);                                                                                                   \
        }                                                                                                              \
    } while (0)

// Options are pairs of --name and value. Each program names its own; one that no one asked for is an error (status 2).
// No strtoul: with new C library headers it becomes a symbol that older libraries lack.
struct Options {
    int argc;
    char **argv;
    bool known[64];

    Options(int count, char **values) : argc(count), argv(values) {
        memset(known, 0, sizeof known);
        if (argc > 64 || argc % 2 == 0) {
            fail("options are pairs of --name and value");
        }
    }
    const char *text(const char *name, const char *otherwise) {
        for (int i = 1; i + 1 < argc; i += 2) {
            if (strcmp(argv[i], name) == 0) {
                known[i] = true;
                return argv[i + 1];
            }
        }
        return otherwise;
    }
    uint64_t number(const char *name, uint64_t otherwise) {
        const char *given = text(name, nullptr);
        if (!given) {
            return otherwise;
        }
        uint64_t value = 0;
        for (const char *c = given; *c || c == given; c++) {
            if (*c < '0' || *c > '9') {
                fail(name);
            }
            value = value * 10 + (uint64_t)(*c - '0');
        }
        return value;
    }
    void done() const {
        for (int i = 1; i < argc; i += 2) {
            if (!known[i]) {
                fail(argv[i]);
            }
        }
    }
    [[noreturn]] void fail(const char *what) const {
        fprintf(stderr, "%s: bad option: %s\n", argv[0], what);
        exit(2);
    }
};

// An invertible mixing of 64 bits (splitmix64's), the same on both sides.
__host__ __device__ inline uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ull;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// A digest of bytes (FNV-1a over 64 bits, mixed at the end); `so_far` chains.
inline uint64_t digest(const void *data, size_t bytes, uint64_t so_far = 0xcbf29ce484222325ull) {
    const unsigned char *at = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        so_far = (so_far ^ at[i]) * 0x100000001b3ull;
    }
    return mix(so_far);
}

inline double now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

// Sleeps the whole time, signals and a dump in between or not.
inline void sleep_us(uint64_t us) {
    timespec t = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    while (us && nanosleep(&t, &t) != 0) {
    }
}

// How far programs may go for now: as far as the file that APP_HOLD names says, as long as it is there. Read once, so that
// a dump rarely finds it open.
struct Hold {
    const char *file;
    uint64_t from;

    Hold() : file(getenv("APP_HOLD")), from(0) {
        if (FILE *open = file ? fopen(file, "r") : nullptr) {
            for (int c; (c = fgetc(open)) >= '0' && c <= '9';) {
                from = from * 10 + (uint64_t)(c - '0');
            }
            fclose(open);
        }
    }
    void wait(uint64_t value) const {
        while (file && value >= from && access(file, F_OK) == 0) {
            sleep_us(2000);
        }
    }
};

// Writes `value` into a file, if one was asked for: how far the program is, without a word on stdout. A test may have it
// stand still here until a dump is done, so that it is dumped in its middle on any machine.
inline void progress(const char *path, uint64_t value) {
    static const Hold hold;
    if (!path) {
        return;
    }
    // Always as many bytes, in place: CRIU restores a process only if a file that it had open has the size of then.
    char line[22];
    int length = snprintf(line, sizeof line, "%20llu\n", (unsigned long long)value);
    int file = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (file >= 0) {
        ssize_t written = pwrite(file, line, (size_t)length, 0);
        (void)written;
        close(file);
    }
    hold.wait(value);
}
