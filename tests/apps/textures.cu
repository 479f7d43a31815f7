// Textures of every kind of memory: arrays of one to three dimensions, layers, cubes, mipmaps, pitched and linear memory,
// read by point and between points, with every way to treat what lies outside. The texture objects' own numbers are kept
// in device memory, and objects are destroyed and made again all the time.
//
//   textures [--iterations N] [--sleep-us N] [--progress FILE]      100, 0, none
//
// Prints "described ok", a digest of what each kind gave, and "digest D" of all, the same in every run with the same
// numbers on one GPU; how exactly a GPU filters is its own affair. FILE holds the iterations done.
#include "app.h"

const int W = 48, H = 20, D = 10, LAYERS = 5, LINEAR = 1000, THREADS = 256;
enum { FLOAT4, BYTES, VOLUME, FETCH, PITCHED, BORDER, LAYERED, CUBE, MIPMAPPED, GATHER, LINE, COUNT };
static const char *const names[COUNT] = {"float4",  "bytes", "volume",    "fetch",  "pitched", "border",
                                         "layered", "cube",  "mipmapped", "gather", "line"};

static cudaArray_t plane, bytes_plane, volume, layered, cube, gatherable, line;
static cudaMipmappedArray_t mipmapped;
static int *linear;
static float *pitched;
static size_t pitch;
static cudaTextureObject_t textures[COUNT];

__device__ inline int64_t fixed(float f) { return (int64_t)(f * 4096.0f); }

// A coordinate in eighths, from below 0 to above `size`.
__device__ inline float eighths(uint64_t &random, int size) {
    random = mix(random + 0x9e3779b97f4a7c15ull);
    return (float)(int)(random % (uint64_t)(size * 12)) / 8.0f - (float)size / 4.0f;
}

__global__ void sample(const cudaTextureObject_t *t, uint64_t *state, uint64_t round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t r = mix(round * THREADS + i + 1);
    auto add = [&](int kind, int64_t value) {
        uint64_t &of = state[kind * THREADS + i];
        of = of * 6364136223846793005ull + (uint64_t)value;
    };
    // Powers of two divide exactly: normalised coordinates of these are what they are everywhere.
    float4 a = tex2D<float4>(t[FLOAT4], eighths(r, W) / 64.0f, eighths(r, H) / 32.0f);
    add(FLOAT4, fixed(a.x) + 3 * fixed(a.y) + 5 * fixed(a.z) + 7 * fixed(a.w));
    float4 b = tex2D<float4>(t[BYTES], eighths(r, W), eighths(r, H));
    add(BYTES, __float2int_rn(b.x * 255) + 3 * __float2int_rn(b.y * 255) + 5 * __float2int_rn(b.w * 255));
    short2 c = tex3D<short2>(t[VOLUME], eighths(r, W), eighths(r, H), eighths(r, D));
    add(VOLUME, c.x * 3 + c.y);
    add(FETCH, tex1Dfetch<int>(t[FETCH], (int)(r % (LINEAR + 50)) - 20));
    add(PITCHED, fixed(tex2D<float>(t[PITCHED], eighths(r, W), eighths(r, H))));
    float2 e = tex2D<float2>(t[BORDER], eighths(r, W), eighths(r, H));
    add(BORDER, fixed(e.x) + 3 * fixed(e.y));
    add(LAYERED, tex2DLayered<int>(t[LAYERED], eighths(r, W), eighths(r, H), (int)(r >> 20) % LAYERS));
    float x = eighths(r, 4), y = eighths(r, 4), z = eighths(r, 4);
    if (x != 0 && fabsf(x) != fabsf(y) && fabsf(x) != fabsf(z) && fabsf(y) != fabsf(z)) {
        // In the middle of a quarter of a face, where no rounding decides.
        float m = fmaxf(fabsf(x), fmaxf(fabsf(y), fabsf(z)));
        x = fabsf(x) == m ? x : copysignf(m / 2, x), y = fabsf(y) == m ? y : copysignf(m / 2, y);
        z = fabsf(z) == m ? z : copysignf(m / 2, z);
        add(CUBE, texCubemap<int>(t[CUBE], x, y, z));
    }
    float u = (float)(r % 64) / 64.0f + 1.0f / 128.0f, v = (float)((r >> 8) % 64) / 64.0f + 1.0f / 128.0f;
    add(MIPMAPPED, fixed(tex2DLod<float>(t[MIPMAPPED], u, v, (float)((r >> 16) % 28) / 4.0f)));
    float4 g = tex2Dgather<float4>(t[GATHER], (float)(r % W), (float)(r % H), 1);
    add(GATHER, fixed(g.x) + 3 * fixed(g.y) + 5 * fixed(g.z) + 7 * fixed(g.w));
    add(LINE, fixed(tex1D<float>(t[LINE], eighths(r, W))));
}

__global__ void change(int *linear, float *pitched, size_t pitch, const uint64_t *state) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < LINEAR) {
        linear[i] = linear[i] * 5 + (int)(state[FETCH * THREADS + i % THREADS] >> 40);
    }
    if (i < W) {
        float *row = (float *)((char *)pitched + (i % H) * pitch);
        row[i] = (float)(state[FETCH * THREADS + i] >> 52);
    }
}

// What a texture is of: the arrays' numbers are fixed, but what they hold is not.
static void describe(int which, cudaResourceDesc &r, cudaTextureDesc &t) {
    memset(&r, 0, sizeof r);
    memset(&t, 0, sizeof t);
    r.resType = cudaResourceTypeArray;
    for (int i = 0; i < 3; i++) {
        t.addressMode[i] = cudaAddressModeClamp;
    }
    switch (which) {
    case FLOAT4:
        r.res.array.array = plane;
        t.normalizedCoords = 1, t.filterMode = cudaFilterModeLinear;
        t.addressMode[0] = cudaAddressModeWrap, t.addressMode[1] = cudaAddressModeMirror;
        break;
    case BYTES: r.res.array.array = bytes_plane, t.readMode = cudaReadModeNormalizedFloat; break;
    case VOLUME: r.res.array.array = volume; break;
    case FETCH:
        r.resType = cudaResourceTypeLinear;
        r.res.linear.devPtr = linear, r.res.linear.desc = cudaCreateChannelDesc<int>();
        r.res.linear.sizeInBytes = LINEAR * 4;
        break;
    case PITCHED:
        r.resType = cudaResourceTypePitch2D;
        r.res.pitch2D.devPtr = pitched, r.res.pitch2D.desc = cudaCreateChannelDesc<float>();
        r.res.pitch2D.width = W, r.res.pitch2D.height = H, r.res.pitch2D.pitchInBytes = pitch;
        t.filterMode = cudaFilterModeLinear;
        break;
    case BORDER:
        r.res.array.array = gatherable;
        t.addressMode[0] = t.addressMode[1] = cudaAddressModeBorder;
        t.borderColor[0] = 9, t.borderColor[1] = 11;
        break;
    case LAYERED: r.res.array.array = layered; break;
    case CUBE: r.res.array.array = cube, t.normalizedCoords = 1; break;
    case MIPMAPPED:
        r.resType = cudaResourceTypeMipmappedArray;
        r.res.mipmap.mipmap = mipmapped;
        t.normalizedCoords = 1, t.mipmapFilterMode = cudaFilterModeLinear, t.maxMipmapLevelClamp = 6;
        break;
    case GATHER: r.res.array.array = gatherable; break;
    case LINE: r.res.array.array = line, t.filterMode = cudaFilterModeLinear; break;
    }
}

static void create(int which) {
    cudaResourceDesc r;
    cudaTextureDesc t;
    describe(which, r, t);
    CHECK(cudaCreateTextureObject(&textures[which], &r, &t, nullptr));
}

// Fills an array (or a part of a mipmapped one) with small numbers of a channel's type.
template <typename T> static void fill(cudaArray_t array, int channels, uint64_t salt) {
    cudaExtent e;
    cudaChannelFormatDesc format;
    unsigned flags;
    CHECK(cudaArrayGetInfo(&format, &e, &flags, array));
    size_t height = e.height ? e.height : 1, depth = e.depth ? e.depth : 1;
    size_t count = e.width * height * depth * channels;
    T *host = (T *)malloc(count * sizeof(T));
    for (size_t i = 0; i < count; i++) {
        host[i] = (T)(mix(salt + i) % 200);
    }
    cudaMemcpy3DParms p = {};
    p.srcPtr = make_cudaPitchedPtr(host, e.width * channels * sizeof(T), e.width, height);
    p.dstArray = array;
    p.extent = make_cudaExtent(e.width, height, depth);
    p.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&p));
    free(host);
}

static void check_described() {
    cudaResourceDesc r;
    cudaTextureDesc t;
    CHECK(cudaGetTextureObjectResourceDesc(&r, textures[PITCHED]));
    REQUIRE(r.resType == cudaResourceTypePitch2D && r.res.pitch2D.devPtr == pitched && r.res.pitch2D.height == H);
    CHECK(cudaGetTextureObjectResourceDesc(&r, textures[LAYERED]));
    REQUIRE(r.resType == cudaResourceTypeArray && r.res.array.array == layered);
    CHECK(cudaGetTextureObjectTextureDesc(&t, textures[FLOAT4]));
    REQUIRE(t.normalizedCoords == 1 && t.filterMode == cudaFilterModeLinear && t.addressMode[1] == cudaAddressModeMirror);
    // What is bad is refused, and no harm done.
    cudaTextureObject_t none;
    describe(VOLUME, r, t);
    t.filterMode = cudaFilterModeLinear;
    REQUIRE(cudaCreateTextureObject(&none, &r, &t, nullptr) != cudaSuccess);
    cudaGetLastError();
    printf("described ok\n");
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 100), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    auto float1 = cudaCreateChannelDesc<float>();
    auto float2_ = cudaCreateChannelDesc<float2>();
    auto float4_ = cudaCreateChannelDesc<float4>();
    auto bytes4 = cudaCreateChannelDesc<uchar4>();
    auto short2_ = cudaCreateChannelDesc<short2>();
    auto int1 = cudaCreateChannelDesc<int>();
    CHECK(cudaMallocArray(&plane, &float4_, 64, 32));
    CHECK(cudaMallocArray(&bytes_plane, &bytes4, W, H));
    CHECK(cudaMalloc3DArray(&volume, &short2_, make_cudaExtent(W, H, D)));
    CHECK(cudaMalloc3DArray(&layered, &int1, make_cudaExtent(W, H, LAYERS), cudaArrayLayered));
    CHECK(cudaMalloc3DArray(&cube, &int1, make_cudaExtent(16, 16, 6), cudaArrayCubemap));
    CHECK(cudaMallocArray(&gatherable, &float2_, W, H, cudaArrayTextureGather));
    CHECK(cudaMallocArray(&line, &float1, W));
    CHECK(cudaMallocMipmappedArray(&mipmapped, &float1, make_cudaExtent(64, 64, 0), 7));
    CHECK(cudaMalloc(&linear, LINEAR * 4));
    CHECK(cudaMemset(linear, 1, LINEAR * 4));
    CHECK(cudaMallocPitch(&pitched, &pitch, W * 4, H));
    CHECK(cudaMemset2D(pitched, pitch, 0, W * 4, H));
    fill<float>(plane, 4, 1), fill<uint8_t>(bytes_plane, 4, 2), fill<int16_t>(volume, 2, 3), fill<int>(layered, 1, 4);
    fill<int>(cube, 1, 5), fill<float>(gatherable, 2, 6), fill<float>(line, 1, 7);
    for (unsigned level = 0; level < 7; level++) {
        cudaArray_t array;
        CHECK(cudaGetMipmappedArrayLevel(&array, mipmapped, level));
        fill<float>(array, 1, 100 + level);
    }
    // One leaves for good: from now on there is a gap among the numbers, wherever it comes to be.
    create(LINE);
    cudaTextureObject_t gap = textures[LINE];
    for (int i = 0; i < COUNT; i++) {
        create(i);
    }
    CHECK(cudaDestroyTextureObject(gap));
    check_described();
    fflush(stdout);

    cudaTextureObject_t *table;
    uint64_t *state;
    CHECK(cudaMalloc(&table, sizeof textures));
    CHECK(cudaMalloc(&state, COUNT * THREADS * 8));
    CHECK(cudaMemset(state, 0, COUNT * THREADS * 8));
    CHECK(cudaMemcpy(table, textures, sizeof textures, cudaMemcpyHostToDevice));
    uint64_t random = 1;
    for (uint64_t round = 1; round <= iterations; round++) {
        sample<<<THREADS / 64, 64>>>(table, state, round);
        CHECK(cudaGetLastError());
        change<<<(LINEAR + 63) / 64, 64>>>(linear, pitched, pitch, state);
        CHECK(cudaGetLastError());
        random = mix(random + round);
        if (round % 4 == 0) {
            // Two leave, and come back in the other order, so that each gets another number.
            int one = (int)(random % COUNT), other = (int)((random >> 8) % COUNT);
            CHECK(cudaDeviceSynchronize());
            CHECK(cudaDestroyTextureObject(textures[one]));
            if (one != other) {
                CHECK(cudaDestroyTextureObject(textures[other]));
                create(other);
            }
            create(one);
            CHECK(cudaMemcpy(table, textures, sizeof textures, cudaMemcpyHostToDevice));
        }
        if (round % 10 == 5) {
            fill<float>(plane, 4, random), fill<int16_t>(volume, 2, random), fill<int>(cube, 1, random);
        }
        sleep_us(pause_us);
        progress(progress_file, round);
    }
    static uint64_t host[COUNT * THREADS];
    CHECK(cudaMemcpy(host, state, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < COUNT; i++) {
        CHECK(cudaDestroyTextureObject(textures[i]));
    }
    for (cudaArray_t array : {plane, bytes_plane, volume, layered, cube, gatherable, line}) {
        CHECK(cudaFreeArray(array));
    }
    CHECK(cudaFreeMipmappedArray(mipmapped));
    for (int i = 0; i < COUNT; i++) {
        printf("%s %016llx\n", names[i], (unsigned long long)digest(&host[i * THREADS], THREADS * 8));
    }
    printf("digest %016llx\n", (unsigned long long)digest(host, sizeof host));
    return 0;
}
