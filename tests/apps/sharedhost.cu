// Host memory that processes share and that is registered: an anonymous mapping that a child has too, and a file without a name
// that is mapped twice. Kernels write both through their device pointers, and the child and the other mapping see it; what those
// write, kernels see.
//
//   sharedhost [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//              40, 3000, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the iterations done. A value that is not what the
// processor computed ends it with status 4.
#include "app.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

__global__ void add(uint32_t *data, uint32_t n, uint32_t more) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] = data[i] * 3u + more;
    }
}

static const size_t PAGE = 4096;

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static uint32_t *map(size_t bytes, int flags, int file) {
    void *at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, file, 0);
    REQUIRE(at != MAP_FAILED);
    return (uint32_t *)at;
}

// A file in memory that has no name any more, with two mappings.
static void map_file(size_t bytes, uint32_t **one, uint32_t **other) {
    char name[] = "/dev/shm/sharedhost-XXXXXX";
    int file = mkstemp(name);
    REQUIRE(file >= 0 && ftruncate(file, (off_t)bytes) == 0);
    *one = map(bytes, 0, file);
    *other = map(bytes, 0, file);
    unlink(name);
    close(file);
}

// Adds 7 to all words when a byte comes, and answers with a byte, until the pipe closes.
static void child(uint32_t *shared, uint32_t n, int from, int to) {
    char byte;
    while (read(from, &byte, 1) == 1) {
        for (uint32_t i = 0; i < n; i++) {
            shared[i] += 7;
        }
        REQUIRE(write(to, &byte, 1) == 1);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 40), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 3000);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    size_t bytes = n * 4;
    uint32_t *anonymous = map(pages(bytes), MAP_ANONYMOUS, -1), *file, *again;
    map_file(pages(bytes) + PAGE, &file, &again);
    int ask[2], answer[2];
    REQUIRE(pipe(ask) == 0 && pipe(answer) == 0);
    pid_t helper = fork();
    REQUIRE(helper >= 0);
    if (helper == 0) {
        close(ask[1]);
        close(answer[0]);
        child(anonymous, n, ask[0], answer[1]);
    }
    close(ask[0]);
    close(answer[1]);

    uint32_t *expected = (uint32_t *)calloc(2 * n, 4), *device[2];
    REQUIRE(expected);
    // The second one begins inside of a page.
    uint32_t *registered[2] = {anonymous, file + 5};
    for (int i = 0; i < 2; i++) {
        CHECK(cudaHostRegister(registered[i], bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
        CHECK(cudaHostGetDevicePointer(&device[i], registered[i], 0));
        cudaPointerAttributes about;
        CHECK(cudaPointerGetAttributes(&about, registered[i]));
        REQUIRE(about.type == cudaMemoryTypeHost && about.devicePointer == device[i]);
    }
    uint32_t *on_device;
    CHECK(cudaMalloc(&on_device, bytes));
    for (uint64_t step = 1; step <= iterations; step++) {
        for (int i = 0; i < 2; i++) {
            add<<<(n + 127) / 128, 128>>>(device[i], n, (uint32_t)step + i);
            CHECK(cudaGetLastError());
            for (uint32_t word = 0; word < n; word++) {
                expected[i * n + word] = expected[i * n + word] * 3u + (uint32_t)step + i;
            }
        }
        CHECK(cudaDeviceSynchronize());
        REQUIRE(memcmp(registered[0], expected, bytes) == 0);
        REQUIRE(memcmp(again + 5, expected + n, bytes) == 0);
        char byte = 'x';
        REQUIRE(write(ask[1], &byte, 1) == 1 && read(answer[0], &byte, 1) == 1);
        for (uint32_t word = 0; word < n; word++) {
            expected[word] += 7;
            again[5 + word] ^= word;
            expected[n + word] ^= word;
        }
        // A copy reads it too.
        CHECK(cudaMemcpyAsync(on_device, registered[step % 2], bytes, cudaMemcpyHostToDevice, 0));
        add<<<(n + 127) / 128, 128>>>(on_device, n, 1);
        CHECK(cudaMemcpyAsync(registered[step % 2], on_device, bytes, cudaMemcpyDeviceToHost, 0));
        CHECK(cudaDeviceSynchronize());
        uint32_t *copied = expected + (step % 2) * n;
        for (uint32_t word = 0; word < n; word++) {
            copied[word] = copied[word] * 3u + 1;
        }
        progress(progress_file, step);
        sleep_us(pause_us);
    }
    REQUIRE(memcmp(anonymous, expected, bytes) == 0 && memcmp(file + 5, expected + n, bytes) == 0);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaHostUnregister(registered[i]));
    }
    REQUIRE(memcmp(anonymous, expected, bytes) == 0 && memcmp(file + 5, expected + n, bytes) == 0);
    // Once more, in the place of the first.
    CHECK(cudaHostRegister(file, pages(bytes), cudaHostRegisterDefault));
    CHECK(cudaHostUnregister(file));
    close(ask[1]);
    int status;
    REQUIRE(waitpid(helper, &status, 0) == helper && status == 0);
    printf("digest %016llx\n", (unsigned long long)digest(expected, 2 * bytes, 1));
    return 0;
}
