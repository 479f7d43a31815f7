// Managed variables: counters, records with pointers to each other, arrays smaller and larger than what moves at once, in two modules
// and beside ordinary variables. The CPU and the GPU change them in turn, by name, by address, by copies to symbols and by system
// calls; graphs and host callbacks do, too.
//
//   variables [--iterations N] [--sleep-us N] [--progress FILE]     40, 0, none
//
// Prints a digest, the same in every run with the same numbers.
// build: apart
#include "variables.h"

#include <unistd.h>

const uint32_t WORDS = 3 << 18, FEW = 300;

struct Node {
    Node *next;
    uint32_t value;
    uint32_t sum; // of the list up to this node, by the kernel
};

__managed__ uint32_t turns = 7;                                        // with a first value
__device__ uint32_t beside[5] = {2, 3, 5, 7, 11};                      // only the GPU changes it
__managed__ uint32_t primes[8] = {2, 3, 5, 7, 11, 13, 17, 19};
static __managed__ unsigned char odd_sized[13];
__managed__ Node nodes[20];
__managed__ Node *first;
__device__ uint32_t behind = 99;
__managed__ uint32_t large[WORDS];                                     // 3 MiB
__constant__ uint32_t factors[4] = {3, 5, 7, 11};
namespace {
__managed__ double nameless = 0.5;
}

// Names nothing in its parameters.
__global__ void walk() {
    uint32_t sum = 0;
    for (Node *node = first; node; node = node->next) {
        node->value = node->value * factors[node->value & 3] + turns;
        sum += node->value;
        node->sum = sum;
    }
    for (uint32_t i = 0; i < 5; i++) beside[i] = beside[i] * 31 + turns + i;
    behind += sum;
    for (uint32_t i = 0; i < 13; i++) odd_sized[i] = (unsigned char)(odd_sized[i] + primes[i & 7] + beside[i % 5]);
    nameless = nameless * 0.75 + (double)(sum & 1023);
    turns++;
}

__global__ void stir(uint32_t *words, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) words[i] = words[i] * 1664525u + round + i;
}

__global__ void see(uint32_t *out) {
    for (uint32_t i = 0; i < 5; i++) out[i] = beside[i];
    out[5] = behind;
    out[6] = turns;
}

static void between(void *) {
    primes[turns & 7] += turns;
    large[WORDS - 1] ^= turns;
}

static void attributes() {
    cudaPointerAttributes told;
    CHECK(cudaPointerGetAttributes(&told, &primes[3]));
    REQUIRE(told.type == cudaMemoryTypeManaged);
    REQUIRE(told.hostPointer == &primes[3] && told.devicePointer == &primes[3]);
    void *address;
    size_t bytes;
    CHECK(cudaGetSymbolAddress(&address, primes));
    CHECK(cudaGetSymbolSize(&bytes, primes));
    REQUIRE(address == primes && bytes == sizeof primes);
    cudaMemLocation there = {cudaMemLocationTypeDevice, 0};
    CHECK(cudaMemAdvise(large, sizeof large, cudaMemAdviseSetPreferredLocation, there));
    CHECK(cudaMemPrefetchAsync(large, sizeof large, there, 0, 0));
    REQUIRE(cudaFree(large) != cudaSuccess);
    (void)cudaGetLastError();
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    REQUIRE(turns == 7 && primes[7] == 19 && odd_sized[12] == 0 && first == nullptr && large[WORDS - 1] == 0);
    attributes();
    for (uint32_t i = 0; i < 20; i++) {
        nodes[i] = {first, i, 0};
        first = &nodes[i];
    }
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    uint32_t *seen = zeros<uint32_t>(7);
    cudaGraph_t graph;
    cudaGraphExec_t launches;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    walk<<<1, 1, 0, stream>>>();
    stir<<<blocks(WORDS), BLOCK, 0, stream>>>(large, WORDS, 77);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&launches, graph, 0));
    int ends[2];
    REQUIRE(pipe(ends) == 0);

    rounds.run([&](uint64_t round) {
        // The CPU writes here and there, and so does the GPU.
        for (uint32_t i = 0; i < 32; i++) large[mix(round * 32 + i) % WORDS] += (uint32_t)round + primes[i & 7];
        odd_sized[round % 13] ^= (unsigned char)round;
        nodes[round % 20].value += turns;
        walk<<<1, 1>>>();
        stir<<<blocks(FEW), BLOCK>>>(large + mix(round) % (WORDS - FEW), FEW, (uint32_t)round);
        see<<<1, 1>>>(seen);
        CHECK(cudaDeviceSynchronize());
        uint32_t sum = 0;
        for (Node *node = first; node; node = node->next) {
            sum += node->value;
            REQUIRE(node->sum == sum);
        }
        rounds.take(&sum, sizeof sum);
        rounds.take(odd_sized, sizeof odd_sized);
        rounds.take(&nameless, sizeof nameless);
        for (uint32_t i = 0; i < 32; i++) rounds.take(&large[mix(round * 32 + i + 1) % WORDS], 4);

        // A callback changes them between two kernels, and a graph after that.
        CHECK(cudaLaunchHostFunc(stream, between, nullptr));
        CHECK(cudaGraphLaunch(launches, stream));
        CHECK(cudaStreamSynchronize(stream));
        rounds.take(primes, sizeof primes);

        // Copies to and from symbols, and between these and other memory.
        uint32_t pair[2] = {(uint32_t)round, turns}, back[64];
        CHECK(cudaMemcpyToSymbol(primes, pair, sizeof pair, 8));
        CHECK(cudaMemcpyFromSymbol(back, large, sizeof back, (mix(round) % (WORDS - 64)) * 4));
        CHECK(cudaMemcpy(large + 4096, primes, sizeof primes, cudaMemcpyDefault));
        CHECK(cudaMemset(large + 8192, (int)round, 512));
        REQUIRE(primes[2] == pair[0] && primes[3] == pair[1] && large[4096] == primes[0]);
        rounds.take(back, sizeof back);

        // System calls.
        uint64_t sent[32];
        for (uint64_t &word : sent) word = mix(round * 99 + (uint64_t)(&word - sent));
        REQUIRE(write(ends[1], sent, sizeof sent) == (ssize_t)sizeof sent);
        REQUIRE(read(ends[0], large + 100, sizeof sent) == (ssize_t)sizeof sent);
        REQUIRE(write(ends[1], primes, sizeof primes) == sizeof primes);
        REQUIRE(read(ends[0], back, sizeof primes) == sizeof primes && back[2] == pair[0]);

        // The other module's variables, whose address a kernel here gets.
        other_round((uint32_t)round);
        uint32_t count, *words = other_words(&count);
        stir<<<blocks(count), BLOCK>>>(words, count, (uint32_t)round);
        CHECK(cudaDeviceSynchronize());
        sum = other_sum();
        rounds.take(&sum, sizeof sum);
    });
    see<<<1, 1>>>(seen);
    rounds.take_from_device(seen, 7);
    rounds.take(large, sizeof large);
    return rounds.end();
}
