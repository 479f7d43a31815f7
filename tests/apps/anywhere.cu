// Copies to and from host memory wherever a program may have it: where executables that are loaded anywhere have their
// heap (0x55.., 0x56..), where older kernels put libraries (0x2ad6..), and elsewhere between.
//
//   anywhere [--iterations N] [--sleep-us N] [--progress FILE]      20, 0, none
//
// Prints "digest D" of what came back, and how many places there were.
#include "rounds.h"

#include <sys/mman.h>

const uint64_t PLACES[] = {0x000700000000, 0x2ad612345000, 0x432176540000, 0x555566667000, 0x563eb9666000, 0x5fffeeee1000,
                           0x7654321ab000};
const size_t WORDS = 4096;

static __global__ void turn(uint32_t *words, uint64_t seed) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    words[i] = (uint32_t)mix(words[i] + seed);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 20);
    uint32_t *host[sizeof PLACES / sizeof *PLACES], *device = zeros<uint32_t>(WORDS), found = 0;
    for (uint64_t place : PLACES) {
        void *at = mmap((void *)place, WORDS * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != (void *)place) {
            fprintf(stderr, "%#lx is not free\n", (unsigned long)place);
            return 1;
        }
        host[found++] = (uint32_t *)at;
    }
    rounds.run([&](uint64_t round) {
        // From one place through the device to the next: a word alone, and all of them, and between places.
        uint32_t *from = host[round % found], *to = host[(round + 1) % found];
        size_t bytes = round % 3 ? WORDS * 4 : 4 * round;
        CHECK(cudaMemcpy(device, from, bytes, cudaMemcpyHostToDevice));
        turn<<<WORDS / BLOCK, BLOCK>>>(device, round);
        CHECK(cudaMemcpyAsync(to, device, bytes, cudaMemcpyDeviceToHost, 0));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(from, to, bytes / 2, cudaMemcpyDefault));
    });
    for (uint32_t k = 0; k < found; k++) {
        rounds.take(host[k], WORDS * 4);
    }
    int status = rounds.end();
    printf("%u places\n", found);
    return status;
}
