// An image with a variable of 1.5 MiB: a few of them need more room than the driver has for code already.
#include "image.h"

extern "C" {
__device__ uint8_t large[3 << 19];
}

extern "C" __global__ void kernel0(uint8_t *at) { large[at[0]] = (uint8_t)value[at[1]]; }
