// Managed memory as a device without concurrent access has it: the CPU and the GPU take turns. A linked list of small
// allocations that the CPU makes and kernels walk, a large array that both change, memory that one stream is given while the
// CPU goes on with other memory, system calls that read into managed memory, copies and memsets of every direction, graphs,
// advice and moves.
//
//   managed [--iterations N] [--sleep-us N] [--progress FILE]     40, 0, none
//
// Prints a digest, the same in every run with the same numbers.
#include "rounds.h"

#include <unistd.h>

struct Node {
    Node *next;
    uint32_t value;
    uint32_t sum; // of the list up to this node, by the kernel
};

__global__ void walk(Node *first, uint32_t add) {
    uint32_t sum = 0;
    for (Node *node = first; node; node = node->next) {
        node->value += add;
        sum += node->value;
        node->sum = sum;
    }
}

__global__ void stir(uint32_t *words, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) words[i] = words[i] * 1664525u + round + i;
}

// Counts through a pointer that only memory names.
__global__ void count(uint32_t *const *table, uint32_t rows) {
    for (uint32_t row = threadIdx.x; row < rows; row += blockDim.x) atomicAdd(table[row], row + 1);
}

static Node *made(Node *next, uint32_t value) {
    Node *node;
    CHECK(cudaMallocManaged(&node, sizeof *node));
    *node = {next, value, 0};
    return node;
}

static void attributes(void *memory, size_t bytes, int device) {
    cudaPointerAttributes told;
    CHECK(cudaPointerGetAttributes(&told, (char *)memory + 9));
    REQUIRE(told.type == cudaMemoryTypeManaged && told.device == device);
    REQUIRE(told.hostPointer == (char *)memory + 9 && told.devicePointer == (char *)memory + 9);
    int value = 7;
    cudaMemLocation there = {cudaMemLocationTypeDevice, device};
    CHECK(cudaMemAdvise(memory, bytes, cudaMemAdviseSetReadMostly, there));
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributeReadMostly, memory, bytes));
    REQUIRE(value == 1);
    CHECK(cudaMemAdvise(memory, bytes, cudaMemAdviseUnsetReadMostly, there));
    CHECK(cudaMemAdvise(memory, bytes, cudaMemAdviseSetPreferredLocation, there));
    CHECK(cudaMemRangeGetAttribute(&value, sizeof value, cudaMemRangeAttributePreferredLocation, memory, bytes));
    REQUIRE(value == device);
    REQUIRE(cudaMemAdvise(&value, sizeof value, cudaMemAdviseSetReadMostly, there) != cudaSuccess);
    (void)cudaGetLastError();
    void *none;
    REQUIRE(cudaMallocManaged(&none, 100, 7) == cudaErrorInvalidValue);
    REQUIRE(cudaMallocManaged(&none, 0) == cudaErrorInvalidValue || none == nullptr);
    (void)cudaGetLastError();
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    const uint32_t words = 3 << 18, nodes = 50, rows = 64;
    int device, offered = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&offered, cudaDevAttrManagedMemory, device));
    REQUIRE(offered == 1);

    uint32_t *large, *own, **table, *plain;
    CHECK(cudaMallocManaged(&large, words * 4));
    CHECK(cudaMallocManaged(&own, words, cudaMemAttachHost));
    CHECK(cudaMallocManaged(&table, rows * sizeof *table));
    CHECK(cudaMalloc(&plain, words * 4));
    CHECK(cudaMemset(plain, 0, words * 4));
    attributes(large, words * 4, device);
    for (uint32_t i = 0; i < words; i++) large[i] = (uint32_t)mix(i);
    for (uint32_t row = 0; row < rows; row++) {
        CHECK(cudaMallocManaged(&table[row], 4));
        *table[row] = row;
    }
    Node *list = nullptr;
    for (uint32_t i = 0; i < nodes; i++) list = made(list, i);

    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamAttachMemAsync(stream, own, 0, cudaMemAttachSingle));
    CHECK(cudaStreamSynchronize(stream));
    cudaGraph_t graph;
    cudaGraphExec_t launches;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    stir<<<blocks(words), BLOCK, 0, stream>>>(large, words, 77);
    count<<<1, 32, 0, stream>>>(table, rows);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&launches, graph, 0));
    int ends[2];
    REQUIRE(pipe(ends) == 0);

    rounds.run([&](uint64_t round) {
        // The CPU writes here and there; the kernel all over; the CPU reads here and there.
        for (uint32_t i = 0; i < 64; i++) large[mix(round * 64 + i) % words] += (uint32_t)round;
        stir<<<blocks(words), BLOCK>>>(large, words, (uint32_t)round);
        walk<<<1, 1>>>(list, (uint32_t)round);
        CHECK(cudaDeviceSynchronize());
        uint32_t sum = 0;
        for (Node *node = list; node; node = node->next) {
            sum += node->value;
            REQUIRE(node->sum == sum);
        }
        rounds.take(&sum, sizeof sum);
        for (uint32_t i = 0; i < 64; i++) rounds.take(&large[mix(round * 64 + i) % words], 4);

        // The list changes: the CPU takes the first node away, and puts another in its place.
        Node *old = list;
        list = made(list->next, (uint32_t)mix(round));
        CHECK(cudaFree(old));

        // A stream's own memory, while the GPU's other streams have the rest.
        stir<<<blocks(words / 4), BLOCK, 0, stream>>>(own, words / 4, (uint32_t)round);
        CHECK(cudaStreamSynchronize(stream));
        rounds.take(own + mix(round) % (words / 4 - 16), 64);

        // System calls.
        uint64_t sent[32];
        for (uint64_t &word : sent) word = mix(round * 99 + (uint64_t)(&word - sent));
        REQUIRE(write(ends[1], sent, sizeof sent) == (ssize_t)sizeof sent);
        REQUIRE(read(ends[0], large + 100, sizeof sent) == (ssize_t)sizeof sent);

        // Copies from, to and within managed memory, and memsets.
        uint32_t at = (uint32_t)(mix(round) % (words - 8192)), back[512];
        CHECK(cudaMemcpy(plain + at, large + at, 4096 * 4, cudaMemcpyDefault));
        CHECK(cudaMemcpy(large + at, plain + at + 64, 2048 * 4, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpyAsync(own, large, 4096, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(back, own, sizeof back, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaMemset(large + at + 5000, (int)round, 1024));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaDeviceSynchronize());
        REQUIRE(memcmp(back, own, sizeof back) == 0);
        REQUIRE((large[at + 5000] & 255) == (round & 255));
        rounds.take(back, sizeof back);

        CHECK(cudaGraphLaunch(launches, stream));
        cudaMemLocation host = {cudaMemLocationTypeHost, 0};
        if (round % 3 == 0) CHECK(cudaMemPrefetchAsync(large, words * 4, host, 0, stream));
        CHECK(cudaStreamSynchronize(stream));
        for (uint32_t row = 0; row < rows; row++) REQUIRE(*table[row] == row + round * (row + 1));
    });
    rounds.take(large, words * 4);
    rounds.take_from_device(plain, words);
    CHECK(cudaFree(large));
    CHECK(cudaFree(own));
    return rounds.end();
}
