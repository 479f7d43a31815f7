// Which GPUs a program sees, and that it can use each.
//
//   visible [--use N] [--mib N] [--until FILE]      none, 1, none
//
// Prints "count C", then for each GPU "N UUID ok" when a kernel has run in memory of it; with --use "use N: ERROR" of what
// asking for that GPU gives. With --until it then says "ready" and waits for FILE, and checks its memory again.
#include "app.h"

#include <unistd.h>

const int MOST = 16;

__global__ void fill(uint64_t *out, uint64_t words, uint64_t seed) {
    for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) {
        out[i] = mix(seed + i);
    }
}

__global__ void check(const uint64_t *in, uint64_t words, uint64_t seed, int *bad) {
    for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) {
        if (in[i] != mix(seed + i)) {
            *bad = 1;
        }
    }
}

static void print_uuid(int device) {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, device));
    printf("%d GPU", device);
    for (int i = 0; i < 16; i++) {
        printf("%s%02x", i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)properties.uuid.bytes[i]);
    }
}

static bool holds(int device, const uint64_t *at, uint64_t words) {
    int *bad, found = 0;
    CHECK(cudaSetDevice(device));
    CHECK(cudaMalloc(&bad, sizeof *bad));
    CHECK(cudaMemset(bad, 0, sizeof *bad));
    check<<<1, 64>>>(at, words, device, bad);
    CHECK(cudaMemcpy(&found, bad, sizeof found, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(bad));
    return found == 0;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const bool asks = options.text("--use", nullptr) != nullptr;
    const int use = (int)options.number("--use", 0);
    const uint64_t words = options.number("--mib", 1) << 17;
    const char *until = options.text("--until", nullptr);
    options.done();

    int count;
    cudaError_t result = cudaGetDeviceCount(&count);
    if (result == cudaErrorNoDevice) {
        count = 0;
    } else {
        CHECK(result);
    }
    REQUIRE(count <= MOST);
    printf("count %d\n", count);
    uint64_t *memory[MOST];
    for (int device = 0; device < count; device++) {
        print_uuid(device);
        CHECK(cudaSetDevice(device));
        CHECK(cudaMalloc(&memory[device], words * sizeof(uint64_t)));
        fill<<<1, 64>>>(memory[device], words, device);
        CHECK(cudaGetLastError());
        printf(" %s\n", holds(device, memory[device], words) ? "ok" : "bad");
    }
    if (asks) {
        printf("use %d: %s\n", use, cudaGetErrorName(cudaSetDevice(use)));
    }
    if (until) {
        printf("ready\n");
        fflush(stdout);
        while (access(until, F_OK) != 0) {
            sleep_us(2000);
        }
        for (int device = 0; device < count; device++) {
            REQUIRE(holds(device, memory[device], words));
        }
        printf("the same\n");
    }
    return 0;
}
