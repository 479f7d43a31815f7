// What modules and libraries say of themselves: their kernels by enumeration and by name, names and parameters, where
// each comes from, and that handles are the same whenever they are asked for.
//
//   enumerate [--iterations N] [--sleep-us N] [--progress FILE]      50, 0, none
//
// Prints a line for each kernel and "value V". FILE holds the iterations done.
#include "driver.h"

static const char CODE[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 counter = 5;
.visible .entry add(.param .u32 much)
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u32 %r1, [much];
    mov.u64 %rd1, counter;
    atom.global.add.u32 %r2, [%rd1], %r1;
    ret;
}
.visible .entry scale(.param .u8 small, .param .u32 factor, .param .align 16 .b8 unused[32])
{
    .reg .b32 %r<3>;
    .reg .b64 %rd<2>;
    ld.param.u32 %r1, [factor];
    mov.u64 %rd1, counter;
    ld.global.u32 %r2, [%rd1];
    mul.lo.u32 %r2, %r2, %r1;
    st.global.u32 [%rd1], %r2;
    ret;
}
)";

static void launch(CUfunction f, void **params) { CU(cuLaunchKernel, f, 1, 1, 1, 1, 1, 1, 0, 0, params, nullptr); }

static void describe(CUkernel kernel) {
    const char *name;
    CU(cuKernelGetName, &name, kernel);
    printf("%s", name);
    size_t offset, size;
    for (size_t i = 0; ASK(cuKernelGetParamInfo, kernel, i, &offset, &size) == CUDA_SUCCESS; i++) {
        printf(" %zu+%zu", offset, size);
    }
    printf("\n");
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 50);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    CUdevice device;
    CUcontext context;
    CU(cuInit, 0);
    CU(cuDeviceGet, &device, 0);
    CU(cuDevicePrimaryCtxRetain, &context, device);
    CU(cuCtxSetCurrent, context);
    CUlibrary library;
    CUmodule module;
    CU(cuLibraryLoadData, &library, CODE, nullptr, nullptr, 0, nullptr, nullptr, 0);
    CU(cuModuleLoadData, &module, CODE);

    unsigned count;
    CUkernel kernels[2];
    CU(cuLibraryGetKernelCount, &count, library);
    REQUIRE(count == 2);
    CU(cuLibraryEnumerateKernels, kernels, 2, library);
    const char *name;
    CU(cuKernelGetName, &name, kernels[0]);
    const bool turned = strcmp(name, "add") != 0;
    for (int i = 0; i < 2; i++) {
        describe(kernels[turned ? 1 - i : i]);
    }
    CUkernel add, scale;
    CU(cuLibraryGetKernel, &add, library, "add");
    CU(cuLibraryGetKernel, &scale, library, "scale");
    REQUIRE(add == kernels[turned] && scale == kernels[!turned]);
    CU(cuKernelSetAttribute, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 60000, scale, device);
    CUmodule placed;
    CUfunction added;
    CU(cuLibraryGetModule, &placed, library);
    CU(cuKernelGetFunction, &added, add);

    for (uint64_t i = 0; i < iterations; i++) {
        CU(cuModuleGetFunctionCount, &count, module);
        REQUIRE(count == 2);
        CUfunction functions[2], by_name, of_library;
        CU(cuModuleEnumerateFunctions, functions, 2, module);
        CU(cuModuleGetFunction, &by_name, module, "scale");
        REQUIRE(by_name == functions[0] || by_name == functions[1]);
        CU(cuFuncGetName, &name, by_name);
        REQUIRE(strcmp(name, "scale") == 0);
        CUmodule of;
        CU(cuFuncGetModule, &of, by_name);
        REQUIRE(of == module);
        CU(cuLibraryGetModule, &of, library);
        REQUIRE(of == placed);
        CU(cuKernelGetFunction, &of_library, add);
        REQUIRE(of_library == added);
        CU(cuFuncGetModule, &of, added);
        REQUIRE(of == placed);
        CUlibrary parent;
        CU(cuKernelGetLibrary, &parent, add);
        REQUIRE(parent == library);
        int value;
        CU(cuKernelGetAttribute, &value, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, scale, device);
        REQUIRE(value == 60000);
        CUfunctionLoadingState state;
        CU(cuFuncLoad, added);
        CU(cuFuncIsLoaded, &state, added);
        REQUIRE(state == CU_FUNCTION_LOADING_STATE_LOADED);
        FAILS(CUDA_ERROR_NOT_FOUND, cuLibraryGetKernel, &add, library, "nothing");
        FAILS(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction, &by_name, module, "nothing");
        CU(cuLibraryGetKernel, &add, library, "add");

        unsigned much = (unsigned)i + 1, factor = 3;
        unsigned char small = 0;
        char unused[32] = {0};
        void *of_add[] = {&much}, *of_scale[] = {&small, &factor, unused};
        launch(added, of_add);
        launch((CUfunction)scale, of_scale);
        CU(cuCtxSynchronize);
        progress(file, i + 1);
        sleep_us(sleep);
    }
    CUdeviceptr counter;
    size_t bytes;
    unsigned value;
    CU(cuLibraryGetGlobal, &counter, &bytes, library, "counter");
    CU(cuMemcpyDtoH, &value, counter, 4);
    printf("value %u\n", value);
    CU(cuLibraryUnload, library);
    CU(cuModuleUnload, module);
    CU(cuDevicePrimaryCtxRelease, device);
    return 0;
}
