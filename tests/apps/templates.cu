// Templates: kernels over types, sizes and functors, expressions that are types, recursion at compile time, lambdas on the
// device, classes with operators.
//
//   templates [--iterations N] [--sleep-us N] [--progress FILE]      40, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 512;

template <typename T, uint32_t SIZE> struct Vector {
    T at[SIZE];
    __device__ Vector operator+(const Vector &other) const {
        Vector sum;
#pragma unroll
        for (uint32_t i = 0; i < SIZE; i++) {
            sum.at[i] = at[i] + other.at[i];
        }
        return sum;
    }
    template <typename F> __device__ T fold(F f) const {
        T all = at[0];
        for (uint32_t i = 1; i < SIZE; i++) {
            all = f(all, at[i]);
        }
        return all;
    }
};

struct Add {
    template <typename T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Mangle {
    uint32_t by;
    template <typename T> __device__ T operator()(T a, T b) const { return (T)(a * (T)by + b); }
};
template <typename A, typename B> struct Then {
    A a;
    B b;
    template <typename T> __device__ T operator()(T x, T y) const { return b(a(x, y), x); }
};

template <uint32_t DEPTH> struct Power {
    __device__ static uint64_t of(uint64_t x) { return x * Power<DEPTH - 1>::of(x + DEPTH); }
};
template <> struct Power<0> {
    __device__ static uint64_t of(uint64_t) { return 1; }
};

template <typename... Ts> __device__ uint64_t sum_of(Ts... values) {
    return (... + (uint64_t)values);
}

template <typename T, typename F> __global__ void map(T *data, F f) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    data[i] = f(data[i], (T)(i + 1));
}

template <typename T, uint32_t SIZE> __global__ void vectors(T *data, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    Vector<T, SIZE> a, b;
    for (uint32_t k = 0; k < SIZE; k++) {
        a.at[k] = data[(i + k) % N];
        b.at[k] = (T)(by * k);
    }
    auto halve = [by](T x, T y) { return (T)((x >> 1) ^ (y + (T)by)); };
    T folded = (a + b).fold(halve) + (a + b).fold(Mangle{by});
    __syncthreads(); // one block: all have read
    data[i] = (T)sum_of(folded, Power<SIZE>::of(by), (short)i, by);
}

template <typename T> void all_sizes(T *data, uint32_t round) {
    map<<<N / BLOCK, BLOCK>>>(data, Then<Add, Mangle>{{}, {round}});
    vectors<T, 3><<<1, N>>>(data, round);
    map<<<N / BLOCK, BLOCK>>>(data, Then<Then<Mangle, Add>, Mangle>{{{round + 1}, {}}, {7}});
    vectors<T, 8><<<1, N>>>(data, round);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 40);
    auto *bytes = randoms<unsigned char>(N, 6);
    auto *shorts = randoms<unsigned short>(N, 7);
    auto *words = randoms<uint32_t>(N, 8);
    auto *longs = randoms<uint64_t>(N, 9);
    rounds.run([&](uint64_t round) {
        all_sizes(bytes, (uint32_t)round);
        all_sizes(shorts, (uint32_t)round);
        all_sizes(words, (uint32_t)round);
        all_sizes(longs, (uint32_t)round);
    });
    rounds.take_from_device(bytes, N);
    rounds.take_from_device(shorts, N);
    rounds.take_from_device(words, N);
    rounds.take_from_device(longs, N);
    return rounds.end();
}
