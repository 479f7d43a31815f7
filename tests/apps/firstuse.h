// A module of `firstuse`, the one that MODULE numbers: functions whose addresses it keeps in device memory. Every other
// module has addresses of functions in variables too, so that they must be known when it is loaded: in a table, and in
// the tables of virtual functions. In the rest they are in code alone, and can be chosen when that is first used.
#pragma once

#include "app.h"

#include <new>

typedef unsigned (*Step)(unsigned);

static const unsigned COUNT = 64;

// Device memory that a module's kernels work on.
struct Memory {
    char *room;
    void **shapes;
    Step *kept, *later;
    unsigned *values;
};

// What a module offers.
struct Part {
    void (*make)(const Memory &);
    void (*use)(const Memory &, unsigned turn);
    void (*prepare)(const Memory &);
    void (*late)(const Memory &, unsigned turn);
};

namespace {

__device__ __noinline__ unsigned twice(unsigned n) { return n * 2 + MODULE; }
__device__ __noinline__ unsigned more(unsigned n) { return n + 7 + MODULE; }
__device__ __noinline__ unsigned mixed(unsigned n) { return (unsigned)mix(n + MODULE); }
__device__ __noinline__ unsigned turned(unsigned n) { return n << 5 ^ n >> 27 ^ MODULE; }
__device__ __noinline__ unsigned less(unsigned n) { return n * 3 - MODULE; }

#if MODULE % 2
struct Shape {
    unsigned size;
    __device__ explicit Shape(unsigned n) : size(n) {}
    __device__ virtual unsigned area(unsigned scale) const = 0;
    __device__ virtual unsigned corners() const { return MODULE; }
};

struct Square : Shape {
    __device__ explicit Square(unsigned n) : Shape(n) {}
    __device__ unsigned area(unsigned scale) const override { return size * size * scale + MODULE; }
    __device__ unsigned corners() const override { return 4 * MODULE + 4; }
};

struct Disc : Shape {
    __device__ explicit Disc(unsigned n) : Shape(n) {}
    __device__ unsigned area(unsigned scale) const override { return 3 * size * size * scale + 7 * MODULE; }
};

__device__ Step steps[2] = {twice, mixed};
#endif

__global__ void make_kernel(Memory m) {
    unsigned i = threadIdx.x;
#if MODULE % 2
    void *place = m.room + i * 16;
    m.shapes[i] = i % 3 == 0 ? (void *)(Shape *)new (place) Disc(i) : (void *)(Shape *)new (place) Square(i);
#endif
    m.kept[i] = i % 2 == 0 ? more : turned;
}

__global__ void use_kernel(Memory m, unsigned turn) {
    unsigned i = threadIdx.x;
    m.values[i] = m.kept[i](m.values[i]);
    m.kept[i] = (i + turn) % 3 == 0 ? more : turned;
#if MODULE % 2
    const Shape *shape = (const Shape *)m.shapes[i];
    m.values[i] += shape->area(turn) + shape->corners();
    m.kept[i] = (i + turn) % 5 == 0 ? steps[turn % 2] : m.kept[i];
#endif
}

// Kernels that are used for the first time when the others have long been, with a function that is theirs alone.
__global__ void prepare_kernel(Memory m) {
    unsigned i = threadIdx.x;
    m.later[i] = i % 2 == 0 ? less : turned;
}

__global__ void late_kernel(Memory m, unsigned turn) {
    unsigned i = threadIdx.x;
    m.values[i] = m.later[i](m.values[i]) + turn;
    m.later[i] = (i + turn) % 2 == 0 ? less : turned;
}

} // namespace

#define PART_(number) part##number
#define PART(number) PART_(number)

extern const Part PART(MODULE) = {
    [](const Memory &m) { make_kernel<<<1, COUNT>>>(m); },
    [](const Memory &m, unsigned turn) { use_kernel<<<1, COUNT>>>(m, turn); },
    [](const Memory &m) { prepare_kernel<<<1, COUNT>>>(m); },
    [](const Memory &m, unsigned turn) { late_kernel<<<1, COUNT>>>(m, turn); },
};
