// build: ptx
// State of every kind, at rest or held, for an image that is kept in the tree (tests/e2e/kept): code loaded both ways and
// its variables, streams, events, commands behind a host callback, a graph, memory that the program maps itself, pools, an
// array with a texture and a surface, pinned memory.
//
//   kept --go FILE --progress FILE
//
// FILE holds 1 when all is there and a callback waits; from when the file of --go is there, everything is changed by commands
// that do not wait, then waited for; 2 when that is over. Then it sleeps for ever.
#include "driver.h"

static const int WORDS = 1024, SIDE = 16;
static const size_t GRANULE = 2 << 20;
static const char *go;

__device__ uint32_t counter = 7;
__device__ uint32_t table[64];

// Variables are changed by one stream only.
__global__ void stir(uint32_t *data, uint32_t n, uint32_t round, bool variables) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = data[i] + round + i;
        data[i] = (x ^ (x >> 15)) * 0x2c1b3c6du;
        if (variables && i < 64) {
            table[i] = table[i] * 31 + data[i];
        }
        if (variables && i == 0) {
            counter += round;
        }
    }
}

__global__ void look(cudaTextureObject_t texture, cudaSurfaceObject_t surface, float *out) {
    int x = threadIdx.x, y = blockIdx.x;
    float value = tex2D<float>(texture, (float)x + 0.5f, (float)y + 0.5f);
    out[y * SIDE + x] += value;
    surf2Dwrite(value * 2.0f + 1.0f, surface, x * (int)sizeof(float), (y + 1) % SIDE);
}

// Loaded by hand: adds to each word what lies in a variable.
static const char module_text[] = ".version 7.0\n.target sm_75\n.address_size 64\n"
                                  ".visible .global .align 4 .u32 step = 5;\n"
                                  ".visible .entry add(.param .u64 at) {\n"
                                  " .reg .u32 %r<4>; .reg .u64 %d<4>;\n"
                                  " ld.param.u64 %d1, [at];\n mov.u32 %r1, %tid.x;\n mul.wide.u32 %d2, %r1, 4;\n"
                                  " add.u64 %d3, %d1, %d2;\n ld.global.u32 %r2, [%d3];\n ld.global.u32 %r3, [step];\n"
                                  " add.u32 %r2, %r2, %r3;\n st.global.u32 [%d3], %r2;\n ret;\n}\n";

static void CUDART_CB wait_for_go(void *) {
    while (access(go, F_OK) != 0) {
        sleep_us(1000);
    }
}

static CUmemGenericAllocationHandle piece() {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle;
    CU(cuMemCreate, &handle, GRANULE, &wanted, 0);
    return handle;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    go = options.text("--go", nullptr);
    const char *file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(go);

    cudaStream_t held, after, plain;
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithPriority(&after, cudaStreamNonBlocking, -1));
    CHECK(cudaStreamCreateWithFlags(&plain, cudaStreamNonBlocking));
    cudaEvent_t recorded, between;
    CHECK(cudaEventCreate(&recorded));
    CHECK(cudaEventCreateWithFlags(&between, cudaEventDisableTiming));

    uint32_t *data, *behind, *copied, *pinned, *from_pool, *from_own;
    float *seen;
    CHECK(cudaMalloc(&data, WORDS * 4));
    CHECK(cudaMalloc(&behind, WORDS * 4));
    CHECK(cudaMalloc(&copied, WORDS * 4));
    CHECK(cudaMalloc(&seen, SIDE * SIDE * 4));
    CHECK(cudaMallocHost(&pinned, WORDS * 4));
    uint32_t *device_pinned;
    CHECK(cudaHostGetDevicePointer(&device_pinned, pinned, 0));
    for (int i = 0; i < WORDS; i++) {
        pinned[i] = (uint32_t)mix(i);
    }
    CHECK(cudaMemcpy(data, pinned, WORDS * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(behind, 3, WORDS * 4));
    CHECK(cudaMemset(copied, 0, WORDS * 4));
    CHECK(cudaMemset(seen, 0, SIDE * SIDE * 4));

    CHECK(cudaMallocAsync(&from_pool, WORDS * 4, plain));
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t own;
    uint64_t threshold = 1 << 20;
    CHECK(cudaMemPoolCreate(&own, &properties));
    CHECK(cudaMemPoolSetAttribute(own, cudaMemPoolAttrReleaseThreshold, &threshold));
    CHECK(cudaMallocFromPoolAsync(&from_own, WORDS * 4, own, plain));
    CHECK(cudaMemsetAsync(from_pool, 1, WORDS * 4, plain));
    CHECK(cudaMemsetAsync(from_own, 2, WORDS * 4, plain));

    float plane[SIDE * SIDE];
    for (int i = 0; i < SIDE * SIDE; i++) {
        plane[i] = (float)(i * 3 % 97);
    }
    cudaArray_t array;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&array, &format, SIDE, SIDE, cudaArraySurfaceLoadStore));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, plane, SIDE * 4, SIDE * 4, SIDE, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc how = {};
    how.readMode = cudaReadModeElementType;
    cudaTextureObject_t texture;
    cudaSurfaceObject_t surface;
    CHECK(cudaCreateTextureObject(&texture, &resource, &how, nullptr));
    CHECK(cudaCreateSurfaceObject(&surface, &resource));

    // Two pieces, the first of them mapped twice and without a handle.
    CUdeviceptr segment;
    CU(cuMemAddressReserve, &segment, 8 * GRANULE, 0, 0, 0);
    CUmemGenericAllocationHandle first = piece(), second = piece();
    CU(cuMemMap, segment, GRANULE, 0, first, 0);
    CU(cuMemMap, segment + GRANULE, GRANULE, 0, second, 0);
    CU(cuMemMap, segment + 4 * GRANULE, GRANULE, 0, first, 0);
    CUmemAccessDesc open = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(cuMemSetAccess, segment, 2 * GRANULE, &open, 1);
    CU(cuMemSetAccess, segment + 4 * GRANULE, GRANULE, &open, 1);
    CU(cuMemRelease, first);
    CHECK(cudaMemsetAsync((void *)segment, 0, 2 * GRANULE, plain));
    uint32_t *edge = (uint32_t *)(segment + GRANULE) - WORDS / 2, *again = (uint32_t *)(segment + 4 * GRANULE);

    CUmodule module;
    CUfunction add;
    CUdeviceptr step;
    size_t step_size;
    CU(cuModuleLoadData, &module, module_text);
    CU(cuModuleGetFunction, &add, module, "add");
    CU(cuModuleGetGlobal, &step, &step_size, module, "step");
    void *add_arguments[] = {&copied};

    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(plain, cudaStreamCaptureModeThreadLocal));
    stir<<<WORDS / 128, 128, 0, plain>>>(from_pool, WORDS, 11, true);
    CHECK(cudaMemcpyAsync(from_own, from_pool, WORDS * 2, cudaMemcpyDeviceToDevice, plain));
    CHECK(cudaMemsetAsync(from_own + WORDS - 16, 9, 64, plain));
    CHECK(cudaStreamEndCapture(plain, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));

    // Each once: the first launch of a function waits.
    CHECK(cudaGraphLaunch(exec, plain));
    stir<<<WORDS / 128, 128, 0, plain>>>(data, WORDS, 1, true);
    look<<<SIDE, SIDE, 0, plain>>>(texture, surface, seen);
    CU(cuLaunchKernel, add, 1, 1, 1, 256, 1, 1, 0, plain, add_arguments, nullptr);
    CHECK(cudaEventRecord(recorded, plain));
    CHECK(cudaDeviceSynchronize());

    // What is held: `after` waits for an event that is recorded behind the callback.
    CHECK(cudaLaunchHostFunc(held, wait_for_go, nullptr));
    stir<<<WORDS / 128, 128, 0, held>>>(behind, WORDS, 2, false);
    CHECK(cudaMemcpyAsync(behind + 512, plane, 256, cudaMemcpyHostToDevice, held));
    CHECK(cudaEventRecord(between, held));
    CHECK(cudaStreamWaitEvent(after, between, 0));
    stir<<<WORDS / 128, 128, 0, after>>>(behind, WORDS, 3, false);
    progress(file, 1);

    wait_for_go(nullptr);
    for (uint32_t round = 20; round < 24; round++) {
        stir<<<WORDS / 128, 128, 0, plain>>>(data, WORDS, round, true);
        stir<<<WORDS / 128, 128, 0, plain>>>(edge, WORDS, round, true);
        stir<<<WORDS / 128, 128, 0, plain>>>(device_pinned, WORDS, round, true);
        CHECK(cudaMemcpyAsync(copied, pinned, WORDS * 2, cudaMemcpyHostToDevice, plain));
        CHECK(cudaMemcpyAsync(copied + WORDS / 2, plane, 512, cudaMemcpyHostToDevice, plain));
        CU(cuLaunchKernel, add, 1, 1, 1, 256, 1, 1, 0, plain, add_arguments, nullptr);
        CHECK(cudaMemsetAsync(again + round, (int)round, 4, plain));
        look<<<SIDE, SIDE, 0, plain>>>(texture, surface, seen);
        CHECK(cudaGraphLaunch(exec, plain));
        CHECK(cudaEventRecord(recorded, plain));
        CHECK(cudaStreamWaitEvent(after, recorded, 0));
        stir<<<WORDS / 128, 128, 0, after>>>(behind, WORDS, round, false);
    }
    CHECK(cudaStreamSynchronize(plain));
    CHECK(cudaDeviceSynchronize());
    progress(file, 2);
    for (;;) {
        pause();
    }
}
