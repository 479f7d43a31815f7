// B3: what calls do with memory that is only reserved, mapped without access, or read-only: one call in one process.
//
//   states --state reserved --case copy-to-host [--small 0]
//
// --state  reserved, mapped (without access), readonly, ready (control)
// --case   a name in the table at the end of this file; a name with "-late" makes its object in that state, has the memory
//          made ready, and uses the object then
//
// Prints a line for each call: what it returned, and what waiting for it returned.
#include "facts.h"

#include <cstdint>

const size_t SIZE = 2 * MIB, BYTES = 64 * KIB;
const uint32_t WORD = 0x2a2a2a2a, OTHER_WORD = 0x17171717;

struct Place {
    std::string state;
    CUmemGenericAllocationHandle handle;
    CUcontext context;
    CUdeviceptr alias, at, good;
    CUstream stream;
    uint32_t *host;
    bool late;

    Place(const char *what, bool is_late) : state(what), late(is_late) {
        context = start_device();
        stream = new_stream();
        host = (uint32_t *)new_pinned(BYTES);
        handle = new_piece(SIZE);
        alias = map_new(handle, SIZE);
        good = map_new(new_piece(SIZE), SIZE);
        NEED(cuMemsetD32, alias, WORD, SIZE / 4);
        NEED(cuMemsetD32, good, OTHER_WORD, SIZE / 4);
        NEED(cuCtxSynchronize);
        at = reserve(SIZE);
        if (state != "reserved") {
            NEED(cuMemMap, at, SIZE, 0, handle, 0);
        }
        if (state == "readonly") {
            NEED_ACCESS(at, SIZE, CU_MEM_ACCESS_FLAGS_PROT_READ);
        } else if (state == "ready") {
            NEED_ACCESS(at, SIZE);
        } else {
            REQUIRE(state == "mapped" || state == "reserved");
        }
    }
    void make_ready() {
        if (state == "reserved") {
            NEED(cuMemMap, at, SIZE, 0, handle, 0);
        }
        NEED_ACCESS(at, SIZE);
    }
    // What a call returned, and what waiting for it gives. Whether both are well.
    bool said(const char *call, CUresult result) {
        Line().word("call", call).result("result", result).print();
        if (result == CUDA_SUCCESS) {
            double start = now_ns();
            result = ASK(cuStreamSynchronize, stream);
            Line().word("waited_for", call).result("result", result).number("ms", (now_ns() - start) / 1e6).print();
        }
        return result == CUDA_SUCCESS;
    }
    // The first and the last word of what a call gave.
    void found(const char *what, const uint32_t *words, uint32_t wanted) {
        Line().word("content", what).yes("right", words[0] == wanted && words[BYTES / 4 - 1] == wanted).print();
    }
    void found_on_device(CUdeviceptr from, uint32_t wanted) {
        memset(host, 0, BYTES);
        CUresult result = ASK(cuMemcpyDtoH, host, from, BYTES);
        if (result == CUDA_SUCCESS) {
            found("device memory", host, wanted);
        } else {
            Line().word("content", "device memory").result("result", result).print();
        }
    }
};

static __global__ void read_one(const uint32_t *at, uint32_t *out) { *out = *(volatile const uint32_t *)at; }
static __global__ void write_one(uint32_t *at, uint32_t value) { *at = value; }
static __global__ void fetch_linear(cudaTextureObject_t texture, uint32_t *out) {
    out[threadIdx.x] = tex1Dfetch<uint32_t>(texture, (int)threadIdx.x);
}
static __global__ void fetch_pitched(cudaTextureObject_t texture, uint32_t *out) {
    out[threadIdx.x] = tex2D<uint32_t>(texture, (float)threadIdx.x + 0.5f, 3.5f);
}

static void copy_to_host(Place &p) {
    if (p.said("cuMemcpyDtoH", ASK(cuMemcpyDtoH, p.host, p.at, BYTES))) {
        p.found("host memory", p.host, WORD);
    }
}

static void copy_to_host_async(Place &p) {
    if (p.said("cuMemcpyDtoHAsync", ASK(cuMemcpyDtoHAsync, p.host, p.at, BYTES, p.stream))) {
        p.found("host memory", p.host, WORD);
    }
}

static void copy_to_pageable(Place &p) {
    std::vector<uint32_t> pageable(BYTES / 4);
    if (p.said("cuMemcpyDtoHAsync", ASK(cuMemcpyDtoHAsync, pageable.data(), p.at, BYTES, p.stream))) {
        p.found("host memory", pageable.data(), WORD);
    }
}

static void copy_from_host(Place &p) {
    if (p.said("cuMemcpyHtoD", ASK(cuMemcpyHtoD, p.at, p.host, BYTES))) {
        p.found_on_device(p.alias, 0);
    }
}

static void copy_from_host_async(Place &p) {
    if (p.said("cuMemcpyHtoDAsync", ASK(cuMemcpyHtoDAsync, p.at, p.host, BYTES, p.stream))) {
        p.found_on_device(p.alias, 0);
    }
}

static void copy_device_from(Place &p) {
    if (p.said("cuMemcpyDtoDAsync", ASK(cuMemcpyDtoDAsync, p.good, p.at, BYTES, p.stream))) {
        p.found_on_device(p.good, WORD);
    }
}

static void copy_device_to(Place &p) {
    if (p.said("cuMemcpyDtoDAsync", ASK(cuMemcpyDtoDAsync, p.at, p.good, BYTES, p.stream))) {
        p.found_on_device(p.alias, OTHER_WORD);
    }
}

static void copy_2d_from(Place &p) {
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = p.at;
    copy.srcPitch = 1024;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = p.good;
    copy.dstPitch = 512;
    copy.WidthInBytes = 512;
    copy.Height = BYTES / 512;
    if (p.said("cuMemcpy2DAsync", ASK(cuMemcpy2DAsync, &copy, p.stream))) {
        p.found_on_device(p.good, WORD);
    }
}

static void set(Place &p) {
    if (p.said("cuMemsetD32", ASK(cuMemsetD32, p.at, OTHER_WORD, BYTES / 4))) {
        p.found_on_device(p.alias, OTHER_WORD);
    }
}

static void set_async(Place &p) {
    if (p.said("cuMemsetD32Async", ASK(cuMemsetD32Async, p.at, OTHER_WORD, BYTES / 4, p.stream))) {
        p.found_on_device(p.alias, OTHER_WORD);
    }
}

// Instantiates a graph of one node, and launches it. Whether it ran.
static bool run_graph(Place &p, CUgraph graph) {
    CUgraphExec executable;
    if (!p.said("cuGraphInstantiateWithFlags", ASK(cuGraphInstantiateWithFlags, &executable, graph, 0))) {
        return false;
    }
    if (p.late) {
        p.make_ready();
    }
    return p.said("cuGraphUpload", ASK(cuGraphUpload, executable, p.stream)) &&
           p.said("cuGraphLaunch", ASK(cuGraphLaunch, executable, p.stream));
}

static CUgraph new_graph() {
    CUgraph graph;
    NEED(cuGraphCreate, &graph, 0);
    return graph;
}

static void graph_copy(Place &p, CUdeviceptr to, CUdeviceptr from) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    CUDA_MEMCPY3D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = from;
    copy.dstDevice = to;
    copy.WidthInBytes = BYTES;
    copy.Height = copy.Depth = 1;
    bool added = p.said("cuGraphAddMemcpyNode", ASK(cuGraphAddMemcpyNode, &node, graph, nullptr, 0, &copy, p.context));
    if (added && run_graph(p, graph)) {
        p.found_on_device(to == p.at ? p.alias : to, to == p.at ? OTHER_WORD : WORD);
    }
}

static void graph_copy_from(Place &p) { graph_copy(p, p.good, p.at); }
static void graph_copy_to(Place &p) { graph_copy(p, p.at, p.good); }

static void graph_set(Place &p) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    CUDA_MEMSET_NODE_PARAMS how = {};
    how.dst = p.at;
    how.elementSize = 4;
    how.value = OTHER_WORD;
    how.width = BYTES / 4;
    how.height = 1;
    bool added = p.said("cuGraphAddMemsetNode", ASK(cuGraphAddMemsetNode, &node, graph, nullptr, 0, &how, p.context));
    if (added && run_graph(p, graph)) {
        p.found_on_device(p.alias, OTHER_WORD);
    }
}

static void graph_kernel(Place &p) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(p.stream, cudaStreamCaptureModeRelaxed));
    read_one<<<1, 1, 0, p.stream>>>((const uint32_t *)p.at, (uint32_t *)p.good);
    CHECK(cudaStreamEndCapture(p.stream, &graph));
    if (run_graph(p, graph)) {
        NEED(cuMemcpyDtoH, p.host, p.good, 4);
        Line().word("content", "what the kernel read").yes("right", p.host[0] == WORD).print();
    }
}

static CUstreamBatchMemOpParams write_word(CUdeviceptr at) {
    CUstreamBatchMemOpParams operation = {};
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = at;
    operation.writeValue.value = OTHER_WORD;
    return operation;
}

static void found_first_word(Place &p) {
    CUresult result = ASK(cuMemcpyDtoH, p.host, p.alias, 4);
    Line().word("content", "first word").result("result", result).yes("right", p.host[0] == OTHER_WORD).print();
}

static void graph_batch(Place &p) {
    CUgraph graph = new_graph();
    CUgraphNode node;
    CUstreamBatchMemOpParams operation = write_word(p.at);
    CUDA_BATCH_MEM_OP_NODE_PARAMS how = {};
    how.ctx = p.context;
    how.count = 1;
    how.paramArray = &operation;
    bool added = p.said("cuGraphAddBatchMemOpNode", ASK(cuGraphAddBatchMemOpNode, &node, graph, nullptr, 0, &how));
    if (added && run_graph(p, graph)) {
        found_first_word(p);
    }
}

static void batch_write(Place &p) {
    CUstreamBatchMemOpParams operation = write_word(p.at);
    if (p.said("cuStreamBatchMemOp", ASK(cuStreamBatchMemOp, p.stream, 1, &operation, 0))) {
        found_first_word(p);
    }
}

static void write_value(Place &p) {
    if (p.said("cuStreamWriteValue32", ASK(cuStreamWriteValue32, p.stream, p.at, OTHER_WORD, 0))) {
        found_first_word(p);
    }
}

static void wait_value(Place &p) {
    p.said("cuStreamWaitValue32", ASK(cuStreamWaitValue32, p.stream, p.at, WORD, CU_STREAM_WAIT_VALUE_EQ));
}

static void texture(Place &p, const CUDA_RESOURCE_DESC &resource) {
    CUDA_TEXTURE_DESC how = {};
    how.addressMode[0] = how.addressMode[1] = CU_TR_ADDRESS_MODE_CLAMP;
    how.flags = CU_TRSF_READ_AS_INTEGER;
    CUtexObject object;
    if (!p.said("cuTexObjectCreate", ASK(cuTexObjectCreate, &object, &resource, &how, nullptr))) {
        return;
    }
    if (p.late) {
        p.make_ready();
    }
    if (resource.resType == CU_RESOURCE_TYPE_LINEAR) {
        fetch_linear<<<1, 32, 0, p.stream>>>(object, (uint32_t *)p.good);
    } else {
        fetch_pitched<<<1, 32, 0, p.stream>>>(object, (uint32_t *)p.good);
    }
    if (p.said("a kernel that reads the texture", CUDA_SUCCESS)) {
        NEED(cuMemcpyDtoH, p.host, p.good, 32 * 4);
        Line().word("content", "what the kernel read").yes("right", p.host[0] == WORD && p.host[31] == WORD).print();
    }
}

static void texture_linear(Place &p) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_LINEAR;
    resource.res.linear.devPtr = p.at;
    resource.res.linear.format = CU_AD_FORMAT_UNSIGNED_INT32;
    resource.res.linear.numChannels = 1;
    resource.res.linear.sizeInBytes = BYTES;
    texture(p, resource);
}

static void texture_pitched(Place &p) {
    CUDA_RESOURCE_DESC resource = {};
    resource.resType = CU_RESOURCE_TYPE_PITCH2D;
    resource.res.pitch2D.devPtr = p.at;
    resource.res.pitch2D.format = CU_AD_FORMAT_UNSIGNED_INT32;
    resource.res.pitch2D.numChannels = 1;
    resource.res.pitch2D.width = 128;
    resource.res.pitch2D.height = 64;
    resource.res.pitch2D.pitchInBytes = 512;
    texture(p, resource);
}

// Whether a map is the same bytes before and after its memory is there.
static void tensor_map(Place &p) {
    alignas(64) CUtensorMap before = {}, after = {};
    cuuint64_t sizes[] = {128, 64}, strides[] = {512};
    cuuint32_t box[] = {32, 8}, steps[] = {1, 1};
    auto encode = [&](CUtensorMap *map) {
        return ASK(cuTensorMapEncodeTiled, map, CU_TENSOR_MAP_DATA_TYPE_UINT32, 2, (void *)p.at, sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    if (!p.said("cuTensorMapEncodeTiled", encode(&before))) {
        return;
    }
    if (p.state != "ready") {
        p.make_ready();
    }
    if (p.said("cuTensorMapEncodeTiled when ready", encode(&after))) {
        Line().word("content", "the map before and after").yes("right", memcmp(&before, &after, sizeof before) == 0).print();
    }
}

static void kernel_reads(Place &p) {
    read_one<<<1, 1, 0, p.stream>>>((const uint32_t *)p.at, (uint32_t *)p.good);
    if (p.said("a kernel that reads", CUDA_SUCCESS)) {
        NEED(cuMemcpyDtoH, p.host, p.good, 4);
        Line().word("content", "what the kernel read").yes("right", p.host[0] == WORD).print();
    }
}

static void kernel_writes(Place &p) {
    write_one<<<1, 1, 0, p.stream>>>((uint32_t *)p.at, OTHER_WORD);
    if (p.said("a kernel that writes", CUDA_SUCCESS)) {
        found_first_word(p);
    }
}

static void attributes(Place &p) {
    const struct {
        CUpointer_attribute which;
        const char *name;
    } all[] = {{CU_POINTER_ATTRIBUTE_CONTEXT, "cuPointerGetAttribute CONTEXT"},
               {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, "cuPointerGetAttribute MEMORY_TYPE"},
               {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, "cuPointerGetAttribute RANGE_START_ADDR"},
               {CU_POINTER_ATTRIBUTE_MAPPED, "cuPointerGetAttribute MAPPED"},
               {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, "cuPointerGetAttribute DEVICE_ORDINAL"}};
    for (const auto &it : all) {
        uint64_t value[4] = {};
        CUresult result = ASK(cuPointerGetAttribute, value, it.which, p.at);
        Line().word("call", it.name).result("result", result).print();
    }
    CUdeviceptr base = 0;
    size_t size = 0;
    p.said("cuMemGetAddressRange", ASK(cuMemGetAddressRange, &base, &size, p.at));
}

static const struct {
    const char *name;
    void (*run)(Place &);
    bool late;
} CASES[] = {
    {"copy-to-host", copy_to_host, false},
    {"copy-to-host-async", copy_to_host_async, false},
    {"copy-to-pageable", copy_to_pageable, false},
    {"copy-from-host", copy_from_host, false},
    {"copy-from-host-async", copy_from_host_async, false},
    {"copy-device-from", copy_device_from, false},
    {"copy-device-to", copy_device_to, false},
    {"copy-2d-from", copy_2d_from, false},
    {"memset", set, false},
    {"memset-async", set_async, false},
    {"graph-copy-from", graph_copy_from, false},
    {"graph-copy-from-late", graph_copy_from, true},
    {"graph-copy-to", graph_copy_to, false},
    {"graph-copy-to-late", graph_copy_to, true},
    {"graph-memset", graph_set, false},
    {"graph-memset-late", graph_set, true},
    {"graph-kernel", graph_kernel, false},
    {"graph-kernel-late", graph_kernel, true},
    {"graph-batch", graph_batch, false},
    {"graph-batch-late", graph_batch, true},
    {"batch-write", batch_write, false},
    {"write-value", write_value, false},
    {"wait-value", wait_value, false},
    {"texture-linear", texture_linear, false},
    {"texture-linear-late", texture_linear, true},
    {"texture-pitched", texture_pitched, false},
    {"texture-pitched-late", texture_pitched, true},
    {"tensor-map", tensor_map, false},
    {"kernel-reads", kernel_reads, false},
    {"kernel-writes", kernel_writes, false},
    {"attributes", attributes, false},
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    const char *state = options.text("--state", "mapped"), *name = options.text("--case", "list");
    options.number("--small", 0);
    options.done();
    if (strcmp(name, "list") == 0) {
        for (const auto &it : CASES) {
            printf("%s\n", it.name);
        }
        return 0;
    }
    for (const auto &it : CASES) {
        if (strcmp(it.name, name) == 0) {
            Place place(state, it.late);
            it.run(place);
            Line().result("context_afterwards", ASK(cuCtxSynchronize)).print();
            _exit(0);
        }
    }
    options.fail(name);
}
