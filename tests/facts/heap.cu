// Whether the heap of `malloc` in kernels can be saved and come back as a whole: where it lies, whether the driver tells its range,
// and whether all that `malloc` knows lies in it.
//
//   heap [--what describe] [--limit-mib 0] [--file heap.bin] [--before 0] [--small 0]
//
// --what   describe  addresses that kernels get, and what the driver says of them
//          same      lists are made, the heap is copied; lists are freed and others made; the heap is copied back: the first lists must be
//                    whole, and `malloc` must give out neither their memory nor less than it would have
//          save      makes lists and writes the heap to a file
//          load      in another process: the same after reading the heap from that file, where no kernel has made a list
//          when      what the driver takes, and whether the limit can be set, after the code is loaded and after it has run
//          places    where a variable of the heap's size lies that is there before, and where the heap is when that is gone; with
//                    --fillers, variables of 2 MiB stay before it
// --limit-mib  the heap's size; 0: as the driver has it
// --fillers    how many
// --load-first 1: the kernel that allocates is loaded before the variables
// --before     so many MiB are allocated before anything else, and code is loaded
#include "facts.h"

#include <malloc.h>
#include <sys/personality.h>

struct Node {
    Node *next;
    uint32_t words, seed;
    uint32_t content[1];
};

const unsigned BLOCKS = 64, THREADS = 64, LISTS = BLOCKS * THREADS;

__host__ __device__ inline uint32_t mixed(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352dU;
    x ^= x >> 15;
    x *= 0x846ca68bU;
    return x ^ (x >> 16);
}

// Each thread allocates and frees by turns, and keeps a list.
static __global__ void make_lists(Node **heads, uint32_t rounds, uint32_t seed) {
    uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, state = mixed(thread + seed * 7919);
    Node *head = heads[thread];
    for (uint32_t i = 0; i < rounds; i++) {
        state = mixed(state + i);
        if (state % 3 == 0 && head) {
            Node *next = head->next;
            free(head);
            head = next;
            continue;
        }
        uint32_t words = 1 + state % (state % 17 == 0 ? 700 : 24);
        Node *node = (Node *)malloc(sizeof(Node) + words * 4);
        if (!node) {
            continue;
        }
        node->next = head;
        node->words = words;
        node->seed = state;
        for (uint32_t w = 0; w < words; w++) {
            node->content[w] = mixed(state + w);
        }
        head = node;
    }
    heads[thread] = head;
}

static __global__ void free_lists(Node **heads) {
    uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    for (Node *node = heads[thread]; node;) {
        Node *next = node->next;
        free(node);
        node = next;
    }
    heads[thread] = nullptr;
}

// out: nodes, bad words, a digest
static __global__ void check_lists(Node **heads, unsigned long long *out) {
    uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long nodes = 0, bad = 0, digest = 0;
    for (Node *node = heads[thread]; node; node = node->next) {
        nodes++;
        digest += (unsigned long long)mixed(node->seed) * (thread + 1) + (unsigned long long)node;
        for (uint32_t w = 0; w < node->words; w++) {
            bad += node->content[w] != mixed(node->seed + w);
        }
    }
    atomicAdd(&out[0], nodes);
    atomicAdd(&out[1], bad);
    atomicAdd(&out[2], digest);
}

// Takes all that there is. out: blocks, the lowest address, the end of the highest
static __global__ void exhaust(uint32_t size, unsigned long long *out, uint64_t **chain) {
    unsigned long long blocks = 0, low = ~0ull, high = 0;
    uint64_t *before = *chain;
    for (uint64_t *at; (at = (uint64_t *)malloc(size)); blocks++) {
        for (uint32_t w = 1; w < size / 8; w++) {
            at[w] = ~0ull;
        }
        at[0] = (uint64_t)before;
        before = at;
        low = (unsigned long long)at < low ? (unsigned long long)at : low;
        high = (unsigned long long)at + size > high ? (unsigned long long)at + size : high;
    }
    *chain = before;
    out[0] = blocks;
    out[1] = low;
    out[2] = high;
}

static __global__ void free_chain(uint64_t **chain) {
    for (uint64_t *at = *chain; at;) {
        uint64_t *next = (uint64_t *)at[0];
        free(at);
        at = next;
    }
    *chain = nullptr;
}

static __global__ void some(unsigned long long *out) {
    const uint32_t sizes[] = {16, 80, 1000, 4096, 100000, 1 << 20};
    for (int i = 0; i < 6; i++) {
        void *at = malloc(sizes[i]);
        out[i] = (unsigned long long)at;
        if (threadIdx.x == 0) {
            free(at);
        }
    }
}

static __global__ void move_words(uint64_t *to, const uint64_t *from, size_t words) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < words; i += (size_t)gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}

struct Range {
    CUdeviceptr base = 0;
    size_t size = 0;
};

struct Heap {
    Node **heads;
    uint64_t **chain;
    unsigned long long *out;
    Range range;

    Heap() {
        CUdeviceptr at;
        NEED(cuMemAlloc, &at, LISTS * sizeof(Node *) + 8);
        NEED(cuMemsetD8, at, 0, LISTS * sizeof(Node *) + 8);
        heads = (Node **)at;
        chain = (uint64_t **)(at + LISTS * sizeof(Node *));
        out = (unsigned long long *)new_pinned(4096);
    }
    void wait() {
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
    }
    void describe(Line &line) {
        memset(out, 0, 64);
        some<<<1, 1>>>(out);
        wait();
        std::string all;
        for (int i = 0; i < 6; i++) {
            char text[40];
            snprintf(text, sizeof text, "%s\"%llx\"", i ? ", " : "", out[i]);
            all += text;
        }
        line.raw("addresses", "[" + all + "]");
        size_t limit = 0;
        NEED(cuCtxGetLimit, &limit, CU_LIMIT_MALLOC_HEAP_SIZE);
        line.number("limit", (double)limit);
        CUdeviceptr at = (CUdeviceptr)out[0], base = 0;
        size_t size = 0;
        line.result("range_call", ASK(cuMemGetAddressRange, &base, &size, at)).address("base", base).number("size", (double)size);
        range = {base, size};
        CUdeviceptr start = 0;
        size_t length = 0;
        line.result("range_start", ASK(cuPointerGetAttribute, &start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at)).address("start", start);
        line.result("range_size", ASK(cuPointerGetAttribute, &length, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at)).number("length", (double)length);
        char content[64];
        line.result("copy", ASK(cuMemcpyDtoH, content, at, 64));
    }
    Range taken(Line &line, const char *name) {
        exhaust<<<1, 1>>>(4096, out, chain);
        wait();
        Range all = {(CUdeviceptr)out[1], (size_t)(out[2] - out[1])};
        line.number((std::string(name) + "_blocks").c_str(), (double)out[0]).address((std::string(name) + "_low").c_str(), out[1])
            .address((std::string(name) + "_high").c_str(), out[2]);
        return all;
    }
    void give_back() {
        free_chain<<<1, 1>>>(chain);
        wait();
    }
    void make(uint32_t seed) {
        make_lists<<<BLOCKS, THREADS>>>(heads, 40, seed);
        wait();
    }
    void drop() {
        free_lists<<<BLOCKS, THREADS>>>(heads);
        wait();
    }
    std::string check() {
        memset(out, 0, 64);
        check_lists<<<BLOCKS, THREADS>>>(heads, out);
        wait();
        char text[120];
        snprintf(text, sizeof text, "{\"nodes\": %llu, \"bad\": %llu, \"digest\": \"%llx\"}", out[0], out[1], out[2]);
        return text;
    }
    void move(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
        move_words<<<264, 256>>>((uint64_t *)to, (const uint64_t *)from, bytes / 8);
        wait();
    }
};

static size_t free_now() {
    size_t free, total;
    NEED(cuMemGetInfo, &free, &total);
    return free;
}

static void load_some() {
    cudaFunction_t function;
    CHECK(cudaGetFuncBySymbol(&function, (const void *)some));
    NEED(cuFuncLoad, (CUfunction)function);
}

static CUmodule variable(size_t bytes, CUdeviceptr *at) {
    char text[200];
    snprintf(text, sizeof text, ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 256 .b8 room[%zu];\n", bytes);
    CUmodule module;
    size_t size;
    NEED(cuModuleLoadData, &module, text);
    NEED(cuModuleGetGlobal, at, &size, module, "room");
    return module;
}

static CUdeviceptr run_some(unsigned long long *out) {
    some<<<1, 1>>>(out);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    return (CUdeviceptr)out[0];
}

static void when(Line &line) {
    unsigned long long *out = (unsigned long long *)new_pinned(4096);
    size_t first = free_now();
    load_some();
    size_t loaded = free_now();
    line.number("taken_by_load", (double)(first - loaded)).result("set_after_load", ASK(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 64 * MIB));
    size_t set = free_now();
    line.number("taken_by_set", (double)(loaded - set)).address("at", run_some(out));
    line.number("taken_by_run", (double)(set - free_now()));
    line.result("set_after_run", ASK(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 32 * MIB));
    line.result("the_same_after_run", ASK(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 64 * MIB));
}

static void places(Line &line, size_t fillers, bool loaded) {
    unsigned long long *out = (unsigned long long *)new_pinned(4096);
    size_t size;
    NEED(cuCtxGetLimit, &size, CU_LIMIT_MALLOC_HEAP_SIZE);
    if (loaded) {
        load_some();
    }
    CUdeviceptr at;
    std::vector<CUmodule> kept;
    std::string all;
    for (size_t i = 0; i < fillers; i++) {
        kept.push_back(variable(2 * MIB, &at));
        char text[40];
        snprintf(text, sizeof text, "%s\"%llx\"", i ? ", " : "", (unsigned long long)at);
        all += text;
    }
    line.raw("fillers", "[" + all + "]");
    CUmodule room = variable(size, &at);
    line.address("variable", at);
    NEED(cuModuleUnload, room);
    line.address("heap_address", run_some(out)).number("size", (double)size);
    room = variable(size, &at);
    line.address("variable_then", at);
    for (CUmodule it : kept) {
        NEED(cuModuleUnload, it);
    }
    line.address("heap_address_then", run_some(out));
}

int main(int argc, char **argv) {
    int now = personality(0xffffffff);
    if (now != -1 && !(now & ADDR_NO_RANDOMIZE) && personality((unsigned long)now | ADDR_NO_RANDOMIZE) != -1) {
        execv("/proc/self/exe", argv);
    }
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_ARENA_MAX, 1);
    Options options(argc, argv);
    std::string what = options.text("--what", "describe"), file = options.text("--file", "heap.bin");
    size_t limit = options.number("--limit-mib", 0) * MIB, before = options.number("--before", 0) * MIB, fillers = options.number("--fillers", 0);
    bool loads_first = options.number("--load-first", 0);
    options.number("--small", 0);
    options.done();

    start_device();
    Line line;
    line.word("what", what.c_str()).number("before", (double)before);
    if (before) {
        CUdeviceptr at;
        NEED(cuMemAlloc, &at, before);
        nothing<<<1, 1>>>();
    }
    if (limit) {
        line.result("set_limit", ASK(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, limit));
    }
    if (what == "when" || what == "places") {
        what == "when" ? when(line) : places(line, fillers, loads_first);
        line.print();
        return 0;
    }
    size_t free_first, free_then, total;
    NEED(cuMemGetInfo, &free_first, &total);
    Heap heap;
    heap.describe(line);
    NEED(cuMemGetInfo, &free_then, &total);
    line.number("taken_mib", (double)(free_first - free_then) / MIB);
    line.result("set_limit_later", ASK(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, 32 * MIB));
    if (what == "describe") {
        heap.taken(line, "all");
        line.print();
        return 0;
    }
    if (!heap.range.size) {
        // The driver does not say it: what kernels get, in whole blocks of 2 MiB.
        Range all = heap.taken(line, "all");
        heap.give_back();
        CUdeviceptr base = all.base / (2 * MIB) * (2 * MIB), end = (all.base + all.size + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
        heap.range = {base, (size_t)(end - base)};
        line.yes("guessed", true);
    }
    CUdeviceptr kept;
    NEED(cuMemAlloc, &kept, heap.range.size);
    if (what == "same") {
        heap.make(1);
        line.raw("made", heap.check());
        std::vector<Node *> heads(LISTS);
        NEED(cuMemcpyDtoH, heads.data(), (CUdeviceptr)heap.heads, LISTS * sizeof(Node *));
        heap.move(kept, heap.range.base, heap.range.size);
        heap.taken(line, "then");
        heap.give_back();
        heap.drop();
        heap.make(2);
        heap.make(3);
        line.raw("others", heap.check());
        heap.move(heap.range.base, kept, heap.range.size);
        NEED(cuMemcpyHtoD, (CUdeviceptr)heap.heads, heads.data(), LISTS * sizeof(Node *));
        line.raw("back", heap.check());
        heap.taken(line, "again");
        line.raw("after_all_is_taken", heap.check());
        heap.give_back();
        heap.make(4);
        line.raw("and_more", heap.check());
        heap.drop();
        heap.taken(line, "last");
        line.print();
        return 0;
    }
    std::vector<char> content(heap.range.size), heads(LISTS * sizeof(Node *));
    if (what == "save") {
        heap.make(1);
        line.raw("made", heap.check());
        heap.move(kept, heap.range.base, heap.range.size);
        NEED(cuMemcpyDtoH, content.data(), kept, heap.range.size);
        NEED(cuMemcpyDtoH, heads.data(), (CUdeviceptr)heap.heads, heads.size());
        heap.taken(line, "then");
        FILE *out = fopen(file.c_str(), "wb");
        REQUIRE(out && fwrite(&heap.range, sizeof heap.range, 1, out) == 1 && fwrite(heads.data(), heads.size(), 1, out) == 1);
        REQUIRE(fwrite(content.data(), content.size(), 1, out) == 1 && fclose(out) == 0);
        line.print();
        return 0;
    }
    REQUIRE(what == "load");
    FILE *in = fopen(file.c_str(), "rb");
    Range saved;
    REQUIRE(in && fread(&saved, sizeof saved, 1, in) == 1 && fread(heads.data(), heads.size(), 1, in) == 1);
    line.yes("same_range", saved.base == heap.range.base && saved.size == heap.range.size);
    if (saved.size == heap.range.size && saved.base == heap.range.base) {
        REQUIRE(fread(content.data(), content.size(), 1, in) == 1);
        NEED(cuMemcpyHtoD, kept, content.data(), content.size());
        heap.move(heap.range.base, kept, heap.range.size);
        NEED(cuMemcpyHtoD, (CUdeviceptr)heap.heads, heads.data(), heads.size());
        line.raw("back", heap.check());
        heap.taken(line, "then");
        line.raw("after_all_is_taken", heap.check());
        heap.give_back();
        heap.make(4);
        line.raw("and_more", heap.check());
        heap.drop();
    }
    line.print();
    return 0;
}
