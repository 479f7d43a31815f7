// The other file of `separate`.
#include "separate.h"

__device__ unsigned table[4] = {3, 1, 4, 1};
static __device__ unsigned hidden = 5;

__device__ unsigned fold(unsigned value, unsigned turn) {
    atomicAdd(&calls, 1u);
    return value * 31 + turn + hidden;
}

static __device__ __noinline__ unsigned up(unsigned value) { return value + 1; }
static __device__ __noinline__ unsigned across(unsigned value) { return value ^ 0x5555; }

__device__ Choice chosen(unsigned turn) { return turn % 2 ? up : across; }
