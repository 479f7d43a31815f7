// The order of streams: what waits for what, and what never waits.
#include <ctime>
#include <pthread.h>

#include "check.h"

// Holds its stream until the CPU, or another stream, writes.
__global__ void hold(volatile int *gate) {
    while (*gate == 0) {
    }
}
__global__ void open(volatile int *gate) { *gate = 1; }
__global__ void count(int *counter) { atomicAdd(counter, 1); }
__global__ void append(int *log, int value) { log[1 + atomicAdd(log, 1)] = value; }

static void soon() {
    timespec t = {0, 30000000};
    nanosleep(&t, nullptr);
}

struct Log {
    int *at;
    int *gate;
    Log() {
        OK(cudaMallocHost(&at, 64 * 4));
        OK(cudaMallocHost(&gate, 4));
        reset();
    }
    void reset() {
        for (int i = 0; i < 64; i++) {
            at[i] = 0;
        }
        *(volatile int *)gate = 0;
    }
};

// The legacy default stream waits for blocking streams, and they for it; a non-blocking one does neither.
static void legacy() {
    Log log;
    cudaStream_t blocking, free;
    OK(cudaStreamCreate(&blocking));
    OK(cudaStreamCreateWithFlags(&free, cudaStreamNonBlocking));
    hold<<<1, 1, 0, blocking>>>(log.gate);
    append<<<1, 1, 0, cudaStreamLegacy>>>(log.at, 1);
    append<<<1, 1, 0, blocking>>>(log.at, 2);
    append<<<1, 1, 0, free>>>(log.at, 3);
    OK(cudaStreamSynchronize(free));
    soon();
    EXPECT(cudaStreamQuery(blocking), cudaErrorNotReady);
    EXPECT(cudaStreamQuery(cudaStreamLegacy), cudaErrorNotReady);
    REQUIRE(log.at[0] == 1 && log.at[1] == 3);
    *(volatile int *)log.gate = 1;
    OK(cudaDeviceSynchronize());
    REQUIRE(log.at[0] == 3 && log.at[2] == 1 && log.at[3] == 2);
    OK(cudaStreamDestroy(blocking));
    OK(cudaStreamDestroy(free));
}

// Kernels of different streams run at the same time: one opens what the other waits for.
static void concurrent() {
    Log log;
    cudaStream_t a, b;
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    hold<<<1, 1, 0, a>>>(log.gate);
    open<<<1, 1, 0, b>>>(log.gate);
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

static void events() {
    Log log;
    cudaStream_t a, b;
    cudaEvent_t before, after, plain;
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreate(&before));
    OK(cudaEventCreate(&after));
    OK(cudaEventCreateWithFlags(&plain, cudaEventDisableTiming));
    OK(cudaEventQuery(plain));
    OK(cudaEventRecord(before, a));
    OK(cudaEventSynchronize(before));
    hold<<<1, 1, 0, a>>>(log.gate);
    OK(cudaEventRecord(after, a));
    OK(cudaStreamWaitEvent(b, after, 0));
    append<<<1, 1, 0, b>>>(log.at, 7);
    soon();
    EXPECT(cudaEventQuery(after), cudaErrorNotReady);
    EXPECT(cudaStreamQuery(b), cudaErrorNotReady);
    float ms;
    EXPECT(cudaEventElapsedTime(&ms, before, after), cudaErrorNotReady);
    REQUIRE(log.at[0] == 0);
    *(volatile int *)log.gate = 1;
    OK(cudaStreamSynchronize(b));
    OK(cudaEventSynchronize(after));
    OK(cudaEventElapsedTime(&ms, before, after));
    REQUIRE(ms >= 20 && ms < 20000 && log.at[1] == 7);
    OK(cudaEventRecord(plain, a));
    OK(cudaEventSynchronize(plain));
    EXPECT(cudaEventElapsedTime(&ms, before, plain), cudaErrorInvalidResourceHandle);
    OK(cudaEventDestroy(before));
    EXPECT(cudaEventRecord(before, a), cudaErrorInvalidResourceHandle);
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
}

static void CUDART_CB host_function(void *data) { ((int *)data)[1] = ((int *)data)[0] + 1; }
static void CUDART_CB callback(cudaStream_t, cudaError_t status, void *data) {
    ((int *)data)[2] = ((int *)data)[1] + 1 + (int)status;
}

static void host_functions() {
    cudaStream_t stream;
    int *device, host[3] = {}, value = 40;
    OK(cudaStreamCreate(&stream));
    OK(cudaMalloc(&device, 4));
    OK(cudaMemcpyAsync(device, &value, 4, cudaMemcpyHostToDevice, stream));
    OK(cudaMemcpyAsync(host, device, 4, cudaMemcpyDeviceToHost, stream));
    OK(cudaLaunchHostFunc(stream, host_function, host));
    OK(cudaStreamAddCallback(stream, callback, host, 0));
    OK(cudaStreamSynchronize(stream));
    REQUIRE(host[0] == 40 && host[1] == 41 && host[2] == 42);
}

// Each thread has a default stream of its own.
static Log *thread_log;
static void *thread(void *number) {
    append<<<1, 1, 0, cudaStreamPerThread>>>(thread_log->at, (int)(size_t)number);
    OK(cudaStreamSynchronize(cudaStreamPerThread));
    return nullptr;
}
static void per_thread() {
    Log log;
    thread_log = &log;
    hold<<<1, 1, 0, cudaStreamPerThread>>>(log.gate);
    pthread_t other;
    REQUIRE(pthread_create(&other, nullptr, thread, (void *)5) == 0);
    REQUIRE(pthread_join(other, nullptr) == 0);
    REQUIRE(log.at[0] == 1 && log.at[1] == 5);
    EXPECT(cudaStreamQuery(cudaStreamPerThread), cudaErrorNotReady);
    *(volatile int *)log.gate = 1;
    OK(cudaStreamSynchronize(cudaStreamPerThread));
}

// Words that a stream writes and waits for.
static void words() {
    Log log;
    CUstream a, b;
    OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
    OK(cuStreamCreate(&b, CU_STREAM_NON_BLOCKING));
    OK(cuStreamWaitValue32(a, (CUdeviceptr)log.gate, 3, CU_STREAM_WAIT_VALUE_GEQ));
    append<<<1, 1, 0, a>>>(log.at, 9);
    soon();
    EXPECT(cuStreamQuery(a), CUDA_ERROR_NOT_READY);
    OK(cuStreamWriteValue32(b, (CUdeviceptr)log.gate, 5, 0));
    OK(cuStreamSynchronize(a));
    REQUIRE(log.at[1] == 9 && *(volatile int *)log.gate == 5);
}

// A program may be far ahead of the device; another stream goes on meanwhile.
static void far_ahead() {
    Log log;
    cudaStream_t a, b;
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    hold<<<1, 1, 0, a>>>(log.gate);
    for (int i = 0; i < 900; i++) {
        count<<<1, 1, 0, a>>>(log.at + 32);
    }
    for (int i = 0; i < 10; i++) {
        append<<<1, 1, 0, b>>>(log.at, i);
    }
    OK(cudaStreamSynchronize(b));
    REQUIRE(log.at[0] == 10);
    REQUIRE(log.at[32] == 0);
    *(volatile int *)log.gate = 1;
    OK(cudaStreamSynchronize(a));
    REQUIRE(log.at[32] == 900);
    int least, greatest, priority;
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    REQUIRE(least == 0 && greatest < 0);
    OK(cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, -99));
    OK(cudaStreamGetPriority(b, &priority));
    REQUIRE(priority == greatest);
}

int main() {
    legacy();
    concurrent();
    events();
    host_functions();
    per_thread();
    words();
    far_ahead();
    printf("ok\n");
}
