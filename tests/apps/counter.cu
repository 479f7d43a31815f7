// Counts on the device and answers over the network what it has counted, with N MiB of device data that it can verify.
//
//   counter [--port N] [--tcp 1] [--mib N] [--interval-ms N]        0 (chosen and printed), 0 (UDP), 64, 10
//
// Prints "port N" when it is ready. Each step a kernel increments a counter in a device global and writes one page of
// the data anew, from the page's number and the counter; so the data is a function of the counter, and a checkpoint
// that took one of them at another moment is found out. Answers a datagram, on the loopback address only, or what
// arrives at a time on one of up to eight TCP connections, on every address:
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

// Where requests come from: a UDP socket, or a TCP one and its connections.
struct Requests {
    static const int MOST = 9;
    bool tcp;
    uint16_t port;
    pollfd sockets[MOST]; // the first is bound; descriptors of -1 are no connection
    int from = 0;         // who has asked last
    sockaddr_in peer = {};

    Requests(bool over_tcp, uint16_t wanted) : tcp(over_tcp) {
        for (pollfd &each : sockets) {
            each = {-1, POLLIN, 0};
        }
        int sock = sockets[0].fd = socket(AF_INET, tcp ? SOCK_STREAM : SOCK_DGRAM, 0);
        int yes = 1;
        sockaddr_in address = {};
        address.sin_family = AF_INET;
        address.sin_port = htons(wanted);
        address.sin_addr.s_addr = htonl(tcp ? INADDR_ANY : INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        if (sock < 0 || (tcp && setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0) ||
            bind(sock, (sockaddr *)&address, sizeof address) != 0 || (tcp && listen(sock, MOST) != 0) ||
            getsockname(sock, (sockaddr *)&address, &length) != 0) {
            fprintf(stderr, "cannot bind port %u: %s\n", wanted, strerror(errno));
            exit(4);
        }
        port = ntohs(address.sin_port);
    }
    // Whether something has come within this time.
    bool wait(int milliseconds) { return poll(sockets, MOST, milliseconds) > 0; }
    // A request that is there, if any. New connections are taken in, those that have ended closed.
    bool take(char *request, size_t size) {
        if (!tcp) {
            socklen_t length = sizeof peer;
            return recvfrom(sockets[0].fd, request, size, MSG_DONTWAIT, (sockaddr *)&peer, &length) > 0;
        }
        if (poll(sockets, MOST, 0) <= 0) {
            return false;
        }
        if (sockets[0].revents) {
            int taken = accept(sockets[0].fd, nullptr, nullptr);
            for (int i = 1; taken >= 0 && i < MOST; i++) {
                if (sockets[i].fd < 0) {
                    sockets[i].fd = taken;
                    sockets[i].revents = 0;
                    taken = -1;
                }
            }
            if (taken >= 0) {
                close(taken);
            }
        }
        for (int i = 1; i < MOST; i++) {
            if (sockets[i].fd >= 0 && sockets[i].revents) {
                if (recv(sockets[i].fd, request, size, MSG_DONTWAIT) > 0) {
                    from = i;
                    return true;
                }
                close(sockets[i].fd);
                sockets[i].fd = -1;
            }
        }
        return false;
    }
    void answer(const char *reply) {
        // One who is gone by now misses nothing.
        if (tcp) {
            (void)!send(sockets[from].fd, reply, strlen(reply), MSG_NOSIGNAL);
        } else {
            (void)!sendto(sockets[0].fd, reply, strlen(reply), 0, (sockaddr *)&peer, sizeof peer);
        }
    }
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint16_t port = (uint16_t)options.number("--port", 0);
    bool tcp = options.number("--tcp", 0) != 0;
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

    Requests requests(tcp, port);
    printf("port %u\n", requests.port);
    fflush(stdout);

    uint64_t steps = 0;
    for (double next = now_ns();;) {
        double left = next - now_ns();
        if (left > 0 && !requests.wait((int)(left / 1e6) + 1)) {
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
        if (!requests.take(request, sizeof request - 1)) {
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
        requests.answer(reply);
        if (reply[0] == 'b' && reply[1] == 'y') {
            return 0;
        }
    }
}
