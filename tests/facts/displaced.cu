// Whether anything but code decides where code goes: what a program does between two loads of code may take memory of the driver's
// where the second would lie. A restore loads the same code and does none of that.
//
//   displaced [--what nothing] [--times 6] [--small 0]
//
// --what    nothing; local: a kernel whose threads need much memory of their own; deep: many launches behind a kernel that spins;
//           wide: the same with 4 KiB of parameters each; streams: 128 streams with work; events: 4096 events, recorded; copies: copies
//           from and to pageable memory; graph: a graph of 512 kernels, launched; print: a kernel that prints
//
// "before" are the addresses of variables that were loaded before that, "after" of those behind: compare runs.
#include "facts.h"
#include "spin.h"

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

// A line of JSON, as all that these programs print.
static __global__ void prints(uint32_t *out) { printf("{\"word\": %u}\n", out[64] & 0); }

static std::string addresses_of(const std::string &image, int times) {
    std::string all;
    for (int i = 0; i < times; i++) {
        CUmodule module;
        CUfunction function;
        CUdeviceptr at;
        size_t bytes;
        NEED(cuModuleLoadData, &module, image.data());
        NEED(cuModuleGetFunction, &function, module, "kernel0");
        NEED(cuFuncLoad, function);
        NEED(cuModuleGetGlobal, &at, &bytes, module, "value");
        char text[40];
        snprintf(text, sizeof text, "%s\"%llx\"", i ? ", " : "", (unsigned long long)at);
        all += text;
    }
    return all;
}

static std::string image_beside(const char *program) {
    std::string path = program, data;
    path = path.substr(0, path.rfind('/') + 1) + "image.many.fatbin";
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
template <class Launch> static void behind_a_spin(CUstream stream, int launches, Launch launch) {
    volatile uint32_t *words = new_spin_words();
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
    std::string what = options.text("--what", "nothing");
    Scale scale(options.number("--small", 0));
    int times = (int)options.number("--times", scale.size(6, 1));
    options.done();
    std::string image = image_beside(argv[0]);

    start_device();
    CUstream stream = new_stream();
    auto *out = (uint32_t *)new_pinned(4096);
    warm_up_spin(stream, new_spin_words());
    for (const void *kernel : {(const void *)small, (const void *)wide, (const void *)local, (const void *)prints}) {
        cudaFuncAttributes about;
        CHECK(cudaFuncGetAttributes(&about, kernel));
        cudaFunction_t function;
        CHECK(cudaGetFuncBySymbol(&function, kernel));
        NEED(cuFuncLoad, (CUfunction)function);
    }
    std::string before = addresses_of(image, times);

    if (what == "local") {
        local<<<1, 32, 0, stream>>>(out, 7);
    } else if (what == "deep") {
        behind_a_spin(stream, (int)scale.size(1000, 50), [&] { small<<<1, 1, 0, stream>>>(out); });
    } else if (what == "wide") {
        behind_a_spin(stream, (int)scale.size(1000, 50), [&] { wide<<<1, 1, 0, stream>>>(out, Wide()); });
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
        CUdeviceptr at = map_new(new_piece(64 * MIB), 64 * MIB);
        NEED(cuMemcpyHtoDAsync, at, host.data(), bytes, stream);
        NEED(cuMemcpyDtoHAsync, host.data(), at, bytes, stream);
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
    } else {
        REQUIRE(what == "nothing");
    }
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());

    std::string after = addresses_of(image, times);
    Line().word("what", what.c_str()).raw("before", "[" + before + "]").raw("after", "[" + after + "]").print();
    return 0;
}
