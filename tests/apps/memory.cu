// Allocations of many sizes, made and freed in a fixed random order; memsets of each width, copies each way, pinned
// memory that kernels read and write; what the driver says of pointers and of free memory.
//
//   memory [--iterations N] [--largest-kib N] [--sleep-us N] [--progress FILE]      300, 32768, 0, none
//
// Prints "attributes ok", "free memory ok" and "digest D", the same in every run with the same numbers. FILE holds the
// iterations done.
#include "app.h"

const uint32_t SLOTS = 32;

// Every `stride`-th word, so that large buffers cost little.
__global__ void touch(uint32_t *words, uint32_t count, uint32_t stride, uint32_t salt) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        words[(size_t)i * stride] = words[(size_t)i * stride] * 0x2c1b3c6du + salt + i;
    }
}

// Reads and writes memory of the host in place.
__global__ void exchange(uint32_t *host, uint32_t *device, uint32_t count) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        uint32_t mine = host[i];
        host[i] = device[i] ^ (mine << 3);
        device[i] = mine + i;
    }
}

struct Slot {
    unsigned char *at;
    size_t size;
};

static uint64_t random_state = 1;
static uint64_t next_random() { return mix(random_state += 0x9e3779b97f4a7c15ull); }

static void check_attributes() {
    cudaPointerAttributes a;
    unsigned char *device, *pinned;
    CHECK(cudaMalloc(&device, 4096));
    CHECK(cudaHostAlloc(&pinned, 4096, cudaHostAllocMapped));
    CHECK(cudaPointerGetAttributes(&a, device + 100));
    REQUIRE(a.type == cudaMemoryTypeDevice && a.device == 0 && a.devicePointer == device + 100 && !a.hostPointer);
    CHECK(cudaPointerGetAttributes(&a, pinned + 8));
    REQUIRE(a.type == cudaMemoryTypeHost && a.hostPointer == pinned + 8 && a.devicePointer);
    CHECK(cudaPointerGetAttributes(&a, &a));
    REQUIRE(a.type == cudaMemoryTypeUnregistered);
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(nullptr));
    REQUIRE((uintptr_t)device % 256 == 0);
    printf("attributes ok\n");
}

static void check_free_memory() {
    size_t before, during, after, total, again;
    unsigned char *block;
    const size_t SIZE = 48 << 20;
    CHECK(cudaMemGetInfo(&before, &total));
    CHECK(cudaMalloc(&block, SIZE));
    CHECK(cudaMemGetInfo(&during, &again));
    CHECK(cudaFree(block));
    CHECK(cudaMemGetInfo(&after, &again));
    REQUIRE(total == again && before <= total && during < before && after > during);
    // Others may use the device at the same time; that they use as much as this, just now, is not likely.
    REQUIRE(before - during >= SIZE / 2 && after - during >= SIZE / 2);
    printf("free memory ok\n");
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 300), largest = options.number("--largest-kib", 32768) << 10;
    uint64_t pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(largest >= 4096);
    check_attributes();
    check_free_memory();
    fflush(stdout);

    const uint32_t PINNED = 1024;
    uint32_t *pinned, *pinned_device, *partner;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaHostAlloc(&pinned, PINNED * 4, cudaHostAllocMapped | cudaHostAllocPortable));
    CHECK(cudaHostGetDevicePointer(&pinned_device, pinned, 0));
    CHECK(cudaMalloc(&partner, PINNED * 4));
    CHECK(cudaMemset(partner, 0x5a, PINNED * 4));
    for (uint32_t i = 0; i < PINNED; i++) {
        pinned[i] = (uint32_t)next_random();
    }

    Slot slots[SLOTS] = {};
    uint64_t state = 0;
    for (uint64_t round = 1; round <= iterations; round++) {
        Slot &slot = slots[next_random() % SLOTS];
        if (slot.at && next_random() % 2) {
            // The end of an allocation's life: its last bytes count.
            unsigned char tail[256];
            CHECK(cudaMemcpy(tail, slot.at + slot.size - sizeof tail, sizeof tail, cudaMemcpyDeviceToHost));
            state = digest(tail, sizeof tail, state);
            CHECK(cudaFree(slot.at));
            slot.at = nullptr;
        }
        if (!slot.at) {
            // Sizes over all magnitudes, multiples of 4 but of nothing else.
            uint64_t bits = 9 + next_random() % 20;
            slot.size = ((1ull << bits) + next_random() % (1ull << bits)) & ~3ull;
            if (slot.size > largest) {
                slot.size = largest - 4;
            }
            CHECK(cudaMalloc(&slot.at, slot.size));
            CHECK(cudaMemset(slot.at, (int)(round & 255), slot.size));
        }
        uint32_t words = (uint32_t)(slot.size / 4), stride = words / 512 + 1, count = words / stride;
        switch (next_random() % 6) {
        case 0:
            touch<<<(count + 63) / 64, 64, 0, stream>>>((uint32_t *)slot.at, count, stride, (uint32_t)round);
            CHECK(cudaGetLastError());
            break;
        case 1: // a part, of odd place and length, by bytes
            CHECK(cudaMemsetAsync(slot.at + 13, 0xc3, slot.size / 2 - 7, stream));
            break;
        case 2: { // rows with gaps between them
            size_t pitch = slot.size / 8;
            CHECK(cudaMemset2DAsync(slot.at, pitch, (int)(round * 7 & 255), pitch / 2, 8, stream));
            break;
        }
        case 3: { // to another allocation
            Slot &other = slots[next_random() % SLOTS];
            if (other.at && other.at != slot.at) {
                size_t part = (slot.size < other.size ? slot.size : other.size) / 2;
                CHECK(cudaMemcpyAsync(other.at + other.size - part, slot.at, part, cudaMemcpyDeviceToDevice, stream));
            }
            break;
        }
        case 4: { // within it, without overlap
            CHECK(cudaMemcpyAsync(slot.at, slot.at + slot.size - slot.size / 3, slot.size / 3, cudaMemcpyDefault, stream));
            break;
        }
        default: // pinned memory, in place, and what the CPU makes of it
            CHECK(cudaStreamSynchronize(stream));
            exchange<<<PINNED / 128, 128, 0, stream>>>(pinned_device, partner, PINNED);
            CHECK(cudaGetLastError());
            CHECK(cudaStreamSynchronize(stream));
            state = digest(pinned, PINNED * 4, state);
            pinned[round % PINNED] ^= (uint32_t)state;
            CHECK(cudaMemcpyAsync(slot.at, pinned, slot.size < 2048 ? slot.size : 2048, cudaMemcpyHostToDevice, stream));
            break;
        }
        // The next round may free or copy without the stream.
        CHECK(cudaStreamSynchronize(stream));
        progress(progress_file, round);
        sleep_us(pause_us);
    }

    unsigned char *whole = (unsigned char *)malloc(largest);
    for (Slot &slot : slots) {
        if (slot.at) {
            CHECK(cudaMemcpy(whole, slot.at, slot.size, cudaMemcpyDeviceToHost));
            // Every 64th byte and the last: the digest is slow.
            for (size_t i = 0; i < slot.size; i += 64) {
                state = (state ^ whole[i]) * 0x100000001b3ull;
            }
            state = digest(whole + slot.size - 64, 64, state);
            CHECK(cudaFree(slot.at));
        }
    }
    CHECK(cudaMemcpy(whole, partner, PINNED * 4, cudaMemcpyDeviceToHost));
    state = digest(whole, PINNED * 4, state);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFree(partner));
    CHECK(cudaStreamDestroy(stream));
    printf("digest %016llx\n", (unsigned long long)state);
    return 0;
}
