// Sorts pairs of keys and values with kernels of its own: a bitonic sort, in shared memory where it fits and on device
// memory where not, and a radix sort by bits with prefix sums.
//
//   sort [--iterations N] [--sleep-us N] [--progress FILE]      16, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 2048, PART = 512;

struct Pair {
    uint32_t key, value;
};

__device__ bool before(Pair a, Pair b) {
    return a.key < b.key || (a.key == b.key && a.value < b.value);
}

__device__ void exchange(Pair *data, uint32_t i, uint32_t step, bool up) {
    Pair a = data[i], b = data[i + step];
    if (before(b, a) == up) {
        data[i] = b, data[i + step] = a;
    }
}

// All steps of at most PART, for sequences of `length`.
__global__ void in_shared(Pair *data, uint32_t first_length, uint32_t last_length) {
    __shared__ Pair part[PART];
    uint32_t t = threadIdx.x, base = blockIdx.x * PART;
    part[t] = data[base + t];
    part[t + PART / 2] = data[base + t + PART / 2];
    for (uint32_t length = first_length; length <= last_length; length *= 2) {
        for (uint32_t step = min(length, PART) / 2; step > 0; step /= 2) {
            __syncthreads();
            uint32_t i = 2 * t - (t & (step - 1));
            exchange(part, i, step, ((base + i) & length) == 0);
        }
    }
    __syncthreads();
    data[base + t] = part[t];
    data[base + t + PART / 2] = part[t + PART / 2];
}

__global__ void in_device(Pair *data, uint32_t length, uint32_t step) {
    uint32_t t = blockIdx.x * blockDim.x + threadIdx.x, i = 2 * t - (t & (step - 1));
    exchange(data, i, step, (i & length) == 0);
}

// One bit of the values: those without it first, each in their order. One block.
__global__ void by_bit(Pair *out, const Pair *in, uint32_t bit) {
    __shared__ uint32_t ones[BLOCK];
    const uint32_t EACH = N / BLOCK;
    uint32_t t = threadIdx.x, count = 0;
    for (uint32_t i = 0; i < EACH; i++) {
        count += in[t * EACH + i].value >> bit & 1;
    }
    ones[t] = count;
    for (uint32_t step = 1; step < BLOCK; step *= 2) {
        __syncthreads();
        uint32_t below = t >= step ? ones[t - step] : 0;
        __syncthreads();
        ones[t] += below;
    }
    __syncthreads();
    uint32_t zeros = N - ones[BLOCK - 1], ones_before = ones[t] - count;
    for (uint32_t i = 0; i < EACH; i++) {
        uint32_t place = t * EACH + i;
        Pair pair = in[place];
        if (pair.value >> bit & 1) {
            out[zeros + ones_before++] = pair;
        } else {
            out[place - ones_before] = pair;
        }
    }
}

__global__ void check(const Pair *data, uint32_t *wrong) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i > 0 && (data[i].value & 15) < (data[i - 1].value & 15)) {
        atomicAdd(wrong, 1);
    }
}

__global__ void stir(Pair *data, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i].key = (uint32_t)mix(((uint64_t)data[i].key << 32 | data[i].value) + i + round);
    data[i].value += data[i].key >> 28;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 16);
    Pair *data = randoms<Pair>(N, 11), *other = zeros<Pair>(N);
    uint32_t *wrong = zeros<uint32_t>(1);
    rounds.run([&](uint64_t round) {
        in_shared<<<N / PART, PART / 2>>>(data, 2, PART);
        for (uint32_t length = 2 * PART; length <= N; length *= 2) {
            for (uint32_t step = length / 2; step >= PART; step /= 2) {
                in_device<<<N / 2 / BLOCK, BLOCK>>>(data, length, step);
            }
            in_shared<<<N / PART, PART / 2>>>(data, length, length);
        }
        for (uint32_t bit = 0; bit < 4; bit += 2) {
            by_bit<<<1, BLOCK>>>(other, data, bit);
            by_bit<<<1, BLOCK>>>(data, other, bit + 1);
        }
        check<<<N / BLOCK, BLOCK>>>(data, wrong);
        stir<<<N / BLOCK, BLOCK>>>(data, (uint32_t)round);
    });
    uint32_t count;
    CHECK(cudaMemcpy(&count, wrong, 4, cudaMemcpyDeviceToHost));
    REQUIRE(count == 0);
    rounds.take_from_device(data, N);
    return rounds.end();
}
