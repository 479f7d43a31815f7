// Code made at run time: PTX with other numbers in each iteration, compiled by the driver, used and unloaded, with the
// next loaded before the last is unloaded; options and the compiler's words about PTX that is wrong.
//
//   jit [--iterations N] [--sleep-us N] [--progress FILE]      100, 0, none
//
// Prints "value V". FILE holds the iterations done.
#include "driver.h"

static const char TEXT[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 kept_%u = %u;
.visible .entry step(.param .u64 value)
{
    .reg .b32 %%r<5>;
    .reg .b64 %%rd<4>;
    ld.param.u64 %%rd1, [value];
    cvta.to.global.u64 %%rd2, %%rd1;
    mov.u64 %%rd3, kept_%u;
    ld.global.u32 %%r1, [%%rd3];
    ld.global.u32 %%r2, [%%rd2];
    mad.lo.u32 %%r3, %%r2, %u, %%r1;
    st.global.u32 [%%rd2], %%r3;
    add.u32 %%r4, %%r1, 1;
    st.global.u32 [%%rd3], %%r4;
    ret;
}
)";

static CUmodule compile(unsigned turn) {
    char text[2048];
    snprintf(text, sizeof text, TEXT, turn % 5, turn * 3, turn % 5, turn % 7 + 2);
    char info[256] = "?", error[256] = "?";
    CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER,  CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                              CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, CU_JIT_OPTIMIZATION_LEVEL, CU_JIT_MAX_REGISTERS};
    void *values[] = {info, (void *)sizeof info, error, (void *)sizeof error, (void *)(size_t)(turn % 5),
                      (void *)(size_t)32};
    CUmodule module;
    CU(cuModuleLoadDataEx, &module, text, 6, options, values);
    REQUIRE(strlen(error) == 0);
    // What is wrong is said, and in the buffer's size alone.
    char wrong[2048], said[24];
    memset(said, 'x', sizeof said);
    snprintf(wrong, sizeof wrong, ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry e() { no.such.thing %%r%u", turn);
    CUjit_option where[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *there[] = {said, (void *)(size_t)16};
    CUmodule none;
    FAILS(CUDA_ERROR_INVALID_PTX, cuModuleLoadDataEx, &none, wrong, 2, where, there);
    REQUIRE(strlen(said) > 0 && strlen(said) < 16 && said[16] == 'x');
    return module;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 100);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    unsigned *value, said = 1;
    CHECK(cudaMalloc(&value, 4));
    CHECK(cudaMemcpy(value, &said, 4, cudaMemcpyHostToDevice));
    CUmodule module = compile(0);
    for (uint64_t i = 0; i < iterations; i++) {
        CUfunction step;
        CU(cuModuleGetFunction, &step, module, "step");
        void *parameters[] = {&value};
        CU(cuLaunchKernel, step, 1, 1, 1, 1, 1, 1, 0, 0, parameters, nullptr);
        CU(cuLaunchKernel, step, 1, 1, 1, 1, 1, 1, 0, 0, parameters, nullptr);
        CUmodule next = compile((unsigned)i + 1);
        progress(file, i + 1);
        sleep_us(sleep);
        CU(cuLaunchKernel, step, 1, 1, 1, 1, 1, 1, 0, 0, parameters, nullptr);
        CU(cuCtxSynchronize);
        CU(cuModuleUnload, module);
        module = next;
    }
    CHECK(cudaMemcpy(&said, value, 4, cudaMemcpyDeviceToHost));
    printf("value %u\n", said);
    return 0;
}
