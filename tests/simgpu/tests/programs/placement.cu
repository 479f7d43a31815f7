// Where code lies: by what is there when it is first used.
#include <cstring>

#include "check.h"

#include <cuda.h>

#define CU(call) REQUIRE((call) == CUDA_SUCCESS)

// Tells the address of one of its functions.
static const char CODE[] = R"(
.version 7.0
.target sm_75
.address_size 64
.func (.param .b32 out) same(.param .b32 in)
{
    .reg .b32 %r<2>;
    ld.param.b32 %r1, [in];
    st.param.b32 [out], %r1;
    ret;
}
.visible .entry tell(.param .u64 to)
{
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    mov.u64 %rd2, same;
    st.global.u64 [%rd1], %rd2;
    ret;
}
)";

static CUdeviceptr told;

static CUmodule load() {
    CUmodule module;
    CU(cuModuleLoadData(&module, CODE));
    return module;
}

static unsigned long long use(CUmodule module) {
    CUfunction tell;
    unsigned long long address;
    void *params[] = {&told};
    CU(cuModuleGetFunction(&tell, module, "tell"));
    CU(cuLaunchKernel(tell, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr));
    CU(cuMemcpyDtoH(&address, told, 8));
    return address;
}

int main() {
    CUdevice device;
    CUcontext context, other;
    CU(cuInit(0));
    CU(cuDeviceGet(&device, 0));
    CU(cuDevicePrimaryCtxRetain(&context, device));
    CU(cuCtxSetCurrent(context));
    CU(cuMemAlloc(&told, 8));

    // By the order of first uses, not of loads.
    CUmodule first = load(), second = load(), third = load();
    unsigned long long low = use(second), middle = use(first), high = use(third);
    REQUIRE(low < middle && middle < high);
    // What is unloaded leaves its place to the next.
    CU(cuModuleUnload(second));
    CUmodule fourth = load();
    REQUIRE(use(fourth) == low && use(first) == middle && use(third) == high);
    // Another context has blocks of its own.
    CU(cuCtxCreate(&other, nullptr, 0, device));
    unsigned long long elsewhere = use(load());
    REQUIRE(elsewhere >> 21 != low >> 21);
    CU(cuCtxDestroy(other));
    CU(cuCtxSetCurrent(context));
    CU(cuCtxCreate(&other, nullptr, 0, device));
    REQUIRE(use(load()) == elsewhere);
    // A function that was not used is not loaded.
    CUfunction tell;
    CUfunctionLoadingState state;
    CU(cuModuleGetFunction(&tell, load(), "tell"));
    CU(cuFuncIsLoaded(&state, tell));
    REQUIRE(state == CU_FUNCTION_LOADING_STATE_UNLOADED);
    CU(cuFuncLoad(tell));
    CU(cuFuncIsLoaded(&state, tell));
    REQUIRE(state == CU_FUNCTION_LOADING_STATE_LOADED);
    printf("ok\n");
}
