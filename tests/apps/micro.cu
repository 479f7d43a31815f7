// What single calls cost, and how fast copies are; the same program on the driver and on what stands in for it.
//
//   micro [--repeats N] [--burst N] [--max-mib N]      41, 500, 1024
//
// Prints one JSON object. Each figure is {"median", "low", "high"} over the repeats (low and high: 10th and 90th
// hundredths). Times in nanoseconds; copies in GB/s (1e9 bytes) for 64 KiB, 1, 64 and 1024 MiB up to --max-mib; of managed memory the
// bytes of the allocation over the time of a pass, or of both passes.
#include "app.h"

__global__ void empty() {}
__global__ void two(uint32_t *a, uint64_t b) {
    if (b == ~0ull) {
        *a = 1;
    }
}

__global__ void increment(uint4 *words, size_t n) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint4 word = words[i];
        words[i] = {word.x + 1, word.y + 1, word.z + 1, word.w + 1};
    }
}

static uint64_t repeats, burst, most;

// Insertion, not qsort: there are few, and they come nearly in order.
static void print(const char *name, double *values, const char *after) {
    for (uint64_t i = 1; i < repeats; i++) {
        double value = values[i];
        uint64_t at = i;
        for (; at > 0 && values[at - 1] > value; at--) {
            values[at] = values[at - 1];
        }
        values[at] = value;
    }
    printf("\"%s\": {\"median\": %.3f, \"low\": %.3f, \"high\": %.3f}%s", name, values[repeats / 2],
           values[repeats / 10], values[repeats - 1 - repeats / 10], after);
}

// The time of one `call`, over `times` calls in a row; once untimed before the repeats.
template <typename Call> static void cost(const char *name, uint64_t times, Call call) {
    double *values = (double *)calloc(repeats, sizeof *values);
    call();
    for (uint64_t r = 0; r < repeats; r++) {
        double start = now_ns();
        for (uint64_t i = 0; i < times; i++) {
            call();
        }
        values[r] = (now_ns() - start) / (double)times;
        CHECK(cudaDeviceSynchronize());
    }
    printf("  ");
    print(name, values, ",\n");
    fflush(stdout);
    free(values);
}

template <typename Call> static void speed(const char *kind, const char *direction, size_t bytes, bool last, Call call) {
    double *values = (double *)calloc(repeats, sizeof *values);
    uint64_t times = bytes >= (16u << 20) ? 1 : (16u << 20) / bytes; // short copies in a row, or the clock would count
    uint64_t all = repeats;
    if (bytes >= (1u << 30) && repeats > 7) {
        repeats = 7;
    }
    call();
    CHECK(cudaDeviceSynchronize());
    for (uint64_t r = 0; r < repeats; r++) {
        double start = now_ns();
        for (uint64_t i = 0; i < times; i++) {
            call();
        }
        CHECK(cudaStreamSynchronize(0));
        values[r] = (double)bytes * (double)times / (now_ns() - start);
    }
    printf("    {\"memory\": \"%s\", \"direction\": \"%s\", \"bytes\": %zu, ", kind, direction, bytes);
    print("gb_per_s", values, last ? "}\n" : "},\n");
    fflush(stdout);
    repeats = all;
    free(values);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    repeats = options.number("--repeats", 41);
    burst = options.number("--burst", 500);
    most = options.number("--max-mib", 1024) << 20;
    options.done();
    REQUIRE(repeats > 0 && burst > 0);

    double start = now_ns();
    CHECK(cudaFree(nullptr));
    double ready = now_ns();
    uint32_t *small, out;
    CHECK(cudaMalloc(&small, 4096));
    empty<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    double ran = now_ns();
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaStreamSynchronize(stream));

    printf("{\n  \"device\": \"%s\", \"repeats\": %llu, \"burst\": %llu,\n", properties.name, (unsigned long long)repeats,
           (unsigned long long)burst);
    printf("  \"init_ns\": %.0f, \"first_kernel_ns\": %.0f,\n", ready - start, ran - start);
    // Enqueueing alone: the wait for the burst is outside of the time.
    cost("launch_empty", burst, [&] {
        empty<<<1, 1, 0, stream>>>();
    });
    CHECK(cudaGetLastError());
    cost("launch_two_parameters", burst, [&] {
        two<<<1, 1, 0, stream>>>(small, 1);
    });
    CHECK(cudaGetLastError());
    cost("memset_async", burst, [&] { CHECK(cudaMemsetAsync(small, 1, 64, stream)); });
    cost("event_record", burst, [&] { CHECK(cudaEventRecord(event, stream)); });
    // Calls that ask: an idle stream's state, an event that has happened, free memory.
    cost("stream_query", 200, [&] { CHECK(cudaStreamQuery(stream)); });
    cost("event_query", 200, [&] { CHECK(cudaEventQuery(event)); });
    cost("stream_synchronize_idle", 200, [&] { CHECK(cudaStreamSynchronize(stream)); });
    size_t free_bytes, total;
    cost("mem_get_info", 50, [&] { CHECK(cudaMemGetInfo(&free_bytes, &total)); });
    // Work and its result: the whole way there and back.
    cost("launch_and_synchronize", 50, [&] {
        empty<<<1, 1, 0, stream>>>();
        CHECK(cudaStreamSynchronize(stream));
    });
    cost("copy_4_bytes_d2h", 50, [&] { CHECK(cudaMemcpy(&out, small, 4, cudaMemcpyDeviceToHost)); });
    cost("copy_4_bytes_h2d", 50, [&] { CHECK(cudaMemcpy(small, &out, 4, cudaMemcpyHostToDevice)); });
    cost("malloc_free_2_mib", 20, [&] {
        void *block;
        CHECK(cudaMalloc(&block, 2 << 20));
        CHECK(cudaFree(block));
    });

    printf("  \"copies\": [\n");
    {
        // Managed memory: a kernel's pass over what the GPU has, and passes of the CPU and of a kernel in turn.
        size_t bytes = most < (256u << 20) ? most : 256u << 20;
        char *managed;
        CHECK(cudaMallocManaged(&managed, bytes));
        memset(managed, 4, bytes);
        auto pass = [&] {
            increment<<<1024, 256>>>((uint4 *)managed, bytes / sizeof(uint4));
            CHECK(cudaDeviceSynchronize());
        };
        speed("managed", "kernel", bytes, false, pass);
        speed("managed", "cpu_writes_kernel", bytes, false, [&] {
            memset(managed, 5, bytes);
            pass();
        });
        volatile uint64_t sum = 0;
        speed("managed", "kernel_cpu_reads", bytes, false, [&] {
            pass();
            uint64_t all = 0;
            for (size_t i = 0; i < bytes; i += 64) all += (uint64_t)managed[i];
            sum = sum + all;
        });
        CHECK(cudaFree(managed));
    }
    const size_t sizes[] = {64 << 10, 1 << 20, 64 << 20, 1 << 30};
    size_t count = 1;
    while (count < 4 && sizes[count] <= most) {
        count++;
    }
    for (size_t i = 0; i < count; i++) {
        size_t bytes = sizes[i];
        char *device, *pinned, *pageable = (char *)malloc(bytes);
        REQUIRE(pageable);
        CHECK(cudaMalloc(&device, bytes));
        CHECK(cudaMallocHost(&pinned, bytes));
        // Touched before: the kernel's work of finding pages is not the copy's.
        memset(pageable, 1, bytes);
        memset(pinned, 2, bytes);
        CHECK(cudaMemset(device, 3, bytes));
        speed("pinned", "h2d", bytes, false, [&] { CHECK(cudaMemcpyAsync(device, pinned, bytes, cudaMemcpyHostToDevice, 0)); });
        speed("pinned", "d2h", bytes, false, [&] { CHECK(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, 0)); });
        speed("pageable", "h2d", bytes, false, [&] { CHECK(cudaMemcpy(device, pageable, bytes, cudaMemcpyHostToDevice)); });
        speed("pageable", "d2h", bytes, i + 1 == count, [&] { CHECK(cudaMemcpy(pageable, device, bytes, cudaMemcpyDeviceToHost)); });
        CHECK(cudaFree(device));
        CHECK(cudaFreeHost(pinned));
        free(pageable);
    }
    printf("  ]\n}\n");
    return 0;
}
