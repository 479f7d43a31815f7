// Multiplies matrices in tiles of shared memory: 32-bit integers, float and double with fused operations in a fixed
// order, each result an input of the next round.
//
//   matmul [--iterations N] [--sleep-us N] [--progress FILE]      16, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t SIDE = 48, TILE = 16, CELLS = SIDE * SIDE;

__device__ uint32_t fused(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
__device__ float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

template <typename T> __global__ void multiply(T *out, const T *a, const T *b) {
    __shared__ T tile_a[TILE][TILE], tile_b[TILE][TILE];
    uint32_t x = threadIdx.x, y = threadIdx.y, column = blockIdx.x * TILE + x, row = blockIdx.y * TILE + y;
    T sum = 0;
    for (uint32_t k = 0; k < SIDE; k += TILE) {
        tile_a[y][x] = a[row * SIDE + k + x];
        tile_b[y][x] = b[(k + y) * SIDE + column];
        __syncthreads();
#pragma unroll
        for (uint32_t i = 0; i < TILE; i++) {
            sum = fused(tile_a[y][i], tile_b[i][x], sum);
        }
        __syncthreads();
    }
    out[row * SIDE + column] = sum;
}

// Back to numbers that do not grow from round to round.
template <typename T> __global__ void tame(T *data, double by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = (T)__dmul_rn((double)data[i], by);
}
__global__ void tame(uint32_t *data, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = data[i] >> 3 ^ by * i;
}
template <typename T> __global__ void start(T *data, uint64_t seed) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = (T)(mix(seed + i) & 255);
}

template <typename T> struct Matrices {
    T *a = zeros<T>(CELLS), *b = zeros<T>(CELLS), *c = zeros<T>(CELLS);

    explicit Matrices(uint64_t seed) {
        start<<<CELLS / BLOCK, BLOCK>>>(a, seed);
        start<<<CELLS / BLOCK, BLOCK>>>(b, seed + CELLS);
    }
    template <typename By> void round(By by) {
        multiply<<<dim3(SIDE / TILE, SIDE / TILE), dim3(TILE, TILE)>>>(c, a, b);
        tame<<<CELLS / BLOCK, BLOCK>>>(c, by);
        T *last = b;
        b = a, a = c, c = last;
    }
};

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 16);
    Matrices<uint32_t> whole(1);
    Matrices<float> single(2);
    Matrices<double> precise(3);
    rounds.run([&](uint64_t round) {
        whole.round((uint32_t)round);
        single.round(1.0 / 8192);
        precise.round(1.0 / 8192);
    });
    rounds.take_from_device(whole.a, CELLS);
    rounds.take_from_device(single.a, CELLS);
    rounds.take_from_device(precise.a, CELLS);
    return rounds.end();
}
