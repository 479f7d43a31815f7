// Makes and destroys everything that there is, round after round: whoever keeps something of it grows. Between rounds
// nothing is there that was not there before the first, but what --leak asks for.
//
//   soak --told FILE [--only NAME,...] [--without NAME,...] [--leak 0] [--progress FILE]
//
// FILE holds how many rounds it is to do, a number of eight digits; when those are done it stands still until the file says
// more, and it ends when that says 00000000. NAMEs are those of `kinds` below. With --leak 1 each round leaves an event,
// with --leak 2 an allocation of the C library's.
#include "driver.h"

#include <pthread.h>

// How many of each small thing a round makes.
const int EACH = 4;
const uint32_t WORDS = 1024;
const size_t GRANULE = 2 << 20;

static uint64_t turn;
static CUdevice device;

__global__ void add(uint32_t *data, uint32_t n, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] += by;
    }
}

static void launch(uint32_t *data, cudaStream_t stream) {
    add<<<WORDS / 128, 128, 0, stream>>>(data, WORDS, (uint32_t)turn);
    CHECK(cudaGetLastError());
}

// Other code in every round, so that none is known already.
static const char TEXT[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 kept = %u;
.visible .entry step(.param .u64 value)
{
    .reg .b32 %%r<4>;
    .reg .b64 %%rd<3>;
    ld.param.u64 %%rd1, [value];
    cvta.to.global.u64 %%rd2, %%rd1;
    ld.global.u32 %%r1, [%%rd2];
    add.u32 %%r2, %%r1, %u;
    st.global.u32 [%%rd2], %%r2;
    ret;
}
)";

static const char *text(unsigned salt) {
    static char made[1024];
    snprintf(made, sizeof made, TEXT, (unsigned)turn * 8 + salt, (unsigned)turn);
    return made;
}

static void run(CUfunction function) {
    CUdeviceptr value;
    CU(cuMemAlloc, &value, 4);
    CU(cuMemsetD32, value, 0, 1);
    void *parameters[] = {&value};
    CU(cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, 0, parameters, nullptr);
    uint32_t got;
    CU(cuMemcpyDtoH, &got, value, 4);
    REQUIRE(got == (uint32_t)turn);
    CU(cuMemFree, value);
}

static void memory() {
    uint32_t *some[EACH];
    for (int i = 0; i < EACH; i++) {
        CHECK(cudaMalloc(&some[i], WORDS * 4 << i * 3));
        CHECK(cudaMemset(some[i], 0, WORDS * 4));
        launch(some[i], nullptr);
    }
    uint32_t *host = (uint32_t *)malloc(WORDS * 4);
    for (uint32_t *one : some) {
        CHECK(cudaMemcpy(host, one, WORDS * 4, cudaMemcpyDeviceToHost));
        REQUIRE(host[7] == (uint32_t)turn);
        CHECK(cudaMemcpy(one, host, WORDS * 4, cudaMemcpyHostToDevice));
        CHECK(cudaFree(one));
    }
    free(host);
    void *none;
    REQUIRE(cudaMalloc(&none, (size_t)1 << 45) == cudaErrorMemoryAllocation);
    cudaGetLastError();
    FAILS(CUDA_ERROR_INVALID_VALUE, cuMemFree, 0x1234567);
}

static void pinned() {
    uint32_t *data, *some[EACH];
    CHECK(cudaMalloc(&data, WORDS * 4));
    for (int i = 0; i < EACH; i++) {
        CHECK(cudaHostAlloc(&some[i], WORDS * 4, i % 2 ? cudaHostAllocMapped : cudaHostAllocPortable));
        memset(some[i], i, WORDS * 4);
        CHECK(cudaMemcpyAsync(data, some[i], WORDS * 4, cudaMemcpyHostToDevice, nullptr));
        launch(some[i], nullptr);
    }
    CHECK(cudaDeviceSynchronize());
    for (uint32_t *one : some) {
        CHECK(cudaFreeHost(one));
    }
    CHECK(cudaFree(data));
}

static void registered() {
    alignas(4096) static uint32_t place[EACH][WORDS * 2];
    for (auto &one : place) {
        CHECK(cudaHostRegister(one, sizeof one, cudaHostRegisterMapped));
        uint32_t *there;
        CHECK(cudaHostGetDevicePointer(&there, one, 0));
        launch(there, nullptr);
    }
    CHECK(cudaDeviceSynchronize());
    for (auto &one : place) {
        CHECK(cudaHostUnregister(one));
    }
}

static void streams() {
    cudaStream_t some[EACH];
    uint32_t *data;
    CHECK(cudaMalloc(&data, WORDS * 4));
    for (int i = 0; i < EACH; i++) {
        CHECK(cudaStreamCreateWithPriority(&some[i], cudaStreamNonBlocking, -(i % 2)));
        launch(data, some[i]);
        REQUIRE(cudaStreamQuery(some[i]) != cudaErrorInvalidValue);
    }
    for (int i = 0; i < EACH; i++) {
        if (i % 2) {
            CHECK(cudaStreamSynchronize(some[i]));
        }
        CHECK(cudaStreamDestroy(some[i]));
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(data));
}

static void attributes() {
    for (int i = 0; i < EACH; i++) {
        cudaStream_t stream;
        CHECK(cudaStreamCreate(&stream));
        cudaStreamAttrValue value = {};
        value.syncPolicy = cudaSyncPolicyBlockingSync;
        CHECK(cudaStreamSetAttribute(stream, cudaStreamAttributeSynchronizationPolicy, &value));
        CHECK(cudaStreamDestroy(stream));
    }
}

static void events() {
    cudaEvent_t some[EACH];
    uint32_t *data;
    CHECK(cudaMalloc(&data, WORDS * 4));
    for (cudaEvent_t &one : some) {
        CHECK(cudaEventCreate(&one));
        CHECK(cudaEventRecord(one, nullptr));
        launch(data, nullptr);
    }
    CHECK(cudaStreamWaitEvent(nullptr, some[0], 0));
    CHECK(cudaEventSynchronize(some[EACH - 1]));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, some[0], some[EACH - 1]));
    CHECK(cudaEventRecord(some[1], nullptr));
    for (cudaEvent_t one : some) {
        CHECK(cudaEventDestroy(one));
    }
    CHECK(cudaFree(data));
}

static void modules() {
    CUmodule some[EACH];
    for (int i = 0; i < EACH; i++) {
        CUfunction function;
        CUdeviceptr kept;
        size_t bytes;
        CU(cuModuleLoadData, &some[i], text(i));
        CU(cuModuleGetFunction, &function, some[i], "step");
        CU(cuModuleGetGlobal, &kept, &bytes, some[i], "kept");
        CU(cuFuncSetAttribute, function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 50);
        run(function);
    }
    for (CUmodule one : some) {
        CU(cuModuleUnload, one);
    }
    CUmodule none;
    REQUIRE(ASK(cuModuleLoadData, &none, "no code") != CUDA_SUCCESS);
}

static void libraries() {
    CUlibrary some[EACH];
    for (int i = 0; i < EACH; i++) {
        CUkernel kernel;
        CUfunction function;
        CUdeviceptr kept;
        size_t bytes;
        CU(cuLibraryLoadData, &some[i], text(i), nullptr, nullptr, 0, nullptr, nullptr, 0);
        CU(cuLibraryGetKernel, &kernel, some[i], "step");
        CU(cuKernelGetFunction, &function, kernel);
        CU(cuLibraryGetGlobal, &kept, &bytes, some[i], "kept");
        run(function);
        run((CUfunction)kernel);
    }
    for (CUlibrary one : some) {
        CU(cuLibraryUnload, one);
    }
}

static void linkers() {
    CUlinkState state;
    void *cubin;
    size_t size;
    CUmodule module;
    CUfunction function;
    CU(cuLinkCreate, 0, nullptr, nullptr, &state);
    CU(cuLinkAddData, state, CU_JIT_INPUT_PTX, (void *)text(0), strlen(text(0)) + 1, "text", 0, nullptr, nullptr);
    CU(cuLinkComplete, state, &cubin, &size);
    CU(cuModuleLoadData, &module, cubin);
    CU(cuLinkDestroy, state);
    CU(cuModuleGetFunction, &function, module, "step");
    run(function);
    CU(cuModuleUnload, module);
    // One that is not finished.
    CU(cuLinkCreate, 0, nullptr, nullptr, &state);
    CU(cuLinkAddData, state, CU_JIT_INPUT_PTX, (void *)text(1), strlen(text(1)) + 1, "text", 0, nullptr, nullptr);
    CU(cuLinkDestroy, state);
}

// A context of its own, destroyed with memory, streams and events in it.
static void contexts() {
    CUcontext own, now;
    CUstream stream;
    CUevent event;
    CUdeviceptr data;
    CU(cuCtxCreate, &own, nullptr, 0, device);
    CU(cuMemAlloc, &data, 4096);
    CU(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CU(cuEventCreate, &event, CU_EVENT_DEFAULT);
    CU(cuMemsetD32Async, data, 1, 1024, stream);
    CU(cuEventRecord, event, stream);
    CU(cuCtxSetLimit, CU_LIMIT_STACK_SIZE, 2048);
    CU(cuCtxSynchronize, );
    CU(cuCtxDestroy, own);
    CU(cuCtxGetCurrent, &now);
    REQUIRE(now != own);
}

// The same with code in it, which goes with it.
static void contexts_with_code() {
    CUcontext own;
    CUmodule module;
    CUfunction function;
    CU(cuCtxCreate, &own, nullptr, 0, device);
    CU(cuModuleLoadData, &module, text(0));
    CU(cuModuleGetFunction, &function, module, "step");
    run(function);
    CU(cuCtxDestroy, own);
}

static void pools() {
    cudaStream_t stream;
    cudaMemPool_t pool;
    CHECK(cudaStreamCreate(&stream));
    cudaMemPoolProps wanted = {};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location.type = cudaMemLocationTypeDevice;
    CHECK(cudaMemPoolCreate(&pool, &wanted));
    for (int i = 0; i < EACH; i++) {
        uint32_t *one, *other;
        CHECK(cudaMallocAsync(&one, WORDS * 4, stream));
        CHECK(cudaMallocFromPoolAsync(&other, WORDS * 8, pool, stream));
        launch(one, stream);
        launch(other, stream);
        CHECK(cudaFreeAsync(one, stream));
        CHECK(cudaFreeAsync(other, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolDestroy(pool));
    CHECK(cudaStreamDestroy(stream));
}

static void arrays() {
    auto format = cudaCreateChannelDesc<float>();
    static float host[32 * 32];
    for (int i = 0; i < EACH; i++) {
        cudaArray_t plane, volume, level;
        cudaMipmappedArray_t mipmapped;
        CHECK(cudaMallocArray(&plane, &format, 32, 32, cudaArraySurfaceLoadStore));
        CHECK(cudaMalloc3DArray(&volume, &format, make_cudaExtent(16, 8, 4), 0));
        CHECK(cudaMallocMipmappedArray(&mipmapped, &format, make_cudaExtent(32, 32, 0), 3, 0));
        CHECK(cudaGetMipmappedArrayLevel(&level, mipmapped, 1));
        CHECK(cudaMemcpy2DToArray(plane, 0, 0, host, 128, 128, 32, cudaMemcpyHostToDevice));
        cudaResourceDesc from = {};
        from.resType = cudaResourceTypeArray;
        from.res.array.array = plane;
        cudaTextureDesc how = {};
        cudaTextureObject_t texture;
        cudaSurfaceObject_t surface;
        CHECK(cudaCreateTextureObject(&texture, &from, &how, nullptr));
        CHECK(cudaCreateSurfaceObject(&surface, &from));
        CHECK(cudaDestroyTextureObject(texture));
        CHECK(cudaDestroySurfaceObject(surface));
        CHECK(cudaFreeArray(plane));
        CHECK(cudaFreeArray(volume));
        CHECK(cudaFreeMipmappedArray(mipmapped));
    }
}

static void CUDART_CB count(void *data) { ++*(volatile uint64_t *)data; }

static void CUDART_CB count_of_stream(cudaStream_t, cudaError_t, void *data) { count(data); }

static void callbacks() {
    static uint64_t counted;
    cudaStream_t stream;
    counted = 0;
    CHECK(cudaStreamCreate(&stream));
    for (int i = 0; i < EACH; i++) {
        CHECK(cudaLaunchHostFunc(stream, count, &counted));
        CHECK(cudaStreamAddCallback(stream, count_of_stream, &counted, 0));
    }
    CHECK(cudaStreamSynchronize(stream));
    REQUIRE(*(volatile uint64_t *)&counted == 2 * EACH);
    CHECK(cudaStreamDestroy(stream));
}

static void graphs() {
    static uint64_t counted;
    cudaStream_t stream;
    uint32_t *data, *scratch;
    CHECK(cudaMalloc(&data, WORDS * 4));
    CHECK(cudaStreamCreate(&stream));
    for (int i = 0; i < EACH; i++) {
        cudaGraph_t graph, child;
        cudaGraphExec_t made;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        launch(data, stream);
        CHECK(cudaMemsetAsync(data, 0, 64, stream));
        if (i % 2) {
            // What needs the program at each launch.
            CHECK(cudaLaunchHostFunc(stream, count, &counted));
        }
        if (i == 2) {
            CHECK(cudaMallocAsync(&scratch, WORDS * 4, stream));
            launch(scratch, stream);
            CHECK(cudaFreeAsync(scratch, stream));
        }
        CHECK(cudaStreamEndCapture(stream, &graph));
        if (i != 2) {
            cudaGraphNode_t node;
            CHECK(cudaGraphCreate(&child, 0));
            CHECK(cudaGraphAddEmptyNode(&node, child, nullptr, 0));
            CHECK(cudaGraphAddChildGraphNode(&node, graph, nullptr, 0, child));
            CHECK(cudaGraphDestroy(child));
        }
        CHECK(cudaGraphInstantiate(&made, graph, 0));
        CHECK(cudaGraphLaunch(made, stream));
        CHECK(cudaGraphLaunch(made, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(made));
        CHECK(cudaGraphDestroy(graph));
    }
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(data));
}

static void segments() {
    CUdeviceptr at;
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CU(cuMemAddressReserve, &at, EACH * GRANULE, 0, 0, 0);
    for (int i = 0; i < EACH; i++) {
        CUmemGenericAllocationHandle piece;
        CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CU(cuMemCreate, &piece, GRANULE, &wanted, 0);
        CU(cuMemMap, at + i * GRANULE, GRANULE, 0, piece, 0);
        CU(cuMemSetAccess, at + i * GRANULE, GRANULE, &access, 1);
        CU(cuMemRelease, piece);
    }
    CU(cuMemsetD32, at, 5, 1024);
    CU(cuCtxSynchronize, );
    CU(cuMemUnmap, at, EACH * GRANULE);
    CU(cuMemAddressFree, at, EACH * GRANULE);
}

// What another process could open. Nobody does.
static void handles() {
    void *data;
    cudaEvent_t event;
    cudaIpcMemHandle_t memory_handle;
    cudaIpcEventHandle_t event_handle;
    CHECK(cudaMalloc(&data, GRANULE));
    CHECK(cudaIpcGetMemHandle(&memory_handle, data));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventInterprocess | cudaEventDisableTiming));
    CHECK(cudaIpcGetEventHandle(&event_handle, event));
    CHECK(cudaEventRecord(event, nullptr));
    CHECK(cudaEventSynchronize(event));
    CHECK(cudaEventDestroy(event));
    CHECK(cudaFree(data));
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle piece;
    int file = -1;
    CU(cuMemCreate, &piece, GRANULE, &wanted, 0);
    CU(cuMemExportToShareableHandle, &file, piece, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    close(file);
    CU(cuMemRelease, piece);
}

static void *work(void *) {
    uint32_t *data;
    CHECK(cudaMalloc(&data, WORDS * 4));
    launch(data, cudaStreamPerThread);
    CHECK(cudaStreamSynchronize(cudaStreamPerThread));
    CHECK(cudaFree(data));
    return nullptr;
}

static void threads() {
    pthread_t some[2];
    for (pthread_t &one : some) {
        REQUIRE(pthread_create(&one, nullptr, work, nullptr) == 0);
    }
    for (pthread_t one : some) {
        REQUIRE(pthread_join(one, nullptr) == 0);
    }
}

// Nothing ends resources and descriptors, so that whoever asks again has to get the same ones.
static void green_contexts() {
    CUdevResource whole, part;
    CUdevResourceDesc descriptor;
    CUgreenCtx green;
    CUstream stream;
    CUevent event;
    uint32_t *data;
    unsigned count = 1;
    CU(cuDeviceGetDevResource, device, &whole, CU_DEV_RESOURCE_TYPE_SM);
    CU(cuDevSmResourceSplitByCount, &part, &count, &whole, nullptr, 0, whole.sm.minSmPartitionSize);
    CU(cuDevResourceGenerateDesc, &descriptor, &part, 1);
    CU(cuGreenCtxCreate, &green, descriptor, device, CU_GREEN_CTX_DEFAULT_STREAM);
    CU(cuGreenCtxStreamCreate, &stream, green, CU_STREAM_NON_BLOCKING, 0);
    CU(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    CHECK(cudaMalloc(&data, WORDS * 4));
    launch(data, (cudaStream_t)stream);
    CU(cuGreenCtxRecordEvent, green, event);
    CU(cuEventSynchronize, event);
    CHECK(cudaFree(data));
    CU(cuEventDestroy, event);
    CU(cuStreamDestroy, stream);
    CU(cuGreenCtxDestroy, green);
}

static void words() {
    CUstream stream;
    CUdeviceptr word;
    CU(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CU(cuMemAlloc, &word, 4096);
    CU(cuMemsetD32, word, 0, 1);
    CU(cuCtxSynchronize, );
    CU(cuStreamWriteValue32, stream, word, 7, 0);
    CU(cuStreamWaitValue32, stream, word, 7, CU_STREAM_WAIT_VALUE_EQ);
    CU(cuStreamSynchronize, stream);
    CU(cuStreamDestroy, stream);
    CU(cuMemFree, word);
}

static const struct {
    const char *name;
    void (*make)();
} kinds[] = {
    {"memory", memory},       {"pinned", pinned},       {"registered", registered}, {"streams", streams},
    {"attributes", attributes}, {"events", events},     {"modules", modules},       {"libraries", libraries},
    {"linkers", linkers},     {"contexts", contexts},   {"contexts-with-code", contexts_with_code},
    {"pools", pools},         {"arrays", arrays},       {"callbacks", callbacks},   {"graphs", graphs},
    {"segments", segments},   {"handles", handles},     {"threads", threads},       {"words", words},
    {"green-contexts", green_contexts},
};

// Whether a name is in a list with commas.
static bool named(const char *list, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : nullptr) {
        if (strncmp(at, name, length) == 0 && (at[length] == 0 || at[length] == ',')) {
            return true;
        }
    }
    return false;
}

static uint64_t told(const char *path) {
    char digits[8];
    FILE *file = fopen(path, "r");
    REQUIRE(file);
    const size_t got = fread(digits, 1, sizeof digits, file);
    fclose(file);
    uint64_t value = 0;
    // As long as it is being written it says nothing.
    for (size_t i = 0; got == sizeof digits && i < got; i++) {
        value = value * 10 + (uint64_t)(digits[i] - '0');
    }
    return got == sizeof digits ? value : 1;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *file = options.text("--told", nullptr), *progress_file = options.text("--progress", nullptr);
    const char *only = options.text("--only", nullptr), *without = options.text("--without", nullptr);
    const uint64_t leak = options.number("--leak", 0);
    options.done();
    if (!file) {
        options.fail("--told is missing");
    }
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    CU(cuDeviceGet, &device, 0);
    // At rest there is something to save.
    uint32_t *kept, sum;
    CHECK(cudaMalloc(&kept, WORDS * 4));
    CHECK(cudaMemset(kept, 0, WORDS * 4));
    for (uint64_t limit; (limit = told(file)) != 0;) {
        if (turn >= limit) {
            sleep_us(2000);
            continue;
        }
        turn++;
        for (const auto &kind : kinds) {
            if (only ? named(only, kind.name) : !named(without, kind.name)) {
                kind.make();
            }
        }
        add<<<WORDS / 128, 128>>>(kept, WORDS, 1);
        CHECK(cudaMemcpy(&sum, kept + 5, 4, cudaMemcpyDeviceToHost));
        REQUIRE(sum == (uint32_t)turn);
        if (leak == 1) {
            cudaEvent_t event;
            CHECK(cudaEventCreate(&event));
        } else if (leak == 2) {
            REQUIRE(memset(malloc(64), 1, 64));
        }
        progress(progress_file, turn);
    }
    CHECK(cudaFree(kept));
    printf("every round was right\n");
    return 0;
}
