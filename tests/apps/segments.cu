// The program's own virtual memory: a large reservation that grows and shrinks piece by piece at its end, as PyTorch's
// expandable segments do; a piece that is mapped twice, one that is mapped nowhere for a while and keeps its content, one
// whose handle is gone while it is mapped; copies and kernels across pieces side by side.
//
//   segments [--iterations N] [--sleep-us N] [--progress FILE]
//            60, 0, none
//
// Prints "rules ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "driver.h"

static const size_t GRANULE = 2 << 20, RESERVED = (size_t)4 << 30;
static const int PIECES = 12, WORDS = 2 << 20 >> 2;
// Kernels use every so-manieth word, to be quick where they are interpreted.
static const uint32_t STRIDE = 211;

__global__ void write(uint32_t *out, uint32_t n, uint32_t seed) {
    uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) * STRIDE;
    if (i < n) {
        out[i] = (i ^ seed) * 2654435761u;
    }
}

// Over all that is mapped, across pieces.
__global__ void fold(uint32_t *at, uint32_t n, uint32_t round) {
    uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) * STRIDE;
    if (i < n) {
        at[i] = at[i] * 0x85ebca6bu + round + (at[i] >> 13);
    }
}

static unsigned blocks(size_t words) { return (unsigned)(words / STRIDE / 128 + 1); }

static CUmemAllocationProp properties(int device) {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    return wanted;
}

static CUmemGenericAllocationHandle piece(size_t size) {
    CUmemAllocationProp wanted = properties(0);
    CUmemGenericAllocationHandle handle;
    CU(cuMemCreate, &handle, size, &wanted, 0);
    return handle;
}

static void open_to_device(CUdeviceptr at, size_t size) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(cuMemSetAccess, at, size, &access, 1);
}

static void map(CUdeviceptr at, CUmemGenericAllocationHandle handle) {
    CU(cuMemMap, at, GRANULE, 0, handle, 0);
    open_to_device(at, GRANULE);
}

static void run_write(CUdeviceptr at, size_t words, uint32_t seed) {
    CHECK(cudaMemsetAsync((void *)at, 0, words * 4));
    write<<<blocks(words), 128>>>((uint32_t *)at, (uint32_t)words, seed);
    CHECK(cudaGetLastError());
}

static void run_fold(CUdeviceptr at, size_t words, uint64_t round) {
    fold<<<blocks(words), 128>>>((uint32_t *)at, (uint32_t)words, (uint32_t)round);
    CHECK(cudaGetLastError());
}

static uint64_t content(CUdeviceptr at, size_t words, uint64_t so_far) {
    static uint32_t buffer[PIECES * (2 << 20 >> 2)];
    CHECK(cudaMemcpy(buffer, (void *)at, words * 4, cudaMemcpyDeviceToHost));
    return digest(buffer, words * 4, so_far);
}

static void rules() {
    size_t granularity = 0;
    CUmemAllocationProp wanted = properties(0), told = {};
    CU(cuMemGetAllocationGranularity, &granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    REQUIRE(granularity && GRANULE % granularity == 0);
    CUdeviceptr at, other;
    CU(cuMemAddressReserve, &at, 8 * GRANULE, 0, 0, 0);
    CU(cuMemAddressReserve, &other, GRANULE, 64 * GRANULE, 0, 0);
    REQUIRE(other % (64 * GRANULE) == 0);
    CUmemGenericAllocationHandle handle = piece(GRANULE), again = 0;
    CU(cuMemGetAllocationPropertiesFromHandle, &told, handle);
    REQUIRE(told.location.id == 0 && told.type == CU_MEM_ALLOCATION_TYPE_PINNED);
    CU(cuMemUnmap, at, GRANULE); // of nothing
    map(at, handle);
    map(at + GRANULE, handle);
    // What is written in one place is read in the other.
    run_write(at, WORDS, 5);
    REQUIRE(content(at + GRANULE, WORDS, 0) == content(at, WORDS, 0));
    unsigned long long flags = 0;
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CU(cuMemGetAccess, &flags, &here, at);
    REQUIRE(flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CU(cuMemRetainAllocationHandle, &again, (void *)(at + GRANULE + 4096));
    CU(cuMemRelease, again);
    CU(cuMemRelease, handle);
    FAILS(CUDA_ERROR_INVALID_VALUE, cuMemMap, at + 2 * GRANULE, GRANULE, 0, piece(GRANULE), 1);
    FAILS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree, at, 8 * GRANULE);
    FAILS(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree, at, GRANULE);
    CU(cuMemUnmap, at, 2 * GRANULE);
    CU(cuMemAddressFree, at, 8 * GRANULE);
    CU(cuMemAddressFree, other, GRANULE);
    printf("rules ok\n");
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    rules();

    CUdeviceptr segment, aside;
    CU(cuMemAddressReserve, &segment, RESERVED, 0, 0, 0);
    CU(cuMemAddressReserve, &aside, 4 * GRANULE, 0, 0, 0);
    CUmemGenericAllocationHandle handles[PIECES];
    int mapped = 0;
    // Mapped nowhere, but with content, between the iterations.
    CUmemGenericAllocationHandle hidden = piece(GRANULE);
    map(aside, hidden);
    run_write(aside, WORDS, 99);
    CHECK(cudaDeviceSynchronize());
    CU(cuMemUnmap, aside, GRANULE);
    // Its handle is gone, and it is there as long as it is mapped; and mapped without access.
    CUmemGenericAllocationHandle orphan = piece(GRANULE);
    map(aside + 2 * GRANULE, orphan);
    CU(cuMemMap, aside + 3 * GRANULE, GRANULE, 0, orphan, 0);
    CU(cuMemRelease, orphan);
    run_write(aside + 2 * GRANULE, WORDS, 77);

    uint64_t sum = 0;
    for (uint64_t i = 0; i < iterations; i++) {
        // Grows to some length, and shrinks to another.
        int target = 1 + (int)(mix(i) % PIECES);
        while (mapped < target) {
            handles[mapped] = piece(GRANULE);
            map(segment + mapped * GRANULE, handles[mapped]);
            run_write(segment + mapped * GRANULE, WORDS, (uint32_t)(i * 31 + mapped));
            mapped++;
        }
        if (mapped > target) {
            CHECK(cudaDeviceSynchronize());
            CU(cuMemUnmap, segment + target * GRANULE, (mapped - target) * GRANULE);
            while (mapped > target) {
                CU(cuMemRelease, handles[--mapped]);
            }
        }
        run_fold(segment, (size_t)mapped * WORDS, i);
        if (mapped > 1) {
            // Across a seam.
            CHECK(cudaMemcpyAsync((void *)(segment + 4096), (void *)(segment + GRANULE - 2048), 4096, cudaMemcpyDefault));
            sum = content(segment + GRANULE - 8192, 4096, sum);
        }
        if (i % 4 == 0) {
            map(aside + GRANULE, hidden);
            run_fold(aside + GRANULE, WORDS, i);
            sum = content(aside + GRANULE, 1024, sum);
            CU(cuMemUnmap, aside + GRANULE, GRANULE);
        }
        run_fold(aside + 2 * GRANULE, WORDS, i);
        progress(file, i + 1);
        sleep_us(sleep);
    }
    sum = content(segment, mapped * WORDS, sum);
    open_to_device(aside + 3 * GRANULE, GRANULE);
    sum = content(aside + 3 * GRANULE, WORDS, sum);
    printf("digest %016llx\n", (unsigned long long)sum);
    return 0;
}
