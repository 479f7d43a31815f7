// What the threads of a warp do together: shuffles of each kind, width and type, votes, matches, masks of those that are
// there, in parts of a warp and where threads go different ways.
//
//   warps [--iterations N] [--sleep-us N] [--progress FILE]      50, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 1024, ALL = 0xffffffffu;

__device__ uint64_t shuffles(uint32_t x, uint32_t lane) {
    uint64_t sum = 0;
    sum += __shfl_sync(ALL, x, (lane * 7) & 31);
    sum = mix(sum + __shfl_up_sync(ALL, x, 3));
    sum = mix(sum + __shfl_down_sync(ALL, x, 5));
    sum = mix(sum + __shfl_xor_sync(ALL, x, 17));
    sum = mix(sum + __shfl_sync(ALL, x, 2, 8));
    sum = mix(sum + __shfl_up_sync(ALL, x, 1, 4));
    sum = mix(sum + __shfl_down_sync(ALL, x, 6, 16));
    sum = mix(sum + __shfl_xor_sync(ALL, (unsigned long long)x << 21, 9));
    sum = mix(sum + (uint64_t)__shfl_xor_sync(ALL, (double)x, 2));
    sum = mix(sum + (uint64_t)(int64_t)__shfl_down_sync(ALL, (int)x, 1));
    return sum;
}

__device__ uint64_t votes(uint32_t x, uint32_t lane) {
    uint64_t sum = __ballot_sync(ALL, x & 1);
    sum = mix(sum + (uint64_t)(__any_sync(ALL, (x & 255) == 3) * 2 + __all_sync(ALL, x & 0x7fff)));
    sum = mix(sum + __match_any_sync(ALL, x & 7));
    int all;
    sum = mix(sum + __match_all_sync(ALL, x & 0x10000, &all));
    sum = mix(sum + (uint64_t)all + __match_any_sync(ALL, (unsigned long long)(x & 3) << 40));
    // Only some: each group votes among itself.
    if (lane < 12) {
        sum = mix(sum + __ballot_sync(0xfff, x & 4) + __shfl_sync(0xfff, x, 11));
    } else {
        sum = mix(sum + __ballot_sync(~0xfffu, x & 8) + (uint64_t)__popc(__activemask() & 0));
    }
    __syncwarp();
    uint32_t odd = __ballot_sync(ALL, x & 2);
    if (x & 2) {
        uint32_t leader = (uint32_t)__ffs((int)odd) - 1;
        sum = mix(sum + __shfl_sync(odd, x, (int)leader) + __popc(odd & ((1u << lane) - 1)));
    }
    return sum;
}

// A prefix sum and a maximum over a warp.
__device__ uint32_t scan(uint32_t x, uint32_t lane) {
    for (uint32_t step = 1; step < 32; step *= 2) {
        uint32_t below = __shfl_up_sync(ALL, x, step);
        x += lane >= step ? below : 0;
    }
    uint32_t most = x;
    for (uint32_t step = 16; step > 0; step /= 2) {
        most = max(most, __shfl_xor_sync(ALL, most, step));
    }
    return x ^ most;
}

__global__ void together(uint64_t *data) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
    uint64_t x = data[i];
    x = mix(x + shuffles((uint32_t)x, lane));
    x = mix(x + votes((uint32_t)(x >> 8), lane));
    x = mix(x + scan((uint32_t)(x >> 16), lane));
    data[i] = x;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 50);
    uint64_t *data = randoms<uint64_t>(N, 2);
    rounds.run([&](uint64_t) { together<<<N / BLOCK, BLOCK>>>(data); });
    rounds.take_from_device(data, N);
    return rounds.end();
}
