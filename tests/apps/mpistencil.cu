// A heat equation in three dimensions by several processes of MPI, each with a slab on the GPU: planes at the borders go
// from GPU to pinned memory, to the neighbour and up again; now and then all agree on how hot it is. Arithmetic is of
// integers, so every number of processes comes to the same end.
//
//   mpirun -n 4 mpistencil [--iterations N] [--sleep-us N] [--progress FILE]      100, 0, none
//
// The first process prints "hottest H" each 25 rounds, "digest D" at the end. FILE holds the rounds it has done.
// build: mpi
#include "rounds.h"

#include <mpi.h>

const uint32_t X = 32, Y = 16, PLANE = X * Y, PLANES = 24; // all processes together

// Slab: a plane of the neighbour's, the own ones, a plane of the other neighbour's.
__global__ void step(uint32_t *out, const uint32_t *in, uint32_t *hottest) {
    uint32_t x = threadIdx.x, y = threadIdx.y, z = blockIdx.x + 1;
    auto at = [in](uint32_t x, uint32_t y, uint32_t z) { return in[z * PLANE + y % Y * X + x % X] >> 3; };
    uint32_t middle = in[z * PLANE + y * X + x];
    uint32_t heat = at(x + 1, y, z) + at(x + X - 1, y, z) + at(x, y + 1, z) + at(x, y + Y - 1, z) + at(x, y, z + 1) +
                    at(x, y, z - 1) + (middle >> 3) * 2;
    out[z * PLANE + y * X + x] = heat;
    atomicMax(hottest, heat);
}

__global__ void start(uint32_t *slab, uint32_t first) {
    uint32_t i = threadIdx.y * X + threadIdx.x, plane = blockIdx.x;
    slab[(plane + 1) * PLANE + i] = (uint32_t)mix((first + plane) * PLANE + i);
}

__global__ void heat_up(uint32_t *slab, uint32_t at, uint32_t by) {
    slab[at] += by;
}

static void must(int result) {
    REQUIRE(result == MPI_SUCCESS);
}

int main(int argc, char **argv) {
    must(MPI_Init(&argc, &argv));
    int rank, size;
    must(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
    must(MPI_Comm_size(MPI_COMM_WORLD, &size));
    REQUIRE(PLANES % (uint32_t)size == 0);
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 100), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    uint32_t planes = PLANES / (uint32_t)size, first = planes * (uint32_t)rank, words = (planes + 2) * PLANE;
    uint32_t *slab = zeros<uint32_t>(words), *next = zeros<uint32_t>(words), *hottest = zeros<uint32_t>(1), *border;
    CHECK(cudaMallocHost(&border, 4 * PLANE * 4)); // to the left, to the right, from the left, from the right
    start<<<planes, dim3(X, Y)>>>(slab, first);
    CHECK(cudaGetLastError());
    int left = (rank + size - 1) % size, right = (rank + 1) % size;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaDeviceSynchronize());
    for (uint64_t round = 1; round <= iterations; round++) {
        CHECK(cudaMemcpyAsync(border, slab + PLANE, PLANE * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaMemcpyAsync(border + PLANE, slab + planes * PLANE, PLANE * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        must(MPI_Sendrecv(border, PLANE, MPI_UINT32_T, left, 1, border + 3 * PLANE, PLANE, MPI_UINT32_T, right, 1,
                          MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        must(MPI_Sendrecv(border + PLANE, PLANE, MPI_UINT32_T, right, 2, border + 2 * PLANE, PLANE, MPI_UINT32_T, left, 2,
                          MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        CHECK(cudaMemcpyAsync(slab, border + 2 * PLANE, PLANE * 4, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemcpyAsync(slab + (planes + 1) * PLANE, border + 3 * PLANE, PLANE * 4, cudaMemcpyHostToDevice, stream));
        CHECK(cudaMemsetAsync(hottest, 0, 4, stream));
        step<<<planes, dim3(X, Y), 0, stream>>>(next, slab, hottest);
        uint32_t place = (uint32_t)(mix(round) % (PLANES * PLANE)), plane = place / PLANE;
        if (plane >= first && plane < first + planes) {
            heat_up<<<1, 1, 0, stream>>>(next, place - first * PLANE + PLANE, (uint32_t)round << 20);
        }
        CHECK(cudaGetLastError());
        uint32_t *other = slab;
        slab = next, next = other;
        if (round % 25 == 0) {
            uint32_t mine, all;
            CHECK(cudaMemcpyAsync(&mine, hottest, 4, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            must(MPI_Allreduce(&mine, &all, 1, MPI_UINT32_T, MPI_MAX, MPI_COMM_WORLD));
            if (rank == 0) {
                printf("hottest %u\n", all);
                fflush(stdout);
            }
        }
        if (rank == 0) {
            progress(progress_file, round);
        }
        sleep_us(pause_us);
    }
    static uint32_t mine[PLANES * PLANE], all[PLANES * PLANE];
    CHECK(cudaMemcpyAsync(mine, slab + PLANE, planes * PLANE * 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    int count = (int)(planes * PLANE);
    must(MPI_Gather(mine, count, MPI_UINT32_T, all, count, MPI_UINT32_T, 0, MPI_COMM_WORLD));
    if (rank == 0) {
        printf("digest %016llx\n", (unsigned long long)digest(all, sizeof all));
    }
    must(MPI_Finalize());
    return 0;
}
