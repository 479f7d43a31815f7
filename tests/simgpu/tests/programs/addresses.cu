// Prints where memory and globals are: the same in every process.
#include "check.h"

__device__ int small;
__device__ double large[100000];
__constant__ int constant[10];

int main() {
    void *at;
    for (size_t size : {1, 1000, 1 << 20, 3 << 20, 700, 5 << 20}) {
        OK(cudaMalloc(&at, size));
        printf("%p\n", at);
    }
    OK(cudaGetSymbolAddress(&at, small));
    printf("%p\n", at);
    OK(cudaGetSymbolAddress(&at, large));
    printf("%p\n", at);
    OK(cudaGetSymbolAddress(&at, constant));
    printf("%p\n", at);
}
