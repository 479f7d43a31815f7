// Arrays of block-compressed and normalised formats: filled from memory that a kernel has written, read by textures, copied among
// each other and back. Blocks hold only colors and numbers that every GPU reads alike: the two of the block, at their ends.
//
//   blocks [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//
// Prints a digest of what each texture gave, of what came back from each array, and "digest D" of all, the same in every run with
// the same numbers. FILE holds the iterations done.
#include "driver.h"

const int W = 64, H = 32, LAYERS = 3, LEVELS = 3, THREADS = 128;
enum { BC1, BC2, BC3, BC4, BC4_SIGNED, BC5, LAYERED, MIPMAPPED, UNORM8, SNORM16, READ, BC6H = READ, BC7, COUNT };

static const struct {
    const char *name;
    CUarray_format format;
    unsigned channels;
    // Of a block or an element, and elements along its edge.
    size_t bytes;
    int edge;
} kinds[COUNT] = {
    {"bc1", CU_AD_FORMAT_BC1_UNORM, 4, 8, 4},
    {"bc2", CU_AD_FORMAT_BC2_UNORM, 4, 16, 4},
    {"bc3", CU_AD_FORMAT_BC3_UNORM, 4, 16, 4},
    {"bc4", CU_AD_FORMAT_BC4_UNORM, 1, 8, 4},
    {"bc4 signed", CU_AD_FORMAT_BC4_SNORM, 1, 8, 4},
    {"bc5", CU_AD_FORMAT_BC5_UNORM, 2, 16, 4},
    {"layered", CU_AD_FORMAT_BC1_UNORM, 4, 8, 4},
    {"mipmapped", CU_AD_FORMAT_BC5_UNORM, 2, 16, 4},
    {"unorm8", CU_AD_FORMAT_UNORM_INT8X4, 4, 4, 1},
    {"snorm16", CU_AD_FORMAT_SNORM_INT16X2, 2, 4, 1},
    {"bc6h", CU_AD_FORMAT_BC6H_UF16, 3, 16, 4},
    {"bc7", CU_AD_FORMAT_BC7_UNORM, 4, 16, 4},
};

static CUarray arrays[COUNT];
static CUmipmappedArray mipmapped;
static CUtexObject textures[READ];
// The largest array's content.
const size_t MOST = (size_t)W / 4 * H / 4 * 16 * 4;

// Fills memory with blocks of one kind: 8 bytes for colors (kind 0) or numbers (1), whose ends are exact and whose indices name only
// these; or 8 bytes for alpha (2); or anything (3).
__device__ uint64_t half_block(int kind, uint64_t random) {
    const uint64_t colors[4] = {0xf800, 0x07e0, 0x001f, 0xffff};
    uint64_t block = 0;
    if (kind == 0) {
        block = colors[random & 3] | colors[random >> 2 & 3] << 16;
        for (int i = 0; i < 16; i++) {
            block |= (random >> (4 + i) & 1) << (32 + 2 * i);
        }
        return block;
    }
    if (kind == 1) {
        // 255 and 0; with a sign -1 of 255th, and 0.
        block = (random & 1) ? 255 : 255 << 8;
        for (int i = 0; i < 16; i++) {
            block |= (random >> (4 + i) & 1) << (16 + 3 * i);
        }
        return block;
    }
    if (kind == 2) {
        for (int i = 0; i < 16; i++) {
            block |= ((random >> (4 + i) & 1) ? 15ull : 0ull) << (4 * i);
        }
        return block;
    }
    return random;
}

__global__ void write(uint64_t *memory, int halves, int first, int second, uint64_t round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < halves) {
        memory[i] = half_block(i % 2 ? second : first, mix(round * 1000003 + i));
    }
}

__device__ inline uint64_t fixed(float f) { return (uint64_t)(int64_t)(f * 4096.0f); }

__global__ void sample(const CUtexObject *t, uint64_t *state, uint64_t round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t r = mix(round * THREADS + i + 1);
    float x = (float)(r % W) + 0.5f, y = (float)((r >> 8) % H) + 0.5f;
    for (int kind = 0; kind < READ; kind++) {
        float4 v;
        if (kind == LAYERED) {
            v = tex2DLayered<float4>(t[kind], x, y, (int)(r >> 20) % LAYERS);
        } else if (kind == MIPMAPPED) {
            v = tex2DLod<float4>(t[kind], x / W, y / H, (float)((r >> 20) % LEVELS));
        } else {
            v = tex2D<float4>(t[kind], x, y);
        }
        if (kind == SNORM16) {
            // Channels that a format lacks: an H200 reads 0 and 0 here, and 0 and 1 of others.
            v.z = v.w = 0;
        }
        uint64_t &of = state[kind * THREADS + i];
        of = of * 6364136223846793005ull + fixed(v.x) + 3 * fixed(v.y) + 5 * fixed(v.z) + 7 * fixed(v.w);
    }
}

static CUDA_MEMCPY3D whole(int kind, int level) {
    CUDA_MEMCPY3D copy;
    memset(&copy, 0, sizeof copy);
    int width = W >> level, height = H >> level;
    copy.WidthInBytes = (size_t)(width / kinds[kind].edge) * kinds[kind].bytes;
    copy.Height = (size_t)(height / kinds[kind].edge);
    copy.Depth = kind == LAYERED ? LAYERS : 1;
    return copy;
}

static CUarray level_of(int kind, int level) {
    CUarray array = arrays[kind];
    if (kind == MIPMAPPED) {
        CU(cuMipmappedArrayGetLevel, &array, mipmapped, (unsigned)level);
    }
    return array;
}

static void from_memory(int kind, int level, CUdeviceptr memory) {
    CUDA_MEMCPY3D copy = whole(kind, level);
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE, copy.srcDevice = memory;
    copy.srcPitch = copy.WidthInBytes, copy.srcHeight = copy.Height;
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY, copy.dstArray = level_of(kind, level);
    CU(cuMemcpy3D, &copy);
}

// What an array holds, as a digest.
static uint64_t content(int kind, int level, uint64_t so_far) {
    static char back[MOST];
    CUDA_MEMCPY3D copy = whole(kind, level);
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY, copy.srcArray = level_of(kind, level);
    copy.dstMemoryType = CU_MEMORYTYPE_HOST, copy.dstHost = back;
    copy.dstPitch = copy.WidthInBytes, copy.dstHeight = copy.Height;
    CU(cuMemcpy3D, &copy);
    return digest(back, copy.WidthInBytes * copy.Height * copy.Depth, so_far);
}

static void create(int kind) {
    CUDA_ARRAY3D_DESCRIPTOR of = {W, H, kind == LAYERED ? (size_t)LAYERS : 0, kinds[kind].format, kinds[kind].channels,
                                  kind == LAYERED ? CUDA_ARRAY3D_LAYERED : 0u};
    CUDA_RESOURCE_DESC resource;
    memset(&resource, 0, sizeof resource);
    if (kind == MIPMAPPED) {
        CU(cuMipmappedArrayCreate, &mipmapped, &of, (unsigned)LEVELS);
        resource.resType = CU_RESOURCE_TYPE_MIPMAPPED_ARRAY;
        resource.res.mipmap.hMipmappedArray = mipmapped;
    } else {
        CU(cuArray3DCreate, &arrays[kind], &of);
        resource.resType = CU_RESOURCE_TYPE_ARRAY;
        resource.res.array.hArray = arrays[kind];
    }
    if (kind >= READ) {
        return;
    }
    CUDA_TEXTURE_DESC how;
    memset(&how, 0, sizeof how);
    how.addressMode[0] = how.addressMode[1] = how.addressMode[2] = CU_TR_ADDRESS_MODE_CLAMP;
    if (kind == MIPMAPPED) {
        how.flags = CU_TRSF_NORMALIZED_COORDINATES;
        how.maxMipmapLevelClamp = LEVELS - 1;
    }
    CU(cuTexObjectCreate, &textures[kind], &resource, &how, NULL);
}

static void fill(int kind, CUdeviceptr memory, uint64_t round) {
    int first = 3, second = 3;
    switch (kind) {
    case BC1: case LAYERED: first = second = 0; break;
    case BC2: first = 2, second = 0; break;
    case BC3: first = 1, second = 0; break;
    case BC4: case BC4_SIGNED: case BC5: case MIPMAPPED: first = second = 1; break;
    }
    int halves = (int)(MOST / 8);
    write<<<(halves + 127) / 128, 128>>>((uint64_t *)memory, halves, first, second, round * COUNT + kind);
    CHECK(cudaGetLastError());
    for (int level = 0; level < (kind == MIPMAPPED ? LEVELS : 1); level++) {
        from_memory(kind, level, memory + (CUdeviceptr)level * 16);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    CHECK(cudaFree(nullptr));
    CUdeviceptr memory;
    CU(cuMemAlloc, &memory, MOST + 64);
    for (int kind = 0; kind < COUNT; kind++) {
        create(kind);
        fill(kind, memory, 0);
    }
    CUtexObject *table;
    uint64_t *state;
    CHECK(cudaMalloc(&table, sizeof textures));
    CHECK(cudaMemcpy(table, textures, sizeof textures, cudaMemcpyHostToDevice));
    CHECK(cudaMalloc(&state, READ * THREADS * 8));
    CHECK(cudaMemset(state, 0, READ * THREADS * 8));
    for (uint64_t round = 1; round <= iterations; round++) {
        sample<<<THREADS / 64, 64>>>(table, state, round);
        CHECK(cudaGetLastError());
        int kind = (int)(mix(round) % COUNT);
        fill(kind, memory, round);
        if (round % 5 == 0) {
            // Blocks of BC7 come to be those of BC6H: 4 of them, from one row into the next.
            CUDA_MEMCPY2D copy;
            memset(&copy, 0, sizeof copy);
            copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
            copy.srcArray = arrays[BC7], copy.dstArray = arrays[BC6H];
            copy.srcXInBytes = 16 * (round % 8), copy.dstXInBytes = 16 * (round % 4);
            copy.srcY = round % (H / 4), copy.dstY = (round + 1) % (H / 4);
            copy.WidthInBytes = 64, copy.Height = 1;
            CU(cuMemcpy2D, &copy);
        }
        sleep_us(pause_us);
        progress(progress_file, round);
    }
    static uint64_t host[READ * THREADS];
    CHECK(cudaMemcpy(host, state, sizeof host, cudaMemcpyDeviceToHost));
    uint64_t all = digest(host, sizeof host);
    for (int kind = 0; kind < COUNT; kind++) {
        uint64_t held = 1;
        for (int level = 0; level < (kind == MIPMAPPED ? LEVELS : 1); level++) {
            held = content(kind, level, held);
        }
        if (kind < READ) {
            printf("%s %016llx, read %016llx\n", kinds[kind].name, (unsigned long long)held,
                   (unsigned long long)digest(&host[kind * THREADS], THREADS * 8));
            CU(cuTexObjectDestroy, textures[kind]);
        } else {
            printf("%s %016llx\n", kinds[kind].name, (unsigned long long)held);
        }
        all = digest(&held, 8, all);
    }
    printf("digest %016llx\n", (unsigned long long)all);
    return 0;
}
