// Boxes copied between volumes of every kind: pitched device memory, arrays of two and three dimensions, pinned and
// pageable host memory, synchronously and in a stream, with memsets and kernels in between. Each volume has a copy on
// the CPU to which the same is done; they are compared now and then, and at the end.
//
//   copies3d [--iterations N] [--width N] [--sleep-us N] [--progress FILE]      200, 1200, 0, none
//
// --width is that of the volumes in bytes. Prints "pitch ok", "bytes ok" and "digest D", the same in every run with the
// same numbers. FILE holds the iterations done.
#include "app.h"
#include <cuda.h>

const size_t HEIGHT = 60, DEPTH = 17;

enum Kind { DEVICE, ARRAY, PINNED, PAGEABLE, PLANE };

struct Volume {
    Kind kind;
    size_t size[3];
    cudaPitchedPtr memory;
    cudaArray_t array;
    uint8_t *mirror;
};

static Volume volumes[7];
static const int COUNT = 7;
static cudaStream_t stream;

static uint64_t random_state = 1;
static uint64_t next_random() { return mix(random_state += 0x9e3779b97f4a7c15ull); }
static size_t below(size_t n) { return (size_t)(next_random() % n); }

__global__ void stir(uint8_t *base, size_t pitch, uint32_t width, uint32_t height, uint32_t depth, uint32_t salt) {
    uint32_t x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y, z = blockIdx.z;
    if (x < width && y < height && z < depth) {
        uint8_t *at = base + (z * height + y) * pitch + x;
        *at = (uint8_t)(*at * 5 + salt + x + y + z);
    }
}

static void make(Volume &v, Kind kind, size_t width, size_t height, size_t depth) {
    v.kind = kind;
    v.size[0] = width, v.size[1] = height, v.size[2] = depth;
    size_t bytes = width * height * depth;
    v.mirror = (uint8_t *)calloc(bytes, 1);
    if (kind == DEVICE) {
        CHECK(cudaMalloc3D(&v.memory, make_cudaExtent(width, height, depth)));
        CHECK(cudaMemset3D(v.memory, 0, make_cudaExtent(width, height, depth)));
    } else if (kind == ARRAY || kind == PLANE) {
        cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
        if (kind == PLANE) {
            CHECK(cudaMallocArray(&v.array, &format, width / 4, height));
        } else {
            CHECK(cudaMalloc3DArray(&v.array, &format, make_cudaExtent(width / 4, height, depth)));
        }
    } else {
        void *host = nullptr;
        if (kind == PINNED) {
            CHECK(cudaMallocHost(&host, bytes));
            memset(host, 0, bytes);
        } else {
            host = calloc(bytes, 1);
        }
        v.memory = make_cudaPitchedPtr(host, width, width, height);
    }
}

// Where an array takes part, everything along x is in its elements.
static void end(cudaMemcpy3DParms &p, const Volume &v, const size_t at[3], bool array, bool to) {
    cudaPos pos = make_cudaPos(array ? at[0] / 4 : at[0], at[1], at[2]);
    if (to) {
        p.dstPos = pos, p.dstArray = v.array, p.dstPtr = v.memory;
    } else {
        p.srcPos = pos, p.srcArray = v.array, p.srcPtr = v.memory;
    }
}

// Copies a box between two volumes.
static void copy(Volume &to, const size_t to_at[3], Volume &from, const size_t from_at[3], const size_t size[3],
                 bool async) {
    cudaMemcpy3DParms p = {};
    bool array = to.array || from.array;
    end(p, to, to_at, array, true);
    end(p, from, from_at, array, false);
    p.extent = make_cudaExtent(array ? size[0] / 4 : size[0], size[1], size[2]);
    p.kind = cudaMemcpyDefault;
    // Without an array, and of one slice, sometimes the other function that does the same.
    if (!array && size[2] == 1) {
        uint8_t *t = (uint8_t *)to.memory.ptr + (to_at[2] * HEIGHT + to_at[1]) * to.memory.pitch + to_at[0];
        uint8_t *f = (uint8_t *)from.memory.ptr + (from_at[2] * HEIGHT + from_at[1]) * from.memory.pitch + from_at[0];
        size_t tp = to.memory.pitch, fp = from.memory.pitch;
        if (async) {
            CHECK(cudaMemcpy2DAsync(t, tp, f, fp, size[0], size[1], cudaMemcpyDefault, stream));
        } else {
            CHECK(cudaMemcpy2D(t, tp, f, fp, size[0], size[1], cudaMemcpyDefault));
        }
    } else if (async) {
        CHECK(cudaMemcpy3DAsync(&p, stream));
    } else {
        CHECK(cudaMemcpy3D(&p));
    }
}

static uint8_t *mirrored(Volume &v, size_t x, size_t y, size_t z) {
    return v.mirror + (z * v.size[1] + y) * v.size[0] + x;
}

static void random_copy() {
    Volume &to = volumes[below(COUNT)], &from = volumes[below(COUNT)];
    if (&to == &from) {
        return;
    }
    size_t size[3], to_at[3], from_at[3];
    bool small = next_random() % 2;
    for (int i = 0; i < 3; i++) {
        size_t most = to.size[i] < from.size[i] ? to.size[i] : from.size[i];
        size[i] = 1 + below(small && i ? (most + 7) / 8 : most);
        if (i == 0) {
            // Whole elements of the arrays.
            size[i] = size[i] < 4 ? 4 : size[i] & ~(size_t)3;
        }
        to_at[i] = below(to.size[i] - size[i] + 1) & ~(size_t)(i ? 0 : 3);
        from_at[i] = below(from.size[i] - size[i] + 1) & ~(size_t)(i ? 0 : 3);
    }
    // The CPU must not touch host memory under a copy; between two of the host's it does the copy itself.
    bool host = to.kind == PAGEABLE || from.kind == PAGEABLE;
    bool async = next_random() % 2;
    if (host && !async) {
        CHECK(cudaStreamSynchronize(stream));
    }
    copy(to, to_at, from, from_at, size, async);
    for (size_t z = 0; z < size[2]; z++) {
        for (size_t y = 0; y < size[1]; y++) {
            memcpy(mirrored(to, to_at[0], to_at[1] + y, to_at[2] + z),
                   mirrored(from, from_at[0], from_at[1] + y, from_at[2] + z), size[0]);
        }
    }
}

static void random_fill() {
    Volume &v = volumes[below(2)];
    size_t size[3];
    for (int i = 0; i < 3; i++) {
        size[i] = 1 + below(v.size[i]);
    }
    int value = (int)(next_random() % 256);
    if (next_random() % 2) {
        CHECK(cudaMemset3DAsync(v.memory, value, make_cudaExtent(size[0], size[1], size[2]), stream));
    } else {
        size[2] = 1;
        CHECK(cudaMemset2D(v.memory.ptr, v.memory.pitch, value, size[0], size[1]));
    }
    for (size_t z = 0; z < size[2]; z++) {
        for (size_t y = 0; y < size[1]; y++) {
            memset(mirrored(v, 0, y, z), value, size[0]);
        }
    }
}

static void random_kernel() {
    Volume &v = volumes[below(2)];
    uint32_t salt = (uint32_t)next_random();
    uint32_t width = (uint32_t)(1 + below(64)), height = (uint32_t)v.size[1], depth = 2;
    stir<<<dim3((width + 31) / 32, height, depth), 32, 0, stream>>>((uint8_t *)v.memory.ptr, v.memory.pitch, width,
                                                                     height, depth, salt);
    CHECK(cudaGetLastError());
    for (uint32_t z = 0; z < depth; z++) {
        for (uint32_t y = 0; y < height; y++) {
            for (uint32_t x = 0; x < width; x++) {
                uint8_t *at = mirrored(v, x, y, z);
                *at = (uint8_t)(*at * 5 + salt + x + y + z);
            }
        }
    }
}

// Every volume is what its mirror is.
static uint64_t compare(Volume &scratch) {
    uint64_t so_far = 0;
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < COUNT; i++) {
        Volume &v = volumes[i];
        size_t bytes = v.size[0] * v.size[1] * v.size[2];
        const size_t zero[3] = {0, 0, 0};
        memset(scratch.memory.ptr, 0xee, bytes);
        Volume packed = scratch;
        packed.memory = make_cudaPitchedPtr(scratch.memory.ptr, v.size[0], v.size[0], v.size[1]);
        copy(packed, zero, v, zero, v.size, false);
        CHECK(cudaDeviceSynchronize());
        REQUIRE(memcmp(packed.memory.ptr, v.mirror, bytes) == 0);
        so_far = digest(v.mirror, bytes, so_far);
    }
    return so_far;
}

// Pitches hold what was asked for, are what they were the last time, and bad ones are refused.
static void check_pitch() {
    void *memory = nullptr;
    size_t pitch = 0, again = 0;
    CHECK(cudaMallocPitch(&memory, &pitch, 1000, 10));
    REQUIRE(pitch >= 1000 && pitch % 4 == 0);
    CHECK(cudaMemset2D(memory, pitch, 7, 1000, 10));
    uint8_t rows[20 * 10];
    CHECK(cudaMemcpy2D(rows, 20, (uint8_t *)memory + 980, pitch, 20, 10, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < sizeof rows; i++) {
        REQUIRE(rows[i] == 7);
    }
    REQUIRE(cudaMemcpy2D(rows, 10, memory, pitch, 20, 10, cudaMemcpyDeviceToHost) == cudaErrorInvalidPitchValue);
    REQUIRE(cudaGetLastError() == cudaErrorInvalidPitchValue);
    CHECK(cudaFree(memory));
    CHECK(cudaMallocPitch(&memory, &again, 1000, 10));
    REQUIRE(pitch == again);
    CHECK(cudaFree(memory));
    printf("pitch ok\n");
}

template <typename F> static F driver(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, 13000, cudaEnableDefault, &found));
    REQUIRE(found == cudaDriverEntryPointSuccess);
    return (F)function;
}

// Copies of bytes in arrays of one dimension, by the driver's own functions.
static void check_bytes() {
    auto to_array = driver<decltype(&cuMemcpyHtoA)>("cuMemcpyHtoA");
    auto from_array = driver<decltype(&cuMemcpyAtoH)>("cuMemcpyAtoH");
    auto within = driver<decltype(&cuMemcpyAtoA)>("cuMemcpyAtoA");
    auto to_device = driver<decltype(&cuMemcpyAtoD)>("cuMemcpyAtoD");
    auto from_device = driver<decltype(&cuMemcpyDtoA)>("cuMemcpyDtoA");
    auto describe = driver<decltype(&cuArray3DGetDescriptor)>("cuArray3DGetDescriptor");
    cudaChannelFormatDesc format = cudaCreateChannelDesc<short>();
    cudaArray_t runtime[2];
    CUarray a[2];
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMallocArray(&runtime[i], &format, 500));
        a[i] = (CUarray)runtime[i];
    }
    CUDA_ARRAY3D_DESCRIPTOR is;
    REQUIRE(describe(&is, a[0]) == CUDA_SUCCESS);
    REQUIRE(is.Width == 500 && is.Height == 0 && is.Depth == 0 && is.Format == CU_AD_FORMAT_SIGNED_INT16);
    uint8_t in[1000], out[1000];
    for (size_t i = 0; i < sizeof in; i++) {
        in[i] = (uint8_t)mix(i);
    }
    void *memory;
    CHECK(cudaMalloc(&memory, 1000));
    REQUIRE(to_array(a[0], 0, in, 1000) == CUDA_SUCCESS);
    REQUIRE(within(a[1], 100, a[0], 200, 800) == CUDA_SUCCESS);
    REQUIRE(to_device((CUdeviceptr)memory, a[1], 100, 600) == CUDA_SUCCESS);
    REQUIRE(from_device(a[0], 400, (CUdeviceptr)memory, 600) == CUDA_SUCCESS);
    REQUIRE(from_array(out, a[0], 0, 1000) == CUDA_SUCCESS);
    REQUIRE(memcmp(out, in, 400) == 0 && memcmp(out + 400, in + 200, 600) == 0);
    REQUIRE(from_array(out, a[0], 500, 600) == CUDA_ERROR_INVALID_VALUE);
    for (int i = 0; i < 2; i++) {
        CHECK(cudaFreeArray(runtime[i]));
    }
    CHECK(cudaFree(memory));
    printf("bytes ok\n");
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 200), width = options.number("--width", 1200);
    uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(width >= 64 && width % 4 == 0);
    check_pitch();
    check_bytes();
    fflush(stdout);
    CHECK(cudaStreamCreate(&stream));
    make(volumes[0], DEVICE, width, HEIGHT, DEPTH);
    make(volumes[1], DEVICE, width / 2 + 2, HEIGHT, DEPTH);
    make(volumes[2], ARRAY, width, HEIGHT, DEPTH);
    make(volumes[3], ARRAY, width / 2 & ~3ull, HEIGHT / 2, DEPTH);
    make(volumes[4], PINNED, width, HEIGHT, DEPTH);
    make(volumes[5], PAGEABLE, width, HEIGHT, DEPTH);
    make(volumes[6], PLANE, width, HEIGHT * 2, 1);
    Volume scratch = {};
    make(scratch, PAGEABLE, width, HEIGHT, DEPTH);
    // New arrays hold anything.
    for (int i : {2, 3, 6}) {
        const size_t zero[3] = {0, 0, 0};
        Volume packed = scratch;
        packed.memory = make_cudaPitchedPtr(scratch.memory.ptr, volumes[i].size[0], volumes[i].size[0], volumes[i].size[1]);
        copy(volumes[i], zero, packed, zero, volumes[i].size, false);
    }
    // What the volumes begin with.
    Volume &seed = volumes[5];
    for (size_t i = 0; i < seed.size[0] * seed.size[1] * seed.size[2]; i++) {
        seed.mirror[i] = ((uint8_t *)seed.memory.ptr)[i] = (uint8_t)mix(i);
    }
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        switch (next_random() % 8) {
        case 0: random_fill(); break;
        case 1: random_kernel(); break;
        default: random_copy();
        }
        if (round % 25 == 0 || round == iterations) {
            state = digest(&state, sizeof state, compare(scratch));
        }
        sleep_us(pause_us);
        progress(progress_file, round);
    }
    for (Volume &v : volumes) {
        if (v.array) {
            CHECK(cudaFreeArray(v.array));
        }
    }
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
