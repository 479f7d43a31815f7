// Many streams whose launches wait for a word of memory that another stream writes: far more launches than one hardware
// queue takes, which streams share (CUDA_DEVICE_MAX_CONNECTIONS says how many there are).
//
//   queues [--streams N] [--launches N] [--rounds N] [--strict N] [--sleep-us N] [--progress FILE]   32, 40, 12, 0, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the rounds done. One thread launches, another
// has its stream write the word. A GPU cannot always bring that write about, where its queue is another stream's, too; so
// the processor writes it after a while. With --strict it does not: the stream must.
#include "app.h"

#include <cuda.h>
#include <pthread.h>

typedef CUresult (*Word32)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);
static Word32 write32, wait32;

static const uint32_t MOST = 256;
static uint32_t count, launches;
static cudaStream_t streams[MOST], writer;
static uint32_t *results;
static volatile uint32_t *word;
static uint32_t round_now, launched;

static Word32 find(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, 13000, cudaEnableDefault, &found));
    REQUIRE(found == cudaDriverEntryPointSuccess);
    return (Word32)function;
}

__global__ void stir(uint32_t *result, uint32_t number) {
    uint32_t x = *result + number;
    *result = (x ^ (x >> 15)) * 0x2c1b3c6du;
}


// Launches everything, as fast as it goes.
static void *launch(void *) {
    CHECK(cudaSetDevice(0));
    for (uint32_t s = 0; s < count; s++) {
        REQUIRE(wait32(streams[s], (CUdeviceptr)word, round_now, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
        for (uint32_t i = 0; i < launches; i++) {
            stir<<<1, 1, 0, streams[s]>>>(results + s, round_now + i);
            CHECK(cudaGetLastError());
            __atomic_add_fetch(&launched, 1, __ATOMIC_SEQ_CST);
        }
    }
    return nullptr;
}

// Has the word written when the other thread is done, or gets no further.
static void *release(void *) {
    CHECK(cudaSetDevice(0));
    for (uint32_t before = 0, same = 0; same < 40;) {
        uint32_t now = __atomic_load_n(&launched, __ATOMIC_SEQ_CST);
        if (now == count * launches) {
            break;
        }
        same = now == before ? same + 1 : 0;
        before = now;
        sleep_us(5000);
    }
    REQUIRE(write32(writer, (CUdeviceptr)word, round_now, 0) == CUDA_SUCCESS);
    return nullptr;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    count = (uint32_t)options.number("--streams", 32);
    launches = (uint32_t)options.number("--launches", 40);
    uint32_t rounds = (uint32_t)options.number("--rounds", 12);
    bool strict = options.number("--strict", 0) != 0;
    uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(count > 0 && count <= MOST);

    write32 = find("cuStreamWriteValue32");
    wait32 = find("cuStreamWaitValue32");
    CHECK(cudaStreamCreateWithFlags(&writer, cudaStreamNonBlocking));
    for (uint32_t s = 0; s < count; s++) {
        CHECK(cudaStreamCreateWithFlags(&streams[s], cudaStreamNonBlocking));
    }
    CHECK(cudaHostAlloc((void **)&word, 4096, cudaHostAllocMapped));
    *word = 0;
    CHECK(cudaMalloc(&results, MOST * 4));
    CHECK(cudaMemset(results, 3, MOST * 4));
    // The driver loads a kernel when it is first launched, and may wait for the device then.
    stir<<<1, 1>>>(results + MOST - 1, 0);
    CHECK(cudaDeviceSynchronize());

    for (uint32_t round = 1; round <= rounds; round++) {
        round_now = round;
        launched = 0;
        pthread_t launcher, releaser;
        REQUIRE(pthread_create(&launcher, nullptr, launch, nullptr) == 0);
        REQUIRE(pthread_create(&releaser, nullptr, release, nullptr) == 0);
        for (int i = 0; *word < round && (strict || i < 500); i++) {
            sleep_us(1000);
        }
        if (*word < round) {
            *word = round;
        }
        REQUIRE(pthread_join(launcher, nullptr) == 0);
        REQUIRE(pthread_join(releaser, nullptr) == 0);
        progress(progress_file, round);
        CHECK(cudaDeviceSynchronize());
        sleep_us(pause_us);
    }
    uint32_t out[MOST];
    CHECK(cudaMemcpy(out, results, sizeof out, cudaMemcpyDeviceToHost));
    printf("digest %016llx\n", (unsigned long long)digest(out, sizeof out));
    return 0;
}
