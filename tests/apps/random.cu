// A program made of random numbers: threads that launch kernels of many kinds, copy, fill, allocate and free, in streams, by
// graphs, with callbacks, pinned memory that kernels write, and memory that no parameter names. What it does and prints
// depends on its options alone; when it does what is left to chance.
//
//   random [--seed N] [--steps N] [--threads N] [--kib N] [--hidden PERCENT] [--sleep-us N] [--progress FILE]
//          1, 600 of each thread, 2, 16 (the largest allocation), 3 (of the steps write what no parameter names), 0, none
//
// Prints a digest of each thread, of all that it has read in its course and of its memory at the end, and of what they share.
// FILE holds how many steps the first thread has done, times the number of threads.
#include "app.h"

#include <pthread.h>

const int SLOTS = 8, STREAMS = 3, THREADS = 16, COMMON = 64, CHUNK = 1024;

static uint64_t seed, steps, threads, largest, hidden, pause_us;
static const char *progress_file;
// No device may be waited for while any thread captures.
static pthread_mutex_t capturing = PTHREAD_MUTEX_INITIALIZER;

__device__ uint32_t totals[COMMON];
__device__ uint32_t *kept[THREADS];
static uint32_t *common;

// A part of what it is given, spread over all of it.
struct Part {
    uint32_t words, stride, first;
    __host__ __device__ uint32_t at(uint32_t i) const { return (i * stride + first) % words; }
};

__device__ uint32_t index() { return blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void stir(uint32_t *out, const uint32_t *in, Part to, Part from, uint32_t by) {
    uint32_t i = index();
    if (i < CHUNK && i < to.words) out[to.at(i)] = (uint32_t)mix(in[from.at(i)] + by) + i;
}

extern "C" __global__ void without_signature(const uint32_t *in, uint32_t *out, uint32_t words, uint32_t by) {
    uint32_t i = index();
    if (i < words) out[i] = in[i] * 1664525u + by;
}

struct Views {
    uint32_t n;
    const uint32_t *from;
    uint32_t by;
    uint32_t *to;
};

__global__ void in_struct(Views views) {
    uint32_t i = index();
    if (i < views.n) views.to[i] ^= views.from[i] + views.by;
}

// Whoever adds to it when: the sums are the same.
__global__ void count(uint32_t *counts, uint32_t n, const uint32_t *in, Part from) {
    uint32_t i = index();
    if (i < from.words && i < CHUNK) atomicAdd(&counts[in[from.at(i)] % n], in[from.at(i)] >> 7);
}

__global__ void count_in_global(const uint32_t *in, Part from) {
    uint32_t i = index();
    if (i < from.words && i < CHUNK) atomicAdd(&totals[in[from.at(i)] % COMMON], 1u);
}

__global__ void in_bulk(uint4 *to, const uint4 *from, uint32_t n) {
    uint32_t i = index();
    if (i < n) to[i] = from[n - 1 - i];
}

// Called with null as often as not.
__global__ void maybe(uint32_t *to, uint32_t words, uint32_t by) {
    uint32_t i = index();
    if (to && i < words) to[i] += by;
}

__global__ void put(uint32_t **table, uint32_t thread, uint32_t at, uint32_t *pointer) {
    table[at] = pointer;
    kept[thread] = pointer;
}

// Through a pointer that it finds in memory.
__global__ void through_table(uint32_t *const *table, uint32_t at, uint32_t words, uint32_t by) {
    uint32_t i = index();
    if (i < words) table[at][i] = table[at][i] * 69069u + by;
}

// Through a pointer that it finds in a variable.
__global__ void through_global(uint32_t thread, uint32_t words, uint32_t by) {
    uint32_t i = index();
    if (i < words) kept[thread][i] ^= by + i;
}

// Memory, and the stream whose work was the last to use it.
struct Slot {
    uint32_t *at;
    uint32_t words;
    int stream;
    bool pooled, captured;
};

struct Worker {
    pthread_t thread;
    uint32_t number;
    uint64_t random, result;
    volatile uint64_t called;
    cudaStream_t streams[STREAMS];
    cudaEvent_t events[STREAMS];
    Slot slots[SLOTS], table, pinned_in, pinned_out;
    uint32_t *pageable, *device_in, *device_out;
    cudaGraphExec_t graph;
    int in_graph[2];

    uint64_t next() {
        random += 0x9e3779b97f4a7c15ull;
        return mix(random);
    }
    uint32_t below(uint32_t limit) { return (uint32_t)(next() % limit); }
    // What comes into this stream comes after all that has used the slot.
    cudaStream_t use(Slot &slot, int stream) {
        if (slot.stream != stream) {
            CHECK(cudaEventRecord(events[slot.stream], streams[slot.stream]));
            CHECK(cudaStreamWaitEvent(streams[stream], events[slot.stream], 0));
            slot.stream = stream;
        }
        return streams[stream];
    }
    void wait(const Slot &slot) {
        switch (below(3)) {
        case 0:
            CHECK(cudaEventRecord(events[slot.stream], streams[slot.stream]));
            CHECK(cudaEventSynchronize(events[slot.stream]));
            break;
        case 1:
            while (cudaStreamQuery(streams[slot.stream]) == cudaErrorNotReady) sleep_us(20);
            break;
        }
        CHECK(cudaStreamSynchronize(streams[slot.stream]));
    }
    void take(const void *data, uint64_t bytes) { result = digest(data, bytes, result); }
};

static Part part(Worker &w, const Slot &slot) {
    uint32_t stride = slot.words > CHUNK ? slot.words / CHUNK : 1;
    return Part{slot.words, stride, w.below(stride)};
}

static uint32_t blocks(uint32_t words) { return (words + 127) / 128; }
static uint32_t few(uint32_t words) { return words < CHUNK ? words : CHUNK; }

static void read(Worker &w, Slot &slot) {
    uint32_t words = slot.words, from = 0;
    if (w.below(2)) {
        from = w.below(words);
        words -= from;
    }
    if (w.below(2)) {
        CHECK(cudaMemcpyAsync(w.pageable, slot.at + from, words * 4, cudaMemcpyDeviceToHost, w.use(slot, slot.stream)));
        w.wait(slot);
        w.take(w.pageable, words * 4);
    } else {
        cudaStream_t stream = w.use(w.pinned_out, slot.stream);
        CHECK(cudaMemcpyAsync(w.pinned_out.at, slot.at + from, words * 4, cudaMemcpyDeviceToHost, stream));
        w.wait(slot);
        w.take(w.pinned_out.at, words * 4);
    }
}

static void drop_graph(Worker &w) {
    if (!w.graph) return;
    CHECK(cudaGraphExecDestroy(w.graph));
    w.graph = nullptr;
    for (int i : w.in_graph) w.slots[i].captured = false;
}

static void allocate(Worker &w, int i) {
    Slot &slot = w.slots[i];
    uint32_t bits = 5 + w.below(16);
    slot.words = (1u << bits) + w.below(1u << bits);
    if (slot.words > largest / 4) slot.words = (uint32_t)(largest / 4);
    slot.stream = (int)w.below(STREAMS);
    slot.pooled = w.below(3) == 0;
    slot.captured = false;
    if (slot.pooled) {
        CHECK(cudaMallocAsync(&slot.at, slot.words * 4, w.streams[slot.stream]));
    } else {
        CHECK(cudaMalloc(&slot.at, slot.words * 4));
    }
    cudaStream_t stream = w.use(slot, w.table.stream);
    CHECK(cudaMemsetAsync(slot.at, (int)w.below(256), slot.words * 4, stream));
    put<<<1, 1, 0, stream>>>((uint32_t **)w.table.at, w.number, i, slot.at);
    CHECK(cudaGetLastError());
}

static void release(Worker &w, int i) {
    Slot &slot = w.slots[i];
    if (slot.captured) drop_graph(w);
    if (w.below(2)) read(w, slot);
    if (slot.pooled) {
        CHECK(cudaFreeAsync(slot.at, w.streams[slot.stream]));
    } else {
        CHECK(cudaFree(slot.at));
    }
    slot.at = nullptr;
}

static void capture(Worker &w, int i, int j) {
    Slot &a = w.slots[i], &b = w.slots[j];
    drop_graph(w);
    int at = (int)w.below(STREAMS);
    w.use(a, at);
    cudaStream_t stream = w.use(b, at);
    cudaGraph_t graph;
    pthread_mutex_lock(&capturing);
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    stir<<<blocks(few(a.words)), 128, 0, stream>>>(a.at, b.at, part(w, a), part(w, b), w.below(1000));
    if (w.below(2)) CHECK(cudaMemsetAsync(b.at, (int)w.below(256), b.words * 2, stream));
    if (w.below(2)) {
        uint32_t n = few(a.words < b.words ? a.words : b.words);
        without_signature<<<blocks(n), 128, 0, stream>>>(a.at, b.at, n, w.below(1000));
    }
    CHECK(cudaMemcpyAsync(a.at, b.at, (a.words < b.words ? a.words : b.words) * 2, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    pthread_mutex_unlock(&capturing);
    CHECK(cudaGraphInstantiate(&w.graph, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    w.in_graph[0] = i;
    w.in_graph[1] = j;
    a.captured = b.captured = true;
}

static void wait_for_device() {
    pthread_mutex_lock(&capturing);
    CHECK(cudaDeviceSynchronize());
    pthread_mutex_unlock(&capturing);
}

static void CUDART_CB called(void *argument) { *(volatile uint64_t *)argument += 1; }

static void hidden_write(Worker &w, int i) {
    Slot &slot = w.slots[i];
    cudaStream_t stream = w.use(slot, w.table.stream);
    uint32_t by = w.below(1000), n = few(slot.words);
    if (w.below(2)) {
        through_table<<<blocks(n), 128, 0, stream>>>((uint32_t *const *)w.table.at, i, n, by);
    } else {
        put<<<1, 1, 0, stream>>>((uint32_t **)w.table.at, w.number, i, slot.at);
        through_global<<<blocks(n), 128, 0, stream>>>(w.number, n, by);
    }
    CHECK(cudaGetLastError());
}

static void step(Worker &w) {
    int i = (int)w.below(SLOTS), j = (i + 1 + (int)w.below(SLOTS - 1)) % SLOTS, at = (int)w.below(STREAMS);
    Slot &a = w.slots[i], &b = w.slots[j];
    const uint32_t by = w.below(100000), less = a.words < b.words ? a.words : b.words;
    if (w.below(100) < hidden) hidden_write(w, i);
    switch (w.below(16)) {
    case 0:
    case 1: {
        w.use(a, at);
        cudaStream_t stream = w.use(b, at);
        stir<<<blocks(few(a.words)), 128, 0, stream>>>(a.at, b.at, part(w, a), part(w, b), by);
        break;
    }
    case 2: {
        w.use(a, at);
        cudaStream_t stream = w.use(b, at);
        without_signature<<<blocks(few(less)), 128, 0, stream>>>(a.at, b.at, few(less), by);
        break;
    }
    case 3: {
        w.use(a, at);
        cudaStream_t stream = w.use(b, at);
        in_struct<<<blocks(few(less)), 128, 0, stream>>>(Views{few(less), a.at, by, b.at});
        break;
    }
    case 4: {
        w.use(a, at);
        cudaStream_t stream = w.use(b, at);
        count<<<blocks(few(b.words)), 128, 0, stream>>>(a.at, a.words < 32 ? a.words : 32, b.at, part(w, b));
        break;
    }
    case 5: {
        cudaStream_t stream = w.use(a, at);
        if (w.below(2)) {
            count<<<blocks(few(a.words)), 128, 0, stream>>>(common, COMMON, a.at, part(w, a));
        } else {
            count_in_global<<<blocks(few(a.words)), 128, 0, stream>>>(a.at, part(w, a));
        }
        break;
    }
    case 6: {
        w.use(a, at);
        cudaStream_t stream = w.use(b, at);
        in_bulk<<<blocks(few(less / 4)), 128, 0, stream>>>((uint4 *)a.at, (const uint4 *)b.at, few(less / 4));
        break;
    }
    case 7: {
        cudaStream_t stream = w.use(a, at);
        if (w.below(2)) {
            CHECK(cudaMemsetAsync((char *)a.at + 3, (int)(by & 255), a.words * 4 - 5, stream));
        } else {
            CHECK(cudaMemset2DAsync(a.at, a.words / 4 * 4, (int)(by & 255), a.words / 8, 4, stream));
        }
        break;
    }
    case 8: {
        uint32_t from = w.below(a.words), n = a.words - from;
        for (uint32_t k = 0; k < n; k += 7) w.pageable[k] = (uint32_t)mix(by + k);
        CHECK(cudaMemcpyAsync(a.at + from, w.pageable, n * 4, cudaMemcpyHostToDevice, w.use(a, at)));
        break;
    }
    case 9: {
        w.wait(w.pinned_in);
        for (uint32_t k = 0; k < a.words; k += 5) w.pinned_in.at[k] = (uint32_t)mix(by + k);
        w.use(a, at);
        cudaStream_t stream = w.use(w.pinned_in, at);
        if (w.below(2)) {
            CHECK(cudaMemcpyAsync(a.at, w.pinned_in.at, a.words * 4, cudaMemcpyHostToDevice, stream));
        } else {
            stir<<<blocks(few(a.words)), 128, 0, stream>>>(a.at, w.device_in, part(w, a), part(w, a), by);
        }
        break;
    }
    case 10:
        w.use(a, at);
        CHECK(cudaMemcpyAsync(a.at, b.at, less * 4, cudaMemcpyDeviceToDevice, w.use(b, at)));
        break;
    case 11:
        release(w, i);
        allocate(w, i);
        break;
    case 12: read(w, a); break;
    case 13: {
        w.use(a, at);
        cudaStream_t stream = w.use(w.pinned_out, at);
        stir<<<blocks(few(a.words)), 128, 0, stream>>>(w.device_out, a.at, part(w, a), part(w, a), by);
        if (w.below(2)) {
            w.wait(w.pinned_out);
            w.take(w.pinned_out.at, a.words * 4);
        }
        break;
    }
    case 14:
        if (w.graph && w.below(4)) {
            for (int of : w.in_graph) w.use(w.slots[of], at);
            CHECK(cudaGraphLaunch(w.graph, w.streams[at]));
        } else {
            capture(w, i, j);
        }
        break;
    default:
        switch (w.below(5)) {
        case 0: CHECK(cudaLaunchHostFunc(w.streams[at], called, (void *)&w.called)); break;
        case 1: maybe<<<blocks(few(a.words)), 128, 0, w.use(a, at)>>>(w.below(2) ? a.at : nullptr, few(a.words), by); break;
        case 2: // everything of it is in other streams' past, or waits for it
            CHECK(cudaStreamSynchronize(w.streams[at]));
            CHECK(cudaStreamDestroy(w.streams[at]));
            CHECK(cudaStreamCreateWithFlags(&w.streams[at], cudaStreamNonBlocking));
            break;
        case 3: wait_for_device(); break;
        default: w.wait(a); break;
        }
    }
    CHECK(cudaGetLastError());
}

static void *work(void *argument) {
    Worker &w = *(Worker *)argument;
    w.random = seed * 0x10001 + w.number;
    for (int i = 0; i < STREAMS; i++) {
        CHECK(cudaStreamCreateWithFlags(&w.streams[i], cudaStreamNonBlocking));
        CHECK(cudaEventCreateWithFlags(&w.events[i], cudaEventDisableTiming));
    }
    w.pageable = (uint32_t *)calloc(1, largest);
    CHECK(cudaHostAlloc(&w.pinned_in.at, largest, cudaHostAllocMapped));
    CHECK(cudaHostAlloc(&w.pinned_out.at, largest, cudaHostAllocMapped));
    memset(w.pinned_in.at, 1, largest);
    memset(w.pinned_out.at, 2, largest);
    CHECK(cudaHostGetDevicePointer(&w.device_in, w.pinned_in.at, 0));
    CHECK(cudaHostGetDevicePointer(&w.device_out, w.pinned_out.at, 0));
    CHECK(cudaMalloc(&w.table.at, SLOTS * 8));
    for (int i = 0; i < SLOTS; i++) allocate(w, i);
    for (uint64_t done = 1; done <= steps; done++) {
        step(w);
        if (w.number == 0 && done % 5 == 0) progress(progress_file, done * threads);
        sleep_us(pause_us);
    }
    for (int i = 0; i < SLOTS; i++) {
        Slot &slot = w.slots[i];
        CHECK(cudaMemcpyAsync(w.pageable, slot.at, slot.words * 4, cudaMemcpyDeviceToHost, w.streams[slot.stream]));
        CHECK(cudaStreamSynchronize(w.streams[slot.stream]));
        w.take(w.pageable, slot.words * 4);
        release(w, i);
    }
    wait_for_device();
    uint64_t calls = w.called;
    w.take(&calls, sizeof calls);
    w.take(w.pinned_out.at, largest);
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    seed = options.number("--seed", 1);
    steps = options.number("--steps", 600);
    threads = options.number("--threads", 2);
    largest = options.number("--kib", 16) << 10;
    hidden = options.number("--hidden", 3);
    pause_us = options.number("--sleep-us", 0);
    progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(threads >= 1 && threads <= THREADS && largest >= 1024);

    CHECK(cudaMalloc(&common, COMMON * 4));
    CHECK(cudaMemset(common, 0, COMMON * 4));
    // Streams that do not wait for the default stream come next, and a memset does not wait for its end.
    CHECK(cudaDeviceSynchronize());
    Worker *workers = (Worker *)calloc(threads, sizeof *workers);
    for (uint32_t i = 0; i < threads; i++) {
        workers[i].number = i;
        REQUIRE(pthread_create(&workers[i].thread, nullptr, work, &workers[i]) == 0);
    }
    for (uint32_t i = 0; i < threads; i++) {
        REQUIRE(pthread_join(workers[i].thread, nullptr) == 0);
        printf("thread %u %016llx\n", i, (unsigned long long)workers[i].result);
    }
    uint32_t all[2 * COMMON];
    CHECK(cudaMemcpy(all, common, COMMON * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpyFromSymbol(all + COMMON, totals, COMMON * 4));
    printf("common %016llx\n", (unsigned long long)digest(all, sizeof all));
    return 0;
}
