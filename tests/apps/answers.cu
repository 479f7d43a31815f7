// Answers over TCP what its GPU computes from all that each connection has asked: a request that is lost, doubled or out of turn changes
// all later answers of its connection. What other connections ask changes nothing.
//
//   answers --port N [--until FILE]        none; ends when it finds FILE
//
// Prints "port N" when it is ready. A connection begins with its number, below 64, as eight bytes: it goes on where the last one of that
// number has ended. Number 0 begins anew each time. Each request is eight bytes, and so is its answer. Listens on all addresses, also those
// of IPv6.
#include "app.h"

#include <arpa/inet.h>
#include <cerrno>
#include <poll.h>
#include <sys/socket.h>

const int MOST = 64, WORDS = 512;

__device__ uint64_t states[MOST][WORDS];

// All words take part in each answer.
__global__ void hear(int who, uint64_t asked) {
    __shared__ uint64_t sum[WORDS];
    int i = threadIdx.x;
    uint64_t other = states[who][(i + 1) % WORDS];
    __syncthreads();
    uint64_t next = mix(other + asked * 0x9e3779b97f4a7c15ull + i);
    sum[i] = next;
    __syncthreads();
    states[who][i] = next;
    for (int half = WORDS / 2; half; half /= 2) {
        if (i < half) {
            sum[i] = mix(sum[i] ^ sum[i + half]);
        }
        __syncthreads();
    }
    if (i == 0) {
        states[who][0] = sum[0];
    }
}

struct Client {
    int who;       // -1 until it has said so
    char said[8];  // bytes of what it says
    size_t length;
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint16_t port = (uint16_t)options.number("--port", 0);
    const char *until = options.text("--until", "");
    options.done();

    pollfd sockets[MOST + 1];
    Client clients[MOST + 1];
    for (pollfd &each : sockets) {
        each = {-1, POLLIN, 0};
    }
    int listener = sockets[0].fd = socket(AF_INET6, SOCK_STREAM, 0), yes = 1, no = 0;
    sockaddr_in6 address = {};
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(port);
    REQUIRE(setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) == 0);
    REQUIRE(setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no) == 0);
    REQUIRE(bind(listener, (sockaddr *)&address, sizeof address) == 0 && listen(listener, MOST) == 0);
    uint64_t *at;
    CHECK(cudaGetSymbolAddress((void **)&at, states));
    CHECK(cudaMemset(at, 0, sizeof states));
    CHECK(cudaDeviceSynchronize());
    printf("port %u\n", port);
    fflush(stdout);

    while (access(until, F_OK) != 0) {
        if (poll(sockets, MOST + 1, 100) <= 0) {
            continue;
        }
        for (int i = 1; i <= MOST; i++) {
            if (sockets[i].fd < 0 || !sockets[i].revents) {
                continue;
            }
            Client &client = clients[i];
            ssize_t got = recv(sockets[i].fd, client.said + client.length, 8 - client.length, MSG_DONTWAIT);
            if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
                close(sockets[i].fd);
                sockets[i].fd = -1;
                continue;
            }
            client.length += got > 0 ? (size_t)got : 0;
            if (client.length < 8) {
                continue;
            }
            client.length = 0;
            uint64_t asked, answer;
            memcpy(&asked, client.said, 8);
            if (client.who < 0) {
                REQUIRE(asked < MOST);
                client.who = (int)asked;
                if (asked == 0) {
                    CHECK(cudaMemset(at, 0, sizeof states[0]));
                }
                continue;
            }
            hear<<<1, WORDS>>>(client.who, asked);
            CHECK(cudaGetLastError());
            CHECK(cudaMemcpy(&answer, at + (size_t)client.who * WORDS, 8, cudaMemcpyDeviceToHost));
            // One who is gone by now misses nothing.
            (void)!send(sockets[i].fd, &answer, 8, MSG_NOSIGNAL);
        }
        if (sockets[0].revents) {
            int taken = accept(listener, nullptr, nullptr);
            for (int i = 1; taken >= 0 && i <= MOST; i++) {
                if (sockets[i].fd < 0) {
                    sockets[i].fd = taken;
                    sockets[i].revents = 0;
                    clients[i] = {-1, {}, 0};
                    taken = -1;
                }
            }
            if (taken >= 0) {
                close(taken);
            }
        }
    }
    printf("answers ok\n");
}
