// Two devices that use each other's memory: kernels of one in memory of the other where peer access is possible, and the
// same with copies where it is not; copies between devices of every form; pools that another device may use.
//
//   peers [--first D] [--second D] [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//         0, 1, 60, 4096, 0, none
//
// Prints "rules ok" and "digest D", the same in every run with the same numbers, with peer access or without. FILE holds
// the iterations done.
#include "app.h"

__global__ void add(uint32_t *data, const uint32_t *more, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] = data[i] * 3u + more[(i + round) % n] + round;
    }
}

static void expect(cudaError_t got, cudaError_t wanted) {
    REQUIRE(got == wanted);
    REQUIRE(cudaGetLastError() == wanted);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    int first = (int)options.number("--first", 0), second = (int)options.number("--second", 1);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 4096), blocks = (n + 127) / 128;
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n > 0 && first != second);

    int can, back;
    CHECK(cudaDeviceCanAccessPeer(&can, first, second));
    CHECK(cudaDeviceCanAccessPeer(&back, second, first));
    REQUIRE(can == back);
    uint32_t *there, *later, *here, *received, *pooled, *host = (uint32_t *)malloc(n * 4);
    CHECK(cudaSetDevice(second));
    CHECK(cudaMalloc(&there, n * 4));
    CHECK(cudaMemset(there, 1, n * 4));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(first));
    CHECK(cudaMalloc(&here, n * 4));
    CHECK(cudaMalloc(&received, n * 4));
    CHECK(cudaMemset(here, 2, n * 4));
    CHECK(cudaDeviceSynchronize());

    expect(cudaDeviceDisablePeerAccess(second), cudaErrorPeerAccessNotEnabled);
    expect(cudaDeviceEnablePeerAccess(second, 1), cudaErrorInvalidValue);
    if (can) {
        CHECK(cudaDeviceEnablePeerAccess(second, 0));
        expect(cudaDeviceEnablePeerAccess(second, 0), cudaErrorPeerAccessAlreadyEnabled);
        CHECK(cudaDeviceDisablePeerAccess(second));
        CHECK(cudaDeviceEnablePeerAccess(second, 0));
    } else {
        expect(cudaDeviceEnablePeerAccess(second, 0), cudaErrorPeerAccessUnsupported);
    }
    // A pool of the second device that the first may use.
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, second};
    cudaMemPool_t pool;
    CHECK(cudaMemPoolCreate(&pool, &properties));
    cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, first}, cudaMemAccessFlagsProtReadWrite};
    cudaMemAccessFlags flags;
    CHECK(cudaMemPoolGetAccess(&flags, pool, &access.location));
    REQUIRE(flags == cudaMemAccessFlagsProtNone);
    if (can) {
        CHECK(cudaMemPoolSetAccess(pool, &access, 1));
        CHECK(cudaMemPoolGetAccess(&flags, pool, &access.location));
        REQUIRE(flags == cudaMemAccessFlagsProtReadWrite);
    }
    CHECK(cudaSetDevice(second));
    CHECK(cudaMalloc(&later, n * 4)); // made after access was given
    CHECK(cudaMallocFromPoolAsync(&pooled, n * 4, pool, 0));
    CHECK(cudaMemset(later, 3, n * 4));
    CHECK(cudaMemset(pooled, 4, n * 4));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(first));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    printf("rules ok\n");
    fflush(stdout);

    uint64_t state = 0;
    uint32_t *targets[] = {there, later, pooled};
    for (uint64_t round = 1; round <= iterations; round++) {
        uint32_t *target = targets[round % 3];
        if (can) {
            add<<<blocks, 128, 0, stream>>>(target, here, n, (uint32_t)round);
        } else {
            CHECK(cudaMemcpyPeerAsync(received, first, target, second, n * 4, stream));
            add<<<blocks, 128, 0, stream>>>(received, here, n, (uint32_t)round);
            CHECK(cudaMemcpyPeerAsync(target, second, received, first, n * 4, stream));
        }
        CHECK(cudaGetLastError());
        if (round % 2) {
            CHECK(cudaMemcpyAsync(received, target, n * 4, cudaMemcpyDefault, stream));
        } else {
            CHECK(cudaMemcpyPeerAsync(received, first, target, second, n * 4, stream));
        }
        add<<<blocks, 128, 0, stream>>>(here, received, n, (uint32_t)round);
        CHECK(cudaGetLastError());
        if (round % 10 == 0) {
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaMemcpyPeer(there, second, here, first, n * 4));
            CHECK(cudaMemcpy(host, there, n * 4, cudaMemcpyDeviceToHost));
            state = digest(host, n * 4, state);
        }
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host, here, n * 4, cudaMemcpyDeviceToHost));
    if (can) {
        CHECK(cudaDeviceDisablePeerAccess(second));
    }
    CHECK(cudaFree(here));
    CHECK(cudaFree(there));
    CHECK(cudaSetDevice(second));
    CHECK(cudaFreeAsync(pooled, 0));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemPoolDestroy(pool));
    printf("digest %016llx\n", (unsigned long long)digest(host, n * 4, state));
    free(host);
    return 0;
}
