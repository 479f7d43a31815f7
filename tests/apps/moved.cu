// Managed memory that the GPU has written, and that the CPU touches when it is told to, without any further call of CUDA.
//
//   moved [--progress FILE]
//
// Progress is 1 when the GPU has the content. Prints its sum.
#include "app.h"

const uint32_t WORDS = 2 << 20;

__global__ void number(uint32_t *words, uint32_t n) {
    uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) * 1024;
    if (i < n) words[i] = i / 1024 + 1;
}

// Answers when the CPU has set the first word.
__global__ void answer(volatile uint32_t *flags) {
    while (flags[0] == 0) {}
    __threadfence_system();
    flags[1] = 7;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *file = options.text("--progress", nullptr);
    options.done();
    // Few bytes stay where both sides reach them at once.
    uint32_t *small;
    CHECK(cudaMallocManaged(&small, 8));
    volatile uint32_t *flags = small;
    answer<<<1, 1>>>(flags);
    CHECK(cudaGetLastError());
    flags[0] = 1;
    while (flags[1] != 7) sleep_us(100);
    uint32_t *words;
    CHECK(cudaMallocManaged(&words, WORDS * 4));
    number<<<WORDS / 1024 / 128, 128>>>(words, WORDS);
    CHECK(cudaDeviceSynchronize());
    progress(file, 1);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < WORDS; i += 1024) sum += words[i];
    printf("%llu\n", (unsigned long long)sum);
    return 0;
}
