// A heat equation in three dimensions, between two buffers, with planes kept in shared memory and float arithmetic whose
// rounding is fixed.
//
//   stencil3d [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
#include "rounds.h"

const int X = 32, Y = 16, Z = 16;

__global__ void step(float *out, const float *in) {
    __shared__ float plane[Y + 2][X + 2];
    int x = (int)threadIdx.x, y = (int)threadIdx.y, z = (int)blockIdx.x;
    auto at = [in](int x, int y, int z) { return in[((z + Z) % Z * Y + (y + Y) % Y) * X + (x + X) % X]; };
    plane[y + 1][x + 1] = at(x, y, z);
    if (x == 0) {
        plane[y + 1][0] = at(-1, y, z);
        plane[y + 1][X + 1] = at(X, y, z);
    }
    if (y == 0) {
        plane[0][x + 1] = at(x, -1, z);
        plane[Y + 1][x + 1] = at(x, Y, z);
    }
    __syncthreads();
    float middle = plane[y + 1][x + 1];
    float around = __fadd_rn(__fadd_rn(plane[y][x + 1], plane[y + 2][x + 1]), __fadd_rn(plane[y + 1][x], plane[y + 1][x + 2]));
    around = __fadd_rn(around, __fadd_rn(at(x, y, z - 1), at(x, y, z + 1)));
    out[(z * Y + y) * X + x] = __fmaf_rn(0.1f, __fmaf_rn(-6.0f, middle, around), middle);
}

__global__ void start(float *out) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = (float)(mix(i) & 0xffff) * 0.125f;
}

// Heat that comes in at a place that depends on the round.
__global__ void source(float *out, uint32_t at) {
    out[at] = __fadd_rn(out[at], 1000.0f);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    const uint32_t CELLS = X * Y * Z;
    float *a = zeros<float>(CELLS), *b = zeros<float>(CELLS);
    start<<<CELLS / BLOCK, BLOCK>>>(a);
    rounds.run([&](uint64_t round) {
        step<<<Z, dim3(X, Y)>>>(b, a);
        source<<<1, 1>>>(b, (uint32_t)(mix(round) % CELLS));
        float *other = a;
        a = b, b = other;
    });
    rounds.take_from_device(a, CELLS);
    return rounds.end();
}
