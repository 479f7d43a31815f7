// Stream-ordered allocation: from the default pool and from one of the program's own, on several streams; memory that is
// freed while a kernel still uses it and allocated anew at once, attributes, access, and what mixes with cudaMalloc.
//
//   pools [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//         100, 4096, 0, none
//
// Prints "rules ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

__global__ void fill(uint32_t *out, uint32_t n, uint32_t seed) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        out[i] = i * 2654435761u + seed;
    }
}

__global__ void fold(const uint32_t *in, uint32_t *out, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = out[i] ^ (in[(i * 7u + round) % n] + round);
        out[i] = x * 0x85ebca6bu + (x >> 15);
    }
}

// Writes, takes its time, and looks whether anyone else has written there.
__global__ void hold(uint32_t *mine, uint32_t n, uint32_t turns, uint32_t *wrong) {
    uint32_t i = threadIdx.x;
    for (uint32_t turn = 0; turn < turns; turn++) {
        for (uint32_t at = i; at < n; at += blockDim.x) {
            ((volatile uint32_t *)mine)[at] = at ^ turn;
        }
        for (uint32_t at = i; at < n; at += blockDim.x) {
            if (((volatile uint32_t *)mine)[at] != (at ^ turn)) {
                atomicAdd(wrong, 1u);
            }
        }
    }
}

static uint64_t number(cudaMemPool_t pool, cudaMemPoolAttr attribute) {
    uint64_t value = 0;
    CHECK(cudaMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static void rules(cudaMemPool_t own, cudaStream_t a, cudaStream_t b) {
    cudaMemPool_t standard, current;
    CHECK(cudaDeviceGetDefaultMemPool(&standard, 0));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    REQUIRE(current == standard && own != standard);
    int follow = 0;
    CHECK(cudaMemPoolGetAttribute(standard, cudaMemPoolReuseFollowEventDependencies, &follow));
    REQUIRE(follow == 1);
    REQUIRE(number(standard, cudaMemPoolAttrReleaseThreshold) == 0);

    // Without a threshold what is free goes once the program has waited; with one it stays until it is trimmed.
    void *p;
    CHECK(cudaMallocAsync(&p, 1 << 20, a));
    REQUIRE(number(standard, cudaMemPoolAttrUsedMemCurrent) >= 1 << 20);
    REQUIRE(number(standard, cudaMemPoolAttrReservedMemCurrent) >= 1 << 20);
    CHECK(cudaFreeAsync(p, a));
    CHECK(cudaStreamSynchronize(a));
    REQUIRE(number(standard, cudaMemPoolAttrUsedMemCurrent) == 0);
    REQUIRE(number(standard, cudaMemPoolAttrReservedMemCurrent) == 0);
    REQUIRE(number(standard, cudaMemPoolAttrUsedMemHigh) >= 1 << 20);
    CHECK(cudaMallocFromPoolAsync(&p, 1 << 20, own, a));
    CHECK(cudaFreeAsync(p, a));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(number(own, cudaMemPoolAttrReservedMemCurrent) >= 1 << 20);
    CHECK(cudaMemPoolTrimTo(own, 0));
    REQUIRE(number(own, cudaMemPoolAttrReservedMemCurrent) == 0);

    // The pool that a device allocates from can be another; one that is destroyed gives way to the default one.
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, 0};
    cudaMemPool_t passing;
    CHECK(cudaMemPoolCreate(&passing, &properties));
    CHECK(cudaDeviceSetMemPool(0, passing));
    CHECK(cudaMallocAsync(&p, 4096, b));
    REQUIRE(number(passing, cudaMemPoolAttrUsedMemCurrent) == 4096);
    cudaMemAccessFlags flags;
    cudaMemLocation here = {cudaMemLocationTypeDevice, 0};
    CHECK(cudaMemPoolGetAccess(&flags, passing, &here));
    REQUIRE(flags == cudaMemAccessFlagsProtReadWrite);
    CHECK(cudaMemPoolDestroy(passing));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    REQUIRE(current == standard);
    CHECK(cudaMemsetAsync(p, 7, 4096, b)); // its memory stays
    CHECK(cudaFreeAsync(p, b));

    // Memory of each kind may be freed the other way.
    CHECK(cudaMalloc(&p, 1 << 16));
    CHECK(cudaMemsetAsync(p, 1, 1 << 16, a));
    CHECK(cudaFreeAsync(p, a));
    CHECK(cudaMallocAsync(&p, 1 << 16, a));
    CHECK(cudaStreamSynchronize(a));
    CHECK(cudaFree(p));

    // What is freed is no pointer any more; what came from a pool says so.
    CHECK(cudaMallocAsync(&p, 100, a));
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, (char *)p + 50));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
    CHECK(cudaFreeAsync(p, a));
    REQUIRE(cudaFreeAsync(p, a) == cudaErrorInvalidValue);
    REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);

    // Far more than there is, piece by piece: each free makes room for the next, as far as the stream has come or not.
    size_t available, total;
    CHECK(cudaMemGetInfo(&available, &total));
    size_t large = available / 3;
    for (int i = 0; i < 8; i++) {
        cudaStream_t stream = i % 2 ? a : b;
        CHECK(cudaMallocAsync(&p, large, stream));
        CHECK(cudaMemsetAsync(p, i, 4096, stream));
        CHECK(cudaFreeAsync(p, stream));
    }
    REQUIRE(cudaMallocAsync(&p, total + (1 << 20), a) == cudaErrorMemoryAllocation);
    REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation);
    CHECK(cudaDeviceSynchronize());
    printf("rules ok\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 100), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 4096);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n > 0);

    cudaStream_t a, b;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CHECK(cudaStreamCreate(&b));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, 0};
    cudaMemPool_t own;
    CHECK(cudaMemPoolCreate(&own, &properties));
    uint64_t keep = UINT64_MAX;
    CHECK(cudaMemPoolSetAttribute(own, cudaMemPoolAttrReleaseThreshold, &keep));
    rules(own, a, b);

    // What lives long: the result, and a ring of parts that go after eight rounds.
    uint32_t *result, *wrong, *ring[8] = {};
    CHECK(cudaMallocAsync(&result, n * 4, a));
    CHECK(cudaMallocFromPoolAsync(&wrong, 4, own, a));
    CHECK(cudaMemsetAsync(result, 0, n * 4, a));
    CHECK(cudaMemsetAsync(wrong, 0, 4, a));
    CHECK(cudaStreamSynchronize(a));
    uint32_t *host = (uint32_t *)malloc(n * 4);
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        uint32_t seed = (uint32_t)round, blocks = (n + 127) / 128;
        // In a: memory is freed under a kernel that still runs, and a takes it anew while b must not get it.
        uint32_t *busy, *other;
        CHECK(cudaMallocAsync(&busy, n * 4, a));
        hold<<<1, 64, 0, a>>>(busy, n, 3, wrong);
        CHECK(cudaFreeAsync(busy, a));
        CHECK(cudaMallocAsync(&other, n * 4, b));
        fill<<<blocks, 128, 0, b>>>(other, n, seed);
        CHECK(cudaEventRecord(event, b));
        CHECK(cudaMallocAsync(&busy, n * 4, a));
        fill<<<blocks, 128, 0, a>>>(busy, n, seed * 3);
        fold<<<blocks, 128, 0, a>>>(busy, result, n, seed);
        CHECK(cudaFreeAsync(busy, a));
        CHECK(cudaStreamWaitEvent(a, event, 0));
        fold<<<blocks, 128, 0, a>>>(other, result, n, seed + 1);
        // The ring: filled in b, read in a eight rounds later, freed there.
        uint32_t *&part = ring[round % 8];
        if (part) {
            fold<<<blocks, 128, 0, a>>>(part, result, n, seed + 2);
            CHECK(cudaFreeAsync(part, a));
        }
        CHECK(cudaGetLastError());
        size_t bytes = ((size_t)n + (round % 5) * 1000) * 4;
        CHECK(round % 2 ? cudaMallocAsync(&part, bytes, b) : cudaMallocFromPoolAsync(&part, bytes, own, b));
        fill<<<blocks, 128, 0, b>>>(part, n, seed * 5);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(event, b));
        CHECK(cudaStreamWaitEvent(a, event, 0));
        CHECK(cudaFreeAsync(other, a));
        if (round % 10 == 0) {
            CHECK(cudaMemcpyAsync(host, result, n * 4, cudaMemcpyDeviceToHost, a));
            CHECK(cudaStreamSynchronize(a));
            state = digest(host, n * 4, state);
        }
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    uint32_t mistakes = 1;
    CHECK(cudaMemcpyAsync(&mistakes, wrong, 4, cudaMemcpyDeviceToHost, a));
    CHECK(cudaMemcpyAsync(host, result, n * 4, cudaMemcpyDeviceToHost, a));
    CHECK(cudaStreamSynchronize(a));
    REQUIRE(mistakes == 0);
    REQUIRE(number(own, cudaMemPoolAttrReleaseThreshold) == UINT64_MAX);
    for (uint32_t *part : ring) {
        if (part) {
            CHECK(cudaFreeAsync(part, a));
        }
    }
    CHECK(cudaFreeAsync(result, a));
    CHECK(cudaFreeAsync(wrong, a));
    CHECK(cudaDeviceSynchronize());
    REQUIRE(number(own, cudaMemPoolAttrUsedMemCurrent) == 0);
    CHECK(cudaMemPoolDestroy(own));
    printf("digest %016llx\n", (unsigned long long)digest(host, n * 4, state));
    free(host);
    return 0;
}
