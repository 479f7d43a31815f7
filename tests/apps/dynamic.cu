// A program that is not linked against CUDA: it loads the driver by name when it runs, finds functions by their symbols and
// by asking the driver, makes a context of its own and builds its kernels from text.
//
//   dynamic [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "named", "digest D".
#include "app.h"

#include <cuda.h>
#include <dlfcn.h>

const uint32_t N = 1024;

static const char *const TEXT = R"(.version 7.0
.target sm_70
.address_size 64
.visible .global .align 8 .u64 salt = 5;
.visible .entry step(.param .u64 data, .param .u32 round)
{
    .reg .u32 %r<6>;
    .reg .u64 %a<4>, %s;
    ld.param.u64 %a1, [data];
    cvta.to.global.u64 %a1, %a1;
    ld.param.u32 %r1, [round];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r2, %r2, %r3, %r4;
    mul.wide.u32 %a2, %r2, 4;
    add.u64 %a1, %a1, %a2;
    ld.global.u32 %r5, [%a1];
    ld.global.u64 %s, [salt];
    cvt.u32.u64 %r3, %s;
    mad.lo.u32 %r5, %r5, 1664525, %r1;
    xor.b32 %r5, %r5, %r3;
    shf.l.wrap.b32 %r5, %r5, %r5, 7;
    st.global.u32 [%a1], %r5;
    ret;
}
)";

static void must(CUresult result, const char *what) {
    if (result != CUDA_SUCCESS) {
        fprintf(stderr, "%s: %d\n", what, (int)result);
        exit(3);
    }
}
#define MUST(call) must(call, #call)

static void *library;
template <typename F> F *symbol(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "the driver has no %s\n", name);
        exit(3);
    }
    return (F *)found;
}
// By the exported symbol, whose name may end in a version.
#define SYMBOL(name) auto *p_##name = symbol<decltype(name)>(#name)
#define VERSIONED(name, exported) auto *p_##name = symbol<decltype(name)>(exported)

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 40), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library);
    SYMBOL(cuInit);
    SYMBOL(cuDeviceGet);
    SYMBOL(cuDeviceGetName);
    SYMBOL(cuModuleLoadData);
    SYMBOL(cuModuleGetFunction);
    SYMBOL(cuLaunchKernel);
    SYMBOL(cuCtxSynchronize);
    SYMBOL(cuModuleUnload);
    VERSIONED(cuCtxDestroy, "cuCtxDestroy_v2");
    VERSIONED(cuMemAlloc, "cuMemAlloc_v2");
    VERSIONED(cuMemcpyHtoD, "cuMemcpyHtoD_v2");
    VERSIONED(cuModuleGetGlobal, "cuModuleGetGlobal_v2");
    auto *create = symbol<CUresult(CUcontext *, unsigned int, CUdevice)>("cuCtxCreate_v2");
    auto *ask = symbol<CUresult(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *)>("cuGetProcAddress_v2");

    CUdevice device;
    REQUIRE(p_cuDeviceGet(&device, 0) == CUDA_ERROR_NOT_INITIALIZED);
    MUST(p_cuInit(0));
    MUST(p_cuDeviceGet(&device, 0));
    char name[100];
    MUST(p_cuDeviceGetName(name, sizeof name, device));
    printf("%s\n", name[0] ? "named" : "nameless");
    // One more function, as newer programs find them all.
    CUresult (*to_host)(void *, CUdeviceptr, size_t);
    CUdriverProcAddressQueryResult found;
    MUST(ask("cuMemcpyDtoH", (void **)&to_host, 13000, 0, &found));
    REQUIRE(found == CU_GET_PROC_ADDRESS_SUCCESS);

    CUcontext context;
    MUST(create(&context, 0, device));
    CUdeviceptr data;
    MUST(p_cuMemAlloc(&data, N * 4));
    static uint32_t host[N];
    for (uint32_t i = 0; i < N; i++) {
        host[i] = (uint32_t)mix(i);
    }
    MUST(p_cuMemcpyHtoD(data, host, sizeof host));
    CUmodule module;
    CUfunction step;
    CUdeviceptr salt;
    size_t size;
    MUST(p_cuModuleLoadData(&module, TEXT));
    MUST(p_cuModuleGetFunction(&step, module, "step"));
    MUST(p_cuModuleGetGlobal(&salt, &size, module, "salt"));
    REQUIRE(size == 8);
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        uint32_t number = (uint32_t)round;
        void *parameters[] = {&data, &number};
        for (int i = 0; i < 8; i++) {
            MUST(p_cuLaunchKernel(step, N / 128, 1, 1, 128, 1, 1, 0, nullptr, parameters, nullptr));
        }
        if (round % 5 == 0) {
            uint64_t word = 0;
            MUST(to_host(&word, data + round * 4, 4));
            state = digest(&word, 8, state);
            MUST(p_cuMemcpyHtoD(salt, &word, 8));
        }
        if (round % 8 == 0) { // the code once more, its globals as they are at first
            MUST(p_cuCtxSynchronize());
            MUST(p_cuModuleUnload(module));
            MUST(p_cuModuleLoadData(&module, TEXT));
            MUST(p_cuModuleGetFunction(&step, module, "step"));
            MUST(p_cuModuleGetGlobal(&salt, &size, module, "salt"));
        }
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    MUST(to_host(host, data, sizeof host));
    printf("digest %016llx\n", (unsigned long long)digest(host, sizeof host, state));
    MUST(p_cuCtxDestroy(context));
    return 0;
}
