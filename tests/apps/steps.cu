// Steps over much memory, for a benchmark of checkpoints: what a training or an inference does to its memory, and when
// each of its steps ends.
//
//   steps [--mib N] [--piece-mib N] [--touch PERCENT] [--compute-us N] [--pinned-mib N] [--copy-mib N] [--moments N]
//         [--steps N] [--times FILE]
//
// Allocates N MiB (8) in pieces (of 4; 256 for a benchmark) that hold elements as AdamW has them, and does that many steps
// (5; 0: until it is killed). A step updates PERCENT of all elements, from the first, and reads the others: 100 (the
// default) is an optimizer at the start of a step, 1 a model that reads all its weights and writes a small cache. Then it
// computes for about that long (0), without memory. With --touch 0 there are no steps: it is ready, and waits.
//
// Besides it has N MiB (0) of pinned memory with something in all of it, and each step brings N MiB (0) of that to the
// device at its beginning and back at its end, as batches and results are. With --moments 1 it says before each step that it
// may be checkpointed there.
//
// FILE is there and has a size: a number of 64 bits, how many steps have ended, and then when each has (nanoseconds of
// CLOCK_MONOTONIC), from the start again where the file ends. It is mapped, so that nobody is asked anything at a step.
#include "app.h"

#include "../../include/rekindle.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

struct Element {
    float weight, gradient, mean, square;
};

__global__ void fill(Element *all, uint64_t count, uint64_t seed) {
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        uint64_t bits = mix(seed + i);
        all[i] = {(float)(uint32_t)bits * 1e-9f, (float)(bits >> 32) * 1e-10f, 0.0f, 1e-8f};
    }
}

__global__ void update(Element *all, uint64_t count) {
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        Element e = all[i];
        e.gradient = -0.9f * e.gradient + 1e-3f * e.weight;
        e.mean = 0.9f * e.mean + 0.1f * e.gradient;
        e.square = 0.999f * e.square + 0.001f * e.gradient * e.gradient;
        e.weight -= 1e-4f * (e.mean / (sqrtf(e.square) + 1e-8f) + 0.01f * e.weight);
        all[i] = e;
    }
}

__global__ void look(const Element *all, uint64_t count, float *sums) {
    uint64_t stride = (uint64_t)gridDim.x * blockDim.x, first = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (uint64_t i = first; i < count; i += stride) {
        Element e = all[i];
        sum += e.weight + e.gradient + e.mean + e.square;
    }
    sums[first] = sum;
}

__global__ void compute(float *sums, uint64_t turns) {
    uint64_t at = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float x = sums[at];
    for (uint64_t i = 0; i < turns; i++) {
        x = x * 0.999f + 0.001f;
    }
    sums[at] = x;
}

// When the steps end, where somebody wants to know.
struct Times {
    volatile uint64_t *words;
    uint64_t room;

    explicit Times(const char *path) : words(nullptr), room(0) {
        if (!path) {
            return;
        }
        int file = open(path, O_RDWR);
        struct stat about;
        REQUIRE(file >= 0 && fstat(file, &about) == 0 && about.st_size >= 16);
        room = (uint64_t)about.st_size / 8 - 1;
        void *mapped = mmap(nullptr, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        REQUIRE(mapped != MAP_FAILED);
        close(file);
        words = (volatile uint64_t *)mapped;
    }
    void now() {
        if (words) {
            words[1 + words[0] % room] = (uint64_t)now_ns();
            __atomic_store_n(&words[0], words[0] + 1, __ATOMIC_RELEASE);
        }
    }
};

// Pinned memory, and what of it goes to the device and back.
struct Batches {
    uint64_t *host = nullptr, *device = nullptr;
    size_t copied;

    Batches(uint64_t held, uint64_t moved) : copied(moved) {
        uint64_t size = held > moved ? held : moved;
        if (size) {
            CHECK(cudaMallocHost(&host, size));
            for (uint64_t i = 0; i < size / sizeof *host; i++) {
                host[i] = mix(i);
            }
        }
        if (moved) {
            CHECK(cudaMalloc(&device, moved));
        }
    }
    void bring() {
        if (copied) {
            CHECK(cudaMemcpyAsync(device, host, copied, cudaMemcpyHostToDevice));
        }
    }
    void fetch() {
        if (copied) {
            CHECK(cudaMemcpyAsync(host, device, copied, cudaMemcpyDeviceToHost));
        }
    }
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t size = options.number("--mib", 8) << 20;
    uint64_t piece = options.number("--piece-mib", 4) << 20;
    uint64_t touch = options.number("--touch", 100);
    uint64_t compute_us = options.number("--compute-us", 0);
    uint64_t pinned = options.number("--pinned-mib", 0) << 20;
    uint64_t copied = options.number("--copy-mib", 0) << 20;
    bool moments = options.number("--moments", 0) != 0;
    uint64_t steps = options.number("--steps", 5);
    Times times(options.text("--times", nullptr));
    options.done();
    if (!size || !piece || touch > 100) {
        options.fail("nothing to do, or more than all");
    }

    cudaDeviceProp about;
    CHECK(cudaGetDeviceProperties(&about, 0));
    const int threads = 256, blocks = about.multiProcessorCount * 8;
    uint64_t pieces = (size + piece - 1) / piece;
    Element **all = (Element **)calloc(pieces, sizeof *all);
    REQUIRE(all);
    auto elements = [&](uint64_t i) { return (i + 1 < pieces ? piece : size - i * piece) / sizeof(Element); };
    for (uint64_t i = 0; i < pieces; i++) {
        CHECK(cudaMalloc(&all[i], elements(i) * sizeof(Element)));
        fill<<<blocks, threads>>>(all[i], elements(i), i << 32);
    }
    float *sums;
    CHECK(cudaMalloc(&sums, sizeof(float) * threads * blocks));
    CHECK(cudaMemset(sums, 0, sizeof(float) * threads * blocks));
    Batches batches(pinned, copied);
    CHECK(cudaDeviceSynchronize());

    // How many turns take as long as is asked for.
    uint64_t turns = 0;
    for (uint64_t some = 64; compute_us && !turns; some *= 4) {
        double begin = now_ns();
        compute<<<blocks, threads>>>(sums, some);
        CHECK(cudaDeviceSynchronize());
        double took_us = (now_ns() - begin) / 1e3;
        if (took_us > (double)compute_us / 2) {
            turns = (uint64_t)((double)some * (double)compute_us / took_us) + 1;
        }
    }

    if (touch == 0) {
        times.now();
        printf("ready\n");
        fflush(stdout);
        while (true) {
            sleep_us(20000);
        }
    }
    uint64_t touched = (uint64_t)((double)(size / sizeof(Element)) * (double)touch / 100.0);
    for (uint64_t step = 0; steps == 0 || step < steps; step++) {
        if (moments) {
            rekindle_checkpoint();
        }
        batches.bring();
        uint64_t left = touched;
        for (uint64_t i = 0; i < pieces; i++) {
            uint64_t count = elements(i), written = left < count ? left : count;
            left -= written;
            if (written) {
                update<<<blocks, threads>>>(all[i], written);
            }
            if (written < count) {
                look<<<blocks, threads>>>(all[i] + written, count - written, sums);
            }
        }
        if (turns) {
            compute<<<blocks, threads>>>(sums, turns);
        }
        batches.fetch();
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        times.now();
    }
    Element last;
    CHECK(cudaMemcpy(&last, all[0], sizeof last, cudaMemcpyDeviceToHost));
    printf("%llu steps, the first weight is %.6e\n", (unsigned long long)steps, (double)last.weight);
    return 0;
}
