/* A program that iterates, and says where it is best checkpointed:
 *
 *     cc -I include examples/iterations.c -o iterations -ldl
 *     rekindle run -- ./iterations &
 *     rekindle checkpoint --at-moment $! image
 *
 * It uses the driver directly, so that it needs no CUDA to be built.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

#include "rekindle.h"

static void *driver;

static int call_2(const char *name, uint64_t a, uint64_t b)
{
    int (*function)(uint64_t, uint64_t);
    *(void **)&function = dlsym(driver, name);
    int result = function ? function(a, b) : -1;
    if (result != 0)
        fprintf(stderr, "%s: %d\n", name, result);
    return result;
}

int main(void)
{
    uint64_t context = 0, memory = 0;
    int device = 0;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver || call_2("cuInit", 0, 0) || call_2("cuDeviceGet", (uint64_t)&device, 0) ||
        call_2("cuDevicePrimaryCtxRetain", (uint64_t)&context, (uint64_t)device) || call_2("cuCtxSetCurrent", context, 0) ||
        call_2("cuMemAlloc_v2", (uint64_t)&memory, 1 << 20))
        return 1;
    for (uint64_t iteration = 0; iteration < 60; iteration++) {
        if (rekindle_checkpoint())
            printf("a checkpoint has begun at iteration %lu\n", (unsigned long)iteration);
        /* What an iteration does. */
        int (*set)(uint64_t, unsigned, size_t);
        *(void **)&set = dlsym(driver, "cuMemsetD32_v2");
        if (!set || set(memory, (unsigned)iteration, (1 << 20) / 4))
            return 1;
        sleep(1);
    }
    return 0;
}
