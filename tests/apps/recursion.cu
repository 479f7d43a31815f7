// Functions that call themselves on the device, with arrays on the stack: quicksort, the towers of Hanoi, a parser of
// expressions, queens on a board, and a deeper stack asked for.
//
//   recursion [--iterations N] [--sleep-us N] [--progress FILE]      24, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 128, PART = 24;

__device__ __noinline__ void quicksort(uint32_t *data, int low, int high) {
    if (low >= high) {
        return;
    }
    uint32_t pivot = data[(low + high) / 2];
    int i = low, k = high;
    while (i <= k) {
        while (data[i] < pivot) {
            i++;
        }
        while (data[k] > pivot) {
            k--;
        }
        if (i <= k) {
            uint32_t word = data[i];
            data[i++] = data[k], data[k--] = word;
        }
    }
    quicksort(data, low, k);
    quicksort(data, i, high);
}

__device__ __noinline__ uint32_t hanoi(uint32_t discs, uint32_t from, uint32_t to, uint32_t moves) {
    if (discs == 0) {
        return moves;
    }
    uint32_t other = 3 - from - to;
    moves = hanoi(discs - 1, from, other, moves);
    return hanoi(discs - 1, other, to, moves * 3 + from * 5 + to);
}

// sum := product {'+' product}; product := atom {'*' atom}; atom := digit | '(' sum ')'
__device__ uint32_t sum_of(const char *&at);
__device__ __noinline__ uint32_t atom_of(const char *&at) {
    if (*at == '(') {
        uint32_t value = sum_of(++at);
        at++;
        return value;
    }
    return (uint32_t)(*at++ - '0');
}
__device__ __noinline__ uint32_t product_of(const char *&at) {
    uint32_t value = atom_of(at);
    while (*at == '*') {
        value *= atom_of(++at);
    }
    return value;
}
__device__ __noinline__ uint32_t sum_of(const char *&at) {
    uint32_t value = product_of(at);
    while (*at == '+') {
        value += product_of(++at);
    }
    return value;
}

__device__ __noinline__ uint32_t queens(uint32_t row, uint32_t columns, uint32_t left, uint32_t right) {
    if (row == 5) {
        return 1;
    }
    uint32_t count = 0;
    for (uint32_t column = 0; column < 5; column++) {
        uint32_t bit = 1u << column;
        if (!((columns | left | right) & bit)) {
            count += queens(row + 1, columns | bit, (left | bit) << 1, (right | bit) >> 1);
        }
    }
    return count;
}

__constant__ char expression[32] = "2*(3+4*(1+5))+(7+(8*2))*3+1";

__global__ void recurse(uint32_t *data, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, words[PART];
    for (uint32_t k = 0; k < PART; k++) {
        words[k] = (uint32_t)mix(data[i] + k) >> (round & 15);
    }
    quicksort(words, 0, PART - 1);
    uint32_t sum = hanoi(4 + (i & 1), i % 3, (i + 1) % 3, round);
    for (uint32_t k = 0; k < PART; k++) {
        sum = sum * 31 + words[k];
    }
    const char *at = expression;
    sum += sum_of(at) + queens(0, 0, i & 4, 0);
    data[i] = sum;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 24);
    size_t depth;
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 8192));
    CHECK(cudaDeviceGetLimit(&depth, cudaLimitStackSize));
    REQUIRE(depth >= 8192);
    uint32_t *data = randoms<uint32_t>(N, 18);
    rounds.run([&](uint64_t round) { recurse<<<1, N>>>(data, (uint32_t)round); });
    rounds.take_from_device(data, N);
    return rounds.end();
}
