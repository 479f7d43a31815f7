// What is the handle by which a kernel launches a graph: can it be the same after a restore?
//
//   fromdevice        makes graphs that kernels may launch, in several orders, and prints their handles, what the driver says of these as
//                     addresses, and whether a kernel has launched one. Run it twice: a restore needs the same handles in another process.
//
// build: devrt
#include "facts.h"

#include <cuda_runtime.h>

#define RT(call)                                                                                                       \
    do {                                                                                                               \
        cudaError_t rt = (call);                                                                                       \
        if (rt != cudaSuccess) {                                                                                       \
            printf("{\"failed\": \"%s\", \"result\": \"%s\"}\n", #call, cudaGetErrorName(rt));                          \
            exit(rt == cudaErrorNotSupported ? NOT_SUPPORTED : 1);                                                     \
        }                                                                                                              \
    } while (0)

__global__ void add(unsigned *sum) { atomicAdd(sum, 1u); }

__global__ void launch(cudaGraphExec_t graph) { cudaGraphLaunch(graph, cudaStreamGraphTailLaunch); }

template <typename... Arguments>
static cudaGraphExec_t graph_of(void (*kernel)(Arguments...), Arguments... arguments) {
    cudaGraph_t graph;
    cudaGraphExec_t made;
    cudaGraphNode_t node;
    void *pointers[] = {&arguments...};
    cudaKernelNodeParams params = {};
    params.func = (void *)kernel;
    params.gridDim = params.blockDim = dim3(1);
    params.kernelParams = pointers;
    RT(cudaGraphCreate(&graph, 0));
    RT(cudaGraphAddKernelNode(&node, graph, nullptr, 0, &params));
    RT(cudaGraphInstantiate(&made, graph, cudaGraphInstantiateFlagDeviceLaunch));
    RT(cudaGraphDestroy(graph));
    return made;
}

static void tell(const char *which, cudaGraphExec_t graph) {
    unsigned kind = 0;
    CUdeviceptr base = 0;
    size_t size = 0;
    CUresult is_memory = ASK(cuPointerGetAttribute, &kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)graph);
    CUresult range = ASK(cuMemGetAddressRange, &base, &size, (CUdeviceptr)graph);
    // Whether the process may read it.
    FILE *own = fopen("/proc/self/mem", "r");
    char byte;
    bool readable = own && !fseeko(own, (off_t)(uintptr_t)graph, SEEK_SET) && fread(&byte, 1, 1, own) == 1;
    if (own) {
        fclose(own);
    }
    Line()
        .word("graph", which)
        .address("handle", (uint64_t)graph)
        .result("memory_type", is_memory)
        .number("kind", kind)
        .result("range", range)
        .yes("of_the_process", readable)
        .print();
}

int main() {
    unsigned *sum, found = 0;
    RT(cudaMalloc(&sum, sizeof *sum));
    RT(cudaMemset(sum, 0, sizeof *sum));
    cudaGraphExec_t first = graph_of(add, sum), second = graph_of(add, sum);
    tell("first", first);
    tell("second", second);
    cudaGraphExec_t launcher = graph_of(launch, second);
    tell("launcher", launcher);
    RT(cudaGraphUpload(second, 0));
    RT(cudaGraphUpload(launcher, 0));
    RT(cudaGraphLaunch(launcher, 0));
    RT(cudaDeviceSynchronize());
    RT(cudaMemcpy(&found, sum, sizeof found, cudaMemcpyDeviceToHost));
    Line().word("graph", "launched by a kernel").number("times", found).print();
    // Where do later ones lie?
    RT(cudaGraphExecDestroy(first));
    tell("after the first is gone", graph_of(add, sum));
    void *held = malloc(1 << 20);
    tell("after a malloc", graph_of(add, sum));
    free(held);
}
