// Kernels that reach memory in every way in which one could be mistaken about what they write, one way after the other:
// what a checkpoint expects them to write is counted by Rekindle's reporting mode, and compared with what they do write.
//
//   accesses [--case NAME] [--until FILE] [--progress FILE]
//
// Cases: all of them (the default), or one of const, struct, extern, atomic, late, graph (where what kernels are given says
// it) and global, hidden, neighbour, const_cast, graph_hidden (where it does not). Prints "NAME DIGEST" of each. With --until
// it waits for that file at the end.
#include "app.h"

const int N = 1024;

__device__ uint32_t counter;
__device__ uint32_t *kept;

__global__ void add(const uint32_t *a, const uint32_t *b, uint32_t *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i] + 1;
}

struct Views {
    const uint32_t *from;
    int n;
    uint32_t *to;
};

__global__ void in_struct(Views views, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < views.n) views.to[i] = views.from[i] * 3 + by;
}

extern "C" __global__ void without_signature(const uint32_t *from, uint32_t *to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) to[i] = from[i] ^ 0x55;
}

__global__ void count(uint32_t *counts, const uint32_t *from, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(&counts[from[i] % 16], 1u);
}

// Its own code's variable, which no parameter names.
__global__ void count_in_global(int by) { atomicAdd(&counter, (uint32_t)by); }

__global__ void keep(uint32_t *pointer) { kept = pointer; }

// Through a pointer that it finds in a variable.
__global__ void through_global(int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && kept) kept[i] += 5;
}

__global__ void put_pointer(uint32_t **table, uint32_t *pointer) { table[1] = pointer; }

// Through a pointer that it finds in memory.
__global__ void through_table(uint32_t *const *table, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) table[1][i] += 7;
}

// Called with null first.
__global__ void maybe(uint32_t *to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (to && i < n) to[i] += 11;
}

// Beyond the end of what it is given.
__global__ void beyond(uint32_t *to, int64_t distance) { to[distance] += 13; }

__global__ void against_its_word(const uint32_t *to, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) const_cast<uint32_t *>(to)[i] += 17;
}

static uint32_t *a, *b, *c, *d;

static void say(const char *name) {
    static uint32_t host[N];
    uint64_t so_far = 1;
    for (uint32_t *of : {a, b, c, d}) {
        CHECK(cudaMemcpy(host, of, sizeof host, cudaMemcpyDeviceToHost));
        so_far = digest(host, sizeof host, so_far);
    }
    printf("%s %016llx\n", name, (unsigned long long)so_far);
}

static bool wanted(const char *which, const char *name) { return !strcmp(which, "all") || !strcmp(which, name); }

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *which = options.text("--case", "all"), *until = options.text("--until", nullptr);
    const char *progress_file = options.text("--progress", nullptr);
    bool apart = options.number("--apart", 0);
    options.done();

    uint32_t start[N];
    uint32_t **table;
    for (int i = 0; i < N; i++) start[i] = (uint32_t)mix(i);
    // In one slab, side by side; or each in physical memory of its own.
    size_t size = apart ? 4 << 20 : sizeof start;
    for (uint32_t **of : {&a, &b, &c, &d}) {
        CHECK(cudaMalloc(of, size));
        CHECK(cudaMemcpy(*of, start, sizeof start, cudaMemcpyHostToDevice));
    }
    CHECK(cudaMalloc(&table, apart ? size : 4 * sizeof *table));
    CHECK(cudaMemset(table, 0, 4 * sizeof *table));

    if (wanted(which, "const")) {
        add<<<N / 128, 128>>>(a, b, c, N);
        say("const");
    }
    if (wanted(which, "struct")) {
        in_struct<<<N / 128, 128>>>(Views{a, N, d}, 3);
        say("struct");
    }
    if (wanted(which, "extern")) {
        without_signature<<<N / 128, 128>>>(a, c, N);
        say("extern");
    }
    if (wanted(which, "atomic")) {
        count<<<N / 128, 128>>>(d, a, N);
        say("atomic");
    }
    if (wanted(which, "global")) {
        count_in_global<<<1, 32>>>(2);
        keep<<<1, 1>>>(b);
        through_global<<<N / 128, 128>>>(N);
        CHECK(cudaDeviceSynchronize());
        through_global<<<N / 128, 128>>>(N);
        say("global");
    }
    if (wanted(which, "hidden")) {
        put_pointer<<<1, 1>>>(table, c);
        through_table<<<N / 128, 128>>>(table, N);
        say("hidden");
    }
    if (wanted(which, "late")) {
        maybe<<<N / 128, 128>>>(nullptr, N);
        maybe<<<N / 128, 128>>>(d, N);
        say("late");
    }
    if (wanted(which, "neighbour")) {
        beyond<<<1, 1>>>(a, b - a);
        say("neighbour");
    }
    if (wanted(which, "const_cast")) {
        against_its_word<<<N / 128, 128>>>(a, N);
        say("const_cast");
    }
    if (wanted(which, "graph")) {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(cudaMemsetAsync(c, 1, sizeof start, stream));
        add<<<N / 128, 128, 0, stream>>>(a, c, d, N);
        without_signature<<<N / 128, 128, 0, stream>>>(d, b, N);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        for (int i = 0; i < 3; i++) CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        say("graph");
    }
    if (wanted(which, "graph_hidden")) {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamCreate(&stream));
        put_pointer<<<1, 1, 0, stream>>>(table, a);
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        through_table<<<N / 128, 128, 0, stream>>>(table, N);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        for (int i = 0; i < 2; i++) CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        say("graph_hidden");
    }
    fflush(stdout);
    progress(progress_file, 1);
    while (until && access(until, F_OK) != 0) sleep_us(2000);
    return 0;
}
