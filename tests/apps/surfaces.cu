// Surfaces of arrays of one to three dimensions, of layers and of a mipmapped array's levels, read and written by
// kernels: a game of life that two surfaces hold, a volume that is stirred, a histogram by reductions.
//
//   surfaces [--iterations N] [--sleep-us N] [--progress FILE]      100, 0, none
//
// Prints "boundaries ok" and "digest D", the same in every run with the same numbers. FILE holds the iterations done.
#include "app.h"

const int W = 64, H = 48, D = 6, LEVELS = 4;

static cudaSurfaceObject_t surface(cudaArray_t array) {
    cudaResourceDesc r;
    memset(&r, 0, sizeof r);
    r.resType = cudaResourceTypeArray;
    r.res.array.array = array;
    cudaSurfaceObject_t made;
    CHECK(cudaCreateSurfaceObject(&made, &r));
    return made;
}

__global__ void seed(cudaSurfaceObject_t life) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    surf2Dwrite((unsigned char)(mix(y * W + x) % 3 == 0), life, x, y);
}

// Outside of the field everything is dead.
__global__ void step(cudaSurfaceObject_t from, cudaSurfaceObject_t to, cudaSurfaceObject_t histogram) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y, neighbours = 0;
    for (int dy = -1; dy <= 1; dy++) {
        for (int dx = -1; dx <= 1; dx++) {
            if (dx || dy) {
                neighbours += surf2Dread<unsigned char>(from, x + dx, y + dy, cudaBoundaryModeZero);
            }
        }
    }
    unsigned char alive = surf2Dread<unsigned char>(from, x, y);
    surf2Dwrite((unsigned char)(neighbours == 3 || (alive && neighbours == 2)), to, x, y);
    asm volatile("sured.b.add.1d.u32.trap [%0, {%1}], %2;" ::"l"(histogram), "r"(neighbours * 4), "r"(1) : "memory");
}

__global__ void stir(cudaSurfaceObject_t volume, cudaSurfaceObject_t layers, uint32_t salt) {
    int x = threadIdx.x, y = blockIdx.x, z = blockIdx.y;
    int2 v = surf3Dread<int2>(volume, x * 8, y, z);
    int4 w = surf2DLayeredread<int4>(layers, x * 16, y, z);
    v.x = v.x * 5 + (int)salt + w.w, v.y += v.x ^ z;
    w.x += v.y, w.y = w.y * 3 + 1, w.z ^= v.x, w.w += x;
    surf3Dwrite(v, volume, x * 8, y, z);
    surf2DLayeredwrite(w, layers, x * 16, y, z);
}

// Each level is the sum of four of the level before.
__global__ void halve(cudaSurfaceObject_t from, cudaSurfaceObject_t to) {
    int x = threadIdx.x, y = blockIdx.x, sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += surf2Dread<int>(from, (2 * x + i % 2) * 4, 2 * y + i / 2, cudaBoundaryModeClamp);
    }
    surf2Dwrite(sum, to, x * 4, y);
}

__global__ void count(cudaSurfaceObject_t life, cudaSurfaceObject_t level, uint64_t *state) {
    int x = threadIdx.x, y = blockIdx.x;
    int now = surf2Dread<int>(level, x * 4, y) + surf2Dread<unsigned char>(life, x % W, y % H);
    surf2Dwrite(now, level, x * 4, y);
    state[y * 32 + x] = state[y * 32 + x] * 6364136223846793005ull + (uint64_t)now;
}

__global__ void edges(cudaSurfaceObject_t s, int *out) {
    surf2Dwrite(77, s, W * 4, 0, cudaBoundaryModeZero);
    surf2Dwrite(88, s, (W + 5) * 4, H + 3, cudaBoundaryModeClamp);
    out[0] = surf2Dread<int>(s, -4, 0, cudaBoundaryModeZero);
    out[1] = surf2Dread<int>(s, W * 4, H - 1, cudaBoundaryModeClamp);
    surf2Dwrite(99ll << 32 | 5, s, 8, 1);
    out[2] = surf2Dread<int>(s, 12, 1);
    short2 halves = surf2Dread<short2>(s, 8, 1);
    out[3] = halves.x;
}

static void check_boundaries() {
    auto int1 = cudaCreateChannelDesc<int>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &int1, W, H, cudaArraySurfaceLoadStore));
    static int zeros[W * H];
    CHECK(cudaMemcpy2DToArray(array, 0, 0, zeros, W * 4, W * 4, H, cudaMemcpyHostToDevice));
    cudaSurfaceObject_t s = surface(array);
    int *out, host[4];
    CHECK(cudaMalloc(&out, sizeof host));
    edges<<<1, 1>>>(s, out);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    REQUIRE(host[0] == 0 && host[1] == 88 && host[2] == 99 && host[3] == 5);
    cudaResourceDesc r;
    CHECK(cudaGetSurfaceObjectResourceDesc(&r, s));
    REQUIRE(r.resType == cudaResourceTypeArray && r.res.array.array == array);
    CHECK(cudaDestroySurfaceObject(s));
    CHECK(cudaFree(out));
    CHECK(cudaFreeArray(array));
    printf("boundaries ok\n");
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 100), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    check_boundaries();
    fflush(stdout);

    auto byte1 = cudaCreateChannelDesc<unsigned char>();
    auto int1 = cudaCreateChannelDesc<int>();
    auto int2_ = cudaCreateChannelDesc<int2>();
    auto int4_ = cudaCreateChannelDesc<int4>();
    cudaArray_t fields[2], volume, layers, histogram, level[LEVELS];
    cudaMipmappedArray_t pyramid;
    for (cudaArray_t &field : fields) {
        CHECK(cudaMallocArray(&field, &byte1, W, H, cudaArraySurfaceLoadStore));
    }
    CHECK(cudaMalloc3DArray(&volume, &int2_, make_cudaExtent(32, 16, D), cudaArraySurfaceLoadStore));
    CHECK(cudaMalloc3DArray(&layers, &int4_, make_cudaExtent(32, 16, D), cudaArraySurfaceLoadStore | cudaArrayLayered));
    CHECK(cudaMallocArray(&histogram, &int1, 16, 0, cudaArraySurfaceLoadStore));
    CHECK(cudaMallocMipmappedArray(&pyramid, &int1, make_cudaExtent(32, 32, 0), LEVELS, cudaArraySurfaceLoadStore));
    static int zeros[32 * 32 * D * 4];
    cudaMemcpy3DParms p = {};
    p.kind = cudaMemcpyHostToDevice;
    p.extent = make_cudaExtent(32, 16, D);
    p.srcPtr = make_cudaPitchedPtr(zeros, 32 * 8, 32, 16), p.dstArray = volume;
    CHECK(cudaMemcpy3D(&p));
    p.srcPtr = make_cudaPitchedPtr(zeros, 32 * 16, 32, 16), p.dstArray = layers;
    CHECK(cudaMemcpy3D(&p));
    CHECK(cudaMemcpy2DToArray(histogram, 0, 0, zeros, 64, 64, 1, cudaMemcpyHostToDevice));
    cudaSurfaceObject_t life[2] = {surface(fields[0]), surface(fields[1])}, levels[LEVELS];
    cudaSurfaceObject_t in_volume = surface(volume), in_layers = surface(layers), in_histogram = surface(histogram);
    for (int i = 0; i < LEVELS; i++) {
        CHECK(cudaGetMipmappedArrayLevel(&level[i], pyramid, (unsigned)i));
        levels[i] = surface(level[i]);
        int size = 32 >> i;
        CHECK(cudaMemcpy2DToArray(level[i], 0, 0, zeros, size * 4, size * 4, size, cudaMemcpyHostToDevice));
    }
    uint64_t *state;
    CHECK(cudaMalloc(&state, 32 * 32 * 8));
    CHECK(cudaMemset(state, 0, 32 * 32 * 8));
    seed<<<dim3(1, H), W>>>(life[0]);
    CHECK(cudaGetLastError());
    for (uint64_t round = 1; round <= iterations; round++) {
        step<<<dim3(1, H), W>>>(life[(round + 1) % 2], life[round % 2], in_histogram);
        stir<<<dim3(16, D), 32>>>(in_volume, in_layers, (uint32_t)mix(round));
        count<<<32, 32>>>(life[round % 2], levels[0], state);
        for (int i = 1; i < LEVELS; i++) {
            halve<<<32 >> i, 32 >> i>>>(levels[i - 1], levels[i]);
        }
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        sleep_us(pause_us);
        progress(progress_file, round);
    }
    uint64_t so_far = 0;
    static char host[32 * 32 * D * 16];
    auto take = [&](cudaArray_t array, size_t width, size_t height) {
        CHECK(cudaMemcpy2DFromArray(host, width, array, 0, 0, width, height, cudaMemcpyDeviceToHost));
        so_far = digest(host, width * height, so_far);
    };
    take(fields[0], W, H), take(fields[1], W, H), take(histogram, 64, 1);
    for (int i = 0; i < LEVELS; i++) {
        take(level[i], (32 >> i) * 4, 32 >> i);
    }
    cudaMemcpy3DParms q = {};
    q.kind = cudaMemcpyDeviceToHost;
    q.extent = make_cudaExtent(32, 16, D);
    q.dstPtr = make_cudaPitchedPtr(host, 32 * 8, 32, 16), q.srcArray = volume;
    CHECK(cudaMemcpy3D(&q));
    so_far = digest(host, 32 * 8 * 16 * D, so_far);
    q.dstPtr = make_cudaPitchedPtr(host, 32 * 16, 32, 16), q.srcArray = layers;
    CHECK(cudaMemcpy3D(&q));
    so_far = digest(host, 32 * 16 * 16 * D, so_far);
    CHECK(cudaMemcpy(host, state, 32 * 32 * 8, cudaMemcpyDeviceToHost));
    so_far = digest(host, 32 * 32 * 8, so_far);
    for (cudaSurfaceObject_t s : {life[0], life[1], in_volume, in_layers, in_histogram}) {
        CHECK(cudaDestroySurfaceObject(s));
    }
    for (cudaSurfaceObject_t s : levels) {
        CHECK(cudaDestroySurfaceObject(s));
    }
    for (cudaArray_t array : {fields[0], fields[1], volume, layers, histogram}) {
        CHECK(cudaFreeArray(array));
    }
    CHECK(cudaFreeMipmappedArray(pyramid));
    printf("digest %016llx\n", (unsigned long long)so_far);
    return 0;
}
