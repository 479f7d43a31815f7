// A managed variable that the GPU has written, and that the CPU touches when it is told to, without any further call of CUDA.
//
//   touched [--second 1] [--progress FILE]
//
// Progress is 1 when the GPU has the content. Prints the variable's sum; with --second the result of using the variable on a second
// GPU, too.
#include "app.h"

const uint32_t WORDS = 2 << 20;

__managed__ uint32_t words[WORDS];

__global__ void number() {
    uint32_t i = (blockIdx.x * blockDim.x + threadIdx.x) * 1024;
    if (i < WORDS) words[i] = i / 1024 + 1;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *file = options.text("--progress", nullptr);
    bool second = options.number("--second", 0);
    options.done();
    words[5] = 3;
    number<<<WORDS / 1024 / 128, 128>>>();
    CHECK(cudaDeviceSynchronize());
    if (second) {
        CHECK(cudaSetDevice(1));
        number<<<WORDS / 1024 / 128, 128>>>();
        cudaError_t error = cudaGetLastError();
        printf("%s\n", cudaGetErrorName(error ? error : cudaDeviceSynchronize()));
    }
    progress(file, 1);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < WORDS; i++) sum += words[i];
    printf("%llu\n", (unsigned long long)sum);
    return 0;
}
