// Counts on the device and answers over UDP what it has counted, with N MiB of device data that it can verify.
//
//   counter [--port N] [--mib N] [--interval-ms N]        0 (chosen and printed), 64, 10
//
// Prints "port N" when it is ready. Each step a kernel increments a counter in a device global and writes one page of
// the data anew, from the page's number and the counter; so the data is a function of the counter, and a checkpoint
// that took one of them at another moment is found out. Answers a datagram, on the loopback address only:
//   count    "count D S": D read from the device, S this process's own number of steps
//   check    "ok D" if all data is what it must be at counter D, else "bad D PAGES"
//   quit     "bye", and exit 0
#include "app.h"

#include <arpa/inet.h>
#include <cerrno>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

__device__ uint64_t counter;

const uint32_t PAGE_WORDS = 512;          // 4 KiB
const uint32_t CHUNK_PAGES = 32 << 8;     // an allocation is 32 MiB at most
const uint64_t STEP = 6364136223846793005ull, ADD = 1442695040888963407ull, HASH = 0x9e3779b97f4a7c15ull;

// Words of a page: from a seed on, each the last one's times STEP plus ADD.
__device__ void write_page(ulonglong2 *page, uint64_t seed) {
    uint64_t x = seed;
#pragma unroll 8
    for (uint32_t i = 0; i < PAGE_WORDS / 2; i++) {
        ulonglong2 pair;
        pair.x = x = x * STEP + ADD;
        pair.y = x = x * STEP + ADD;
        page[i] = pair;
    }
}

// `page` was last written when the counter was `written` (0: at the start).
__host__ __device__ inline uint64_t page_seed(uint64_t page, uint64_t written) {
    return mix(page * 0xd1342543de82ef95ull + written);
}

__global__ void fill(ulonglong2 *chunk, uint64_t first, uint32_t pages) {
    uint32_t page = blockIdx.x * blockDim.x + threadIdx.x;
    if (page < pages) {
        write_page(chunk + (size_t)page * (PAGE_WORDS / 2), page_seed(first + page, 0));
    }
}

// One step. The page is the counter's, modulo all pages; the host knows in which chunk it is.
__global__ void step(ulonglong2 *chunk, uint64_t first, uint64_t pages) {
    uint64_t count = ++counter;
    uint64_t page = count % pages;
    write_page(chunk + (page - first) * (PAGE_WORDS / 2), page_seed(page, count));
}

// Counts pages that are not what they must be. A page's hash is linear in its words and those in the seed, so the hash
// that it must have is `scale` times the seed plus `base`: it need not be generated again.
__global__ void verify(const ulonglong2 *chunk, uint64_t first, uint32_t pages, uint64_t all, uint64_t scale,
                       uint64_t base, unsigned long long *bad) {
    uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= pages) {
        return;
    }
    uint64_t page = first + index, count = counter, hash = 0;
    uint64_t back = (count % all + all - page) % all; // steps since this page's turn
    uint64_t written = count > back ? count - back : 0;
    const ulonglong2 *at = chunk + (size_t)index * (PAGE_WORDS / 2);
#pragma unroll 8
    for (uint32_t i = 0; i < PAGE_WORDS / 2; i++) {
        ulonglong2 pair = at[i];
        hash = hash * HASH + pair.x;
        hash = hash * HASH + pair.y;
    }
    if (hash != page_seed(page, written) * scale + base) {
        atomicAdd(bad, 1ull);
    }
}

// The hash of a page with this seed.
static uint64_t page_hash(uint64_t seed) {
    uint64_t x = seed, hash = 0;
    for (uint32_t i = 0; i < PAGE_WORDS; i++) {
        x = x * STEP + ADD;
        hash = hash * HASH + x;
    }
    return hash;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint16_t port = (uint16_t)options.number("--port", 0);
    uint64_t pages = options.number("--mib", 64) << 8, interval = options.number("--interval-ms", 10);
    options.done();
    REQUIRE(pages > 0);

    uint64_t chunks = (pages + CHUNK_PAGES - 1) / CHUNK_PAGES;
    ulonglong2 **chunk = (ulonglong2 **)calloc(chunks, sizeof *chunk);
    auto pages_of = [&](uint64_t c) {
        return (uint32_t)(c + 1 < chunks ? CHUNK_PAGES : pages - c * CHUNK_PAGES);
    };
    for (uint64_t c = 0; c < chunks; c++) {
        CHECK(cudaMalloc(&chunk[c], (size_t)pages_of(c) * PAGE_WORDS * 8));
        fill<<<(pages_of(c) + 63) / 64, 64>>>(chunk[c], c * CHUNK_PAGES, pages_of(c));
        CHECK(cudaGetLastError());
    }
    unsigned long long *bad;
    CHECK(cudaMalloc(&bad, sizeof *bad));
    CHECK(cudaDeviceSynchronize());
    uint64_t base = page_hash(0), scale = page_hash(1) - base;

    int sock = socket(AF_INET, SOCK_DGRAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (sock < 0 || bind(sock, (sockaddr *)&address, sizeof address) != 0 ||
        getsockname(sock, (sockaddr *)&address, &length) != 0) {
        fprintf(stderr, "cannot bind UDP port %u: %s\n", port, strerror(errno));
        return 4;
    }
    printf("port %u\n", ntohs(address.sin_port));
    fflush(stdout);

    uint64_t steps = 0;
    for (double next = now_ns();;) {
        double left = next - now_ns();
        pollfd ready = {sock, POLLIN, 0};
        if (left > 0 && poll(&ready, 1, (int)(left / 1e6) + 1) == 0) {
            continue;
        }
        if (left <= 0) {
            steps++;
            uint64_t c = steps % pages / CHUNK_PAGES;
            step<<<1, 1>>>(chunk[c], c * CHUNK_PAGES, pages);
            CHECK(cudaGetLastError());
            next = now_ns() + (double)interval * 1e6; // from now: a process that was stopped does not hurry after
        }
        char request[16] = {}, reply[80];
        sockaddr_in from;
        length = sizeof from;
        if (recvfrom(sock, request, sizeof request - 1, MSG_DONTWAIT, (sockaddr *)&from, &length) < 0) {
            continue;
        }
        unsigned long long count = 0;
        CHECK(cudaMemcpyFromSymbol(&count, counter, sizeof count));
        if (strncmp(request, "count", 5) == 0) {
            snprintf(reply, sizeof reply, "count %llu %llu\n", count, (unsigned long long)steps);
        } else if (strncmp(request, "check", 5) == 0) {
            unsigned long long found = 0;
            CHECK(cudaMemset(bad, 0, sizeof *bad));
            for (uint64_t c = 0; c < chunks; c++) {
                verify<<<(pages_of(c) + 63) / 64, 64>>>(chunk[c], c * CHUNK_PAGES, pages_of(c), pages, scale, base, bad);
                CHECK(cudaGetLastError());
            }
            CHECK(cudaMemcpy(&found, bad, sizeof found, cudaMemcpyDeviceToHost));
            snprintf(reply, sizeof reply, found ? "bad %llu %llu\n" : "ok %llu\n", count, found);
        } else if (strncmp(request, "quit", 4) == 0) {
            snprintf(reply, sizeof reply, "bye\n");
        } else {
            snprintf(reply, sizeof reply, "unknown request\n");
        }
        sendto(sock, reply, strlen(reply), 0, (sockaddr *)&from, length);
        if (reply[0] == 'b' && reply[1] == 'y') {
            return 0;
        }
    }
}
