// Every way to launch a kernel: pointers to parameters, one buffer of them, a configuration with attributes, the calls
// from before CUDA 4, cooperative launches with a barrier of the grid, clusters, events by attribute.
//
//   launches [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "sum S" and "cooperative C". FILE holds the iterations done.
#include "driver.h"

#include <cooperative_groups.h>

static const char MODULE[] = R"(
.version 7.8
.target sm_90
.address_size 64
.visible .entry add(.param .u64 sum, .param .u32 much, .param .f32 half)
{
    .reg .b32 %r<8>;
    .reg .b64 %rd<3>;
    .reg .f32 %f<3>;
    ld.param.u64 %rd1, [sum];
    ld.param.u32 %r1, [much];
    ld.param.f32 %f1, [half];
    add.f32 %f2, %f1, %f1;
    cvt.rzi.u32.f32 %r2, %f2;
    mad.lo.u32 %r3, %r1, %r2, 0;
    mov.u32 %r4, %cluster_nctaid.x;
    mul.lo.u32 %r5, %r3, %r4;
    mov.u32 %r6, %cluster_ctarank;
    add.u32 %r5, %r5, %r6;
    cvta.to.global.u64 %rd2, %rd1;
    atom.global.add.u32 %r7, [%rd2], %r5;
    ret;
}
)";

// Each block adds what all have written before the barrier: wrong unless they have waited for each other.
__global__ void meet(unsigned *room, unsigned *sum, unsigned turn) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    if (threadIdx.x == 0) {
        room[blockIdx.x] = blockIdx.x * turn;
    }
    grid.sync();
    if (threadIdx.x == 0) {
        unsigned mine = 0;
        for (unsigned i = 0; i < gridDim.x; i++) {
            mine += room[i];
        }
        atomicAdd(sum, mine);
    }
    grid.sync();
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 40);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    unsigned *sums, *room;
    CHECK(cudaMalloc(&sums, 8));
    CHECK(cudaMalloc(&room, 16 * 4));
    CHECK(cudaMemset(sums, 0, 8));
    CHECK(cudaDeviceSynchronize());
    CUmodule module;
    CUfunction add;
    CUstream stream;
    CUevent event;
    CU(cuModuleLoadData, &module, MODULE);
    CU(cuModuleGetFunction, &add, module, "add");
    CU(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CU(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);

    struct Parameters {
        unsigned *sum;
        unsigned much;
        float half;
    };
    unsigned *sum = sums, *together = sums + 1;
    for (uint64_t i = 0; i < iterations; i++) {
        Parameters parameters = {sum, (unsigned)i + 1, 0.5f};
        void *pointers[] = {&parameters.sum, &parameters.much, &parameters.half};
        size_t size = sizeof parameters;
        void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &parameters, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                         CU_LAUNCH_PARAM_END};
        CU(cuLaunchKernel, add, 3, 2, 1, 32, 1, 1, 0, stream, pointers, nullptr);
        CU(cuLaunchKernel, add, 1, 1, 1, 7, 3, 2, 0, stream, nullptr, extra);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel, add, 1, 1, 1, 1, 1, 1, 0, stream, pointers, extra);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel, add, 1, 1, 1, 2048, 1, 1, 0, stream, pointers, nullptr);

        CUlaunchAttribute attributes[3];
        memset(attributes, 0, sizeof attributes);
        attributes[0].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        attributes[0].value.clusterDim.x = 2;
        attributes[0].value.clusterDim.y = attributes[0].value.clusterDim.z = 1;
        attributes[1].id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
        attributes[1].value.launchCompletionEvent.event = event;
        attributes[2].id = CU_LAUNCH_ATTRIBUTE_PRIORITY;
        CUlaunchConfig config;
        memset(&config, 0, sizeof config);
        config.gridDimX = 4;
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
        config.blockDimX = 32;
        config.hStream = stream;
        config.attrs = attributes;
        config.numAttrs = 3;
        CU(cuLaunchKernelEx, &config, add, pointers, nullptr);
        CU(cuEventSynchronize, event);
        CU(cuStreamSynchronize, stream);

        // These settings stay from one launch to the next, but the launches above have changed them.
        CU(cuFuncSetBlockShape, add, 8, 2, 1);
        CU(cuFuncSetSharedSize, add, 64);
        CU(cuParamSetSize, add, sizeof(Parameters));
        CU(cuParamSetv, add, 0, &sum, 8);
        CU(cuParamSetf, add, 12, 1.5f);
        CU(cuParamSeti, add, 8, (unsigned)i);
        CU(cuLaunchGrid, add, 2, 3);
        CU(cuLaunchGridAsync, add, 1, 1, stream);
        CU(cuLaunch, add);

        unsigned turn = (unsigned)i;
        void *of_meet[] = {&room, &together, &turn};
        CHECK(cudaLaunchCooperativeKernel(meet, dim3(16), dim3(64), of_meet, 0, nullptr));
        CHECK(cudaDeviceSynchronize());
        cudaError_t many = cudaLaunchCooperativeKernel(meet, dim3(1 << 20), dim3(64), of_meet, 0, nullptr);
        REQUIRE(many == cudaErrorCooperativeLaunchTooLarge);
        (void)cudaGetLastError();

        CUDA_LAUNCH_PARAMS one;
        memset(&one, 0, sizeof one);
        one.function = add;
        one.gridDimX = 2;
        one.gridDimY = one.gridDimZ = one.blockDimX = one.blockDimY = one.blockDimZ = 1;
        one.hStream = stream;
        one.kernelParams = pointers;
        CU(cuLaunchCooperativeKernelMultiDevice, &one, 1, 0);
        CU(cuStreamSynchronize, stream);
        progress(file, i + 1);
        sleep_us(sleep);
    }
    unsigned said[2];
    CHECK(cudaMemcpy(said, sums, 8, cudaMemcpyDeviceToHost));
    printf("sum %u\ncooperative %u\n", said[0], said[1]);
    return 0;
}
