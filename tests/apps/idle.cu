// Uses the GPU a little and then waits: a client that others look at, and that costs nothing.
//
//   idle [--launches N] [--refused N] [--heap N] [--heap-mib N] [--until FILE] [--progress FILE]      3, 0, 0, as it is, none, none
//
// Launches N kernels, makes N calls that no checkpointing layer can pass on, launches N kernels that call malloc on the
// device, whose heap has N MiB. Then writes 1 to the progress file, prints "ready", and waits until FILE is there; without one it ends.
#include "app.h"

#include <unistd.h>

__global__ void add(uint32_t *sum) { atomicAdd(sum, 1); }

__global__ void allocate(uint32_t *sum) {
    uint32_t *own = (uint32_t *)malloc(4);
    if (own) {
        *own = 1;
        atomicAdd(sum, *own);
        free(own);
    }
}

typedef int (*Lock)(int pid, void *arguments);

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t launches = options.number("--launches", 3);
    uint64_t refused = options.number("--refused", 0);
    uint64_t heap = options.number("--heap", 0);
    uint64_t heap_mib = options.number("--heap-mib", 0);
    const char *until = options.text("--until", nullptr);
    const char *file = options.text("--progress", nullptr);
    options.done();

    uint32_t *sum, host = 0;
    if (heap_mib) {
        CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, heap_mib << 20));
    }
    CHECK(cudaMalloc(&sum, 4));
    CHECK(cudaMemset(sum, 0, 4));
    for (uint64_t i = 0; i < launches; i++) {
        add<<<1, 1>>>(sum);
    }
    for (uint64_t i = 0; i < heap; i++) {
        allocate<<<1, 1>>>(sum);
    }
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&host, sum, 4, cudaMemcpyDeviceToHost));
    REQUIRE(host == launches + heap);

    // The driver's own checkpoints, of no process: an error on any driver.
    void *lock = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion("cuCheckpointProcessLock", &lock, 12080, cudaEnableDefault, &found));
    for (uint64_t i = 0; i < refused; i++) {
        REQUIRE(found == cudaDriverEntryPointSuccess && ((Lock)lock)(-1, nullptr) != 0);
    }
    printf("ready\n");
    fflush(stdout);
    progress(file, 1);
    while (until && access(until, F_OK) != 0) {
        sleep_us(20000);
    }
    return 0;
}
