// Writes memory at every step, and nothing else, in one of the ways in which one could be mistaken about what a kernel
// writes. A checkpoint that copies while it runs must foresee that, or find it out.
//
//   hidden [--way NAME] [--steps N] [--kib N] [--ballast-kib N] [--until FILE] [--sleep-us N] [--progress FILE]
//          table, 60, 256, 64 (at lower addresses, never used), none: it ends after N steps; with FILE when that exists, 0, none
//
// Ways: table (through a pointer in device memory), global (in a device global), neighbour (out of another allocation's end),
// const_cast, graph (table, launched by a graph), which no parameter names; and late (a pointer that was null at the first
// launch), struct (inside a struct), extern (of a kernel without a signature), atomic, bulk (16 bytes at a time), copy (a bulk
// copy of the device's), which one does; and held: as late, and each kernel of the legacy stream waits, once there is FILE.go,
// until there is FILE.
//
// Prints a digest of the memory, and "hidden ok" if each word is what it must be after so many steps.
#include "app.h"

__device__ uint32_t *kept;

__device__ uint32_t index() { return blockIdx.x * blockDim.x + threadIdx.x; }
__host__ __device__ uint32_t turned(uint32_t value, uint32_t i) { return value * 1664525u + i; }

__global__ void put(uint32_t **table, uint32_t *pointer) {
    table[3] = pointer;
    kept = pointer;
}

__global__ void turn(uint32_t *const *table, uint32_t words) {
    uint32_t i = index();
    if (i < words) table[3][i] = turned(table[3][i], i);
}

__global__ void through_global(uint32_t words) {
    uint32_t i = index();
    if (i < words) kept[i] = turned(kept[i], i);
}

__global__ void beyond(uint32_t *to, int64_t distance, uint32_t words) {
    uint32_t i = index();
    if (i < words) to[distance + i] = turned(to[distance + i], i);
}

__global__ void against_its_word(const uint32_t *to, uint32_t words) {
    uint32_t i = index();
    if (i < words) const_cast<uint32_t *>(to)[i] = turned(to[i], i);
}

__global__ void maybe(uint32_t *to, uint32_t words) {
    uint32_t i = index();
    if (to && i < words) to[i] = turned(to[i], i);
}

struct Views {
    uint32_t words;
    uint64_t unused;
    uint32_t *to;
};

__global__ void in_struct(Views views) {
    uint32_t i = index();
    if (i < views.words) views.to[i] = turned(views.to[i], i);
}

extern "C" __global__ void without_signature(uint32_t words, uint32_t *to) {
    uint32_t i = index();
    if (i < words) to[i] = turned(to[i], i);
}

__global__ void by_atomics(uint32_t *to, uint32_t words) {
    uint32_t i = index();
    if (i < words) atomicAdd(&to[i], turned(to[i], i) - to[i]);
}

__global__ void in_bulk(uint4 *to, uint32_t count) {
    uint32_t i = index();
    if (i < count) {
        uint4 four = to[i];
        to[i] = make_uint4(turned(four.x, 4 * i), turned(four.y, 4 * i + 1), turned(four.z, 4 * i + 2), turned(four.w, 4 * i + 3));
    }
}

__global__ void held(uint32_t *to, uint32_t words, volatile uint32_t *go) {
    while (!*go) {
    }
    uint32_t i = index();
    if (i < words) to[i] = turned(to[i], i);
}

__global__ void into(uint32_t *scratch, const uint32_t *from, uint32_t words) {
    uint32_t i = index();
    if (i < words) scratch[i] = turned(from[i], i);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *way = options.text("--way", "table");
    const uint64_t least = options.number("--steps", 60);
    const uint32_t words = (uint32_t)(options.number("--kib", 256) << 8);
    const uint64_t ballast_bytes = options.number("--ballast-kib", 64) << 10;
    const char *until = options.text("--until", nullptr);
    const uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    uint32_t **table, *memory, *ballast, *scratch;
    const uint32_t blocks = (words + 255) / 256;
    CHECK(cudaMalloc(&ballast, ballast_bytes));
    CHECK(cudaMemset(ballast, 7, ballast_bytes));
    CHECK(cudaMalloc(&table, 8 * sizeof *table));
    CHECK(cudaMalloc(&memory, words * sizeof *memory));
    CHECK(cudaMalloc(&scratch, words * sizeof *scratch));
    CHECK(cudaMemset(table, 0, 8 * sizeof *table));
    CHECK(cudaMemset(memory, 1, words * sizeof *memory));
    put<<<1, 1>>>(table, memory);
    maybe<<<blocks, 256>>>(nullptr, words);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    turn<<<blocks, 256, 0, stream>>>(table, words);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));

    char holds[512];
    volatile uint32_t *go;
    snprintf(holds, sizeof holds, "%s.go", until ? until : "");
    CHECK(cudaHostAlloc((void **)&go, sizeof *go, cudaHostAllocMapped));
    *go = 1;
    uint64_t steps = 0;
    while (until ? access(until, F_OK) != 0 : steps < least) {
        if (!strcmp(way, "table")) {
            turn<<<blocks, 256>>>(table, words);
        } else if (!strcmp(way, "global")) {
            through_global<<<blocks, 256>>>(words);
        } else if (!strcmp(way, "neighbour")) {
            beyond<<<blocks, 256>>>(ballast, memory - ballast, words);
        } else if (!strcmp(way, "const_cast")) {
            against_its_word<<<blocks, 256>>>(memory, words);
        } else if (!strcmp(way, "graph")) {
            CHECK(cudaGraphLaunch(exec, stream));
        } else if (!strcmp(way, "late")) {
            maybe<<<blocks, 256>>>(memory, words);
        } else if (!strcmp(way, "struct")) {
            in_struct<<<blocks, 256>>>(Views{words, 1, memory});
        } else if (!strcmp(way, "extern")) {
            without_signature<<<blocks, 256>>>(words, memory);
        } else if (!strcmp(way, "atomic")) {
            by_atomics<<<blocks, 256>>>(memory, words);
        } else if (!strcmp(way, "bulk")) {
            in_bulk<<<blocks, 256>>>((uint4 *)memory, words / 4);
        } else if (!strcmp(way, "copy")) {
            into<<<blocks, 256>>>(scratch, memory, words);
            CHECK(cudaMemcpyAsync(memory, scratch, words * sizeof *memory, cudaMemcpyDeviceToDevice));
        } else if (!strcmp(way, "held")) {
            *go = access(holds, F_OK) != 0;
            held<<<blocks, 256>>>(memory, words, go);
            while (!*go) {
                progress(progress_file, 1000000);
                *go = access(until, F_OK) == 0;
                sleep_us(1000);
            }
        } else {
            options.fail("--way");
        }
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(progress_file, ++steps);
        sleep_us(pause_us);
    }
    uint32_t *found = (uint32_t *)malloc(words * sizeof *found);
    REQUIRE(found);
    CHECK(cudaMemcpy(found, memory, words * sizeof *found, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < words; i++) {
        uint32_t value = 0x01010101u;
        for (uint64_t step = 0; step < steps; step++) {
            value = turned(value, i);
        }
        REQUIRE(found[i] == value);
    }
    if (!until) {
        printf("digest %016llx\n", (unsigned long long)digest(found, words * sizeof *found));
    }
    printf("hidden ok\n");
    CHECK(cudaFreeHost((void *)go));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(scratch));
    CHECK(cudaFree(memory));
    CHECK(cudaFree(table));
    CHECK(cudaFree(ballast));
    return 0;
}
