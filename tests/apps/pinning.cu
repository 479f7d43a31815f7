// A large piece of memory that the program registers and unregisters without a break, while other threads count in it: its
// threads stand still for much of the time, since pages are moved.
//
//   pinning [--iterations N] [--mib N] [--threads N] [--sleep-us N] [--progress FILE]
//           50, 16, 4, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"
#include <pthread.h>

const uint64_t MOST_THREADS = 63;

// Every 1,024th word: a page has one.
const size_t STEP = 1024;

__global__ void add(uint32_t *data, size_t words, uint32_t more) {
    size_t i = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) * STEP;
    if (i < words) data[i] = data[i] * 3u + more;
}

// Counts in a word of its own in each page until it is told to stop.
struct Counter {
    volatile uint32_t *words;
    size_t count;
    volatile int stop;
    uint32_t counted;
};

static void *count(void *argument) {
    Counter *counter = (Counter *)argument;
    while (!counter->stop) {
        for (size_t i = 0; i < counter->count; i += STEP * 64) {
            counter->words[i]++;
        }
        counter->counted++;
        sleep_us(50);
    }
    return nullptr;
}

struct Work {
    uint64_t iterations, pause_us;
    size_t words;
    const char *progress_file;
    uint32_t *data;
    uint64_t digest;
};

static void *pin(void *argument) {
    Work *work = (Work *)argument;
    uint32_t *data = work->data;
    size_t words = work->words, pages = (words + STEP - 1) / STEP;
    for (uint64_t round = 1; round <= work->iterations; round++) {
        uint32_t *device;
        CHECK(cudaHostRegister(data, words * 4, cudaHostRegisterMapped));
        CHECK(cudaHostGetDevicePointer(&device, data, 0));
        add<<<(unsigned)((pages + 127) / 128), 128>>>(device, words, (uint32_t)round);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaHostUnregister(data));
        for (size_t i = STEP; i < words; i += STEP) {
            REQUIRE(data[i] == data[0]);
        }
        work->digest = digest(data, 4, work->digest);
        progress(work->progress_file, round);
        sleep_us(work->pause_us);
    }
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    Work work = {};
    work.iterations = options.number("--iterations", 50);
    work.pause_us = options.number("--sleep-us", 0);
    work.words = options.number("--mib", 16) << 18;
    uint64_t count_of_threads = options.number("--threads", 4);
    work.progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(work.words > 0 && count_of_threads <= MOST_THREADS);

    REQUIRE(posix_memalign((void **)&work.data, 4096, work.words * 4) == 0);
    memset(work.data, 0, work.words * 4);
    // Not the main thread: that one is held as well.
    pthread_t pinner;
    REQUIRE(pthread_create(&pinner, nullptr, pin, &work) == 0);
    static Counter counters[MOST_THREADS];
    static pthread_t threads[MOST_THREADS];
    for (size_t i = 0; i < count_of_threads; i++) {
        counters[i] = {work.data + 1 + i, work.words - 1 - i, 0, 0};
        REQUIRE(pthread_create(&threads[i], nullptr, count, &counters[i]) == 0);
    }
    REQUIRE(pthread_join(pinner, nullptr) == 0);
    for (size_t i = 0; i < count_of_threads; i++) {
        counters[i].stop = 1;
        REQUIRE(pthread_join(threads[i], nullptr) == 0);
        // No count is lost.
        for (size_t word = 0; word < counters[i].count; word += STEP * 64) {
            REQUIRE(counters[i].words[word] == counters[i].counted);
        }
    }
    free(work.data);
    printf("digest %016llx\n", (unsigned long long)work.digest);
    return 0;
}
