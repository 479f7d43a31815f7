// One of two processes, on one host or on two, which tell each other over TCP what their GPUs compute. Each takes what it hears into its
// own memory, so a message that is lost, doubled or from another turn changes both ends. Several messages are on their way at a time.
//
//   talk --listen PORT | --connect ADDRESS --port PORT   [--turns N] [--until FILE] [--ahead N] [--sleep-us N] [--burst N] [--progress FILE]
//                                                          100        none           4           0               0           none
//
// With --burst each turn has a connection of its own, which the one that listens closes as soon as it has written; it sleeps only after so
// many turns.
//
// Prints "turns N" and "digest D" at the end, which comes earlier if the one that listens finds FILE. The last FILE holds the turns it has
// heard.
#include "rounds.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

const uint32_t WORDS = 8192;

struct Message {
    uint64_t turn, turns;
    uint32_t words[WORDS];
};

// The next words to tell.
__global__ void think(uint32_t *words, uint32_t turn) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    words[i] = (uint32_t)mix(((uint64_t)turn << 32) + words[i] + i);
}

// Takes what was heard into what is told later.
__global__ void hear(uint32_t *words, const uint32_t *heard) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    words[i] = (uint32_t)mix(words[i] ^ heard[(i + 1) % WORDS]);
}

static void send_all(int to, const void *data, size_t bytes) {
    for (const char *at = (const char *)data; bytes;) {
        ssize_t sent = send(to, at, bytes, MSG_NOSIGNAL);
        REQUIRE(sent > 0);
        at += sent, bytes -= (size_t)sent;
    }
}

static void receive_all(int from, void *data, size_t bytes) {
    for (char *at = (char *)data; bytes;) {
        ssize_t received = recv(from, at, bytes, 0);
        REQUIRE(received > 0);
        at += received, bytes -= (size_t)received;
    }
}

static int tcp() {
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1, room = 1 << 20;
    REQUIRE(s >= 0);
    REQUIRE(setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
    // Both ends may be telling at a time, and neither hearing.
    REQUIRE(setsockopt(s, SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0);
    return s;
}

static int listens(uint64_t port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET, at.sin_port = htons((uint16_t)port), at.sin_addr.s_addr = htonl(INADDR_ANY);
    int listener = tcp();
    REQUIRE(bind(listener, (sockaddr *)&at, sizeof at) == 0 && listen(listener, 1) == 0);
    return listener;
}

static int meet(int listener, const char *address, uint64_t port) {
    sockaddr_in at = {};
    at.sin_family = AF_INET;
    if (!address) {
        int s = accept(listener, nullptr, nullptr);
        REQUIRE(s >= 0);
        return s;
    }
    at.sin_port = htons((uint16_t)port);
    REQUIRE(inet_pton(AF_INET, address, &at.sin_addr) == 1);
    for (;;) {
        int s = tcp();
        if (connect(s, (sockaddr *)&at, sizeof at) == 0) {
            return s;
        }
        // The other one has not begun yet.
        close(s);
        sleep_us(5000);
    }
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t listen_port = options.number("--listen", 0), port = options.number("--port", 0);
    const char *address = options.text("--connect", nullptr), *until = options.text("--until", nullptr);
    const char *file = options.text("--progress", nullptr);
    uint64_t turns = options.number("--turns", 100), ahead = options.number("--ahead", 4);
    uint64_t pause_us = options.number("--sleep-us", 0), burst = options.number("--burst", 0);
    options.done();
    REQUIRE((listen_port == 0) == (address != nullptr));
    ahead = burst ? 1 : ahead;

    uint32_t *words = randoms<uint32_t>(WORDS, address ? 1 : 2), *heard = zeros<uint32_t>(WORDS);
    Message *out, *in;
    CHECK(cudaMallocHost(&out, sizeof *out));
    CHECK(cudaMallocHost(&in, sizeof *in));
    int listener = address ? -1 : listens(listen_port);
    int other = burst ? -1 : meet(listener, address, port);
    if (!burst && !address) {
        close(listener);
    }
    uint64_t state = 0;
    for (uint64_t told = 1, turn = 1; turn <= turns; turn++) {
        if (until && !address && access(until, F_OK) == 0) {
            // The other one hears of it in a turn that is none of the last ones.
            turns = told + 2 * ahead, until = nullptr;
        }
        for (; told <= turns && told < turn + ahead; told++) {
            think<<<blocks(WORDS), BLOCK>>>(words, (uint32_t)told);
            CHECK(cudaMemcpy(out->words, words, sizeof out->words, cudaMemcpyDeviceToHost));
            out->turn = told, out->turns = turns;
            if (!burst) {
                send_all(other, out, sizeof *out);
            }
        }
        if (burst) {
            other = meet(listener, address, port);
            if (address) {
                send_all(other, out, sizeof *out);
            }
        }
        receive_all(other, in, sizeof *in);
        if (burst) {
            if (!address) {
                send_all(other, out, sizeof *out);
            }
            close(other);
        }
        REQUIRE(in->turn == turn);
        turns = in->turns < turns ? in->turns : turns;
        CHECK(cudaMemcpy(heard, in->words, sizeof in->words, cudaMemcpyHostToDevice));
        hear<<<blocks(WORDS), BLOCK>>>(words, heard);
        CHECK(cudaGetLastError());
        state = digest(in->words, sizeof in->words, state);
        progress(file, turn);
        if (!burst || turn % burst == 0) {
            sleep_us(pause_us);
        }
    }
    CHECK(cudaMemcpy(out->words, words, sizeof out->words, cudaMemcpyDeviceToHost));
    printf("turns %llu\n", (unsigned long long)turns);
    printf("digest %016llx\n", (unsigned long long)digest(out->words, sizeof out->words, state));
    return 0;
}
