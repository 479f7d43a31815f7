// Graphs with conditional nodes: an if with two branches, a while with a switch in its body, conditions with and without a default,
// handles that kernels find in memory; nodes of bodies changed and disabled; nodes and bodies made by
// captures; graphs instantiated again.
//
//   conditions [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "digest D".
// build: devrt c++
#include "rounds.h"

const uint32_t N = 256, KINDS = 3;

__global__ void stir(uint32_t *data, uint32_t by) {
    uint32_t i = threadIdx.x;
    data[i] = data[i] * 0x9e3779b9u + by;
}

// Sets a condition by what the data is.
__global__ void decide(cudaGraphConditionalHandle handle, const uint32_t *data, uint32_t choices) {
    cudaGraphSetConditional(handle, (data[0] >> 7) % choices);
}

// The same of a condition whose handle lies in memory; and only in every third launch.
__global__ void decide_sometimes(const cudaGraphConditionalHandle *handle, const uint32_t *data, uint32_t *launches) {
    if (++*launches % 3 == 0) cudaGraphSetConditional(*handle, (data[1] >> 9) % 2);
}

__global__ void begin(uint32_t *left, const uint32_t *data) { *left = data[2] % 5; }

__global__ void again(cudaGraphConditionalHandle repeat, cudaGraphConditionalHandle choice, uint32_t *left, const uint32_t *data) {
    cudaGraphSetConditional(choice, data[*left] % (KINDS + 1));
    cudaGraphSetConditional(repeat, *left > 0 && --*left > 0);
}

static cudaGraphConditionalHandle handle_of(cudaGraph_t graph, uint32_t initially, uint32_t flags) {
    cudaGraphConditionalHandle handle;
    CHECK(cudaGraphConditionalHandleCreate(&handle, graph, initially, flags));
    return handle;
}

static cudaGraphNode_t conditional(cudaGraph_t graph, cudaGraphNode_t *after, cudaGraphConditionalHandle handle,
                                   cudaGraphConditionalNodeType type, uint32_t size, cudaGraph_t *bodies) {
    cudaGraphNodeParams params = {};
    params.type = cudaGraphNodeTypeConditional;
    params.conditional.handle = handle;
    params.conditional.type = type;
    params.conditional.size = size;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddNode(&node, graph, after, nullptr, after ? 1 : 0, &params));
    for (uint32_t i = 0; i < size; i++) bodies[i] = params.conditional.phGraph_out[i];
    return node;
}

static cudaKernelNodeParams stirring(void **parameters) {
    cudaKernelNodeParams params = {};
    params.func = (void *)stir;
    params.gridDim = dim3(1);
    params.blockDim = dim3(N);
    params.kernelParams = parameters;
    return params;
}

static cudaGraphNode_t launch(cudaGraph_t graph, cudaGraphNode_t *after, void *function, uint32_t threads, void **parameters) {
    cudaKernelNodeParams params = stirring(parameters);
    params.func = function;
    params.blockDim = dim3(threads);
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after, after ? 1 : 0, &params));
    return node;
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    uint32_t *data = randoms<uint32_t>(N, 5), *left = zeros<uint32_t>(1), *launches = zeros<uint32_t>(1);
    cudaGraphConditionalHandle *kept = zeros<cudaGraphConditionalHandle>(1);
    cudaStream_t stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&other));

    // By nodes: if and else; a while, and in it a switch.
    cudaGraph_t graph, branches[2], loop, kinds[KINDS];
    CHECK(cudaGraphCreate(&graph, 0));
    uint32_t two = 2, by[] = {3, 5, 7, 11, 13};
    cudaGraphConditionalHandle either = handle_of(graph, 0, 0), repeat = handle_of(graph, 1, cudaGraphCondAssignDefault);
    cudaGraphConditionalHandle choice = handle_of(graph, 9, cudaGraphCondAssignDefault);
    void *deciding[] = {&either, &data, &two}, *beginning[] = {&left, &data}, *repeating[] = {&repeat, &choice, &left, &data};
    void *stirs[5][2];
    for (int i = 0; i < 5; i++) stirs[i][0] = &data, stirs[i][1] = &by[i];
    cudaGraphNode_t first = launch(graph, nullptr, (void *)decide, 1, deciding);
    cudaGraphNode_t second = conditional(graph, &first, either, cudaGraphCondTypeIf, 2, branches);
    cudaGraphNode_t changed = launch(branches[0], nullptr, (void *)stir, N, stirs[0]);
    launch(branches[1], nullptr, (void *)stir, N, stirs[1]);
    cudaGraphNode_t third = launch(graph, &second, (void *)begin, 1, beginning);
    conditional(graph, &third, repeat, cudaGraphCondTypeWhile, 1, &loop);
    cudaGraphNode_t turn = launch(loop, nullptr, (void *)again, 1, repeating);
    conditional(loop, &turn, choice, cudaGraphCondTypeSwitch, KINDS, kinds);
    for (uint32_t i = 0; i < KINDS; i++) launch(kinds[i], nullptr, (void *)stir, N, stirs[2 + i]);
    cudaGraphExec_t made;
    CHECK(cudaGraphInstantiate(&made, graph, 0));
    // A second one would share the conditions.
    cudaGraphExec_t none;
    REQUIRE(cudaGraphInstantiate(&none, graph, 0) == cudaErrorNotSupported);
    cudaGetLastError();

    // By captures, with a condition that is set in every third launch only.
    cudaGraph_t captured, body;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    stir<<<1, N, 0, stream>>>(data, 17);
    decide_sometimes<<<1, 1, 0, stream>>>(kept, data, launches);
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *after;
    size_t count;
    CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &captured, &after, nullptr, &count));
    REQUIRE(status == cudaStreamCaptureStatusActive && count == 1);
    cudaGraphConditionalHandle rarely = handle_of(captured, 0, cudaGraphCondAssignDefault);
    cudaGraphNode_t last = after[0];
    last = conditional(captured, &last, rarely, cudaGraphCondTypeIf, 1, &body);
    CHECK(cudaStreamUpdateCaptureDependencies(stream, &last, nullptr, 1, cudaStreamSetCaptureDependencies));
    CHECK(cudaStreamBeginCaptureToGraph(other, body, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
    stir<<<1, N, 0, other>>>(data, 19);
    CHECK(cudaStreamEndCapture(other, &body));
    stir<<<1, N, 0, stream>>>(data, 23);
    CHECK(cudaStreamEndCapture(stream, &captured));
    cudaGraphExec_t capture_made;
    CHECK(cudaGraphInstantiate(&capture_made, captured, 0));
    CHECK(cudaMemcpy(kept, &rarely, sizeof rarely, cudaMemcpyHostToDevice));

    rounds.run([&](uint64_t round) {
        if (round % 5 == 0) {
            by[0] = (uint32_t)round;
            cudaKernelNodeParams params = stirring(stirs[0]);
            CHECK(cudaGraphExecKernelNodeSetParams(made, changed, &params));
        }
        CHECK(cudaGraphNodeSetEnabled(made, changed, round % 7 != 0));
        if (round % 11 == 0) {
            CHECK(cudaGraphExecDestroy(made));
            CHECK(cudaGraphInstantiate(&made, graph, 0));
        }
        CHECK(cudaGraphLaunch(made, stream));
        CHECK(cudaGraphLaunch(capture_made, stream));
        CHECK(cudaStreamSynchronize(stream));
    });
    rounds.take_from_device(data, N);
    rounds.take_from_device(launches, 1);
    return rounds.end();
}
