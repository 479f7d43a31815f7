// Fourier transforms in double precision, forth and back, with a change of the spectrum in between: radix 2, in shared
// memory and across blocks. Roots of unity come from halving angles, so that no library's sine decides the digest.
//
//   fft [--iterations N] [--sleep-us N] [--progress FILE]      20, 0, none
//
// Prints "digest D", "close" when a transform forth and back gave what was there.
#include "rounds.h"

#include <cmath>

const uint32_t LOG = 10, N = 1u << LOG, PART = 256;

struct Complex {
    double re, im;
};

__device__ Complex times(Complex a, Complex b) {
    return {__fma_rn(a.re, b.re, __dmul_rn(-a.im, b.im)), __fma_rn(a.re, b.im, __dmul_rn(a.im, b.re))};
}

__device__ void butterfly(Complex *data, uint32_t i, uint32_t half, const Complex *roots, double sign) {
    uint32_t inside = i & (half - 1), a = 2 * i - inside, b = a + half;
    Complex root = roots[inside * (N / 2 / half)];
    root.im *= sign;
    Complex x = data[a], y = times(data[b], root);
    data[a] = {__dadd_rn(x.re, y.re), __dadd_rn(x.im, y.im)};
    data[b] = {__dsub_rn(x.re, y.re), __dsub_rn(x.im, y.im)};
}

// Into the order of reversed bits, and the steps that stay in a part.
__global__ void first_steps(Complex *out, const Complex *in, const Complex *roots, double sign) {
    __shared__ Complex part[PART];
    uint32_t t = threadIdx.x;
    for (uint32_t i = t; i < PART; i += PART / 2) {
        part[i] = in[__brev(blockIdx.x * PART + i) >> (32 - LOG)];
    }
    for (uint32_t half = 1; half < PART; half *= 2) {
        __syncthreads();
        butterfly(part, t, half, roots, sign);
    }
    __syncthreads();
    for (uint32_t i = t; i < PART; i += PART / 2) {
        out[blockIdx.x * PART + i] = part[i];
    }
}

__global__ void step(Complex *data, uint32_t half, const Complex *roots, double sign) {
    butterfly(data, blockIdx.x * blockDim.x + threadIdx.x, half, roots, sign);
}

// Divides by N, and changes the spectrum's part that the round says.
__global__ void change(Complex *data, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    double by = (i + round) % 16 == 0 ? 0.875 / N : 1.0 / N;
    data[i] = {__dmul_rn(data[i].re, by), __dmul_rn(data[i].im, by)};
}

__global__ void start(Complex *data) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = {(double)(mix(i) & 0xffff), (double)(int)(mix(i + N) & 0xffff) - 32768.0};
}

static void transform(Complex *out, const Complex *in, const Complex *roots, double sign) {
    first_steps<<<N / PART, PART / 2>>>(out, in, roots, sign);
    for (uint32_t half = PART; half < N; half *= 2) {
        step<<<N / 2 / BLOCK, BLOCK>>>(out, half, roots, sign);
    }
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 20);
    // Root k of N: the product of those of its bits, each the square root of the one before. sqrt is exact to the last bit.
    static Complex roots[N / 2];
    Complex powers[LOG];
    powers[0] = {-1, 0};
    powers[1] = {0, -1};
    for (uint32_t i = 2; i < LOG; i++) {
        powers[i] = {sqrt((1 + powers[i - 1].re) / 2), -sqrt((1 - powers[i - 1].re) / 2)};
    }
    for (uint32_t k = 0; k < N / 2; k++) {
        Complex root = {1, 0};
        for (uint32_t bit = 0; bit < LOG - 1; bit++) {
            if (k >> bit & 1) {
                Complex by = powers[LOG - 1 - bit];
                root = {root.re * by.re - root.im * by.im, root.re * by.im + root.im * by.re};
            }
        }
        roots[k] = root;
    }
    Complex *device_roots = uploaded(roots, N / 2), *data = zeros<Complex>(N), *spectrum = zeros<Complex>(N);
    start<<<N / BLOCK, BLOCK>>>(data);
    static Complex before[N], after[N];
    CHECK(cudaMemcpy(before, data, sizeof before, cudaMemcpyDeviceToHost));
    transform(spectrum, data, device_roots, 1);
    transform(data, spectrum, device_roots, -1);
    CHECK(cudaMemcpy(after, data, sizeof after, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < N; i++) {
        REQUIRE(fabs(after[i].re / N - before[i].re) < 1e-6 && fabs(after[i].im / N - before[i].im) < 1e-6);
    }
    printf("close\n");
    start<<<N / BLOCK, BLOCK>>>(data);
    rounds.run([&](uint64_t round) {
        transform(spectrum, data, device_roots, 1);
        change<<<N / BLOCK, BLOCK>>>(spectrum, (uint32_t)round);
        transform(data, spectrum, device_roots, -1);
    });
    rounds.take_from_device(data, N);
    return rounds.end();
}
