// An image with four kernels and 4 MiB of initialised variables.
#include "image.h"

extern "C" __device__ uint32_t table[1 << 20] = {5, 6, 7};
__constant__ uint32_t constants[4096] = {1};

KERNEL(0)
KERNEL(1)
KERNEL(2)
extern "C" __global__ void kernel3(uint32_t *at) { at[0] += table[at[1] % (1 << 20)] + constants[at[2] % 4096]; }
