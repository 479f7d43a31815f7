// The driver's own interface, without the runtime: libcuda.so.1 opened by hand, code from PTX text by module and by
// library, launches with both ways of passing parameters, contexts made, pushed, popped and destroyed, events.
//
//   modules [--iterations N] [--sleep-us N] [--progress FILE]      50, 0, none
//
// Prints "attributes ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

#include <cuda.h>
#include <dlfcn.h>

// name(KIND): a pointer to the driver's function, under the name that cuda.h gives it now (cuMemAlloc_v2, ...).
#define FUNCTIONS(name)                                                                                                \
    name(cuInit) name(cuDriverGetVersion) name(cuDeviceGet) name(cuDeviceGetCount) name(cuDeviceGetName)               \
    name(cuDeviceTotalMem) name(cuDeviceGetAttribute) name(cuCtxCreate) name(cuCtxDestroy) name(cuCtxPushCurrent)      \
    name(cuCtxPopCurrent) name(cuCtxSetCurrent) name(cuCtxGetCurrent) name(cuCtxGetDevice) name(cuCtxSynchronize)      \
    name(cuDevicePrimaryCtxRetain) name(cuDevicePrimaryCtxRelease) name(cuModuleLoadData) name(cuModuleUnload)         \
    name(cuModuleGetFunction) name(cuModuleGetGlobal) name(cuLibraryLoadData) name(cuLibraryUnload)                    \
    name(cuLibraryGetKernel) name(cuLibraryGetGlobal) name(cuKernelGetFunction) name(cuFuncGetAttribute)               \
    name(cuLaunchKernel) name(cuMemAlloc) name(cuMemFree) name(cuMemcpyHtoD) name(cuMemcpyDtoH) name(cuMemcpyDtoHAsync)\
    name(cuMemcpyHtoDAsync) name(cuMemsetD32) name(cuMemsetD8Async) name(cuStreamCreate) name(cuStreamDestroy)         \
    name(cuStreamSynchronize) name(cuStreamQuery) name(cuStreamWaitEvent) name(cuEventCreate) name(cuEventRecord)      \
    name(cuEventSynchronize) name(cuEventQuery) name(cuEventElapsedTime) name(cuEventDestroy) name(cuGetErrorName)

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME_(function) #function
#define NAME(function) NAME_(function)
#define DECLARE(function) static decltype(&function) JOIN(p_, function);
FUNCTIONS(DECLARE)

static void open_driver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
#define FIND(function)                                                                                                 \
    JOIN(p_, function) = (decltype(JOIN(p_, function)))dlsym(library, NAME(function));                                 \
    if (!JOIN(p_, function)) {                                                                                         \
        fprintf(stderr, "libcuda.so.1 has no %s\n", NAME(function));                                                   \
        exit(3);                                                                                                       \
    }
    FUNCTIONS(FIND)
}

// CU(cuMemAlloc, &p, n): calls it and ends the program if it fails.
#define CU(function, ...)                                                                                              \
    do {                                                                                                               \
        CUresult cu_result = JOIN(p_, function)(__VA_ARGS__);                                                          \
        if (cu_result != CUDA_SUCCESS) {                                                                               \
            const char *cu_name = "?";                                                                                 \
            JOIN(p_, cuGetErrorName)(cu_result, &cu_name);                                                             \
            fprintf(stderr, "%s:%d: %s: %s (%d)\n", __FILE__, __LINE__, #function, cu_name, (int)cu_result);           \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

// data[i] = data[i] * factor + bias[0] + i for i < count, and `turns` counts blocks.
static const char MODULE[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 turns;
.visible .global .align 8 .b8 table[64];
.visible .entry scale(.param .u64 data, .param .u64 bias, .param .u32 count, .param .u32 factor)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [bias];
    ld.param.u32 %r1, [count];
    ld.param.u32 %r2, [factor];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ne.u32 %p1, %r5, 0;
    @%p1 bra COUNTED;
    mov.u64 %rd3, turns;
    atom.global.add.u32 %r7, [%rd3], 1;
COUNTED:
    setp.ge.u32 %p2, %r6, %r1;
    @%p2 bra DONE;
    cvta.to.global.u64 %rd4, %rd1;
    mul.wide.u32 %rd5, %r6, 4;
    add.s64 %rd6, %rd4, %rd5;
    cvta.to.global.u64 %rd7, %rd2;
    ld.global.u32 %r8, [%rd6];
    ld.global.u32 %r9, [%rd7];
    mad.lo.s32 %r10, %r8, %r2, %r9;
    add.u32 %r11, %r10, %r6;
    st.global.u32 [%rd6], %r11;
DONE:
    ret;
}
)";

// Reverses 32 words in a block's shared memory.
static const char LIBRARY[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .const .align 4 .u32 twist = 2654435769;
.visible .entry reverse(.param .u64 data)
{
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    .shared .align 4 .b8 room[128];
    ld.param.u64 %rd1, [data];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %ctaid.x;
    shl.b32 %r2, %r1, 5;
    mov.u32 %r3, %tid.x;
    add.u32 %r4, %r2, %r3;
    mul.wide.u32 %rd3, %r4, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.u32 %r5, [%rd4];
    ld.const.u32 %r6, [twist];
    xor.b32 %r5, %r5, %r6;
    shl.b32 %r7, %r3, 2;
    mov.u32 %r8, room;
    add.u32 %r9, %r8, %r7;
    st.shared.u32 [%r9], %r5;
    bar.sync 0;
    xor.b32 %r10, %r7, 124;
    add.u32 %r9, %r8, %r10;
    ld.shared.u32 %r11, [%r9];
    st.global.u32 [%rd4], %r11;
    ret;
}
)";

const uint32_t COUNT = 1000;
const uint32_t ROOM = 1024;

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 50), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    open_driver();
    CU(cuInit, 0);
    int version, devices, major, threads;
    size_t total;
    char name[96];
    CUdevice device, current_device;
    CU(cuDriverGetVersion, &version);
    CU(cuDeviceGetCount, &devices);
    CU(cuDeviceGet, &device, 0);
    CU(cuDeviceGetName, name, sizeof name, device);
    CU(cuDeviceTotalMem, &total, device);
    CU(cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
    REQUIRE(version >= 12000 && devices > 0 && strlen(name) > 0 && total > 0 && major >= 7);

    // The primary context, and another of our own on top of it.
    CUcontext primary, own, now;
    CU(cuDevicePrimaryCtxRetain, &primary, device);
    CU(cuCtxSetCurrent, primary);
    CU(cuCtxCreate, &own, nullptr, 0, device);
    CU(cuCtxGetCurrent, &now);
    REQUIRE(now == own);
    CU(cuCtxGetDevice, &current_device);
    REQUIRE(current_device == device);
    CU(cuCtxPopCurrent, &now);
    REQUIRE(now == own);
    CU(cuCtxGetCurrent, &now);
    REQUIRE(now == primary);

    // A module belongs to a context, a library to none.
    CUmodule module;
    CUfunction scale, reverse;
    CUlibrary library;
    CUkernel kernel;
    CUdeviceptr turns, table, twist;
    size_t bytes;
    CU(cuModuleLoadData, &module, MODULE);
    CU(cuModuleGetFunction, &scale, module, "scale");
    CU(cuModuleGetGlobal, &turns, &bytes, module, "turns");
    REQUIRE(bytes == 4);
    CU(cuModuleGetGlobal, &table, &bytes, module, "table");
    REQUIRE(bytes == 64);
    CU(cuLibraryLoadData, &library, LIBRARY, nullptr, nullptr, 0, nullptr, nullptr, 0);
    CU(cuLibraryGetKernel, &kernel, library, "reverse");
    CU(cuLibraryGetGlobal, &twist, &bytes, library, "twist");
    REQUIRE(bytes == 4);
    CU(cuKernelGetFunction, &reverse, kernel);

    CU(cuFuncGetAttribute, &threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, scale);
    REQUIRE(threads >= 128 && threads <= 1024);
    int shared;
    CU(cuFuncGetAttribute, &shared, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, reverse);
    REQUIRE(shared >= 128 && shared <= 4096); // Hopper adds 1 KiB of its own
    printf("attributes ok\n");
    fflush(stdout);

    CUdeviceptr data, bias, other_data;
    CUstream stream, side;
    CUevent begun, ended;
    CU(cuMemAlloc, &data, ROOM * 4);
    CU(cuMemAlloc, &bias, 4);
    CU(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CU(cuStreamCreate, &side, CU_STREAM_NON_BLOCKING);
    CU(cuEventCreate, &begun, CU_EVENT_DEFAULT);
    CU(cuEventCreate, &ended, CU_EVENT_DEFAULT);
    CU(cuMemsetD32, data, 12345, ROOM);
    CU(cuMemsetD32, turns, 0, 1);
    CU(cuMemsetD32, table, 77, 16);
    CU(cuCtxSynchronize, );

    // Memory of the second context, which stays there while the first works.
    uint32_t host[ROOM], turned;
    for (uint32_t i = 0; i < ROOM; i++) {
        host[i] = (uint32_t)mix(i);
    }
    CU(cuCtxPushCurrent, own);
    CU(cuMemAlloc, &other_data, ROOM * 4);
    CU(cuMemcpyHtoD, other_data, host, ROOM * 4);
    CU(cuCtxPopCurrent, &now);

    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        uint32_t count = COUNT, factor = 2 * (uint32_t)round + 1, bias_value = (uint32_t)mix(state);
        float ms = -1;
        CU(cuMemcpyHtoD, bias, &bias_value, 4);
        CU(cuEventRecord, begun, stream);
        if (round % 2) {
            void *parameters[] = {&data, &bias, &count, &factor};
            CU(cuLaunchKernel, scale, (COUNT + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters, nullptr);
        } else {
            // The same as one block of bytes.
            struct {
                CUdeviceptr data, bias;
                uint32_t count, factor;
            } block = {data, bias, count, factor};
            size_t size = sizeof block;
            void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &block, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                             CU_LAUNCH_PARAM_END};
            CU(cuLaunchKernel, scale, (COUNT + 127) / 128, 1, 1, 128, 1, 1, 0, stream, nullptr, extra);
        }
        CU(cuEventRecord, ended, stream);
        CU(cuStreamWaitEvent, side, ended, 0);
        // A kernel where a function is meant, as the runtime does.
        void *parameters[] = {&data};
        CU(cuLaunchKernel, round % 3 ? reverse : (CUfunction)kernel, ROOM / 32, 1, 1, 32, 1, 1, 0, side, parameters,
           nullptr);
        CU(cuMemcpyDtoHAsync, host, data, sizeof host, side);
        CU(cuStreamSynchronize, side);
        CU(cuEventSynchronize, ended);
        CU(cuEventQuery, ended);
        CU(cuEventElapsedTime, &ms, begun, ended);
        REQUIRE(ms >= 0);
        CU(cuStreamQuery, side);
        state = digest(host, sizeof host, state);
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    CU(cuMemcpyDtoH, &turned, turns, 4);
    REQUIRE(turned == iterations * ((COUNT + 127) / 128));
    CU(cuMemcpyDtoH, host, table, 64);
    REQUIRE(host[0] == 77 && host[15] == 77);
    CU(cuMemcpyDtoH, &turned, twist, 4);
    REQUIRE(turned == 2654435769u);

    CU(cuCtxPushCurrent, own);
    CU(cuMemcpyDtoH, host, other_data, ROOM * 4);
    REQUIRE(host[5] == (uint32_t)mix(5));
    state = digest(host, sizeof host, state);
    CU(cuMemFree, other_data);
    CU(cuCtxDestroy, own);
    CU(cuCtxSetCurrent, primary);

    CU(cuMemFree, data);
    CU(cuMemFree, bias);
    CU(cuEventDestroy, begun);
    CU(cuEventDestroy, ended);
    CU(cuStreamDestroy, stream);
    CU(cuStreamDestroy, side);
    CU(cuModuleUnload, module);
    CU(cuLibraryUnload, library);
    CU(cuDevicePrimaryCtxRelease, device);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
