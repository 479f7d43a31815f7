// Parameters that are structs: nested, with arrays, bit fields and pointers, of every alignment, up to the 4 KiB that a
// kernel takes; and constant memory read with an index that differs from thread to thread.
//
//   structs [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//
// Prints "digest D".
#include "rounds.h"

const uint32_t N = 1024;

struct Inner {
    unsigned char a;
    uint64_t b;
    unsigned short c[3];
};
struct Outer {
    char letter;
    Inner inner[2];
    double real;
    uint32_t *data;
    uint32_t narrow : 5, wide : 20;
    float4 vector;
};
struct __align__(16) Aligned {
    uint32_t x[5];
};
struct Large {
    uint32_t words[960];
    uint64_t *out;
    const uint32_t *indices[3];
};
struct Empty {};

struct Table {
    uint32_t factor;
    unsigned short shift[6];
};
__constant__ Table tables[37];

__global__ void small(Outer o, Empty, unsigned char byte, Aligned aligned, short number, const Outer *same, bool flag) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t x = o.data[i] + o.inner[i & 1].c[i % 3] + (uint32_t)o.inner[i >> 1 & 1].b + o.narrow * o.wide;
    x ^= aligned.x[i % 5] + (uint32_t)(int)number * byte + (uint32_t)o.letter;
    x += (uint32_t)o.real + (uint32_t)o.vector.z + (flag ? 17 : 0);
    x += same->inner[1].a == o.inner[1].a && same->data == o.data ? 1 : 0;
    o.data[i] = x;
}

__global__ void large(const Large l, uint32_t salt) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t word = l.words[(i * 7 + salt) % 960] + l.indices[i % 3][i];
    const Table &table = tables[word % 37];
    l.out[i] = mix(l.out[i] + word * table.factor) >> (table.shift[i % 6] & 7);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 60);
    uint32_t *data = randoms<uint32_t>(N, 4), *more = randoms<uint32_t>(N, 5);
    uint64_t *out = zeros<uint64_t>(N);
    static Outer outer;
    Outer *kept = zeros<Outer>(1);
    static Table host[37];
    rounds.run([&](uint64_t round) {
        outer.letter = (char)('a' + round % 26);
        for (uint32_t i = 0; i < 2; i++) {
            outer.inner[i] = {(unsigned char)(round + i), mix(round + i), {(unsigned short)round, 2, (unsigned short)(i + 3)}};
        }
        outer.real = (double)round * 1.5;
        outer.data = data;
        outer.narrow = round & 31;
        outer.wide = (uint32_t)(mix(round) & 0xfffff);
        outer.vector = make_float4(1, 2, (float)(round * 3), 4);
        CHECK(cudaMemcpy(kept, &outer, sizeof outer, cudaMemcpyHostToDevice));
        Aligned aligned = {{1, (uint32_t)round, 3, 4, (uint32_t)mix(round)}};
        small<<<N / BLOCK, BLOCK>>>(outer, Empty(), (unsigned char)round, aligned, (short)-(int)round, kept, round & 1);
        for (uint32_t i = 0; i < 37; i++) {
            host[i].factor = (uint32_t)mix(round * 37 + i);
            for (uint32_t k = 0; k < 6; k++) {
                host[i].shift[k] = (unsigned short)(i + k + round);
            }
        }
        CHECK(cudaMemcpyToSymbolAsync(tables, host, sizeof host, 0, cudaMemcpyHostToDevice));
        Large l = {};
        for (uint32_t i = 0; i < 960; i++) {
            l.words[i] = (uint32_t)(round * i);
        }
        l.out = out;
        l.indices[0] = data, l.indices[1] = more, l.indices[2] = data;
        large<<<N / BLOCK, BLOCK>>>(l, (uint32_t)round);
    });
    rounds.take_from_device(data, N);
    rounds.take_from_device(out, N);
    return rounds.end();
}
