// Code linked at run time: functions and variables of one text used by another, in a linker that is finished in a later
// iteration than it was begun in; what is undefined, and what comes too late.
//
//   linker [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "value V". FILE holds the iterations done.
#include "driver.h"

static const char USER[] = R"(
.version 7.0
.target sm_75
.address_size 64
.extern .func (.param .b32 result) turned(.param .b32 number);
.extern .global .align 4 .u32 count;
.global .align 4 .u32 own = 3;
.visible .entry step(.param .u64 value)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    .param .b32 argument;
    .param .b32 answer;
    ld.param.u64 %rd1, [value];
    cvta.to.global.u64 %rd2, %rd1;
    ld.global.u32 %r1, [%rd2];
    st.param.b32 [argument], %r1;
    call.uni (answer), turned, (argument);
    ld.param.b32 %r2, [answer];
    mov.u64 %rd3, own;
    ld.global.u32 %r3, [%rd3];
    mov.u64 %rd4, count;
    ld.global.u32 %r4, [%rd4];
    mad.lo.u32 %r5, %r2, %r3, %r4;
    st.global.u32 [%rd2], %r5;
    ret;
}
)";

static const char PROVIDER[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 count = 10;
.global .align 4 .u32 own = 1000;
.visible .func (.param .b32 result) turned(.param .b32 number)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<3>;
    ld.param.b32 %r1, [number];
    mov.u64 %rd1, count;
    atom.global.add.u32 %r2, [%rd1], 1;
    mov.u64 %rd2, own;
    ld.global.u32 %r3, [%rd2];
    xor.b32 %r4, %r1, %r3;
    shf.l.wrap.b32 %r5, %r4, %r4, 7;
    st.param.b32 [result], %r5;
    ret;
}
)";

static char info[512], errors[512];

static CUlinkState begin() {
    static CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, CU_JIT_ERROR_LOG_BUFFER,
                                     CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    static void *values[4];
    values[0] = info;
    values[2] = errors;
    values[1] = values[3] = (void *)sizeof info;
    CUlinkState state;
    CU(cuLinkCreate, 4, options, values, &state);
    CU(cuLinkAddData, state, CU_JIT_INPUT_PTX, (void *)USER, sizeof USER, "user", 0, nullptr, nullptr);
    return state;
}

static CUmodule end(CUlinkState state) {
    void *cubin;
    size_t size;
    CU(cuLinkAddData, state, CU_JIT_INPUT_PTX, (void *)PROVIDER, sizeof PROVIDER, "provider", 0, nullptr, nullptr);
    CU(cuLinkComplete, state, &cubin, &size);
    REQUIRE(size > 0);
    CUmodule module;
    CU(cuModuleLoadData, &module, cubin);
    CU(cuLinkDestroy, state);
    return module;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 40);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    unsigned *value, said = 1;
    CHECK(cudaMalloc(&value, 4));
    CHECK(cudaMemcpy(value, &said, 4, cudaMemcpyHostToDevice));
    CUmodule module = end(begin());
    for (uint64_t i = 0; i < iterations; i++) {
        CUlinkState begun = begin();
        progress(file, i + 1);
        sleep_us(sleep);
        CUfunction step;
        CU(cuModuleGetFunction, &step, module, "step");
        void *parameters[] = {&value};
        for (int n = 0; n < 3; n++) {
            CU(cuLaunchKernel, step, 1, 1, 1, 1, 1, 1, 0, 0, parameters, nullptr);
        }
        CU(cuCtxSynchronize);
        // What the last one has counted is gone with it.
        CU(cuModuleUnload, module);
        module = end(begun);

        CUlinkState alone = begin();
        void *cubin;
        size_t size;
        REQUIRE(ASK(cuLinkComplete, alone, &cubin, &size) != CUDA_SUCCESS);
        REQUIRE(strlen(errors) > 0);
        CU(cuLinkDestroy, alone);
        CUlinkState wrong = begin();
        static char nonsense[] = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry e() { no.such";
        FAILS(CUDA_ERROR_INVALID_PTX, cuLinkAddData, wrong, CU_JIT_INPUT_PTX, nonsense, sizeof nonsense, "wrong", 0, nullptr,
              nullptr);
        FAILS(CUDA_ERROR_FILE_NOT_FOUND, cuLinkAddFile, wrong, CU_JIT_INPUT_PTX, "/nowhere.ptx", 0, nullptr, nullptr);
        CU(cuLinkDestroy, wrong);
    }
    CHECK(cudaMemcpy(&said, value, 4, cudaMemcpyDeviceToHost));
    printf("value %u\n", said);
    return 0;
}
