// Cooperative groups below a grid: blocks, tiles of every size, threads that happen to be together, groups by a label;
// their collectives (sync, shfl, any, all, ballot, reduce, scans).
//
//   tiles [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "digest D".
#include "rounds.h"

#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

const uint32_t N = 1024;

template <uint32_t SIZE> __device__ uint64_t in_tiles(const cg::thread_block &block, uint32_t x) {
    cg::thread_block_tile<SIZE> tile = cg::tiled_partition<SIZE>(block);
    uint64_t sum = cg::reduce(tile, x, cg::plus<uint32_t>());
    sum = mix(sum + cg::reduce(tile, x, cg::less<uint32_t>()) + cg::reduce(tile, x, cg::bit_xor<uint32_t>()));
    sum = mix(sum + cg::inclusive_scan(tile, x) + cg::exclusive_scan(tile, x, cg::bit_or<uint32_t>()));
    sum = mix(sum + tile.shfl_down(x, 1) + tile.shfl_xor(x, SIZE / 2) + tile.meta_group_rank());
    sum = mix(sum + tile.ballot(x & 1) + (uint64_t)(tile.any(x % 5 == 0) + 2 * tile.all(x & 3)) + tile.match_any(x & 1));
    tile.sync();
    return sum;
}

__global__ void grouped(uint64_t *data) {
    __shared__ uint32_t seen[BLOCK];
    cg::grid_group grid = cg::this_grid();
    cg::thread_block block = cg::this_thread_block();
    uint64_t x = data[grid.thread_rank()];
    seen[block.thread_rank()] = (uint32_t)x;
    block.sync();
    x = mix(x + seen[(block.thread_rank() + 1) % block.size()] + block.group_index().x);
    x = mix(x + in_tiles<32>(block, (uint32_t)x));
    x = mix(x + in_tiles<16>(block, (uint32_t)x));
    x = mix(x + in_tiles<4>(block, (uint32_t)x));
    cg::thread_block_tile<32> warp = cg::tiled_partition<32>(block);
    // Those of a warp whose number ends alike.
    auto alike = cg::labeled_partition(warp, (uint32_t)x & 3);
    x = mix(x + cg::reduce(alike, (uint32_t)(x >> 9), cg::plus<uint32_t>()) + alike.size() * 64 + alike.thread_rank());
    auto half = cg::binary_partition(warp, x & 16);
    x = mix(x + half.shfl((uint32_t)x, 0) + half.size());
    warp.sync();
    if (threadIdx.x % 3 != 1) {
        // The whole of this branch may come in parts, so only what does not depend on that is kept.
        cg::coalesced_group here = cg::coalesced_threads();
        uint32_t first = here.shfl(threadIdx.x, 0), most = cg::reduce(here, threadIdx.x, cg::greater<uint32_t>());
        x += first <= threadIdx.x && most >= threadIdx.x && here.size() <= 22 ? 5 : 1000;
    }
    data[grid.thread_rank()] = x;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    uint64_t *data = randoms<uint64_t>(N, 3);
    rounds.run([&](uint64_t) { grouped<<<N / BLOCK, BLOCK>>>(data); });
    rounds.take_from_device(data, N);
    return rounds.end();
}
