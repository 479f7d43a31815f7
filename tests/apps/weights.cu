// Steps over large allocations, most of which are only read: for instances of one image that share memory. Each step has four
// layers; a layer changes the state by what its weights hold. Now and then an update writes the third layer's weights by a kernel,
// a copy the fourth's. The parameters of the layers' kernel do not tell that it only reads weights.
//
//   weights [--steps N] [--until FILE] [--rebel FILE] [--graph 1] [--idle 1] [--kib N] [--sleep-us N] [--progress FILE]
//           60, none: it ends after N steps; with FILE when that exists, none, launches without a graph, no idle writes, 3072 for each layer, 0, none
//
// Once the file of --rebel exists, the layers' kernel writes the first layer's weights too. With --idle another kernel writes into the
// second layer's weights what is there already. Checks every step against the
// processor, and all weights at the end. Prints "weights ok".
#include "app.h"

#include <unistd.h>

static const uint32_t LAYERS = 4, THREADS = 256;

__host__ __device__ inline uint32_t step_of(uint32_t state, uint32_t weight, uint64_t step) {
    return (uint32_t)mix(((uint64_t)state << 32 | weight) + step);
}

// No signature: the name tells nothing of what is constant. `pace` has the step, and whether the kernel is to write weights.
extern "C" __global__ void layer(uint32_t *state, uint32_t *weights, uint32_t stride, uint32_t first, const uint64_t *pace) {
    uint32_t i = threadIdx.x;
    state[i * stride] = step_of(state[i * stride], weights[i * stride], pace[0]);
    if (first && pace[1]) {
        weights[i * stride] += (uint32_t)pace[0];
    }
}

__global__ void update(uint32_t *weights, uint32_t stride, const uint64_t *pace) {
    weights[threadIdx.x * stride] ^= (uint32_t)pace[0];
}

// Changes nothing.
__global__ void rewrite(uint32_t *weights, uint32_t stride, uint32_t layer) {
    weights[threadIdx.x * stride] = (uint32_t)mix((uint64_t)layer << 32 | threadIdx.x * stride);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t steps = options.number("--steps", 60), pause_us = options.number("--sleep-us", 0);
    const char *until = options.text("--until", nullptr), *progress_file = options.text("--progress", nullptr);
    const char *rebel = options.text("--rebel", nullptr);
    bool by_graph = options.number("--graph", 0) != 0;
    bool idle = options.number("--idle", 0) != 0;
    size_t bytes = options.number("--kib", 3072) * 1024;
    options.done();
    REQUIRE(bytes >= THREADS * 4);
    uint32_t words = (uint32_t)(bytes / 4), stride = words / THREADS;

    uint32_t *state, *weights[LAYERS], *now = (uint32_t *)malloc(bytes), *known[LAYERS + 1];
    for (uint32_t l = 0; l <= LAYERS; l++) {
        known[l] = (uint32_t *)malloc(bytes);
        REQUIRE(now && known[l]);
        for (uint32_t i = 0; i < words; i++) {
            known[l][i] = (uint32_t)mix((uint64_t)l << 32 | i);
        }
        uint32_t **memory = l < LAYERS ? &weights[l] : &state;
        CHECK(cudaMalloc(memory, bytes));
        CHECK(cudaMemcpy(*memory, known[l], bytes, cudaMemcpyHostToDevice));
    }
    uint64_t *pace;
    CHECK(cudaMallocHost(&pace, 2 * sizeof *pace));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));

    auto all_layers = [&] {
        for (uint32_t l = 0; l < LAYERS; l++) {
            layer<<<1, THREADS, 0, stream>>>(state, weights[l], stride, l == 0, pace);
            CHECK(cudaGetLastError());
        }
    };
    cudaGraphExec_t graph = nullptr;
    if (by_graph) {
        cudaGraph_t captured;
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        all_layers();
        CHECK(cudaStreamEndCapture(stream, &captured));
        CHECK(cudaGraphInstantiate(&graph, captured, 0));
        CHECK(cudaGraphDestroy(captured));
    }

    uint32_t *known_state = known[LAYERS];
    for (uint64_t step = 1; until ? access(until, F_OK) != 0 : step <= steps; step++) {
        pace[0] = step;
        pace[1] = rebel && access(rebel, F_OK) == 0;
        if (graph) {
            CHECK(cudaGraphLaunch(graph, stream));
        } else {
            all_layers();
        }
        if (idle) {
            rewrite<<<1, THREADS, 0, stream>>>(weights[1], stride, 1);
            CHECK(cudaGetLastError());
        }
        if (step % 16 == 5) {
            update<<<1, THREADS, 0, stream>>>(weights[2], stride, pace);
            CHECK(cudaGetLastError());
        }
        if (step % 16 == 11) {
            CHECK(cudaMemcpyAsync(weights[3], state, THREADS, cudaMemcpyDeviceToDevice, stream));
        }
        CHECK(cudaStreamSynchronize(stream));
        for (uint32_t i = 0; i < THREADS; i++) {
            uint32_t at = i * stride;
            for (uint32_t l = 0; l < LAYERS; l++) {
                known_state[at] = step_of(known_state[at], known[l][at], step);
            }
            known[0][at] += pace[1] ? (uint32_t)step : 0;
            known[2][at] ^= step % 16 == 5 ? (uint32_t)step : 0;
        }
        if (step % 16 == 11) {
            memcpy(known[3], known_state, THREADS);
        }
        CHECK(cudaMemcpy(now, state, 64, cudaMemcpyDeviceToHost));
        REQUIRE(memcmp(now, known_state, 64) == 0);
        progress(progress_file, step);
        sleep_us(pause_us);
    }

    for (uint32_t l = 0; l <= LAYERS; l++) {
        CHECK(cudaMemcpy(now, l < LAYERS ? weights[l] : state, bytes, cudaMemcpyDeviceToHost));
        REQUIRE(memcmp(now, known[l], bytes) == 0);
    }
    if (graph) {
        CHECK(cudaGraphExecDestroy(graph));
    }
    for (uint32_t *memory : weights) {
        CHECK(cudaFree(memory));
    }
    CHECK(cudaFree(state));
    printf("weights ok\n");
    return 0;
}
