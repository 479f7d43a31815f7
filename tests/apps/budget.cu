// How much memory of each kind there is to be had.
//
//   budget [--until FILE] [--progress FILE]      none, none
//
// Prints, in MiB, what the driver says there is and is free; then how much can be allocated in steps of 2 MiB as plain
// memory, from a pool, as arrays, as mipmapped arrays, as pieces to be mapped by the program itself, as pieces that it
// imports from itself and whose first handle it gives up, and as pinned memory, each freed before the next, and at most 256; then, with 8 MiB allocated and a piece of 8 MiB, how much more when FILE
// is there.
#include "driver.h"

#include <unistd.h>

const int MOST = 128;
const size_t STEP = 2 << 20;

struct Taken {
    void *at[MOST];
    int count;
};

// Takes steps until there is no more memory, and says how much that was.
template <typename Take> static void take(const char *what, Taken &taken, Take more) {
    taken.count = 0;
    while (taken.count < MOST) {
        cudaError_t result = more(&taken.at[taken.count]);
        if (result == cudaErrorMemoryAllocation) {
            cudaGetLastError();
            break;
        }
        CHECK(result);
        taken.count++;
    }
    printf("%s %zu\n", what, taken.count * STEP >> 20);
    fflush(stdout);
}

static cudaError_t plain(void **at) { return cudaMalloc(at, STEP); }

static CUresult piece(CUmemGenericAllocationHandle *handle, size_t size,
                      CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_NONE) {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.requestedHandleTypes = type;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    return ASK(cuMemCreate, handle, size, &wanted, 0);
}

// A piece of which the program has only the handle that it has imported from itself, a second one meanwhile.
static CUresult imported(CUmemGenericAllocationHandle *handle, size_t size) {
    const CUmemAllocationHandleType kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle first;
    CUresult result = piece(&first, size, kind);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    int file;
    CUmemGenericAllocationHandle second;
    CU(cuMemExportToShareableHandle, &file, first, kind, 0);
    CU(cuMemImportFromShareableHandle, handle, (void *)(uintptr_t)file, kind);
    CU(cuMemImportFromShareableHandle, &second, (void *)(uintptr_t)file, kind);
    close(file);
    CU(cuMemRelease, second);
    CU(cuMemRelease, first);
    return CUDA_SUCCESS;
}

static void information() {
    size_t available, total;
    CHECK(cudaMemGetInfo(&available, &total));
    printf("free %zu of %zu\n", available >> 20, total >> 20);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *until = options.text("--until", nullptr);
    const char *file = options.text("--progress", nullptr);
    options.done();

    Taken taken;
    information();
    take("plain", taken, plain);
    information();
    for (int i = 0; i < taken.count; i++) {
        CHECK(cudaFree(taken.at[i]));
    }
    take("pool", taken, [](void **at) { return cudaMallocAsync(at, STEP, 0); });
    for (int i = 0; i < taken.count; i++) {
        CHECK(cudaFreeAsync(taken.at[i], 0));
    }
    CHECK(cudaDeviceSynchronize());
    take("arrays", taken, [](void **at) {
        cudaChannelFormatDesc words = cudaCreateChannelDesc<uint32_t>();
        return cudaMallocArray((cudaArray_t *)at, &words, 1024, STEP / 4096);
    });
    for (int i = 0; i < taken.count; i++) {
        CHECK(cudaFreeArray((cudaArray_t)taken.at[i]));
    }
    take("mipmaps", taken, [](void **at) {
        cudaChannelFormatDesc words = cudaCreateChannelDesc<uint32_t>();
        // With its other levels a third more.
        return cudaMallocMipmappedArray((cudaMipmappedArray_t *)at, &words, make_cudaExtent(1024, STEP / 4096, 0), 10);
    });
    for (int i = 0; i < taken.count; i++) {
        CHECK(cudaFreeMipmappedArray((cudaMipmappedArray_t)taken.at[i]));
    }
    take("pieces", taken, [](void **at) {
        CUresult result = piece((CUmemGenericAllocationHandle *)at, STEP);
        return result == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation : (cudaError_t)result;
    });
    for (int i = 0; i < taken.count; i++) {
        CU(cuMemRelease, (CUmemGenericAllocationHandle)taken.at[i]);
    }
    take("imported", taken, [](void **at) {
        CUresult result = imported((CUmemGenericAllocationHandle *)at, STEP);
        return result == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation : (cudaError_t)result;
    });
    for (int i = 0; i < taken.count; i++) {
        CU(cuMemRelease, (CUmemGenericAllocationHandle)taken.at[i]);
    }
    take("pinned", taken, [](void **at) { return cudaMallocHost(at, STEP); });
    for (int i = 0; i < taken.count; i++) {
        CHECK(cudaFreeHost(taken.at[i]));
    }
    void *kept;
    CHECK(cudaMalloc(&kept, 8 << 20));
    CUmemGenericAllocationHandle piece_kept;
    REQUIRE(piece(&piece_kept, 8 << 20) == CUDA_SUCCESS);
    progress(file, 1);
    while (until && access(until, F_OK) != 0) {
        usleep(1000);
    }
    take("more", taken, plain);
    information();
    return 0;
}
