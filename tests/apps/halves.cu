// Arithmetic with half and bfloat16, single and in pairs: sums, products, fused, comparisons, minimum and maximum,
// conversions each way and rounding, through arrays in device memory.
//
//   halves [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
// build: cc80
#include "rounds.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

const uint32_t N = 1024;

// A finite number of moderate size from any bits.
__device__ float tame(uint32_t bits) {
    return (float)((int)(bits & 0xfff) - 2048) * 0.0078125f;
}

__global__ void half_work(__half2 *data, uint32_t *flags) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    __half2 x = data[i], y = __halves2half2(__float2half_rn(tame(i * 37)), __float2half_rz(tame(i * 101 + 5)));
    __half2 z = __hfma2(x, y, __hadd2(y, __float2half2_rn(0.5f)));
    z = __hsub2(__hmul2(z, __float2half2_rn(0.25f)), __hneg2(y));
    __half a = __low2half(z), b = __high2half(z);
    __half c = __hgt(a, b) ? __hadd(a, b) : __hfma(a, __float2half(0.5f), b);
    c = __hmin(__hmax(c, __float2half(-60.0f)), __float2half(60.0f));
    a = __hmin(__hmax(a, __float2half(-60.0f)), __float2half(60.0f));
    uint32_t flag = (uint32_t)__hle(a, b) | (uint32_t)__heq(a, c) << 1 | (uint32_t)__hisnan(c) << 2 | (uint32_t)__hlt(c, a) << 3;
    flag ^= (uint32_t)(uint16_t)__half2short_rn(c) << 8 ^ (uint32_t)(__half2int_rd(a) & 0xff) << 24;
    flag += (uint32_t)__half_as_ushort(hceil(c)) + (uint32_t)__half_as_ushort(hfloor(a)) + (uint32_t)__half_as_ushort(hrint(c));
    flags[i] = flags[i] * 31 + flag;
    data[i] = __halves2half2(c, __ushort2half_rn((unsigned short)(flag & 63)));
}

__global__ void bfloat_work(__nv_bfloat162 *data, uint32_t *flags) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    __nv_bfloat162 x = data[i], y = __floats2bfloat162_rn(tame(i * 53), tame(i * 11 + 3));
    __nv_bfloat162 z = __hfma2(x, y, __hadd2(x, y));
    z = __hmul2(z, __float2bfloat162_rn(0.125f));
    __nv_bfloat16 a = __low2bfloat16(z), b = __high2bfloat16(z);
    __nv_bfloat16 c = __hsub(a, b);
    c = __hmin(__hmax(c, __float2bfloat16(-100.0f)), __float2bfloat16(100.0f));
    b = __hmin(__hmax(b, __float2bfloat16(-100.0f)), __float2bfloat16(100.0f));
    uint32_t flag = (uint32_t)__hge(a, b) | (uint32_t)__hne(a, c) << 1 | (uint32_t)__bfloat16_as_ushort(c) << 8;
    flag += (uint32_t)__float2int_rn(__fmul_rn(__bfloat162float(b), 16.0f));
    flags[i] = flags[i] * 33 + flag;
    data[i] = __halves2bfloat162(__habs(c), b);
}

__global__ void start(__half2 *halves, __nv_bfloat162 *bfloats) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    halves[i] = __floats2half2_rn(tame((uint32_t)mix(i)), tame((uint32_t)mix(i + N)));
    bfloats[i] = __floats2bfloat162_rn(tame((uint32_t)mix(i + 2 * N)), tame((uint32_t)mix(i + 3 * N)));
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    auto *halves = zeros<__half2>(N);
    auto *bfloats = zeros<__nv_bfloat162>(N);
    uint32_t *flags = zeros<uint32_t>(N);
    start<<<N / BLOCK, BLOCK>>>(halves, bfloats);
    rounds.run([&](uint64_t) {
        half_work<<<N / BLOCK, BLOCK>>>(halves, flags);
        bfloat_work<<<N / BLOCK, BLOCK>>>(bfloats, flags);
    });
    rounds.take_from_device(halves, N);
    rounds.take_from_device(bfloats, N);
    rounds.take_from_device(flags, N);
    return rounds.end();
}
