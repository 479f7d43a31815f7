// Host callbacks in streams: what they write is read by what follows them, and what follows them waits: kernels, copies
// of every kind, events, other streams, queries. Some wait for the thread that goes on enqueueing behind them.
//
//   callbacks [--iterations N] [--words N] [--callback-us N] [--sleep-us N] [--progress FILE]     60, 32768, 0, 0, none
//
// Prints "calls N" and "digest D", the same in every run with the same numbers. --callback-us is slept in each callback,
// --sleep-us between iterations; FILE holds the iterations done.
#include "app.h"

static uint64_t callback_us, calls;

template <int KIND> __global__ void stir(uint32_t *data, const uint32_t *added, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = data[i] + added[i & 255u] * (2u * KIND + 1u) + round;
        data[i] = (x ^ (x >> 15)) * 0x2c1b3c6du;
    }
}

typedef void (*Kernel)(uint32_t *, const uint32_t *, uint32_t, uint32_t);
static const Kernel kernels[8] = {stir<0>, stir<1>, stir<2>, stir<3>, stir<4>, stir<5>, stir<6>, stir<7>};

// From what came out of the device to what goes in.
struct Turn {
    const uint32_t *out;
    uint32_t *in;
    uint64_t state;
};

static void turn(void *argument) {
    Turn *self = (Turn *)argument;
    sleep_us(callback_us);
    self->state = digest(self->out, 1024, self->state);
    for (uint32_t i = 0; i < 256; i++) {
        self->in[i] = (uint32_t)mix(self->state + i);
    }
    __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
}

static void turn_of_stream(cudaStream_t, cudaError_t status, void *argument) {
    REQUIRE(status == cudaSuccess);
    turn(argument);
}

// Waits for the thread that enqueued it.
static void gate(void *argument) {
    while (!__atomic_load_n((int *)argument, __ATOMIC_SEQ_CST)) {
        sleep_us(100);
    }
    __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 32768);
    callback_us = options.number("--callback-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n >= 256);

    cudaStream_t a, b;
    cudaEvent_t turned, stirred;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CHECK(cudaStreamCreate(&b));
    CHECK(cudaEventCreateWithFlags(&turned, cudaEventDisableTiming));
    CHECK(cudaEventCreateWithFlags(&stirred, cudaEventDisableTiming));
    uint32_t *data, *added, *other, *in, *out;
    CHECK(cudaMalloc(&data, n * 4));
    CHECK(cudaMalloc(&other, n * 4));
    CHECK(cudaMalloc(&added, 1024));
    CHECK(cudaHostAlloc(&in, 1024, cudaHostAllocDefault));
    CHECK(cudaHostAlloc(&out, 1024, cudaHostAllocDefault));
    uint32_t *host = (uint32_t *)malloc(n * 4);
    for (uint32_t i = 0; i < n; i++) {
        host[i] = (uint32_t)mix(i);
    }
    CHECK(cudaMemcpy(data, host, n * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(other, host, n * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(added, 0, 1024));
    // The driver loads a kernel when it is first launched, and may wait for the device then: never behind a gate.
    for (Kernel kernel : kernels) {
        kernel<<<1, 32>>>(data, added, 0, 0);
        CHECK(cudaGetLastError());
    }
    CHECK(cudaDeviceSynchronize());

    Turn turns = {out, in, 1};
    const uint32_t blocks = (n + 127) / 128;
    for (uint64_t i = 1; i <= iterations; i++) {
        const uint32_t round = (uint32_t)i;
        // Out, through the callback, and in again, without a word from this thread.
        stir<0><<<blocks, 128, 0, a>>>(data, added, n, round);
        CHECK(cudaMemcpyAsync(out, data, 1024, cudaMemcpyDeviceToHost, a));
        if (i % 2) {
            CHECK(cudaLaunchHostFunc(a, turn, &turns));
        } else {
            CHECK(cudaStreamAddCallback(a, turn_of_stream, &turns, 0));
        }
        CHECK(cudaMemcpyAsync(added, in, 1024, cudaMemcpyHostToDevice, a));
        stir<1><<<blocks, 128, 0, a>>>(data, added, n, round + 1);
        CHECK(cudaEventRecord(turned, a));
        // Another stream waits for that, and the legacy default stream for the other.
        CHECK(cudaStreamWaitEvent(b, turned, 0));
        stir<2><<<blocks, 128, 0, b>>>(other, added, n, round + 2);
        CHECK(cudaEventRecord(stirred, b));
        stir<3><<<blocks, 128>>>(other, added, n, round + 3);
        CHECK(cudaGetLastError());
        if (i % 3 == 0) {
            while (cudaEventQuery(stirred) == cudaErrorNotReady) {
                sleep_us(50);
            }
        }
        CHECK(cudaStreamSynchronize(0));
        CHECK(cudaStreamWaitEvent(a, stirred, 0));
        if (i % 5 == 0) {
            // Nothing behind the callback runs before this thread says so; and enqueueing there does not wait.
            int open = 0;
            uint32_t *gone;
            cudaStream_t brief;
            CHECK(cudaMalloc(&gone, 4096));
            CHECK(cudaStreamCreateWithFlags(&brief, cudaStreamNonBlocking));
            CHECK(cudaLaunchHostFunc(a, gate, &open));
            kernels[(i / 5) % 8]<<<blocks, 128, 0, a>>>(data, added, n, round + 4);
            CHECK(cudaGetLastError());
            for (uint32_t k = 0; k < n; k++) {
                host[k] += round;
            }
            // Up to 64 KiB of pageable memory the driver takes at once.
            CHECK(cudaMemcpyAsync(other, host, n * 4 < 49152 ? n * 4 : 49152, cudaMemcpyHostToDevice, a));
            memset(host, 0, n * 4); // it has been taken
            CHECK(cudaEventRecord(turned, a));
            CHECK(cudaStreamWaitEvent(brief, turned, 0));
            CHECK(cudaMemsetAsync(gone, 1, 4096, brief));
            CHECK(cudaStreamDestroy(brief));
            REQUIRE(cudaStreamQuery(a) == cudaErrorNotReady);
            REQUIRE(cudaEventQuery(turned) == cudaErrorNotReady);
            // A stream that has nothing to do with it goes on, and the event that is recorded there anew is done.
            stir<4><<<1, 32, 0, b>>>(added + 128, added, 32, round);
            CHECK(cudaEventRecord(turned, b));
            CHECK(cudaEventSynchronize(turned));
            sleep_us(callback_us);
            REQUIRE(cudaStreamQuery(a) == cudaErrorNotReady);
            __atomic_store_n(&open, 1, __ATOMIC_SEQ_CST);
            CHECK(cudaFree(gone));
            CHECK(cudaStreamSynchronize(a));
            CHECK(cudaMemcpy(host, other, n * 4, cudaMemcpyDeviceToHost));
            turns.state = digest(host, n * 4, turns.state);
        }
        progress(progress_file, i);
        sleep_us(pause_us);
    }
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(host, data, n * 4, cudaMemcpyDeviceToHost));
    uint64_t state = digest(host, n * 4, turns.state);
    CHECK(cudaMemcpy(host, other, n * 4, cudaMemcpyDeviceToHost));
    printf("calls %llu\n", (unsigned long long)calls);
    printf("digest %016llx\n", (unsigned long long)digest(host, n * 4, state));
    return 0;
}
