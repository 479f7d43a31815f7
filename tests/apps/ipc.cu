// Memory that two processes share, in each of the driver's ways: the first has a small and a large allocation, of which it
// passes handles, and a piece of its own virtual memory, of which it passes a file; the second opens them. They change the
// memory in turns, for which their streams wait for each other's events: the processors say that they have enqueued theirs,
// not that it is done. From time to time the second closes everything and opens it again by what it was given at first.
//
// Before that, the second's stream waits for the first's event behind a host function that has not returned, when the first
// records that event again: the wait is for the record that there was when it was called.
//
//   ipc [--rounds N] [--sleep-us N] [--progress FILE]      80, 0, none
//
// Prints "rules ok" and "digest D", the same in every run with the same numbers. FILE holds the rounds done, and
// 1 too when the second's wait, and a record behind it, are behind the host function.
// `--role other` is the second process, which speaks with the first on descriptor 3.
#include "driver.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

static const size_t GRANULE = 2 << 20;
static const int SMALL = 1000, LARGE = 700 * 1024, PIECE = (int)(GRANULE / 8);
// Kernels use every so-manieth word, to be quick where they are interpreted.
static const int STRIDE = 97;

__global__ void turn(uint64_t *at, int words, uint64_t token) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) * STRIDE;
    if (i < words) {
        at[i] = mix(at[i] + token + (uint64_t)i);
    }
}

static cudaStream_t stream;

static void change(uint64_t *at, int words, uint64_t token) {
    turn<<<words / STRIDE / 128 + 1, 128, 0, stream>>>(at, words, token);
    CHECK(cudaGetLastError());
}

static cudaEvent_t shared_event() {
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventInterprocess | cudaEventDisableTiming));
    return event;
}

static uint64_t sum(const uint64_t *at, int words) {
    size_t bytes = (size_t)words * 8;
    uint64_t *host = (uint64_t *)malloc(bytes);
    CHECK(cudaMemcpy(host, at, bytes, cudaMemcpyDeviceToHost));
    uint64_t result = digest(host, bytes);
    free(host);
    return result;
}

// What the second gets.
struct Handles {
    cudaIpcMemHandle_t small, large;
    cudaIpcEventHandle_t turned;
};

static void send(int to, const void *data, size_t bytes) { REQUIRE(write(to, data, bytes) == (ssize_t)bytes); }
static bool receive(int from, void *data, size_t bytes) { return read(from, data, bytes) == (ssize_t)bytes; }

static void pass(int to, const Handles *handles, int file) {
    iovec part = {(void *)handles, sizeof *handles};
    char room[CMSG_SPACE(sizeof file)] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(header), &file, sizeof file);
    REQUIRE(sendmsg(to, &message, 0) == sizeof *handles);
}

static int take(int from, Handles *handles) {
    iovec part = {handles, sizeof *handles};
    char room[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    REQUIRE(recvmsg(from, &message, MSG_CMSG_CLOEXEC) == sizeof *handles);
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    REQUIRE(header && header->cmsg_type == SCM_RIGHTS);
    int file = -1;
    memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
}

// A piece at an address of this process's.
struct Mapped {
    CUdeviceptr at = 0;

    void map(CUmemGenericAllocationHandle piece) {
        CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CU(cuMemAddressReserve, &at, GRANULE, 0, 0, 0);
        CU(cuMemMap, at, GRANULE, 0, piece, 0);
        CU(cuMemSetAccess, at, GRANULE, &access, 1);
    }
    void unmap() {
        CU(cuMemUnmap, at, GRANULE);
        CU(cuMemAddressFree, at, GRANULE);
    }
};

struct Other {
    Handles handles;
    int file;
    uint64_t *small = nullptr, *large = nullptr;
    Mapped mapped;
    CUmemGenericAllocationHandle piece = 0;
    cudaEvent_t turned;

    void open() {
        void *at, *again;
        CHECK(cudaIpcOpenEventHandle(&turned, handles.turned));
        CHECK(cudaIpcOpenMemHandle(&at, handles.small, cudaIpcMemLazyEnablePeerAccess));
        small = (uint64_t *)at;
        CHECK(cudaIpcOpenMemHandle(&at, handles.large, cudaIpcMemLazyEnablePeerAccess));
        large = (uint64_t *)at;
        // Once more is the same place, until it has been closed as often.
        CHECK(cudaIpcOpenMemHandle(&again, handles.large, cudaIpcMemLazyEnablePeerAccess));
        REQUIRE(again == large);
        CHECK(cudaIpcCloseMemHandle(again));
        CU(cuMemImportFromShareableHandle, &piece, (void *)(uintptr_t)file, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        mapped.map(piece);
        // The mapping keeps it.
        CU(cuMemRelease, piece);
    }
    void close() {
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaEventDestroy(turned));
        CHECK(cudaIpcCloseMemHandle(small));
        CHECK(cudaIpcCloseMemHandle(large));
        FAILS(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle, (CUdeviceptr)large);
        mapped.unmap();
    }
};

// Returns when the first says so.
static void until_told(void *link) {
    uint64_t word;
    REQUIRE(receive(*(int *)link, &word, sizeof word));
}

static int other() {
    const int link = 3;
    Other it;
    it.file = take(link, &it.handles);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    it.open();
    cudaEvent_t done = shared_event();
    cudaIpcEventHandle_t handle;
    CHECK(cudaIpcGetEventHandle(&handle, done));
    send(link, &handle, sizeof handle);
    FAILS(CUDA_ERROR_INVALID_VALUE, cuMemFree, (CUdeviceptr)it.large);
    CHECK(cudaLaunchHostFunc(stream, until_told, (void *)&link));
    CHECK(cudaStreamWaitEvent(stream, it.turned, 0));
    CHECK(cudaEventRecord(done, stream));
    uint64_t behind = 1;
    send(link, &behind, sizeof behind);
    CHECK(cudaStreamSynchronize(stream));
    uint64_t token = 0, turns = 0;
    while (receive(link, &token, sizeof token)) {
        if (++turns % 16 == 0) {
            it.close();
            it.open();
        }
        CHECK(cudaStreamWaitEvent(stream, it.turned, 0));
        change(it.small, SMALL, token);
        change(it.large, LARGE, token);
        change((uint64_t *)it.mapped.at, PIECE, token);
        CHECK(cudaEventRecord(done, stream));
        uint64_t answer = mix(token + turns);
        send(link, &answer, sizeof answer);
    }
    it.close();
    return 0;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t rounds = options.number("--rounds", 80), pause_us = options.number("--sleep-us", 0);
    const char *progress_file = options.text("--progress", nullptr), *role = options.text("--role", nullptr);
    options.done();
    if (role) {
        return other();
    }

    // Started before CUDA is, as it must be.
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        // Also where it is 3 already.
        int end = fcntl(pair[1], F_DUPFD, 10);
        dup2(end, 3);
        close(end);
        char *arguments[] = {argv[0], (char *)"--role", (char *)"other", nullptr};
        execv("/proc/self/exe", arguments);
        _exit(4);
    }
    close(pair[1]);
    int link = pair[0];

    uint64_t *small, *large, *beside;
    Handles handles;
    CHECK(cudaMalloc(&beside, 4096));
    CHECK(cudaMalloc(&small, SMALL * 8));
    CHECK(cudaMalloc(&large, (size_t)LARGE * 8));
    CHECK(cudaMemset(beside, 7, 4096));
    CHECK(cudaMemset(small, 1, SMALL * 8));
    CHECK(cudaMemset(large, 2, (size_t)LARGE * 8));
    cudaEvent_t turned = shared_event(), plain;
    CHECK(cudaEventCreate(&plain));
    REQUIRE(cudaIpcGetEventHandle(&handles.turned, plain) == cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    CHECK(cudaIpcGetEventHandle(&handles.turned, turned));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaIpcGetMemHandle(&handles.small, small));
    CHECK(cudaIpcGetMemHandle(&handles.large, large));
    CUdeviceptr own = 0;
    CUipcMemHandle same;
    memcpy(&same, &handles.large, sizeof same);
    FAILS(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle, &own, same, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);

    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle piece = 0;
    CU(cuMemCreate, &piece, GRANULE, &wanted, 0);
    Mapped mapped;
    mapped.map(piece);
    CHECK(cudaMemset((void *)mapped.at, 3, GRANULE));
    int file = -1;
    CU(cuMemExportToShareableHandle, &file, piece, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    CHECK(cudaEventRecord(turned, stream));
    CHECK(cudaDeviceSynchronize());
    pass(link, &handles, file);
    close(file);
    cudaIpcEventHandle_t handle;
    cudaEvent_t done;
    REQUIRE(receive(link, &handle, sizeof handle));
    CHECK(cudaIpcOpenEventHandle(&done, handle));
    uint64_t behind;
    REQUIRE(receive(link, &behind, sizeof behind));
    progress(progress_file, 1);
    CHECK(cudaStreamWaitEvent(stream, done, 0));
    CHECK(cudaEventRecord(turned, stream));
    REQUIRE(cudaStreamQuery(stream) == cudaErrorNotReady);
    send(link, &behind, sizeof behind);

    uint64_t token = 1;
    for (uint64_t round = 1; round <= rounds; round++) {
        change(small, SMALL, token);
        change(large, LARGE, token);
        change((uint64_t *)mapped.at, PIECE, token);
        CHECK(cudaEventRecord(turned, stream));
        send(link, &token, sizeof token);
        uint64_t answer = 0;
        REQUIRE(receive(link, &answer, sizeof answer));
        CHECK(cudaStreamWaitEvent(stream, done, 0));
        if (round % 8 == 0) {
            CHECK(cudaEventSynchronize(done));
            CHECK(cudaEventQuery(done));
            uint64_t word = 0;
            CHECK(cudaMemcpy(&word, large + token % LARGE / STRIDE * STRIDE, 8, cudaMemcpyDeviceToHost));
            answer ^= word;
        }
        token = mix(token ^ answer);
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    CHECK(cudaStreamSynchronize(stream));
    close(link);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    uint64_t result = sum(small, SMALL) ^ sum(large, LARGE) ^ sum((uint64_t *)mapped.at, PIECE) ^ sum(beside, 512) ^ token;
    CHECK(cudaFree(small));
    CHECK(cudaFree(large));
    printf("rules ok\ndigest %016llx\n", (unsigned long long)result);
    return 0;
}
