// Graphs of nodes that the program makes itself: kernels, copies of one and two dimensions, memsets, functions of the
// host, child graphs, events, memory of graphs, copies from and to memory that is not pinned; parameters of executable
// graphs changed, nodes disabled, whole graphs updated.
//
//   graphnodes [--iterations N] [--words N] [--sleep-us N] [--progress FILE]     40, 2048, 0, none
//
// Prints a digest every eight iterations, the same in every run with the same numbers.
#include "app.h"

__global__ void stir(uint32_t *data, uint32_t n, uint32_t by) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = data[i] * 0x9e3779b9u + by;
        data[i] = x ^ (x >> 13);
    }
}

__global__ void take(uint32_t *data, const uint32_t *from, uint32_t n) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += from[i] * 7u + 1u;
}

struct Calls {
    uint64_t count;
    uint32_t *source;
    uint32_t *result;
    uint32_t words;
};

// Between a copy out and a copy in: the program's own memory. What is copied in is what was there when the graph was
// launched, since the memory is not pinned; so each launch sees what this wrote in the one before.
static void CUDART_CB between(void *data) {
    Calls *calls = (Calls *)data;
    calls->count++;
    for (uint32_t i = 0; i < calls->words; i++) calls->source[i] = calls->result[i] ^ (uint32_t)calls->count;
}

static cudaKernelNodeParams kernel(void *function, uint32_t blocks, void **parameters) {
    cudaKernelNodeParams params = {};
    params.func = function;
    params.gridDim = dim3(blocks);
    params.blockDim = dim3(128);
    params.kernelParams = parameters;
    return params;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 40);
    uint32_t n = (uint32_t)options.number("--words", 2048);
    const uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    const uint32_t blocks = (n + 127) / 128;
    const size_t bytes = n * sizeof(uint32_t);
    uint32_t *a, *b;
    CHECK(cudaMalloc(&a, bytes));
    CHECK(cudaMalloc(&b, bytes));
    Calls calls = {0, (uint32_t *)malloc(bytes), (uint32_t *)malloc(bytes), n};
    for (uint32_t i = 0; i < n; i++) calls.result[i] = calls.source[i] = (uint32_t)mix(i);
    CHECK(cudaMemcpy(a, calls.source, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(b, 1, bytes));
    cudaStream_t stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

    // What the worker of a graph can do by itself: kernels, copies, memsets, a child.
    cudaGraph_t plain, child;
    CHECK(cudaGraphCreate(&plain, 0));
    CHECK(cudaGraphCreate(&child, 0));
    uint32_t by = 1;
    void *stir_a[] = {&a, &n, &by}, *stir_b[] = {&b, &n, &by}, *take_b[] = {&a, &b, &n};
    cudaGraphNode_t first, second, last, set, copied, inner, parent;
    cudaKernelNodeParams params = kernel((void *)stir, blocks, stir_b);
    CHECK(cudaGraphAddKernelNode(&inner, child, nullptr, 0, &params));
    params = kernel((void *)stir, blocks, stir_a);
    CHECK(cudaGraphAddKernelNode(&first, plain, nullptr, 0, &params));
    cudaMemsetParams fill = {};
    fill.dst = b;
    fill.pitch = 256;
    fill.value = 0x5a;
    fill.elementSize = 1;
    fill.width = 100;
    fill.height = 8;
    CHECK(cudaGraphAddMemsetNode(&set, plain, nullptr, 0, &fill));
    CHECK(cudaGraphAddChildGraphNode(&parent, plain, &set, 1, child));
    cudaGraphNode_t both[] = {first, parent};
    params = kernel((void *)take, blocks, take_b);
    CHECK(cudaGraphAddKernelNode(&second, plain, both, 2, &params));
    CHECK(cudaGraphAddMemcpyNode1D(&copied, plain, &second, 1, b, a, bytes / 2, cudaMemcpyDeviceToDevice));
    CHECK(cudaGraphAddKernelNode(&last, plain, &copied, 1, &params));
    cudaGraphExec_t plain_exec;
    CHECK(cudaGraphInstantiate(&plain_exec, plain, 0));

    // What needs the program: its memory, a function of its own, events.
    cudaGraph_t mixed;
    CHECK(cudaGraphCreate(&mixed, 0));
    cudaGraphNode_t out, function, in, record, after;
    CHECK(cudaGraphAddMemcpyNode1D(&out, mixed, nullptr, 0, calls.result, a, bytes, cudaMemcpyDeviceToHost));
    cudaHostNodeParams host = {between, &calls};
    CHECK(cudaGraphAddHostNode(&function, mixed, &out, 1, &host));
    CHECK(cudaGraphAddMemcpyNode1D(&in, mixed, &function, 1, b, calls.source, bytes, cudaMemcpyHostToDevice));
    CHECK(cudaGraphAddEventRecordNode(&record, mixed, &in, 1, event));
    CHECK(cudaGraphAddKernelNode(&after, mixed, &record, 1, &params));
    cudaGraphExec_t mixed_exec;
    CHECK(cudaGraphInstantiate(&mixed_exec, mixed, 0));

    // Memory of a graph, by capture: there only within it.
    cudaGraph_t scratch;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    uint32_t *temporary;
    CHECK(cudaMallocAsync(&temporary, bytes, stream));
    CHECK(cudaMemcpyAsync(temporary, a, bytes, cudaMemcpyDeviceToDevice, stream));
    stir<<<blocks, 128, 0, stream>>>(temporary, n, 99);
    take<<<blocks, 128, 0, stream>>>(b, temporary, n);
    CHECK(cudaFreeAsync(temporary, stream));
    CHECK(cudaStreamEndCapture(stream, &scratch));
    cudaGraphExec_t scratch_exec;
    CHECK(cudaGraphInstantiate(&scratch_exec, scratch, 0));

    for (uint64_t i = 0; i < iterations; i++) {
        by = (uint32_t)i * 3 + 1;
        params = kernel((void *)stir, blocks, stir_a);
        CHECK(cudaGraphExecKernelNodeSetParams(plain_exec, first, &params));
        CHECK(cudaGraphNodeSetEnabled(plain_exec, last, i % 3 != 0));
        if (i % 4 == 1) {
            fill.value = (uint32_t)i;
            CHECK(cudaGraphExecMemsetNodeSetParams(plain_exec, set, &fill));
        }
        CHECK(cudaGraphLaunch(plain_exec, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphLaunch(mixed_exec, stream));
        CHECK(cudaGraphLaunch(scratch_exec, stream));
        // Behind the event that the graph records, which is behind its function.
        if (i % 5 == 4) {
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaGraphLaunch(mixed_exec, stream));
            CHECK(cudaStreamSynchronize(stream));
            CHECK(cudaEventSynchronize(event));
        }
        if (i % 8 == 7) {
            CHECK(cudaStreamSynchronize(stream));
            // Another graph of the same shape takes the place of the first: every parameter differs.
            cudaGraph_t clone;
            CHECK(cudaGraphClone(&clone, plain));
            cudaGraphNode_t twin;
            CHECK(cudaGraphNodeFindInClone(&twin, second, clone));
            params = kernel((void *)take, blocks, take_b);
            params.gridDim = dim3(blocks / 2);
            CHECK(cudaGraphKernelNodeSetParams(twin, &params));
            cudaGraphExecUpdateResultInfo info;
            CHECK(cudaGraphExecUpdate(plain_exec, clone, &info));
            REQUIRE(info.result == cudaGraphExecUpdateSuccess);
            CHECK(cudaGraphDestroy(clone));
            uint32_t *back = (uint32_t *)malloc(2 * bytes);
            CHECK(cudaMemcpy(back, a, bytes, cudaMemcpyDeviceToHost));
            CHECK(cudaMemcpy(back + n, b, bytes, cudaMemcpyDeviceToHost));
            printf("%llu %016llx %llu\n", (unsigned long long)i + 1, (unsigned long long)digest(back, 2 * bytes),
                   (unsigned long long)calls.count);
            fflush(stdout);
            free(back);
        }
        sleep_us(pause_us);
        progress(progress_file, i + 1);
    }
    CHECK(cudaStreamSynchronize(stream));
    for (cudaGraphExec_t exec : {plain_exec, mixed_exec, scratch_exec}) CHECK(cudaGraphExecDestroy(exec));
    for (cudaGraph_t graph : {plain, child, mixed, scratch}) CHECK(cudaGraphDestroy(graph));
    CHECK(cudaStreamDestroy(other));
    printf("calls %llu\n", (unsigned long long)calls.count);
    return 0;
}
