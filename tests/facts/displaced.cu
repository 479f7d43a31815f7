// Whether anything but code decides where code goes: what a program does between two loads of code may take room in the driver's
// address space, where the second would lie. A restore loads the same code and does none of that.
//
//   displaced [--what nothing] [--first nothing] [--reserve 0] [--times 8] [--small 0]
//
// --what    nothing; local: a kernel whose threads need much memory of their own; deep: many launches behind a kernel that spins;
//           wide: the same with 4 KiB of parameters each; streams: 128 streams with work; events: 4096 events, recorded; copies: copies
//           from and to pageable memory; graph: a graph of 512 kernels, launched; print: a kernel that can print; assert: one that can
//           fail; heap: one that allocates memory; cooperative: one that is launched cooperatively; pinned: pinned memory; stack: a larger limit
// --first   one of these, before any code
// --reserve so many MiB are reserved for code before that
//
// "before" are the addresses of variables that were loaded before that, "after" of those behind, which do not fit into the room that the
// driver has for code already: compare runs.
#include "facts.h"
#include "spin.h"

#include <cassert>
#include <cooperative_groups.h>
#include <malloc.h>
#include <sys/personality.h>

struct Wide {
    char bytes[4000];
};

static __global__ void small(uint32_t *out) { out[64] += 1; }

static __global__ void wide(uint32_t *out, Wide wide) { out[65] += wide.bytes[out[64] % 4000]; }

// Dynamic indices keep it out of registers.
static __global__ void local(uint32_t *out, uint32_t n) {
    uint32_t own[16384];
    for (uint32_t i = 0; i < 16384; i++) {
        own[(i * n) % 16384] = i + threadIdx.x;
    }
    out[66] = own[n];
}

// They can, and do not.
static __global__ void prints(uint32_t *out) {
    if (out[64] == 12345) {
        printf("%u\n", out[64]);
    }
}

static __global__ void fails(uint32_t *out) { assert(out[64] != 12345); }

static __global__ void allocates(uint32_t *out) {
    void *at = malloc(64);
    out[67] = at != nullptr;
    free(at);
}

static __global__ void cooperative(uint32_t *out) {
    cooperative_groups::this_grid().sync();
    out[68] = 1;
}

// What is there before any code, so that it moves none.
struct Has {
    CUstream stream;
    uint32_t *out;
    volatile uint32_t *words;
    CUdeviceptr memory;
};

// Has the driver take blocks of 2 MiB for code and keep them, as many as fill so many bytes: variables of CHUNK fill the blocks, and one in
// each stays.
static std::string reserve_for_code(size_t bytes) {
    const size_t CHUNK = 128 << 10, BLOCK = 2 * MIB;
    char text[200];
    snprintf(text, sizeof text, ".version 7.0\n.target sm_75\n.address_size 64\n.visible .global .align 256 .b8 room[%zu];\n", CHUNK);
    std::vector<CUmodule> gone;
    std::vector<uint64_t> blocks;
    double begin = now_ns();
    for (size_t i = 0; i < bytes / CHUNK; i++) {
        CUmodule module;
        CUdeviceptr at;
        size_t size;
        NEED(cuModuleLoadData, &module, text);
        NEED(cuModuleGetGlobal, &at, &size, module, "room");
        bool known = false;
        for (uint64_t block : blocks) {
            known |= block == at / BLOCK;
        }
        known ? gone.push_back(module) : blocks.push_back(at / BLOCK);
    }
    for (CUmodule module : gone) {
        NEED(cuModuleUnload, module);
    }
    char line[100];
    snprintf(line, sizeof line, "{\"blocks\": %zu, \"ms\": %.1f}", blocks.size(), (now_ns() - begin) / 1e6);
    return line;
}

// Loads all kernels of an image.
static void load_functions(const std::string &image, int times) {
    for (int i = 0; i < times; i++) {
        CUmodule module;
        CUfunction function;
        NEED(cuModuleLoadData, &module, image.data());
        for (int k = 0; k < 96; k++) {
            char name[20];
            snprintf(name, sizeof name, "kernel%d", k);
            NEED(cuModuleGetFunction, &function, module, name);
            NEED(cuFuncLoad, function);
        }
    }
}

static std::string mib(size_t bytes) { return std::to_string(bytes / MIB); }

static size_t free_memory() {
    size_t free, total;
    NEED(cuMemGetInfo, &free, &total);
    return free;
}

static std::string addresses_of(const std::string &image, const char *variable, int times) {
    std::string all;
    for (int i = 0; i < times; i++) {
        CUmodule module;
        CUfunction function;
        CUdeviceptr at;
        size_t bytes;
        NEED(cuModuleLoadData, &module, image.data());
        NEED(cuModuleGetFunction, &function, module, "kernel0");
        NEED(cuFuncLoad, function);
        NEED(cuModuleGetGlobal, &at, &bytes, module, variable);
        char text[40];
        snprintf(text, sizeof text, "%s\"%llx\"", i ? ", " : "", (unsigned long long)at);
        all += text;
    }
    return all;
}

static std::string image_beside(const char *program, const char *name) {
    std::string path = program, data;
    path = path.substr(0, path.rfind('/') + 1) + name;
    FILE *file = fopen(path.c_str(), "rb");
    REQUIRE(file);
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) {
        data.append(buffer, n);
    }
    fclose(file);
    return data;
}

// So many launches while the device is busy with another kernel.
template <class Launch> static void behind_a_spin(CUstream stream, volatile uint32_t *words, int launches, Launch launch) {
    words[0] = 0;
    Watchdog watchdog(words, 20000);
    spin_until<<<1, 1, 0, stream>>>(words);
    wait_for_begin(words);
    for (int i = 0; i < launches; i++) {
        launch();
    }
    words[0] = 1;
    NEED(cuStreamSynchronize, stream);
    REQUIRE(!watchdog.call_off());
}

static void act(const std::string &what, const Scale &scale, const Has &has) {
    CUstream stream = has.stream;
    uint32_t *out = has.out;
    if (what == "local") {
        local<<<1, 32, 0, stream>>>(out, 7);
    } else if (what == "deep") {
        behind_a_spin(stream, has.words, (int)scale.size(1000, 50), [&] { small<<<1, 1, 0, stream>>>(out); });
    } else if (what == "wide") {
        behind_a_spin(stream, has.words, (int)scale.size(200, 50), [&] { wide<<<1, 1, 0, stream>>>(out, Wide()); });
    } else if (what == "streams") {
        for (int i = 0; i < 128; i++) {
            small<<<1, 1, 0, new_stream()>>>(out);
        }
    } else if (what == "events") {
        for (int i = 0; i < 4096; i++) {
            CUevent event;
            NEED(cuEventCreate, &event, 0);
            NEED(cuEventRecord, event, stream);
        }
    } else if (what == "copies") {
        size_t bytes = scale.size(64 * MIB, MIB);
        std::vector<char> host(bytes);
        NEED(cuMemcpyHtoDAsync, has.memory, host.data(), bytes, stream);
        NEED(cuMemcpyDtoHAsync, host.data(), has.memory, bytes, stream);
    } else if (what == "graph") {
        cudaGraph_t captured;
        cudaGraphExec_t graph;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        for (int i = 0; i < 512; i++) {
            small<<<1, 1, 0, stream>>>(out);
        }
        CHECK(cudaStreamEndCapture(stream, &captured));
        CHECK(cudaGraphInstantiate(&graph, captured, 0));
        CHECK(cudaGraphLaunch(graph, stream));
    } else if (what == "print") {
        prints<<<1, 1, 0, stream>>>(out);
    } else if (what == "assert") {
        fails<<<1, 1, 0, stream>>>(out);
    } else if (what == "heap") {
        allocates<<<1, 1, 0, stream>>>(out);
    } else if (what == "cooperative") {
        void *parameters[] = {&out};
        CHECK(cudaLaunchCooperativeKernel((const void *)cooperative, dim3(2), dim3(32), parameters, 0, stream));
    } else if (what == "pinned") {
        new_pinned(16 * MIB);
    } else if (what == "stack") {
        NEED(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 32768);
    } else {
        REQUIRE(what == "nothing");
    }
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv) {
    int now = personality(0xffffffff);
    if (now != -1 && !(now & ADDR_NO_RANDOMIZE) && personality((unsigned long)now | ADDR_NO_RANDOMIZE) != -1) {
        execv("/proc/self/exe", argv);
    }
    // No mapping of the C library's own between those of the driver.
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_ARENA_MAX, 1);
    Options options(argc, argv);
    std::string what = options.text("--what", "nothing"), first = options.text("--first", "nothing");
    Scale scale(options.number("--small", 0));
    int times = (int)options.number("--times", scale.size(8, 1));
    size_t reserved = options.number("--reserve", 0) * MIB;
    options.done();

    start_device();
    Has has = {new_stream(), (uint32_t *)new_pinned(4096), new_spin_words(), map_new(new_piece(64 * MIB), 64 * MIB)};
    warm_up_spin(has.stream, has.words);
    size_t free_at_first = free_memory();
    std::string made = reserve_for_code(reserved);
    size_t free_then = free_memory();
    act(first, scale, has);
    for (const void *kernel : {(const void *)small, (const void *)wide, (const void *)local, (const void *)prints, (const void *)fails, (const void *)allocates, (const void *)cooperative}) {
        cudaFuncAttributes about;
        CHECK(cudaFuncGetAttributes(&about, kernel));
        cudaFunction_t function;
        CHECK(cudaGetFuncBySymbol(&function, kernel));
        NEED(cuFuncLoad, (CUfunction)function);
    }
    std::string before = addresses_of(image_beside(argv[0], "image.many.fatbin"), "value", times);

    act(what, scale, has);

    std::string after = addresses_of(image_beside(argv[0], "image.large.fatbin"), "large", times);
    load_functions(image_beside(argv[0], "image.many.fatbin"), times);
    size_t free_at_last = free_memory();
    Line().word("what", what.c_str()).word("first", first.c_str()).raw("before", "[" + before + "]").raw("after", "[" + after + "]")
        .raw("reserve", made)
        .raw("mib", "[" + mib(free_at_first - free_then) + ", " + mib(free_then - free_at_last) + "]")
        .print();
    return 0;
}
