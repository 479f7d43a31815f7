// What is left of a process after a kernel has broken a context: what each call answers in that context, in another context
// of the same device and in those of another device, after the broken context is destroyed or its device reset, and
// afterwards in a new context. Each scenario is a process of its own.
//
//   broken [--first N] [--second N]      0, and 1 where there are two devices (the same number: one device alone)
//
// Prints a line for each call: SCENARIO | MOMENT | CONTEXT | CALL: ANSWER.
#include "driver.h"

#include <sys/wait.h>
#include <unistd.h>

static const char CODE[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .entry store(.param .u64 place)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [place];
    mov.u32 %r1, 7;
    st.global.u32 [%rd1], %r1;
    ret;
}
.visible .entry stop()
{
    trap;
}
)";

static const char *scenario, *moment;

static void say(const char *context, const char *call, CUresult result) {
    const char *name = "?";
    ASK(cuGetErrorName, result, &name);
    printf("%s | %s | %s | %s: %s\n", scenario, moment, context, call, name);
    fflush(stdout);
}

#define TELL(context, function, ...) say(context, #function, ASK(function, ##__VA_ARGS__))

// A context with what was made in it while all was well.
struct Place {
    const char *name;
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction store, stop;
    CUdeviceptr memory;
    CUstream stream;
    CUevent event;
};

static void furnish(Place &place) {
    CU(cuCtxSetCurrent, place.context);
    CU(cuModuleLoadData, &place.module, CODE);
    CU(cuModuleGetFunction, &place.store, place.module, "store");
    CU(cuModuleGetFunction, &place.stop, place.module, "stop");
    CU(cuMemAlloc, &place.memory, 64);
    CU(cuStreamCreate, &place.stream, CU_STREAM_NON_BLOCKING);
    CU(cuEventCreate, &place.event, 0);
    CU(cuMemsetD32, place.memory, 1, 16);
    CU(cuCtxSynchronize);
}

static Place primary(const char *name, CUdevice device) {
    Place place = {name, device};
    CU(cuDevicePrimaryCtxRetain, &place.context, device);
    furnish(place);
    return place;
}

static Place own(const char *name, CUdevice device) {
    Place place = {name, device};
    CU(cuCtxCreate, &place.context, nullptr, 0, device);
    CUcontext popped;
    CU(cuCtxPopCurrent, &popped);
    furnish(place);
    return place;
}

// What can be asked for there.
static void tell(const Place &place) {
    CUdeviceptr memory = 0;
    CUstream stream = nullptr;
    CUevent event = nullptr;
    CUmodule module = nullptr;
    CUcontext current = nullptr;
    CUdevice device = -1;
    CUmemorytype type;
    void *host = nullptr;
    uint32_t words[16] = {};
    size_t available, total;
    int value;
    unsigned version;
    CUdeviceptr there = place.memory;
    void *parameters[] = {&there};
    TELL(place.name, cuCtxSetCurrent, place.context);
    TELL(place.name, cuCtxGetCurrent, &current);
    TELL(place.name, cuCtxGetDevice, &device);
    TELL(place.name, cuCtxGetApiVersion, place.context, &version);
    TELL(place.name, cuDeviceGetAttribute, &value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, place.device);
    TELL(place.name, cuStreamQuery, place.stream);
    TELL(place.name, cuStreamSynchronize, place.stream);
    TELL(place.name, cuCtxSynchronize);
    TELL(place.name, cuLaunchKernel, place.store, 1, 1, 1, 1, 1, 1, 0, place.stream, parameters, nullptr);
    TELL(place.name, cuEventRecord, place.event, place.stream);
    TELL(place.name, cuEventSynchronize, place.event);
    TELL(place.name, cuMemcpyDtoH, words, place.memory, sizeof words);
    TELL(place.name, cuMemcpyHtoD, place.memory, words, sizeof words);
    TELL(place.name, cuMemsetD32, place.memory, 1, 16);
    TELL(place.name, cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, place.memory);
    TELL(place.name, cuMemGetInfo, &available, &total);
    TELL(place.name, cuMemAlloc, &memory, 64);
    TELL(place.name, cuMemHostAlloc, &host, 64, 0);
    TELL(place.name, cuStreamCreate, &stream, 0);
    TELL(place.name, cuEventCreate, &event, 0);
    TELL(place.name, cuModuleLoadData, &module, CODE);
}

// A context that is made now, if it can be.
static void tell_new(const char *name, CUdevice device) {
    Place place = {name, device};
    CUresult made = ASK(cuCtxCreate, &place.context, nullptr, 0, device);
    say(name, "cuCtxCreate", made);
    if (made != CUDA_SUCCESS) {
        return;
    }
    CUdeviceptr memory = 0;
    TELL(name, cuMemAlloc, &memory, 64);
    CUmodule module = nullptr;
    TELL(name, cuModuleLoadData, &module, CODE);
    CUfunction store;
    if (memory && module && ASK(cuModuleGetFunction, &store, module, "store") == CUDA_SUCCESS) {
        void *parameters[] = {&memory};
        TELL(name, cuLaunchKernel, store, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
        TELL(name, cuCtxSynchronize);
    }
    TELL(name, cuCtxDestroy, place.context);
}

// A kernel that stores where nothing is, or stops.
static void break_it(const Place &place, bool by_trap) {
    moment = "the fault";
    CU(cuCtxSetCurrent, place.context);
    CUdeviceptr nowhere = 0;
    void *parameters[] = {&nowhere};
    CUfunction kernel = by_trap ? place.stop : place.store;
    TELL(place.name, cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, place.stream, by_trap ? nullptr : parameters, nullptr);
    TELL(place.name, cuStreamSynchronize, place.stream);
}

static void driver(CUdevice first, CUdevice second, int which, bool by_trap) {
    CU(cuInit, 0);
    Place places[4] = {primary("first device, primary context", first), own("first device, second context", first)};
    int count = 2;
    if (second != first) {
        places[count++] = primary("second device, primary context", second);
        places[count++] = own("second device, second context", second);
    }
    break_it(places[which], by_trap);
    moment = "after it";
    for (int i = 0; i < count; i++) {
        tell(places[i]);
    }
    tell_new("first device, new context", first);
    if (second != first) {
        tell_new("second device, new context", second);
    }

    if (which == 1) {
        moment = "destroying it";
        TELL(places[1].name, cuCtxDestroy, places[1].context);
        moment = "after destroying it";
    } else {
        moment = "resetting its device";
        TELL(places[0].name, cuDevicePrimaryCtxReset, first);
        moment = "after resetting its device";
    }
    tell_new("first device, new context", first);
    CUcontext again;
    TELL(places[0].name, cuDevicePrimaryCtxRetain, &again, first);
    TELL(places[0].name, cuCtxSetCurrent, places[0].context);
    CUdeviceptr memory;
    TELL(places[0].name, cuMemAlloc, &memory, 64);
    TELL(places[0].name, cuCtxSynchronize);
    for (int i = which == 1 ? 2 : 1; i < count; i++) {
        tell(places[i]);
    }
}

// The same by the runtime, whose calls go to the primary contexts.
static void runtime(int first, int second) {
    void *memory;
    int count;
    const char *name = "?";
    auto say_runtime = [&](const char *context, const char *call, cudaError_t result) {
        name = cudaGetErrorName(result);
        printf("%s | %s | %s | %s: %s\n", scenario, moment, context, call, name);
        fflush(stdout);
    };
#define RUNTIME(context, function, ...) say_runtime(context, #function, function(__VA_ARGS__))
    moment = "the fault";
    CHECK(cudaSetDevice(second));
    CHECK(cudaMalloc(&memory, 64));
    CHECK(cudaSetDevice(first));
    CHECK(cudaMalloc(&memory, 64));
    Place place = {"first device", first};
    CU(cuCtxGetCurrent, &place.context);
    furnish(place);
    break_it(place, false);
    const char *moments[] = {"after it", "after cudaDeviceReset"};
    for (const char *now : moments) {
        moment = now;
        for (int device : {first, second}) {
            const char *context = device == first ? "first device" : "second device";
            RUNTIME(context, cudaSetDevice, device);
            RUNTIME(context, cudaGetLastError);
            RUNTIME(context, cudaDeviceSynchronize);
            RUNTIME(context, cudaMalloc, &memory, 64);
            RUNTIME(context, cudaGetDeviceCount, &count);
            RUNTIME(context, cudaGetLastError);
            if (first == second) {
                break;
            }
        }
        if (now == moments[0]) {
            moment = "cudaDeviceReset";
            RUNTIME("first device", cudaSetDevice, first);
            RUNTIME("first device", cudaDeviceReset);
        }
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    int first = (int)options.number("--first", 0), second = (int)options.number("--second", 1000);
    options.done();
    if (second == 1000) {
        // Asked in a process of its own: this one must not have used CUDA when it forks.
        pid_t child = fork();
        if (child == 0) {
            int count = 0;
            CHECK(cudaGetDeviceCount(&count));
            _exit(count > 1 ? 1 : 0);
        }
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status));
        second = WEXITSTATUS(status);
    }
    struct {
        const char *name;
        int which;
        bool by_trap;
    } scenarios[] = {{"primary context, by an address", 0, false},
                     {"second context, by an address", 1, false},
                     {"primary context, by a trap", 0, true},
                     {"by the runtime", -1, false}};
    int bad = 0;
    for (auto &each : scenarios) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            scenario = each.name;
            if (each.which < 0) {
                runtime(first, second);
            } else {
                driver((CUdevice)first, (CUdevice)second, each.which, each.by_trap);
            }
            fflush(stdout);
            _exit(0);
        }
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            printf("%s: its process ended with status %#x\n", each.name, status);
            bad = 1;
        }
    }
    return bad;
}
