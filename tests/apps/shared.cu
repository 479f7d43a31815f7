// Shared memory: static, dynamic, more than a block has without asking, and several arrays in one dynamic piece; blocks
// with barriers in loops. Transposes a matrix in tiles and sums its rows.
//
//   shared [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t SIDE = 64, TILE = 16;

__global__ void transpose(uint32_t *out, const uint32_t *in) {
    __shared__ uint32_t tile[TILE][TILE + 1];
    uint32_t x = blockIdx.x * TILE + threadIdx.x, y = blockIdx.y * TILE + threadIdx.y;
    tile[threadIdx.y][threadIdx.x] = in[y * SIDE + x];
    __syncthreads();
    x = blockIdx.y * TILE + threadIdx.x, y = blockIdx.x * TILE + threadIdx.y;
    out[y * SIDE + x] = tile[threadIdx.x][threadIdx.y] * 3u + 1;
}

// Dynamic: sums of 64 bits, then the row's words, then bytes.
__global__ void sum_rows(uint64_t *sums, uint32_t *data, uint32_t round) {
    extern __shared__ uint64_t dynamic[];
    uint32_t *words = (uint32_t *)(dynamic + SIDE);
    unsigned char *bytes = (unsigned char *)(words + SIDE);
    uint32_t i = threadIdx.x, *row = data + blockIdx.x * SIDE;
    words[i] = row[i];
    bytes[SIDE - 1 - i] = (unsigned char)(row[i] >> (round & 15));
    dynamic[i] = row[i];
    for (uint32_t half = SIDE / 2; half > 0; half /= 2) {
        __syncthreads();
        if (i < half) {
            dynamic[i] += dynamic[i + half];
        }
    }
    __syncthreads();
    row[i] = words[(i + 1) % SIDE] ^ bytes[i] ^ (uint32_t)dynamic[0];
    if (i == 0) {
        sums[blockIdx.x] += dynamic[0];
    }
}

// Uses all of a large piece: each thread walks with a stride that meets other threads' words.
__global__ void stir_large(uint32_t *data, uint32_t words) {
    extern __shared__ uint32_t large[];
    for (uint32_t i = threadIdx.x; i < words; i += blockDim.x) {
        large[i] = data[i % (SIDE * SIDE)] + i;
    }
    __syncthreads();
    uint32_t x = 0;
    for (uint32_t i = threadIdx.x; i < words; i += 4 * blockDim.x) {
        x = x * 31 + large[words - 1 - i];
    }
    data[threadIdx.x] ^= x;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    uint32_t *a = randoms<uint32_t>(SIDE * SIDE, 1), *b = zeros<uint32_t>(SIDE * SIDE);
    uint64_t *sums = zeros<uint64_t>(SIDE);
    const uint32_t LARGE = 60 << 10; // more than the 48 KiB that need no asking
    stir_large<<<1, BLOCK, LARGE>>>(a, LARGE / 4);
    REQUIRE(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(stir_large, cudaFuncAttributeMaxDynamicSharedMemorySize, LARGE));
    rounds.run([&](uint64_t round) {
        transpose<<<dim3(SIDE / TILE, SIDE / TILE), dim3(TILE, TILE)>>>(b, a);
        sum_rows<<<SIDE, SIDE, SIDE * 13>>>(sums, b, (uint32_t)round);
        stir_large<<<1, BLOCK, LARGE>>>(b, LARGE / 4);
        uint32_t *other = a;
        a = b, b = other;
    });
    rounds.take_from_device(a, SIDE * SIDE);
    rounds.take_from_device(sums, SIDE);
    return rounds.end();
}
