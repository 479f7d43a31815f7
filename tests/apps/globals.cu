// Every kind of module global: device and constant, initialised and not, static, in namespaces, a struct; written and
// read by symbol, by address and by kernels; and device pointers kept in device memory, to allocations and to globals.
//
//   globals [--iterations N] [--sleep-us N] [--progress FILE]      100, 0, none
//
// Prints "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

const uint32_t N = 256;

__device__ uint32_t plain[N];                       // zero at load
__device__ uint32_t primed[8] = {1, 2, 3, 5, 8, 13, 21, 34};
__constant__ uint32_t factors[8] = {3, 5, 7, 11, 13, 17, 19, 23};
__constant__ uint64_t salt;
static __device__ uint64_t hidden = 42;             // internal linkage
__device__ unsigned char odd_sized[13];

namespace outer {
__device__ uint32_t value = 7;
namespace inner {
__constant__ uint32_t value = 9;
}
namespace {
__device__ uint32_t nameless = 11;
}
} // namespace outer

struct Node {
    uint32_t *data;   // an allocation
    uint32_t *global; // inside `plain`
    Node *next;       // another node, in an allocation
    uint32_t weight;
};
__device__ Node head;
__device__ Node *cursor; // walks the ring of nodes, one further each round

__global__ void link_nodes(Node *nodes, uint32_t count, uint32_t *data, uint32_t each) {
    uint32_t i = threadIdx.x;
    if (i < count) {
        nodes[i].data = data + i * each;
        nodes[i].global = &plain[i * (N / count)];
        nodes[i].next = &nodes[(i + 1) % count];
        nodes[i].weight = i + 1;
    }
    __syncthreads();
    if (i == 0) {
        head = nodes[0];
        cursor = &nodes[0];
    }
}

// Names no allocation in its parameters: it reaches all through globals.
__global__ void walk(uint32_t each) {
    Node *node = cursor;
    uint32_t i = threadIdx.x;
    if (i < each) {
        uint32_t x = node->data[i] * factors[i & 7] + primed[i & 7] + outer::value * outer::inner::value;
        node->data[i] = x ^ (uint32_t)salt ^ (uint32_t)hidden;
        atomicAdd(&node->global[i % 32], x >> 16); // i and i + 32 meet here
    }
    __syncthreads();
    if (i == 0) {
        cursor = node->next;
        hidden = mix(hidden + node->weight + outer::nameless++);
        outer::value += head.weight;
        odd_sized[hidden % 13]++;
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 100), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    const uint32_t NODES = 8, EACH = 64;
    Node *nodes;
    uint32_t *data, host[NODES * EACH];
    CHECK(cudaMalloc(&nodes, NODES * sizeof *nodes));
    CHECK(cudaMalloc(&data, sizeof host));
    for (uint32_t i = 0; i < NODES * EACH; i++) {
        host[i] = (uint32_t)mix(i);
    }
    CHECK(cudaMemcpy(data, host, sizeof host, cudaMemcpyHostToDevice));
    link_nodes<<<1, 32>>>(nodes, NODES, data, EACH);
    CHECK(cudaGetLastError());

    // Addresses and sizes, as often as asked for the same.
    void *address, *again;
    size_t size;
    CHECK(cudaGetSymbolAddress(&address, plain));
    CHECK(cudaGetSymbolSize(&size, plain));
    REQUIRE(size == N * 4);
    CHECK(cudaGetSymbolSize(&size, odd_sized));
    REQUIRE(size == 13);
    uint32_t constants[8] = {}, expected[8] = {3, 5, 7, 11, 13, 17, 19, 23};
    CHECK(cudaMemcpyFromSymbol(constants, factors, sizeof constants));
    REQUIRE(memcmp(constants, expected, sizeof expected) == 0);

    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        uint64_t new_salt = mix(round);
        CHECK(cudaMemcpyToSymbol(salt, &new_salt, sizeof new_salt));
        walk<<<1, EACH>>>(EACH);
        CHECK(cudaGetLastError());
        if (round % 4 == 0) {
            // Part of an array, at an offset; and through the address.
            uint32_t pair[2] = {(uint32_t)round, (uint32_t)state};
            CHECK(cudaMemcpyToSymbol(primed, pair, 8, 8 * (round / 4 % 4)));
            CHECK(cudaMemcpyToSymbol(factors, &new_salt, 4, 4 * (round / 4 % 8)));
            CHECK(cudaMemcpyFromSymbol(pair, plain, 8, 8 * (round % (N / 2))));
            CHECK(cudaMemcpy((uint32_t *)address + round % N, pair, 4, cudaMemcpyHostToDevice));
            state = digest(pair, 8, state);
        }
        CHECK(cudaGetSymbolAddress(&again, plain));
        REQUIRE(again == address);
        progress(progress_file, round);
        sleep_us(pause_us);
    }

    uint32_t all[N], small[8], outer_value;
    unsigned char bytes[13];
    uint64_t last;
    CHECK(cudaMemcpyFromSymbol(all, plain, sizeof all));
    state = digest(all, sizeof all, state);
    CHECK(cudaMemcpyFromSymbol(small, primed, sizeof small));
    state = digest(small, sizeof small, state);
    CHECK(cudaMemcpyFromSymbol(small, factors, sizeof small));
    state = digest(small, sizeof small, state);
    CHECK(cudaMemcpyFromSymbol(&last, hidden, 8));
    state = digest(&last, 8, state);
    CHECK(cudaMemcpyFromSymbol(&outer_value, outer::value, 4));
    state = digest(&outer_value, 4, state);
    CHECK(cudaMemcpyFromSymbol(&outer_value, outer::nameless, 4));
    REQUIRE(outer_value == 11 + iterations);
    CHECK(cudaMemcpyFromSymbol(bytes, odd_sized, sizeof bytes));
    state = digest(bytes, sizeof bytes, state);
    CHECK(cudaMemcpy(host, data, sizeof host, cudaMemcpyDeviceToHost));
    state = digest(host, sizeof host, state);
    // Where the pointers point has not moved.
    Node first;
    CHECK(cudaMemcpyFromSymbol(&first, head, sizeof first));
    REQUIRE(first.data == data && first.global == address && first.next == nodes + 1);
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
