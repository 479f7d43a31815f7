// Functions of the device by their addresses: pointers in device memory and tables, virtual functions of objects that
// one kernel makes in device memory and later ones use.
//
//   funcptr [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//
// Prints "values V". FILE holds the iterations done.
#include "app.h"

#include <new>

struct Shape {
    unsigned size;
    __device__ explicit Shape(unsigned n) : size(n) {}
    __device__ virtual unsigned area(unsigned scale) const = 0;
    __device__ virtual unsigned corners() const { return 0; }
};

struct Square : Shape {
    __device__ explicit Square(unsigned n) : Shape(n) {}
    __device__ unsigned area(unsigned scale) const override { return size * size * scale; }
    __device__ unsigned corners() const override { return 4; }
};

struct Disc : Shape {
    __device__ explicit Disc(unsigned n) : Shape(n) {}
    __device__ unsigned area(unsigned scale) const override { return 3 * size * size * scale + 1; }
};

typedef unsigned (*Step)(unsigned);

__device__ __noinline__ unsigned twice(unsigned n) { return n * 2; }
__device__ __noinline__ unsigned more(unsigned n) { return n + 7; }
__device__ __noinline__ unsigned mixed(unsigned n) { return (unsigned)mix(n); }

__device__ Step steps[3] = {twice, more, mixed};

static const unsigned COUNT = 64;

__global__ void make(char *room, Shape **shapes, Step *kept) {
    unsigned i = threadIdx.x;
    void *place = room + i * 16;
    shapes[i] = i % 3 == 0 ? (Shape *)new (place) Disc(i) : (Shape *)new (place) Square(i);
    kept[i] = steps[i % 3];
}

__global__ void use(Shape *const *shapes, Step *kept, unsigned *values, unsigned turn) {
    unsigned i = threadIdx.x;
    values[i] = kept[i](values[i]) + shapes[i]->area(turn) + shapes[i]->corners();
    kept[i] = steps[(i + turn) % 3];
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 60);
    const uint64_t sleep = options.number("--sleep-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    char *room;
    Shape **shapes;
    Step *kept;
    unsigned *values, said[COUNT];
    CHECK(cudaMalloc(&room, COUNT * 16));
    CHECK(cudaMalloc(&shapes, COUNT * 8));
    CHECK(cudaMalloc(&kept, COUNT * 8));
    CHECK(cudaMalloc(&values, COUNT * 4));
    CHECK(cudaMemset(values, 0, COUNT * 4));
    make<<<1, COUNT>>>(room, shapes, kept);
    for (uint64_t i = 0; i < iterations; i++) {
        use<<<1, COUNT>>>(shapes, kept, values, (unsigned)i);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        progress(file, i + 1);
        sleep_us(sleep);
    }
    CHECK(cudaMemcpy(said, values, sizeof said, cudaMemcpyDeviceToHost));
    printf("values %016llx\n", (unsigned long long)digest(said, sizeof said));
    return 0;
}
