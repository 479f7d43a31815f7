// Code that is unloaded while other code stays, without end, and contexts that are destroyed while others have code:
// addresses of variables of what stays are kept in device memory.
//
//   unloads [--iterations N] [--sleep-us N] [--table N] [--progress FILE]      200, 0, 0, none
//
// Prints "value V". FILE holds the iterations done. With `--table N` there is, from iteration N on for 50 iterations, code
// whose variable holds the address of a function.
#include "driver.h"

static const char TEXT[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 kept = %u;
.visible .global .align 4 .b8 room[%u];
.visible .entry keep(.param .u64 to)
{
    .reg .b64 %%rd<4>;
    ld.param.u64 %%rd1, [to];
    cvta.to.global.u64 %%rd2, %%rd1;
    mov.u64 %%rd3, kept;
    st.global.u64 [%%rd2], %%rd3;
    ret;
}
.visible .entry step(.param .u64 value, .param .u64 from)
{
    .reg .b32 %%r<5>;
    .reg .b64 %%rd<6>;
    ld.param.u64 %%rd1, [value];
    cvta.to.global.u64 %%rd2, %%rd1;
    ld.param.u64 %%rd3, [from];
    cvta.to.global.u64 %%rd4, %%rd3;
    ld.global.u64 %%rd5, [%%rd4];
    ld.global.u32 %%r1, [%%rd5];
    ld.global.u32 %%r2, [%%rd2];
    mad.lo.u32 %%r3, %%r2, 31, %%r1;
    st.global.u32 [%%rd2], %%r3;
    add.u32 %%r4, %%r1, 1;
    st.global.u32 [%%rd5], %%r4;
    ret;
}
)";

static const char TABLE[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .func (.param .b32 out) next(.param .b32 in)
{
    .reg .b32 %%r<3>;
    ld.param.u32 %%r1, [in];
    add.u32 %%r2, %%r1, 1;
    st.param.b32 [out], %%r2;
    ret;
}
.visible .global .align 8 .u64 table[1] = {next};
.visible .global .align 4 .u32 kept = %u;
.visible .global .align 4 .b8 room[%u];
.visible .entry keep(.param .u64 to)
{
    .reg .b64 %%rd<4>;
    ld.param.u64 %%rd1, [to];
    cvta.to.global.u64 %%rd2, %%rd1;
    mov.u64 %%rd3, kept;
    st.global.u64 [%%rd2], %%rd3;
    ret;
}
)";

// A module, and device memory that holds the address of its variable.
struct Code {
    CUmodule module;
    CUdeviceptr value, kept;

    void load(unsigned number, unsigned room, const char *code = TEXT) {
        char text[2048];
        snprintf(text, sizeof text, code, number, room);
        CU(cuModuleLoadData, &module, text);
        CU(cuMemAlloc, &value, 4);
        CU(cuMemAlloc, &kept, 8);
        CU(cuMemsetD32, value, number, 1);
        void *parameters[] = {&kept};
        launch("keep", parameters);
    }

    void launch(const char *name, void **parameters) {
        CUfunction function;
        CU(cuModuleGetFunction, &function, module, name);
        CU(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
    }

    void step() {
        void *parameters[] = {&value, &kept};
        launch("step", parameters);
    }

    uint32_t said() {
        uint32_t said;
        CU(cuMemcpyDtoH, &said, value, 4);
        return said;
    }

    uint32_t unload() {
        uint32_t last = said();
        CU(cuMemFree, value);
        CU(cuMemFree, kept);
        CU(cuModuleUnload, module);
        return last;
    }
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 200);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const uint64_t table = options.number("--table", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    CUdevice device;
    CUcontext primary, early, late;
    CU(cuInit, 0);
    CU(cuDeviceGet, &device, 0);
    CU(cuDevicePrimaryCtxRetain, &primary, device);
    CU(cuCtxSetCurrent, primary);

    // Code of the primary context that stays, behind code that is unloaded.
    Code gone, stays, again, functions, window[3];
    gone.load(1, 3000);
    stays.load(2, 100);
    gone.unload();
    // A context that is destroyed while a later one has code; each has unloaded some.
    CU(cuCtxCreate, &early, nullptr, 0, device);
    Code first, second, there, here;
    first.load(3, 5000);
    CU(cuCtxCreate, &late, nullptr, 0, device);
    here.load(4, 200);
    there.load(5, 9000);
    second.load(6, 300);
    there.unload();
    CU(cuCtxDestroy, early);
    CU(cuCtxSetCurrent, primary);
    again.load(7, 2000);

    uint32_t value = 0;
    window[0].load(8, 400);
    window[1].load(9, 800);
    for (uint64_t i = 0; i < iterations; i++) {
        if (table && i == table) {
            functions.load(11, 600, TABLE);
        }
        if (table && i == table + 50) {
            value = value * 31 + functions.unload();
        }
        // The next is loaded before the last but one is unloaded; they have other sizes each time.
        window[(i + 2) % 3].load((unsigned)i + 10, 100 + (unsigned)mix(i) % 5000);
        stays.step();
        again.step();
        for (Code &code : window) {
            code.step();
        }
        CU(cuCtxSetCurrent, late);
        here.step();
        second.step();
        CU(cuCtxSynchronize);
        CU(cuCtxSetCurrent, primary);
        progress(file, i + 1);
        sleep_us(sleep);
        value = value * 31 + window[i % 3].unload();
    }
    value = value * 31 + stays.said();
    value = value * 31 + again.said();
    CU(cuCtxSetCurrent, late);
    value = value * 31 + here.said();
    value = value * 31 + second.said();
    printf("value %u\n", value);
    return 0;
}
