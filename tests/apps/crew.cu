// Six threads that hand work to each other through a queue of the CPU's, each with streams of its own: what one begins on
// its stream another goes on with on its own, after an event; per-thread and legacy default streams in between.
//
//   crew [--iterations N] [--sleep-us N] [--progress FILE]      24, 0, none
//
// Prints "digest D".
#include "rounds.h"

#include <pthread.h>

const uint32_t N = 2048, CREW = 6, ITEMS = 12;

// An item of work passes from thread to thread; its event says when what was begun is done.
struct Item {
    uint32_t *data;
    cudaEvent_t done;
    uint64_t stage;
};
static Item items[ITEMS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Item *queue[ITEMS];
static uint32_t head, waiting, busy;
static uint64_t target;
static bool ended;

__global__ void stage_of(uint32_t *data, uint64_t stage) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = (uint32_t)mix(data[i] + stage * N + i);
}
__global__ void fold(uint32_t *data) {
    __shared__ uint32_t words[BLOCK];
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    words[threadIdx.x] = data[i];
    __syncthreads();
    data[i] += words[BLOCK - 1 - threadIdx.x] >> 7;
}

static void put(Item *item) {
    queue[(head + waiting++) % ITEMS] = item;
    pthread_cond_broadcast(&changed);
}

static void *member(void *) {
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    pthread_mutex_lock(&lock);
    for (;;) {
        while (waiting == 0 && !ended) {
            pthread_cond_wait(&changed, &lock);
        }
        if (ended) {
            break;
        }
        Item *item = queue[head];
        head = (head + 1) % ITEMS, waiting--, busy++;
        pthread_mutex_unlock(&lock);
        // Every third stage on the thread's own default stream.
        cudaStream_t here = item->stage % 3 == 2 ? cudaStreamPerThread : stream;
        CHECK(cudaStreamWaitEvent(here, item->done, 0));
        stage_of<<<N / BLOCK, BLOCK, 0, here>>>(item->data, item->stage++);
        fold<<<N / BLOCK, BLOCK, 0, here>>>(item->data);
        CHECK(cudaGetLastError());
        CHECK(cudaEventRecord(item->done, here));
        pthread_mutex_lock(&lock);
        busy--;
        if (item->stage < target) {
            put(item);
        }
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamDestroy(stream));
    return nullptr;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 24);
    for (uint32_t i = 0; i < ITEMS; i++) {
        items[i].data = randoms<uint32_t>(N, 20 + i);
        CHECK(cudaEventCreateWithFlags(&items[i].done, i % 2 ? cudaEventDisableTiming : cudaEventBlockingSync));
    }
    CHECK(cudaDeviceSynchronize());
    pthread_t crew[CREW];
    for (pthread_t &thread : crew) {
        REQUIRE(pthread_create(&thread, nullptr, member, nullptr) == 0);
    }
    rounds.run([&](uint64_t round) {
        pthread_mutex_lock(&lock);
        target = round * 4;
        for (Item &item : items) {
            put(&item);
        }
        while (waiting + busy > 0) {
            pthread_cond_wait(&changed, &lock);
        }
        pthread_mutex_unlock(&lock);
        uint32_t word;
        Item &item = items[round % ITEMS];
        CHECK(cudaEventSynchronize(item.done));
        CHECK(cudaMemcpy(&word, item.data + round % N, 4, cudaMemcpyDeviceToHost));
        rounds.take(&word, 4);
    });
    pthread_mutex_lock(&lock);
    ended = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    for (pthread_t thread : crew) {
        REQUIRE(pthread_join(thread, nullptr) == 0);
    }
    for (Item &item : items) {
        rounds.take_from_device(item.data, N);
        CHECK(cudaEventDestroy(item.done));
    }
    return rounds.end();
}
