// Copies of ordinary memory behind a host callback that has not returned: rows of a pitched allocation, boxes of a three-
// dimensional one, parts of an array, and plain bytes, more of them than there is room to stage. The thread that enqueues
// them goes on, the bytes are taken at once, and the callback waits for that thread. Launches that cannot be are refused
// at once all the same.
//
//   heldcopies [--iterations N] [--copies N] [--callback-us N] [--sleep-us N] [--strict N] [--progress FILE]
//                                                          12, 64, 0, 0, 0, none
//
// Prints "sum S" and "digest D", the same in every run with the same numbers. --callback-us is slept in each callback when the thread
// has come that far, --sleep-us between iterations. The callback waits for the thread for two seconds; with --strict 1 the
// thread must have come in that time. FILE holds the iterations done.
#include "driver.h"

#include <cooperative_groups.h>

static uint64_t callback_us;

struct Gate {
    int open, passed_in_time;
};

static void wait_for_thread(void *argument) {
    Gate *gate = (Gate *)argument;
    for (int i = 0; i < 2000 && !__atomic_load_n(&gate->open, __ATOMIC_SEQ_CST); i++) {
        sleep_us(1000);
    }
    gate->passed_in_time = __atomic_load_n(&gate->open, __ATOMIC_SEQ_CST);
    sleep_us(callback_us);
}

__global__ void stir(uint32_t *data, uint32_t n, uint32_t round) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        uint32_t x = data[i] + round;
        data[i] = (x ^ (x >> 15)) * 0x2c1b3c6du;
    }
}

__global__ void together(uint32_t *data) {
    cooperative_groups::this_grid().sync();
    if (threadIdx.x == 0) {
        atomicAdd(data, gridDim.x);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    const uint64_t iterations = options.number("--iterations", 12), copies = options.number("--copies", 64);
    const uint64_t sleep = options.number("--sleep-us", 0), strict = options.number("--strict", 0);
    callback_us = options.number("--callback-us", 0);
    const char *file = options.text("--progress", nullptr);
    options.done();

    const size_t width = 96, rows = 32, slices = 4, bytes = width * rows * slices;
    unsigned char *host = (unsigned char *)malloc(bytes), *back = (unsigned char *)malloc(bytes);
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    unsigned char *flat;
    size_t pitch;
    cudaPitchedPtr box;
    cudaArray_t array;
    uint32_t *plain, *sum;
    const cudaChannelFormatDesc format = cudaCreateChannelDesc<unsigned char>();
    CHECK(cudaMallocPitch(&flat, &pitch, width, rows * slices));
    CHECK(cudaMalloc3D(&box, make_cudaExtent(width, rows, slices)));
    CHECK(cudaMallocArray(&array, &format, width, rows * slices));
    CHECK(cudaMalloc(&plain, 65536));
    CHECK(cudaMalloc(&sum, 4));
    CHECK(cudaMemset2D(flat, pitch, 0, width, rows * slices));
    CHECK(cudaMemset3D(box, 0, make_cudaExtent(width, rows, slices)));
    CHECK(cudaMemset(plain, 0, 65536));
    CHECK(cudaMemset(sum, 0, 4));
    memset(host, 0, bytes);
    CHECK(cudaMemcpy2DToArray(array, 0, 0, host, width, width, rows * slices, cudaMemcpyHostToDevice));
    cudaFunction_t function;
    CHECK(cudaGetFuncBySymbol(&function, (const void *)together));
    CHECK(cudaDeviceSynchronize());

    uint64_t state = 0;
    Gate gates[2];
    for (uint64_t i = 1; i <= iterations; i++) {
        Gate *gate = &gates[i % 2];
        gate->open = gate->passed_in_time = 0;
        CHECK(cudaLaunchHostFunc(stream, wait_for_thread, gate));
        stir<<<64, 256, 0, stream>>>(plain, 16384, (uint32_t)i);
        CHECK(cudaGetLastError());
        for (uint64_t k = 0; k < copies; k++) {
            // Sizes and places that change, in a box of the whole.
            const size_t w = 16 + (k * 7 + i) % 80, h = 4 + (k + i) % 28, z = k % slices;
            for (size_t b = 0; b < w * h; b++) {
                host[b] = (unsigned char)mix(b + 131 * k + 7919 * i);
            }
            switch (k % 4) {
            case 0:
                CHECK(cudaMemcpy2DAsync(flat + z * rows * pitch, pitch, host, w, w, h, cudaMemcpyHostToDevice, stream));
                break;
            case 1: {
                cudaMemcpy3DParms copy;
                memset(&copy, 0, sizeof copy);
                copy.srcPtr = make_cudaPitchedPtr(host, w, w, h);
                copy.dstPtr = box;
                copy.dstPos = make_cudaPos(width - w, rows - h, z);
                copy.extent = make_cudaExtent(w, h, 1);
                copy.kind = cudaMemcpyHostToDevice;
                CHECK(cudaMemcpy3DAsync(&copy, stream));
                break;
            }
            case 2:
                CHECK(cudaMemcpy2DToArrayAsync(array, width - w, z * rows, host, w, w, h, cudaMemcpyHostToDevice, stream));
                break;
            default:
                CHECK(cudaMemcpyAsync((unsigned char *)plain + 97 * k, host, w * h, cudaMemcpyHostToDevice, stream));
            }
            memset(host, 0, w * h); // it has been taken
        }
        // A few blocks are together on every device; so many are on none, and that is said at once.
        void *arguments[] = {&sum};
        CHECK(cudaLaunchCooperativeKernel((const void *)together, 2, 32, arguments, 0, stream));
        FAILS(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, cuLaunchCooperativeKernel, (CUfunction)function, 1 << 20, 1, 1, 64,
              1, 1, 0, stream, arguments);
        __atomic_store_n(&gate->open, 1, __ATOMIC_SEQ_CST);
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(!strict || gate->passed_in_time);

        CHECK(cudaMemcpy2D(back, width, flat, pitch, width, rows * slices, cudaMemcpyDeviceToHost));
        state = digest(back, bytes, state);
        CHECK(cudaMemcpy2D(back, width, box.ptr, box.pitch, width, rows * slices, cudaMemcpyDeviceToHost));
        state = digest(back, bytes, state);
        CHECK(cudaMemcpy2DFromArray(back, width, array, 0, 0, width, rows * slices, cudaMemcpyDeviceToHost));
        state = digest(back, bytes, state);
        CHECK(cudaMemcpy(back, plain, bytes, cudaMemcpyDeviceToHost));
        state = digest(back, bytes, state);
        progress(file, i);
        sleep_us(sleep);
    }
    uint32_t total;
    CHECK(cudaMemcpy(&total, sum, 4, cudaMemcpyDeviceToHost));
    printf("sum %u\ndigest %016llx\n", total, (unsigned long long)state);
    return 0;
}
