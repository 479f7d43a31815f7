// What the images of code have in common: a variable, functions that are called by address, kernels by number.
#pragma once

#include <cstdint>

extern "C" __device__ uint32_t value[1024] = {1, 2, 3};

__device__ __noinline__ uint32_t first_function(uint32_t x) { return x * 2654435761u; }
__device__ __noinline__ uint32_t second_function(uint32_t x) { return x ^ (x >> 7); }

typedef uint32_t (*Function)(uint32_t);
extern "C" __device__ Function functions[2] = {first_function, second_function};

// Where the image's functions are.
extern "C" __global__ void where(uint64_t *out) {
    out[0] = (uint64_t)functions[0];
    out[1] = (uint64_t)functions[1];
}

// A kernel of some length, another one for each number.
template <int NUMBER> __device__ void stir(uint32_t *at) {
    uint32_t x = at[threadIdx.x];
#pragma unroll
    for (int i = 0; i < 96; i++) {
        x = (x * (2654435761u + NUMBER * 2 + i * 64) + at[i + NUMBER]) ^ (x >> (i % 13 + 1));
    }
    at[threadIdx.x] = x + functions[x % 2](x) + value[x % 1024];
}

#define KERNEL(number)                                                                                                 \
    extern "C" __global__ void kernel##number(uint32_t *at) { stir<number>(at); }
