// Memory that kernels allocate with malloc: lists that threads make, change and free, from round to round, by launches and by a graph,
// in a heap whose size was asked for. Nothing but the heap knows the lists, and which of its memory is free.
//
//   kernelheap [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 64, LONGEST = 12, LARGE = 64 << 10, TAKEN = 64;

struct Node {
    Node *next;
    uint32_t words, of[1];
};

// Lists, and what all went wrong.
struct Lists {
    Node *heads[N];
    uint32_t lengths[N];
    uint32_t missing;
};

__device__ Lists lists;

__device__ void push(uint32_t thread, uint32_t state) {
    uint32_t words = 1 + state % (state % 7 ? 20 : 200);
    Node *node = (Node *)malloc(sizeof(Node) + words * 4);
    if (!node) {
        atomicAdd(&lists.missing, 1);
        return;
    }
    node->next = lists.heads[thread];
    node->words = words;
    for (uint32_t i = 0; i < words; i++) {
        node->of[i] = (uint32_t)mix(state + i);
    }
    lists.heads[thread] = node;
    lists.lengths[thread]++;
}

__device__ uint32_t pop(uint32_t thread) {
    Node *node = lists.heads[thread];
    uint32_t sum = node->words;
    for (uint32_t i = 0; i < node->words; i++) {
        sum = sum * 31 + node->of[i];
    }
    lists.heads[thread] = node->next;
    lists.lengths[thread]--;
    free(node);
    return sum;
}

__global__ void change(uint32_t *sums, uint32_t round) {
    uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, state = (uint32_t)mix(thread * 1000ull + round);
    for (uint32_t i = 0; i < 6; i++) {
        state = (uint32_t)mix(state);
        if (lists.lengths[thread] && (state % 3 == 0 || lists.lengths[thread] == LONGEST)) {
            sums[thread] = sums[thread] * 37 + pop(thread);
        } else {
            push(thread, state);
        }
    }
}

// What the round is comes from memory, since a graph has its parameters for good.
__global__ void change_by_graph(uint32_t *sums, const uint32_t *round) {
    uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    push(thread, *round * 977 + thread);
    sums[thread] = sums[thread] * 41 + pop(thread) + lists.lengths[thread];
}

// All is freed, so there is room for a few large blocks again, none of which overlaps another.
__global__ void end(uint32_t *sums) {
    uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    while (lists.lengths[thread]) {
        sums[thread] = sums[thread] * 43 + pop(thread);
    }
    if (lists.heads[thread]) {
        atomicAdd(&lists.missing, 1000);
    }
}

__global__ void take_large(uint32_t *found) {
    uint32_t *at[TAKEN];
    for (uint32_t i = 0; i < TAKEN; i++) {
        at[i] = (uint32_t *)malloc(LARGE);
        found[0] += at[i] != nullptr;
        for (uint32_t k = 0; at[i] && k < LARGE / 4; k += 1024) {
            at[i][k] = i;
        }
    }
    for (uint32_t i = 0; i < TAKEN; i++) {
        for (uint32_t k = 0; at[i] && k < LARGE / 4; k += 1024) {
            found[1] += at[i][k] != i;
        }
        free(at[i]);
    }
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    // Not whole pages.
    CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 12345678));
    uint32_t *sums = zeros<uint32_t>(N), *now = zeros<uint32_t>(1), *found = zeros<uint32_t>(2);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    change_by_graph<<<2, N / 2, 0, stream>>>(sums, now);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    rounds.run([&](uint64_t round) {
        uint32_t number = (uint32_t)round;
        CHECK(cudaMemcpyAsync(now, &number, 4, cudaMemcpyHostToDevice, stream));
        if (round > 3) {
            CHECK(cudaGraphLaunch(exec, stream));
        }
        change<<<2, N / 2, 0, stream>>>(sums, number);
    });
    Lists after;
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpyFromSymbol(&after, lists, sizeof after));
    REQUIRE(after.missing == 0);
    rounds.take(after.lengths, sizeof after.lengths);
    end<<<2, N / 2, 0, stream>>>(sums);
    take_large<<<1, 1, 0, stream>>>(found);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpyFromSymbol(&after, lists, sizeof after));
    REQUIRE(after.missing == 0);
    uint32_t counts[2];
    CHECK(cudaMemcpy(counts, found, sizeof counts, cudaMemcpyDeviceToHost));
    REQUIRE(counts[0] == TAKEN && counts[1] == 0);
    rounds.take_from_device(sums, N);
    return rounds.end();
}
