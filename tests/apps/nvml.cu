// What NVML says beside what CUDA says: the same devices under the same names, memory that goes and comes back, this
// process among those that compute; errors of calls before initialisation and of bad arguments. Then again and again,
// with NVML shut down and initialised in between.
//
//   nvml --cuda 1 --iterations 40 --sleep-us 0 --progress FILE        --cuda 0: NVML alone
//
// Prints what was compared. libnvidia-ml.so.1 is opened by hand, as programs do that may run without it.
#include "driver.h"

#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <nvml.h>

static void *nvml_function(const char *name) {
    static void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "libnvidia-ml.so.1 has no %s\n", name);
        exit(3);
    }
    return found;
}

// Q(nvmlDeviceGetCount_v2, &n): what the function answers.
#define Q(function, ...)                                                                                               \
    ([&] {                                                                                                             \
        static auto found = (decltype(&function))nvml_function(#function);                                             \
        return found(__VA_ARGS__);                                                                                     \
    }())

// IS(code, nvmlDeviceGetCount_v2, &n): that it answers this and nothing else.
#define IS(code, function, ...)                                                                                        \
    do {                                                                                                               \
        nvmlReturn_t is_result = Q(function, ##__VA_ARGS__);                                                           \
        if (is_result != (code)) {                                                                                     \
            fflush(stdout);                                                                                            \
            fprintf(stderr, "%s:%d: %s: %s (%d) instead of %s\n", __FILE__, __LINE__, #function,                       \
                    Q(nvmlErrorString, is_result), (int)is_result, #code);                                             \
            exit(4);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define OK(function, ...) IS(NVML_SUCCESS, function, ##__VA_ARGS__)

static void before_initialisation() {
    unsigned n;
    nvmlDevice_t device;
    nvmlMemory_t memory;
    char text[96];
    IS(NVML_ERROR_UNINITIALIZED, nvmlShutdown);
    IS(NVML_ERROR_UNINITIALIZED, nvmlDeviceGetCount_v2, &n);
    IS(NVML_ERROR_UNINITIALIZED, nvmlDeviceGetHandleByIndex_v2, 0, &device);
    IS(NVML_ERROR_UNINITIALIZED, nvmlDeviceGetMemoryInfo, nullptr, &memory);
    IS(NVML_ERROR_UNINITIALIZED, nvmlDeviceGetPowerUsage, nullptr, &n);
    IS(NVML_ERROR_UNINITIALIZED, nvmlSystemGetDriverVersion, text, sizeof text);
    // One that is refused.
    IS(NVML_ERROR_UNINITIALIZED, nvmlDeviceSetPersistenceMode, nullptr, NVML_FEATURE_ENABLED);
    REQUIRE(strcmp(Q(nvmlErrorString, NVML_ERROR_UNINITIALIZED), "Uninitialized") == 0);
    REQUIRE(strcmp(Q(nvmlErrorString, (nvmlReturn_t)555), "Unknown Error") == 0);
}

static void bad_arguments() {
    unsigned n;
    nvmlDevice_t device;
    char text[96];
    OK(nvmlDeviceGetCount_v2, &n);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetCount_v2, nullptr);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetHandleByIndex_v2, n, &device);
    IS(NVML_ERROR_NOT_FOUND, nvmlDeviceGetHandleByUUID, "GPU-00000000-0000-0000-0000-00000000dead", &device);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetHandleByUUID, nullptr, &device);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetHandleByPciBusId_v2, "nowhere", &device);
    IS(NVML_ERROR_NOT_FOUND, nvmlDeviceGetHandleByPciBusId_v2, "00ff:ff:1f.0", &device);
    OK(nvmlDeviceGetHandleByIndex_v2, 0, &device);
    IS(NVML_ERROR_INSUFFICIENT_SIZE, nvmlDeviceGetName, device, text, 2);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetName, nullptr, text, sizeof text);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetMemoryInfo, device, nullptr);
    nvmlMemory_v2_t memory = {};
    IS(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvmlDeviceGetMemoryInfo_v2, device, &memory);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetPowerUsage, (nvmlDevice_t)&memory, &n);
    IS(NVML_ERROR_INVALID_ARGUMENT, nvmlDeviceGetUtilizationRates, device, nullptr);
    IS(NVML_ERROR_NOT_SUPPORTED, nvmlDeviceSetPersistenceMode, device, NVML_FEATURE_ENABLED);
    nvmlEventSet_t set;
    IS(NVML_ERROR_NOT_SUPPORTED, nvmlEventSetCreate, &set);
}

// A device in both ways to name it.
static nvmlDevice_t same_device(unsigned index, bool cuda) {
    nvmlDevice_t device, again;
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE], name[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
    unsigned n;
    int major, minor;
    nvmlPciInfo_t pci;
    OK(nvmlDeviceGetHandleByIndex_v2, index, &device);
    OK(nvmlDeviceGetIndex, device, &n);
    REQUIRE(n == index);
    OK(nvmlDeviceGetUUID, device, uuid, sizeof uuid);
    OK(nvmlDeviceGetHandleByUUID, uuid, &again);
    REQUIRE(again == device);
    OK(nvmlDeviceGetPciInfo_v3, device, &pci);
    OK(nvmlDeviceGetHandleByPciBusId_v2, pci.busId, &again);
    REQUIRE(again == device);
    OK(nvmlDeviceGetName, device, name, sizeof name);
    OK(nvmlDeviceGetCudaComputeCapability, device, &major, &minor);
    if (cuda) {
        CUdevice theirs;
        CU(cuDeviceGetByPCIBusId, &theirs, pci.busIdLegacy);
        char their_name[96];
        CU(cuDeviceGetName, their_name, sizeof their_name, theirs);
        REQUIRE(strcmp(name, their_name) == 0);
        CUuuid bytes;
        CU(cuDeviceGetUuid, &bytes, theirs);
        char text[64];
        int at = snprintf(text, sizeof text, "GPU");
        for (int i = 0; i < 16; i++) {
            const char *dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
            at += snprintf(text + at, sizeof text - at, "%s%02x", dash, (unsigned char)bytes.bytes[i]);
        }
        REQUIRE(strcmp(uuid, text) == 0);
        int of_major, of_minor;
        CU(cuDeviceGetAttribute, &of_major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, theirs);
        CU(cuDeviceGetAttribute, &of_minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, theirs);
        REQUIRE(of_major == major && of_minor == minor);
    }
    return device;
}

static bool is_listed(nvmlDevice_t device, unsigned pid) {
    nvmlProcessInfo_t infos[256];
    unsigned n = 0;
    nvmlReturn_t first = Q(nvmlDeviceGetComputeRunningProcesses_v3, device, &n, nullptr);
    REQUIRE(first == (n ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS));
    n = 256;
    OK(nvmlDeviceGetComputeRunningProcesses_v3, device, &n, infos);
    for (unsigned i = 0; i < n; i++) {
        if (infos[i].pid == pid) {
            return infos[i].usedGpuMemory > 0;
        }
    }
    return false;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    bool cuda = options.number("--cuda", 1) != 0;
    uint64_t iterations = options.number("--iterations", 40), sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    before_initialisation();
    OK(nvmlInit_v2);
    OK(nvmlInit_v2); // counted
    OK(nvmlShutdown);
    bad_arguments();
    unsigned count;
    int version;
    OK(nvmlDeviceGetCount_v2, &count);
    OK(nvmlSystemGetCudaDriverVersion_v2, &version);
    printf("%u devices, CUDA %d\n", count, version);
    CUcontext context;
    CUdevice zero;
    if (cuda) {
        int n, of_cuda;
        CU(cuInit, 0);
        CU(cuDeviceGetCount, &n);
        CU(cuDriverGetVersion, &of_cuda);
        REQUIRE((unsigned)n == count && of_cuda == version);
    }
    for (unsigned i = 0; i < count; i++) {
        same_device(i, cuda);
    }
    if (cuda) {
        CU(cuDeviceGet, &zero, 0);
        CU(cuDevicePrimaryCtxRetain, &context, zero);
        CU(cuCtxSetCurrent, context);
    }

    const size_t bytes = 64 << 20;
    uint64_t seen = 0;
    for (uint64_t i = 0; i < iterations; i++) {
        nvmlDevice_t device;
        char bus[32];
        if (cuda) {
            CU(cuDeviceGetPCIBusId, bus, sizeof bus, zero);
            OK(nvmlDeviceGetHandleByPciBusId_v2, bus, &device);
        } else {
            OK(nvmlDeviceGetHandleByIndex_v2, 0, &device);
        }
        nvmlMemory_t memory;
        nvmlMemory_v2_t second = {};
        second.version = nvmlMemory_v2;
        OK(nvmlDeviceGetMemoryInfo, device, &memory);
        OK(nvmlDeviceGetMemoryInfo_v2, device, &second);
        REQUIRE(memory.total == memory.free + memory.used);
        REQUIRE(second.total == second.free + second.used + second.reserved && second.total == memory.total);
        if (cuda) {
            CUdeviceptr p;
            CU(cuMemAlloc, &p, bytes);
            nvmlMemory_t less;
            OK(nvmlDeviceGetMemoryInfo, device, &less);
            seen += less.free + bytes <= memory.free;
            // What is known of a process that is being saved is what was known before.
            for (int tries = 0; !is_listed(device, (unsigned)getpid()); tries++) {
                REQUIRE(tries < 1000);
                sleep_us(10000);
            }
            CU(cuMemFree, p);
        }
        same_device((unsigned)(i % count), cuda);
        OK(nvmlShutdown);
        before_initialisation();
        OK(nvmlInitWithFlags, 0);
        unsigned now;
        OK(nvmlDeviceGetCount_v2, &now);
        REQUIRE(now == count);
        progress(file, i + 1);
        sleep_us(sleep);
    }
    if (cuda) {
        // Others may give memory back meanwhile; that it never goes is wrong.
        REQUIRE(seen > 0);
    }
    OK(nvmlShutdown);
    IS(NVML_ERROR_UNINITIALIZED, nvmlShutdown);
    printf("ok\n");
    return 0;
}
