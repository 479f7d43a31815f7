// What the programs here share: lines of JSON, times of calls, the device made ready, kernels that fill and sum memory.
// The errors, options and the look-up of driver functions are those of tests/apps.
#pragma once

#include "../apps/driver.h"

#include <algorithm>
#include <functional>
#include <pthread.h>
#include <string>
#include <vector>

// Exit status of a program that needs a call which the driver does not support.
const int NOT_SUPPORTED = 77;

const size_t KIB = 1 << 10, MIB = 1 << 20, GIB = 1 << 30;

// Times of one kind of call, in ns.
typedef std::vector<double> Times;

inline const char *name_of(CUresult result) {
    const char *name = "unknown";
    ASK(cuGetErrorName, result, &name);
    return name;
}

// One line of JSON on stdout. Each is flushed, so that what a program has found out before it crashes or hangs is kept.
struct Line {
    std::string line;

    Line &raw(const char *name, const std::string &value) {
        line += line.empty() ? "{" : ", ";
        line += "\"" + std::string(name) + "\": " + value;
        return *this;
    }
    Line &word(const char *name, const char *value) { return raw(name, "\"" + std::string(value) + "\""); }
    Line &result(const char *name, CUresult value) { return word(name, name_of(value)); }
    Line &number(const char *name, double value) {
        char text[64];
        snprintf(text, sizeof text, value == (double)(int64_t)value ? "%.0f" : "%.3f", value);
        return raw(name, text);
    }
    Line &yes(const char *name, bool value) { return raw(name, value ? "true" : "false"); }
    Line &address(const char *name, uint64_t value) {
        char text[32];
        snprintf(text, sizeof text, "0x%llx", (unsigned long long)value);
        return word(name, text);
    }
    // Median, 99th percentile and maximum in us; the sum in ms.
    Line &times(const char *name, Times times) {
        if (times.empty()) {
            return raw(name, "null");
        }
        std::sort(times.begin(), times.end());
        double total = 0;
        for (double one : times) {
            total += one;
        }
        size_t n = times.size();
        char text[200];
        snprintf(text, sizeof text, "{\"n\": %zu, \"median_us\": %.3f, \"p99_us\": %.3f, \"max_us\": %.3f, \"total_ms\": %.3f}", n,
                 times[n / 2] / 1e3, times[std::min(n - 1, n * 99 / 100)] / 1e3, times[n - 1] / 1e3, total / 1e6);
        return raw(name, text);
    }
    void print() {
        printf("%s}\n", line.empty() ? "{" : line.c_str());
        fflush(stdout);
    }
};

inline void need(CUresult result, const char *call) {
    if (result == CUDA_SUCCESS) {
        return;
    }
    bool missing = result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_FOUND;
    Line().word(missing ? "not_supported" : "failed", call).result("result", result).print();
    // Without destructors: a broken context may not let them end.
    _exit(missing ? NOT_SUPPORTED : 3);
}

// NEED(cuMemAlloc, &p, n): the program ends if the call fails, and its last line says so.
#define NEED(function, ...) need(ASK(function, __VA_ARGS__), #function)

// TIMED(times, statement): adds how long it took.
#define TIMED(times, ...)                                                                                              \
    do {                                                                                                               \
        double timed_start = now_ns();                                                                                 \
        __VA_ARGS__;                                                                                                   \
        (times).push_back(now_ns() - timed_start);                                                                     \
    } while (0)

// A thread, which ends before its object does.
struct Thread {
    std::function<void()> work;
    pthread_t id;
    bool joined = false;

    explicit Thread(std::function<void()> what) : work(std::move(what)) { REQUIRE(pthread_create(&id, nullptr, run, this) == 0); }
    Thread(const Thread &) = delete;
    ~Thread() { join(); }
    void join() {
        if (!joined) {
            pthread_join(id, nullptr);
        }
        joined = true;
    }
    static void *run(void *self) {
        ((Thread *)self)->work();
        return nullptr;
    }
};

template <class T> T look(const T &shared) { return __atomic_load_n(&shared, __ATOMIC_SEQ_CST); }
template <class T> void tell(T &shared, T value) { __atomic_store_n(&shared, value, __ATOMIC_SEQ_CST); }

// The primary context of device 0, current in the calling thread.
inline CUcontext start_device() {
    CUcontext context = nullptr;
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    NEED(cuCtxGetCurrent, &context);
    return context;
}

inline CUstream new_stream() {
    CUstream stream;
    NEED(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    return stream;
}

// Pinned memory that is there: its pages have been touched.
inline void *new_pinned(size_t bytes) {
    void *memory = nullptr;
    NEED(cuMemHostAlloc, &memory, bytes, CU_MEMHOSTALLOC_PORTABLE);
    memset(memory, 0, bytes);
    return memory;
}

inline CUmemGenericAllocationHandle new_piece(size_t bytes, bool exported = false) {
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = exported ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
    CUmemGenericAllocationHandle handle;
    NEED(cuMemCreate, &handle, bytes, &wanted, 0);
    return handle;
}

inline CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr at;
    NEED(cuMemAddressReserve, &at, bytes, 0, 0, 0);
    return at;
}

inline CUresult set_access(CUdeviceptr at, size_t bytes, CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.flags = flags;
    return ASK(cuMemSetAccess, at, bytes, &access, 1);
}

#define NEED_ACCESS(...) need(set_access(__VA_ARGS__), "cuMemSetAccess")

// A piece of memory where kernels can read and write it.
inline CUdeviceptr map_new(CUmemGenericAllocationHandle handle, size_t bytes) {
    CUdeviceptr at = reserve(bytes);
    NEED(cuMemMap, at, bytes, 0, handle, 0);
    NEED_ACCESS(at, bytes);
    return at;
}

// What word `i` of memory filled with `seed` is.
__host__ __device__ inline uint64_t word_of(uint64_t i, uint64_t seed) { return (i + seed) * 0x9e3779b97f4a7c15ull; }

// Writes, and sums up, every `stride`-th word: not every one where kernels are interpreted.
static __global__ void fill(uint64_t *at, uint64_t words, uint64_t stride, uint64_t seed) {
    for (uint64_t i = (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x) * stride; i < words;
         i += (uint64_t)gridDim.x * blockDim.x * stride) {
        at[i] = word_of(i, seed);
    }
}

// One atomic operation a block: `out` may be pinned memory, where each takes about a microsecond.
static __global__ void sum(const uint64_t *at, uint64_t words, uint64_t stride, unsigned long long *out) {
    __shared__ unsigned long long of_block;
    if (threadIdx.x == 0) {
        of_block = 0;
    }
    __syncthreads();
    unsigned long long mine = 0;
    for (uint64_t i = (blockIdx.x * (uint64_t)blockDim.x + threadIdx.x) * stride; i < words;
         i += (uint64_t)gridDim.x * blockDim.x * stride) {
        mine += at[i] * (2 * i + 1);
    }
    atomicAdd(&of_block, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(out, of_block);
    }
}

static __global__ void nothing() {}

// How a program does its work: in full on a GPU, little of it on the software GPU.
struct Scale {
    bool small;
    uint64_t stride;
    unsigned blocks;

    explicit Scale(bool is_small) : small(is_small), stride(is_small ? 997 : 1), blocks(is_small ? 2 : 1056) {}
    size_t size(size_t full, size_t little) const { return small ? little : full; }
    void start_fill(CUstream stream, CUdeviceptr at, size_t bytes, uint64_t seed) const {
        fill<<<blocks, 256, 0, stream>>>((uint64_t *)at, bytes / 8, stride, seed);
    }
    // Adds to the word at `out`.
    void start_sum(CUstream stream, CUdeviceptr at, size_t bytes, unsigned long long *out) const {
        sum<<<blocks, 256, 0, stream>>>((const uint64_t *)at, bytes / 8, stride, out);
    }
    void fill_host(void *at, size_t bytes, uint64_t seed) const {
        for (uint64_t i = 0; i < bytes / 8; i += stride) {
            ((uint64_t *)at)[i] = word_of(i, seed);
        }
    }
    uint64_t sum_host(const void *at, size_t bytes) const {
        uint64_t all = 0;
        for (uint64_t i = 0; i < bytes / 8; i += stride) {
            all += ((const uint64_t *)at)[i] * (2 * i + 1);
        }
        return all;
    }
    uint64_t sum_filled(size_t bytes, uint64_t seed) const {
        uint64_t all = 0;
        for (uint64_t i = 0; i < bytes / 8; i += stride) {
            all += word_of(i, seed) * (2 * i + 1);
        }
        return all;
    }
    // Loads these kernels' code, which a later first launch would do at a bad moment. `scratch` has eight words.
    void warm_up(CUstream stream, CUdeviceptr scratch) const {
        fill<<<1, 1, 0, stream>>>((uint64_t *)scratch, 1, 1, 0);
        sum<<<1, 1, 0, stream>>>((const uint64_t *)scratch, 1, 1, (unsigned long long *)scratch + 1);
        nothing<<<1, 1, 0, stream>>>();
        NEED(cuStreamSynchronize, stream);
    }
};

// The sum of device memory, waited for; the error that it ended with is in `ended`.
inline uint64_t sum_now(const Scale &scale, CUstream stream, CUdeviceptr at, size_t bytes, unsigned long long *pinned,
                        CUresult *ended = nullptr) {
    *pinned = 0;
    scale.start_sum(stream, at, bytes, pinned);
    CUresult result = ASK(cuStreamSynchronize, stream);
    if (ended) {
        *ended = result;
    } else {
        need(result, "a kernel that reads");
    }
    return *pinned;
}
