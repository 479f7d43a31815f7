// Breadth-first searches in a graph, with a frontier that the device appends to and whose size the host reads at each
// level; edges change from round to round.
//
//   bfs [--iterations N] [--sleep-us N] [--progress FILE]      12, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t NODES = 4096, EDGES = 3, UNSEEN = ~0u;

__global__ void expand(const uint32_t *edges, uint32_t *levels, uint32_t *next, uint32_t *count, const uint32_t *frontier,
                       uint32_t size, uint32_t level) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) {
        return;
    }
    uint32_t node = frontier[i];
    for (uint32_t k = 0; k < EDGES; k++) {
        uint32_t to = edges[node * EDGES + k];
        if (atomicCAS(&levels[to], UNSEEN, level) == UNSEEN) {
            next[atomicAdd(count, 1)] = to;
        }
    }
}

__global__ void limit(uint32_t *edges) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    edges[i] %= NODES;
}

// Edges that led to a node of an odd level lead elsewhere.
__global__ void change(uint32_t *edges, const uint32_t *levels, uint64_t *sums, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, to = edges[i];
    if (levels[to] & 1) {
        edges[i] = (uint32_t)(mix(to + (uint64_t)round * NODES) % NODES);
    }
    if (i < NODES) {
        sums[i] = mix(sums[i] + levels[i]);
    }
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 12);
    uint32_t *edges = randoms<uint32_t>(NODES * EDGES, 14), *levels = zeros<uint32_t>(NODES);
    uint32_t *frontier = zeros<uint32_t>(NODES), *next = zeros<uint32_t>(NODES), *count = zeros<uint32_t>(1);
    uint64_t *sums = zeros<uint64_t>(NODES);
    limit<<<NODES * EDGES / BLOCK, BLOCK>>>(edges);
    rounds.run([&](uint64_t round) {
        uint32_t root = (uint32_t)(mix(round) % NODES), size = 1, zero = 0;
        CHECK(cudaMemset(levels, 0xff, NODES * 4));
        CHECK(cudaMemcpy(frontier, &root, 4, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(levels + root, &zero, 4, cudaMemcpyHostToDevice));
        for (uint32_t level = 1; size > 0; level++) {
            CHECK(cudaMemset(count, 0, 4));
            expand<<<blocks(size), BLOCK>>>(edges, levels, next, count, frontier, size, level);
            CHECK(cudaMemcpy(&size, count, 4, cudaMemcpyDeviceToHost));
            rounds.take(&size, sizeof size);
            uint32_t *other = frontier;
            frontier = next, next = other;
        }
        change<<<NODES * EDGES / BLOCK, BLOCK>>>(edges, levels, sums, (uint32_t)round);
    });
    rounds.take_from_device(sums, NODES);
    rounds.take_from_device(edges, NODES * EDGES);
    return rounds.end();
}
