// Bodies that attract each other, all with all, in tiles of shared memory; float arithmetic whose rounding is fixed.
//
//   nbody [--iterations N] [--sleep-us N] [--progress FILE]      20, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 256, TILE = 64;

__global__ void start(float4 *places, float4 *speeds) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t x = mix(i + 1), y = mix(x);
    places[i] = make_float4((float)(x & 1023), (float)(x >> 10 & 1023), (float)(x >> 20 & 1023), 1.0f + (float)(x >> 30 & 7));
    speeds[i] = make_float4((float)(y & 15), (float)(y >> 4 & 15), (float)(y >> 8 & 15), 0);
}

__global__ void pull(float4 *next, const float4 *places, float4 *speeds, float time) {
    __shared__ float4 tile[TILE];
    uint32_t i = blockIdx.x * TILE + threadIdx.x;
    float4 me = places[i];
    float fx = 0, fy = 0, fz = 0;
    for (uint32_t base = 0; base < N; base += TILE) {
        tile[threadIdx.x] = places[base + threadIdx.x];
        __syncthreads();
#pragma unroll 4
        for (uint32_t k = 0; k < TILE; k++) {
            float4 other = tile[k];
            float dx = __fsub_rn(other.x, me.x), dy = __fsub_rn(other.y, me.y), dz = __fsub_rn(other.z, me.z);
            float square = __fmaf_rn(dx, dx, __fmaf_rn(dy, dy, __fmaf_rn(dz, dz, 4.0f)));
            float near = __fdiv_rn(other.w, __fmul_rn(square, __fsqrt_rn(square)));
            fx = __fmaf_rn(dx, near, fx);
            fy = __fmaf_rn(dy, near, fy);
            fz = __fmaf_rn(dz, near, fz);
        }
        __syncthreads();
    }
    float4 speed = speeds[i];
    speed.x = __fmaf_rn(fx, time, speed.x);
    speed.y = __fmaf_rn(fy, time, speed.y);
    speed.z = __fmaf_rn(fz, time, speed.z);
    speeds[i] = speed;
    next[i] = make_float4(__fmaf_rn(speed.x, time, me.x), __fmaf_rn(speed.y, time, me.y), __fmaf_rn(speed.z, time, me.z), me.w);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 20);
    float4 *places = zeros<float4>(N), *next = zeros<float4>(N), *speeds = zeros<float4>(N);
    start<<<N / TILE, TILE>>>(places, speeds);
    rounds.run([&](uint64_t) {
        pull<<<N / TILE, TILE>>>(next, places, speeds, 0.25f);
        float4 *other = places;
        places = next, next = other;
    });
    rounds.take_from_device(places, N);
    rounds.take_from_device(speeds, N);
    return rounds.end();
}
