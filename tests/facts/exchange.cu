// B9: do objects made on memory work after the physical memory behind its addresses was exchanged? One object in one process.
//
//   exchange --case graph-copy-from [--small 0]
//   exchange --case cost --pieces 128 --mib 64
//
// --case   a name in the table at the end of this file, or `cost`: what it costs to give memory back and to make it anew
//
// The object is used, the memory is unmapped and released, other memory is made and mapped at the same addresses, and the object
// is used again. Prints what each use gave.
#include "facts.h"

#include <cstdint>

const size_t SIZE = 2 * MIB, BYTES = 64 * KIB;
const uint32_t FIRST = 0x2a2a2a2a, SECOND = 0x17171717, OTHER = 0x0c0c0c0c;

struct Place {
    CUcontext context;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at, good;
    CUstream stream;
    uint32_t *host;

    Place() {
        context = start_device();
        stream = new_stream();
        host = (uint32_t *)new_pinned(BYTES);
        handle = new_piece(SIZE);
        at = map_new(handle, SIZE);
        good = map_new(new_piece(SIZE), SIZE);
        set(at, FIRST);
    }
    void set(CUdeviceptr where, uint32_t word) {
        NEED(cuMemsetD32, where, word, SIZE / 4);
        NEED(cuCtxSynchronize);
    }
    // Other memory comes to the addresses: a second piece is made before the first one is released.
    void exchange() {
        CUmemGenericAllocationHandle other = new_piece(SIZE);
        NEED(cuMemUnmap, at, SIZE);
        NEED(cuMemRelease, handle);
        NEED(cuMemMap, at, SIZE, 0, other, 0);
        NEED_ACCESS(at, SIZE);
        handle = other;
        set(at, SECOND);
    }
    bool is_all(CUdeviceptr where, uint32_t word) {
        memset(host, 0, BYTES);
        NEED(cuMemcpyDtoH, host, where, BYTES);
        return host[0] == word && host[BYTES / 4 - 1] == word;
    }
    bool is_first(CUdeviceptr where, uint32_t word) {
        NEED(cuMemcpyDtoH, host, where, 4);
        return host[0] == word;
    }
};

// An object: how it is used, and whether it did what it should when the memory had this word everywhere.
struct Object {
    std::function<CUresult()> use;
    std::function<bool(uint32_t)> is_right;
};

static __global__ void read_one(const uint32_t *at, uint32_t *out) { *out = *(volatile const uint32_t *)at; }
static __global__ void fetch_linear(cudaTextureObject_t texture, uint32_t *out) {
    out[threadIdx.x] = tex1Dfetch<uint32_t>(texture, (int)threadIdx.x);
}
static __global__ void fetch_pitched(cudaTextureObject_t texture, uint32_t *out) {
    out[threadIdx.x] = tex2D<uint32_t>(texture, (float)threadIdx.x + 0.5f, 3.5f);
}

static std::function<CUresult()> launches(Place &p, CUgraph graph) {
    CUgraphExec executable;
    NEED(cuGraphInstantiateWithFlags, &executable, graph, 0);
    return [&p, executable] {
        CUresult launched = ASK(cuGraphLaunch, executable, p.stream);
        return launched == CUDA_SUCCESS ? ASK(cuStreamSynchronize, p.stream) : launched;
    };
}

static CUgraph new_graph() {
    CUgraph graph;
    NEED(cuGraphCreate, &graph, 0);
    return graph;
}

static CUgraph graph_of_copy(Place &p, CUdeviceptr to, CUdeviceptr from) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = from;
    copy.dstDevice = to;
    copy.WidthInBytes = BYTES;
    copy.Height = copy.Depth = 1;
    NEED(cuGraphAddMemcpyNode, &node, graph, nullptr, 0, &copy, p.context);
    return graph;
}

static Object graph_copy_from(Place &p) {
    return {launches(p, graph_of_copy(p, p.good, p.at)), [&p](uint32_t word) { return p.is_all(p.good, word); }};
}

static Object graph_copy_to(Place &p) {
    p.set(p.good, OTHER);
    return {launches(p, graph_of_copy(p, p.at, p.good)), [&p](uint32_t) { return p.is_all(p.at, OTHER); }};
}

static Object graph_copy_to_host(Place &p) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = p.at;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = p.host;
    copy.WidthInBytes = BYTES;
    copy.Height = copy.Depth = 1;
    NEED(cuGraphAddMemcpyNode, &node, graph, nullptr, 0, &copy, p.context);
    return {launches(p, graph),
            [&p](uint32_t word) { return p.host[0] == word && p.host[BYTES / 4 - 1] == word; }};
}

static Object graph_set(Place &p) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    CUDA_MEMSET_NODE_PARAMS how = {};
    how.dst = p.at;
    how.elementSize = 4;
    how.value = OTHER;
    how.width = BYTES / 4;
    how.height = 1;
    NEED(cuGraphAddMemsetNode, &node, graph, nullptr, 0, &how, p.context);
    return {launches(p, graph), [&p](uint32_t) { return p.is_all(p.at, OTHER); }};
}

static Object graph_kernel(Place &p) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeRelaxed));
    read_one<<<1, 1, 0, p.stream>>>((const uint32_t *)p.at, (uint32_t *)p.good);
    CHECK(cudaStreamEndCapture(p.stream, &graph));
    return {launches(p, graph), [&p](uint32_t word) { return p.is_first(p.good, word); }};
}

static Object graph_batch(Place &p) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    static CUstreamBatchMemOpParams operation;
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = p.at;
    operation.writeValue.value = OTHER;
    CUDA_BATCH_MEM_OP_NODE_PARAMS how = {};
    how.ctx = p.context;
    how.count = 1;
    how.paramArray = &operation;
    NEED(cuGraphAddBatchMemOpNode, &node, graph, nullptr, 0, &how);
    return {launches(p, graph), [&p](uint32_t) { return p.is_first(p.at, OTHER); }};
}

static Object texture(Place &p, const CUDA_RESOURCE_DESC &resource) {
    CUDA_TEXTURE_DESC how = {};
    how.addressMode[0] = how.addressMode[1] = CU_TR_ADDRESS_MODE_CLAMP;
    how.flags = CU_TRSF_READ_AS_INTEGER;
    CUtexObject object;
    NEED(cuTexObjectCreate, &object, &resource, &how, nullptr);
    bool linear = resource.resType == CU_RESOURCE_TYPE_LINEAR;
    auto use = [&p, object, linear] {
        if (linear) {
            fetch_linear<<<1, 32, 0, p.stream>>>(object, (uint32_t *)p.good);
        } else {
            fetch_pitched<<<1, 32, 0, p.stream>>>(object, (uint32_t *)p.good);
        }
        return ASK(cuStreamSynchronize, p.stream);
    };
    return {use, [&p](uint32_t word) { return p.is_first(p.good, word) && p.is_first(p.good + 31 * 4, word); }};
}

static Object texture_linear(Place &p) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = p.at;
    resource.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT32;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = BYTES;
    return texture(p, resource);
}

static Object texture_pitched(Place &p) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_PITCH2D;
    resource.res.pitch2D.devPtr = p.at;
    resource.res.pitch2D.format = CU_AD_FORMAT_UNSIGNED_INT32;
    resource.res.pitch2D.numChannels = 1;
    resource.res.pitch2D.width = 128;
    resource.res.pitch2D.height = 64;
    resource.res.pitch2D.pitchInBytes = 512;
    return texture(p, resource);
}

static const struct {
    const char *name;
    Object (*make)(Place &);
} CASES[] = {
    {"graph-copy-from", graph_copy_from},
    {"graph-copy-to", graph_copy_to},
    {"graph-copy-to-host", graph_copy_to_host},
    {"graph-memset", graph_set},
    {"graph-kernel", graph_kernel},
    {"graph-batch", graph_batch},
    {"texture-linear", texture_linear},
    {"texture-pitched", texture_pitched},
};

static void used(const char *memory, Object &object, uint32_t word) {
    CUresult result = object.use();
    Line line;
    line.word("memory", memory).result("result", result);
    if (result == CUDA_SUCCESS) {
        line.yes("right", object.is_right(word));
    }
    line.print();
}

// Gives memory back and makes it anew, at the same addresses: access is granted once for all pieces.
// How memory is given back.
enum class Way { EACH, AT_ONCE, RELEASED_FIRST };
const struct {
    const char *name;
    Way way;
} WAYS[] = {{"each piece", Way::EACH}, {"all pieces by one call", Way::AT_ONCE}, {"each piece, released before", Way::RELEASED_FIRST}};

static void cost(int pieces, size_t bytes) {
    start_device();
    CUdeviceptr at = reserve(pieces * bytes);
    std::vector<CUmemGenericAllocationHandle> handles(pieces);
    size_t free_without = 0, free_with = 0, total = 0;
    for (int round = 0; round < 9; round++) {
        auto [name, way] = WAYS[round % 3];
        Times create, map, access, unmap, release;
        NEED(cuMemGetInfo, &free_without, &total);
        double start = now_ns();
        for (int i = 0; i < pieces; i++) {
            TIMED(create, handles[i] = new_piece(bytes, true));
        }
        for (int i = 0; i < pieces; i++) {
            TIMED(map, NEED(cuMemMap, at + i * bytes, bytes, 0, handles[i], 0));
        }
        TIMED(access, NEED_ACCESS(at, pieces * bytes));
        double made = now_ns() - start;
        NEED(cuMemsetD32, at, 1, pieces * bytes / 4);
        NEED(cuCtxSynchronize);
        NEED(cuMemGetInfo, &free_with, &total);
        auto release_all = [&] {
            for (int i = 0; i < pieces; i++) {
                TIMED(release, NEED(cuMemRelease, handles[i]));
            }
        };
        start = now_ns();
        if (way == Way::RELEASED_FIRST) {
            release_all();
        }
        if (way == Way::AT_ONCE) {
            TIMED(unmap, NEED(cuMemUnmap, at, pieces * bytes));
        } else {
            for (int i = 0; i < pieces; i++) {
                TIMED(unmap, NEED(cuMemUnmap, at + i * bytes, bytes));
            }
        }
        if (way != Way::RELEASED_FIRST) {
            release_all();
        }
        double gone = now_ns() - start;
        Line().word("unmapped", name).number("round", round / 3).number("pieces", pieces).number("bytes", bytes).number("made_ms", made / 1e6)
            .number("gone_ms", gone / 1e6).times("create", create).times("map", map).times("access", access).times("unmap", unmap)
            .times("release", release).number("held_bytes", (double)(free_without - free_with)).print();
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *name = options.text("--case", "list");
    int pieces = (int)options.number("--pieces", 8);
    size_t mib = (size_t)options.number("--mib", 2);
    options.number("--small", 0);
    options.done();
    if (strcmp(name, "list") == 0) {
        for (const auto &it : CASES) {
            printf("%s\n", it.name);
        }
        return 0;
    }
    if (strcmp(name, "cost") == 0) {
        cost(pieces, mib * MIB);
        _exit(0);
    }
    for (const auto &it : CASES) {
        if (strcmp(it.name, name) == 0) {
            Place place;
            Object object = it.make(place);
            used("the first", object, FIRST);
            place.exchange();
            used("exchanged", object, SECOND);
            Line().result("context_afterwards", ASK(cuCtxSynchronize)).print();
            _exit(0);
        }
    }
    options.fail(name);
}
