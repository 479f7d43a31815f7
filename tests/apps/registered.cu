// Memory of the program's own that it registers: while another thread writes it, with odd beginnings, on the heap, in a
// variable, on the stack; kernels and copies use it, in the order of their streams; after it is unregistered it is what it
// was before.
//
//   registered [--iterations N] [--words N] [--sleep-us N] [--progress FILE]
//              60, 5000, 0, none
//
// Prints "rules ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"
#include <pthread.h>
#include <sys/mman.h>

__global__ void add(uint32_t *data, uint32_t n, uint32_t more) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        data[i] = data[i] * 3u + more;
    }
}

__global__ void wait_for(volatile uint32_t *flag, uint32_t value) {
    while (*flag != value) {
    }
}

static uint32_t variable[3000];

// Counts in its words of a page until it is told to stop: no count may be lost when the page moves.
struct Counter {
    volatile uint64_t *words;
    volatile int stop;
    uint64_t counted;
};

static void *count(void *argument) {
    Counter *counter = (Counter *)argument;
    while (!counter->stop) {
        for (int i = 0; i < 8; i++) {
            counter->words[i * 512]++;
        }
        counter->counted++;
    }
    return nullptr;
}

static void expect(cudaError_t got, cudaError_t wanted) {
    REQUIRE(got == wanted);
    REQUIRE(cudaGetLastError() == wanted);
}

static void use(uint32_t *host, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        host[i] = i;
    }
    CHECK(cudaHostRegister(host, n * 4, cudaHostRegisterMapped));
    for (uint32_t i = 0; i < n; i++) {
        REQUIRE(host[i] == i);
    }
    expect(cudaHostRegister(host + n / 2, 4, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
    uint32_t *device;
    CHECK(cudaHostGetDevicePointer(&device, host, 0));
    add<<<(n + 127) / 128, 128>>>(device, n, 5);
    CHECK(cudaDeviceSynchronize());
    for (uint32_t i = 0; i < n; i++) {
        REQUIRE(host[i] == i * 3 + 5);
    }
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, host));
    REQUIRE(attributes.type == cudaMemoryTypeHost && attributes.devicePointer == device);
    CHECK(cudaHostUnregister(host));
    expect(cudaHostUnregister(host), cudaErrorHostMemoryNotRegistered);
    CHECK(cudaPointerGetAttributes(&attributes, host));
    REQUIRE(attributes.type == cudaMemoryTypeUnregistered);
    for (uint32_t i = 0; i < n; i++) {
        REQUIRE(host[i] == i * 3 + 5);
    }
}

static void rules(uint32_t n) {
    uint32_t *heap = (uint32_t *)malloc(n * 4 + 100);
    use(heap + 3, n);
    free(heap);
    use(variable + 1, 2999);
    uint32_t stack[2000];
    use(stack, 2000);

    // Pages that were registered can be given up as before.
    size_t bytes = 64 * 4096;
    char *pages = (char *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(pages != MAP_FAILED);
    memset(pages, 7, bytes);
    use((uint32_t *)pages, (uint32_t)bytes / 4);
    REQUIRE(madvise(pages, bytes, MADV_DONTNEED) == 0);
    REQUIRE(pages[5] == 0 && pages[bytes - 1] == 0);

    // Another thread counts while its pages go and come.
    Counter counter = {(volatile uint64_t *)pages, 0, 0};
    pthread_t thread;
    REQUIRE(pthread_create(&thread, nullptr, count, &counter) == 0);
    for (int i = 0; i < 20; i++) {
        CHECK(cudaHostRegister(pages, bytes, cudaHostRegisterMapped));
        sleep_us(200);
        CHECK(cudaHostUnregister(pages));
    }
    counter.stop = 1;
    REQUIRE(pthread_join(thread, nullptr) == 0);
    for (int i = 0; i < 8; i++) {
        REQUIRE(counter.words[i * 512] == counter.counted);
    }

    // Nothing there, nothing at all, and no such flag.
    REQUIRE(munmap(pages, bytes) == 0);
    expect(cudaHostRegister(pages, bytes, cudaHostRegisterDefault), cudaErrorInvalidValue);
    expect(cudaHostRegister(nullptr, 100, cudaHostRegisterDefault), cudaErrorInvalidValue);
    expect(cudaHostRegister(variable, 0, cudaHostRegisterDefault), cudaErrorInvalidValue);
    expect(cudaHostUnregister(variable), cudaErrorHostMemoryNotRegistered);
    printf("rules ok\n");
    fflush(stdout);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    uint32_t n = (uint32_t)options.number("--words", 5000);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(n > 0);
    rules(n);

    uint32_t *buffer = (uint32_t *)malloc(n * 4), *mirror, *device, *flag, *flag_there;
    CHECK(cudaHostRegister(buffer, n * 4, cudaHostRegisterMapped | cudaHostRegisterPortable));
    CHECK(cudaHostGetDevicePointer(&mirror, buffer, 0));
    CHECK(cudaHostAlloc(&flag, 4, cudaHostAllocMapped));
    CHECK(cudaHostGetDevicePointer(&flag_there, flag, 0));
    *(volatile uint32_t *)flag = 0;
    CHECK(cudaMalloc(&device, n * 4));
    CHECK(cudaMemset(device, 1, n * 4));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaDeviceSynchronize());
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        // Both copies wait in the stream: what the first takes is what is in the buffer when its turn comes.
        wait_for<<<1, 1, 0, stream>>>(flag_there, (uint32_t)round);
        CHECK(cudaMemcpyAsync(device, buffer, n * 4, cudaMemcpyHostToDevice, stream));
        add<<<(n + 127) / 128, 128, 0, stream>>>(device, n, (uint32_t)round);
        CHECK(cudaMemcpyAsync(buffer, device, n * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaGetLastError());
        for (uint32_t i = 0; i < n; i++) {
            buffer[i] = (uint32_t)mix(round * n + i);
        }
        sleep_us(pause_us);
        __sync_synchronize();
        *(volatile uint32_t *)flag = (uint32_t)round;
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(buffer[n - 1] == (uint32_t)mix(round * n + n - 1) * 3 + (uint32_t)round);
        add<<<(n + 127) / 128, 128, 0, stream>>>(mirror, n, 1);
        CHECK(cudaStreamSynchronize(stream));
        state = digest(buffer, n * 4, state);
        progress(progress_file, round);
    }
    CHECK(cudaHostUnregister(buffer));
    CHECK(cudaFreeHost(flag));
    CHECK(cudaFree(device));
    free(buffer);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
