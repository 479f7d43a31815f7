// Settings for core dumps of GPUs, of two contexts and of those to come, changed again and again and compared with what was set. No
// kernel fails, so there is no dump.
//
//   coredumps [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//
// Prints what the settings are at the end, and "digest D" of what a kernel has counted. FILE holds the iterations done.
#include "driver.h"

struct Settings {
    bool on_exception;
    unsigned flags;
    char file[64];
};

// Settings of the current context; or, if `global`, those that new contexts begin with.
static void set(bool global, const Settings &s) {
    bool dumps = s.on_exception;
    unsigned flags = s.flags;
    size_t one = sizeof dumps, four = sizeof flags, length = strlen(s.file) + 1;
    if (global) {
        CU(cuCoredumpSetAttributeGlobal, CU_COREDUMP_ENABLE_ON_EXCEPTION, &dumps, &one);
        CU(cuCoredumpSetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, &four);
        CU(cuCoredumpSetAttributeGlobal, CU_COREDUMP_FILE, (void *)s.file, &length);
    } else {
        CU(cuCoredumpSetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &dumps, &one);
        CU(cuCoredumpSetAttribute, CU_COREDUMP_GENERATION_FLAGS, &flags, &four);
        CU(cuCoredumpSetAttribute, CU_COREDUMP_FILE, (void *)s.file, &length);
    }
}

static void expect(bool global, const Settings &s) {
    bool dumps = !s.on_exception;
    unsigned flags = ~0u;
    char file[1024] = "";
    size_t one = sizeof dumps, four = sizeof flags, room = sizeof file;
    if (global) {
        CU(cuCoredumpGetAttributeGlobal, CU_COREDUMP_ENABLE_ON_EXCEPTION, &dumps, &one);
        CU(cuCoredumpGetAttributeGlobal, CU_COREDUMP_GENERATION_FLAGS, &flags, &four);
        CU(cuCoredumpGetAttributeGlobal, CU_COREDUMP_FILE, file, &room);
    } else {
        CU(cuCoredumpGetAttribute, CU_COREDUMP_ENABLE_ON_EXCEPTION, &dumps, &one);
        CU(cuCoredumpGetAttribute, CU_COREDUMP_GENERATION_FLAGS, &flags, &four);
        CU(cuCoredumpGetAttribute, CU_COREDUMP_FILE, file, &room);
    }
    REQUIRE(dumps == s.on_exception);
    REQUIRE(flags == s.flags);
    REQUIRE(strcmp(file, s.file) == 0);
}

static Settings of(uint64_t number) {
    Settings s;
    s.on_exception = number % 3 == 0;
    s.flags = (unsigned)(mix(number) % 64);
    snprintf(s.file, sizeof s.file, "core.number.%llu", (unsigned long long)number);
    return s;
}

__global__ void count(uint64_t *counter, uint64_t round) { *counter = *counter * 31 + round; }

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    CHECK(cudaFree(nullptr));
    uint64_t *counter, counted = 0;
    CHECK(cudaMalloc(&counter, 8));
    CHECK(cudaMemset(counter, 0, 8));
    CUcontext first, second;
    CU(cuCtxGetCurrent, &first);
    CUdevice device;
    CU(cuCtxGetDevice, &device);

    Settings global = of(1), of_first = of(2);
    set(true, global);
    set(false, of_first);
    // A later context begins with the settings for all, and its flags ask for dumps.
    CUctxCreateParams params;
    memset(&params, 0, sizeof params);
    CU(cuCtxCreate, &second, &params, CU_CTX_COREDUMP_ENABLE, device);
    Settings of_second = global;
    of_second.on_exception = true;
    for (uint64_t round = 1; round <= iterations; round++) {
        expect(false, of_second);
        CU(cuCtxSetCurrent, first);
        expect(false, of_first);
        expect(true, global);
        count<<<1, 1>>>(counter, round);
        CHECK(cudaGetLastError());
        Settings next = of(10 + round);
        switch (round % 3) {
        case 0:
            set(true, global = next);
            break;
        case 1:
            set(false, of_first = next);
            break;
        default:
            CU(cuCtxSetCurrent, second);
            set(false, of_second = next);
        }
        CU(cuCtxSetCurrent, second);
        sleep_us(pause_us);
        progress(progress_file, round);
    }
    CU(cuCtxDestroy, second);
    CU(cuCtxSetCurrent, first);
    CHECK(cudaMemcpy(&counted, counter, 8, cudaMemcpyDeviceToHost));
    const Settings all[] = {global, of_first, of_second};
    for (const Settings &s : all) {
        printf("%s %s, flags %u\n", s.file, s.on_exception ? "on exceptions" : "never", s.flags);
    }
    printf("digest %016llx\n", (unsigned long long)digest(&counted, 8));
    return 0;
}
