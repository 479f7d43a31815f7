// Ranks of NCCL, a process with a GPU for each, in one tree: each step reduces, gathers and passes data on, and every rank compares
// what it gets with what the processor computed for all of them. With --graph the step is a graph's.
//
//   ranks --library FILE [--ranks N] [--iterations N] [--words N] [--graph 0|1] [--sleep-us N] [--progress FILE]
//         libnccl.so.2, 2, 30, 1500, 0, 0, none
//
// Prints "rank R digest D" for each rank, the same in every run with the same numbers. FILE holds the steps that the first rank has
// done. Variables of NCCL (NCCL_P2P_DISABLE, ...) choose how ranks reach each other's memory.
#include "app.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <csignal>

// What this program needs of nccl.h.
struct Id {
    char internal[128];
};
typedef void *Communicator;
enum { NCCL_UINT32 = 3, NCCL_SUM = 0 };

static int (*get_unique_id)(Id *);
static int (*comm_init_rank)(Communicator *, int, Id, int);
static int (*comm_destroy)(Communicator);
static int (*all_reduce)(const void *, void *, size_t, int, int, Communicator, cudaStream_t);
static int (*all_gather)(const void *, void *, size_t, int, Communicator, cudaStream_t);
static int (*send_to)(const void *, size_t, int, int, Communicator, cudaStream_t);
static int (*receive_from)(void *, size_t, int, int, Communicator, cudaStream_t);
static int (*group_start)();
static int (*group_end)();
static const char *(*last_error)(Communicator);

#define NCCL(call)                                                                                                     \
    do {                                                                                                               \
        int nccl_error = (call);                                                                                       \
        if (nccl_error != 0) {                                                                                         \
            fprintf(stderr, "%s:%d: %s: %d: %s\n", __FILE__, __LINE__, #call, nccl_error, last_error(nullptr));        \
            exit(3);                                                                                                   \
        }                                                                                                              \
    } while (0)

template <typename Function> static void find(void *library, const char *name, Function &function) {
    function = (Function)dlsym(library, name);
    REQUIRE(function);
}

static void load(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    find(library, "ncclGetUniqueId", get_unique_id);
    find(library, "ncclCommInitRank", comm_init_rank);
    find(library, "ncclCommDestroy", comm_destroy);
    find(library, "ncclAllReduce", all_reduce);
    find(library, "ncclAllGather", all_gather);
    find(library, "ncclSend", send_to);
    find(library, "ncclRecv", receive_from);
    find(library, "ncclGroupStart", group_start);
    find(library, "ncclGroupEnd", group_end);
    find(library, "ncclGetLastError", last_error);
}

static __host__ __device__ uint32_t mixed(uint32_t sum, uint32_t gathered, uint32_t passed, uint32_t rank, uint32_t step) {
    return sum * 3u + (gathered ^ passed * 5u) + rank + step;
}

// The step's number is on the device, since a graph's launches have the same parameters.
__global__ void advance(uint32_t *own, const uint32_t *sum, const uint32_t *gathered, const uint32_t *passed, uint32_t n,
                        uint32_t ranks, uint32_t rank, const uint32_t *step) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        own[i] = mixed(sum[i], gathered[i * 7u % (n * ranks)], passed[i], rank, *step);
    }
}
__global__ void count(uint32_t *step) { ++*step; }

struct Settings {
    uint32_t ranks, words;
    uint64_t iterations, pause_us;
    bool graph;
    const char *progress_file;
};

// What the ranks share before they have a communicator.
struct Shared {
    volatile int known;
    Id id;
};

// All ranks' words as the processor computes them.
struct Model {
    uint32_t n, ranks, step;
    uint32_t *words, *next;

    Model(uint32_t count, uint32_t of) : n(count), ranks(of), step(0) {
        words = (uint32_t *)malloc(n * ranks * 4);
        next = (uint32_t *)malloc(n * ranks * 4);
        REQUIRE(words && next);
        for (uint32_t i = 0; i < n * ranks; i++) {
            words[i] = (uint32_t)mix(i + 1);
        }
    }
    void advance() {
        for (uint32_t rank = 0; rank < ranks; rank++) {
            const uint32_t *passed = words + (rank + ranks - 1) % ranks * n;
            for (uint32_t i = 0; i < n; i++) {
                uint32_t sum = 0;
                for (uint32_t of = 0; of < ranks; of++) {
                    sum += words[of * n + i];
                }
                next[rank * n + i] = mixed(sum, words[i * 7u % (n * ranks)], passed[i], rank, step);
            }
        }
        uint32_t *old = words;
        words = next, next = old, step++;
    }
};

static int run(uint32_t rank, const Settings &s, Shared *shared) {
    int devices;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaSetDevice((int)rank % devices));
    if (rank == 0) {
        NCCL(get_unique_id(&shared->id));
        __sync_synchronize();
        shared->known = 1;
    }
    while (!shared->known) {
        sleep_us(1000);
    }
    Communicator communicator;
    NCCL(comm_init_rank(&communicator, (int)s.ranks, shared->id, (int)rank));

    uint32_t n = s.words, *own, *sum, *gathered, *passed, *step;
    Model model(n, s.ranks);
    uint32_t *host = (uint32_t *)malloc(n * 4);
    cudaStream_t stream;
    REQUIRE(host);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&own, n * 4));
    CHECK(cudaMalloc(&sum, n * 4));
    CHECK(cudaMalloc(&gathered, n * s.ranks * 4));
    CHECK(cudaMalloc(&passed, n * 4));
    CHECK(cudaMalloc(&step, 4));
    CHECK(cudaMemset(step, 0, 4));
    CHECK(cudaMemcpy(own, model.words + rank * n, n * 4, cudaMemcpyHostToDevice));
    auto enqueue = [&] {
        int next = (int)((rank + 1) % s.ranks), last = (int)((rank + s.ranks - 1) % s.ranks);
        NCCL(all_reduce(own, sum, n, NCCL_UINT32, NCCL_SUM, communicator, stream));
        NCCL(all_gather(own, gathered, n, NCCL_UINT32, communicator, stream));
        NCCL(group_start());
        NCCL(send_to(own, n, NCCL_UINT32, next, communicator, stream));
        NCCL(receive_from(passed, n, NCCL_UINT32, last, communicator, stream));
        NCCL(group_end());
        advance<<<(n + 127) / 128, 128, 0, stream>>>(own, sum, gathered, passed, n, s.ranks, rank, step);
        count<<<1, 1, 0, stream>>>(step);
        CHECK(cudaGetLastError());
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    for (uint64_t i = 1; i <= s.iterations; i++) {
        // The first collectives connect the ranks, which no capture may do.
        if (s.graph && i == 2) {
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            enqueue();
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&exec, graph, 0));
        }
        if (exec) {
            CHECK(cudaGraphLaunch(exec, stream));
        } else {
            enqueue();
        }
        model.advance();
        CHECK(cudaMemcpyAsync(host, own, n * 4, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        REQUIRE(memcmp(host, model.words + rank * n, n * 4) == 0);
        if (rank == 0) {
            progress(s.progress_file, i);
        }
        sleep_us(s.pause_us);
    }
    if (exec) {
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
    }
    NCCL(comm_destroy(communicator));
    printf("rank %u digest %016llx\n", rank, (unsigned long long)digest(host, n * 4, 1));
    fflush(stdout);
    return 0;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    Settings s;
    s.ranks = (uint32_t)options.number("--ranks", 2);
    s.iterations = options.number("--iterations", 30);
    s.words = (uint32_t)options.number("--words", 1500);
    s.graph = options.number("--graph", 0) != 0;
    s.pause_us = options.number("--sleep-us", 0);
    const char *library = options.text("--library", "libnccl.so.2");
    s.progress_file = options.text("--progress", nullptr);
    options.done();
    REQUIRE(s.ranks > 0 && s.ranks <= 16 && s.words > 0);

    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    pid_t children[16];
    for (uint32_t rank = 0; rank < s.ranks; rank++) {
        // Output in the order of ranks, and a rank that fails ends all: the others would wait for it for ever.
        children[rank] = fork();
        REQUIRE(children[rank] >= 0);
        if (children[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            load(library);
            exit(run(rank, s, (Shared *)memory));
        }
    }
    int worst = 0;
    for (uint32_t ended = 0; ended < s.ranks; ended++) {
        int status;
        REQUIRE(wait(&status) > 0);
        if (status != 0 && worst == 0) {
            worst = WIFEXITED(status) ? WEXITSTATUS(status) : 5;
            for (uint32_t rank = 0; rank < s.ranks; rank++) {
                kill(children[rank], SIGKILL);
            }
        }
    }
    return worst;
}
