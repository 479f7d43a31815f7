// Two green contexts with multiprocessors of their own, which compute in turns: each waits for an event of all that the other
// one has enqueued, in a stream and in its default stream. From time to time a third one is made, out of a copy of the resource
// that the program got at its start; its work is waited for by all of the primary context, and it is destroyed again. A graph that
// was captured in a stream of the first is launched there, too.
//
//   green [--iterations N] [--sleep-us N] [--progress FILE]      200, 0, none
//
// Prints "resources ok" and "digest D", the same in every run with the same numbers, whatever the multiprocessors are.
#include "driver.h"
#include "rounds.h"

static const uint32_t WORDS = 4096, EXTRA = 16;

__global__ void stir(uint32_t *own, const uint32_t *other, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = own[i] * 0x9e3779b9u + other[(i * 17u + round) % n];
        own[i] = x ^ (x >> 15);
    }
}

static CUdevResource whole, groups[2], rest;

// A green context of a resource, and what a program has of it.
struct Part {
    CUgreenCtx green;
    CUcontext context;
    CUstream stream;
    CUevent event;
    unsigned long long id;

    void make(CUdevResource *resource) {
        CUdevResourceDesc descriptor;
        CU(cuDevResourceGenerateDesc, &descriptor, resource, 1);
        CU(cuGreenCtxCreate, &green, descriptor, 0, CU_GREEN_CTX_DEFAULT_STREAM);
        CU(cuCtxFromGreenCtx, &context, green);
        CU(cuGreenCtxStreamCreate, &stream, green, CU_STREAM_NON_BLOCKING, 0);
        CU(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
        CU(cuGreenCtxGetId, green, &id);
    }

    void end() {
        CU(cuEventDestroy, event);
        CU(cuStreamDestroy, stream);
        CU(cuGreenCtxDestroy, green);
    }

    // That it is what it was made of, and the stream its own.
    void check(const CUdevResource *resource) const {
        CUdevResource now, of_context;
        CUgreenCtx of = nullptr;
        CUcontext primary = nullptr, retained;
        unsigned long long same = 0;
        CU(cuGreenCtxGetDevResource, green, &now, CU_DEV_RESOURCE_TYPE_SM);
        CU(cuCtxGetDevResource, context, &of_context, CU_DEV_RESOURCE_TYPE_SM);
        REQUIRE(now.sm.smCount == resource->sm.smCount && of_context.sm.smCount == now.sm.smCount);
        CU(cuStreamGetGreenCtx, stream, &of);
        REQUIRE(of == green);
        CU(cuStreamGetCtx_v2, stream, &primary, &of);
        CU(cuDevicePrimaryCtxRetain, &retained, 0);
        CU(cuDevicePrimaryCtxRelease, 0);
        REQUIRE(primary == retained && of == green);
        CU(cuGreenCtxGetId, green, &same);
        REQUIRE(same == id);
    }
};

// Splits what the program got at its start, and compares the parts with those that it has.
static void split_again() {
    CUdevResource parts[2], left;
    unsigned count = 2;
    CU(cuDevSmResourceSplitByCount, parts, &count, &whole, &left, 0, whole.sm.minSmPartitionSize);
    REQUIRE(count == 2 && parts[0].sm.smCount == groups[0].sm.smCount && left.sm.smCount == rest.sm.smCount);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 200);
    CHECK(cudaFree(nullptr));
    uint32_t *own[2] = {randoms<uint32_t>(WORDS, 1), randoms<uint32_t>(WORDS, 2)}, *extra = zeros<uint32_t>(WORDS);
    CHECK(cudaDeviceSynchronize());
    CUcontext primary;
    CU(cuCtxGetCurrent, &primary);
    CU(cuDeviceGetDevResource, 0, &whole, CU_DEV_RESOURCE_TYPE_SM);
    unsigned possible = 0, count = 2;
    CU(cuDevSmResourceSplitByCount, nullptr, &possible, &whole, nullptr, 0, whole.sm.minSmPartitionSize);
    REQUIRE(possible >= 2);
    CU(cuDevSmResourceSplitByCount, groups, &count, &whole, &rest, 0, whole.sm.minSmPartitionSize);
    REQUIRE(count == 2 && groups[0].sm.smCount + groups[1].sm.smCount + rest.sm.smCount == whole.sm.smCount);

    Part parts[2];
    for (int i = 0; i < 2; i++) {
        parts[i].make(&groups[i]);
    }
    REQUIRE(parts[0].id != parts[1].id && parts[0].context != parts[1].context);
    CUevent all;
    CU(cuEventCreate, &all, CU_EVENT_DISABLE_TIMING);
    cudaGraph_t graph;
    cudaGraphExec_t launched;
    CHECK(cudaStreamBeginCapture((cudaStream_t)parts[0].stream, cudaStreamCaptureModeThreadLocal));
    stir<<<blocks(WORDS), BLOCK, 0, (cudaStream_t)parts[0].stream>>>(own[0], own[1], WORDS, 7);
    CHECK(cudaStreamEndCapture((cudaStream_t)parts[0].stream, &graph));
    CHECK(cudaGraphInstantiate(&launched, graph, 0));
    rounds.run([&](uint64_t round) {
        for (int i = 0; i < 2; i++) {
            Part &part = parts[i], &other = parts[1 - i];
            stir<<<blocks(WORDS), BLOCK, 0, (cudaStream_t)part.stream>>>(own[i], own[1 - i], WORDS, (uint32_t)round);
            // Its default stream changes a part of what the kernel has written.
            CU(cuCtxPushCurrent, part.context);
            CU(cuGreenCtxRecordEvent, part.green, part.event);
            CU(cuStreamWaitEvent, nullptr, part.event, 0);
            CU(cuMemsetD32Async, (CUdeviceptr)(own[i] + round % WORDS), (unsigned)round, 1, nullptr);
            CU(cuCtxPopCurrent, nullptr);
            CU(cuGreenCtxRecordEvent, part.green, part.event);
            CU(cuGreenCtxWaitEvent, other.green, part.event);
        }
        if (round % 3 == 0) {
            CHECK(cudaGraphLaunch(launched, (cudaStream_t)parts[0].stream));
            CU(cuGreenCtxRecordEvent, parts[0].green, parts[0].event);
            CU(cuGreenCtxWaitEvent, parts[1].green, parts[0].event);
        }
        if (round % EXTRA == 0) {
            split_again();
            Part third;
            third.make(&groups[round / EXTRA % 2]);
            third.check(&groups[round / EXTRA % 2]);
            for (Part &part : parts) {
                CU(cuGreenCtxWaitEvent, third.green, part.event);
            }
            stir<<<blocks(WORDS), BLOCK, 0, (cudaStream_t)third.stream>>>(extra, own[0], WORDS, (uint32_t)round);
            CU(cuCtxRecordEvent, primary, all);
            CU(cuCtxWaitEvent, primary, all);
            CU(cuEventSynchronize, all);
            third.end();
            for (int i = 0; i < 2; i++) {
                parts[i].check(&groups[i]);
            }
        }
    });
    for (Part &part : parts) {
        CU(cuCtxPushCurrent, part.context);
        CU(cuCtxSynchronize);
        CU(cuCtxPopCurrent, nullptr);
    }
    printf("resources ok\n");
    for (uint32_t *words : {own[0], own[1], extra}) {
        rounds.take_from_device(words, WORDS);
    }
    CHECK(cudaGraphExecDestroy(launched));
    CHECK(cudaGraphDestroy(graph));
    for (Part &part : parts) {
        part.end();
    }
    return rounds.end();
}
