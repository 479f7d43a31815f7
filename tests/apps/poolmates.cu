// A pool that two processes share: the first allocates from it, and passes on the pool's file and what names the memory; the
// second imports both. They change the memory in turns, for which their streams wait for each other's events. From time to time
// the first passes on memory that is new, which the second uses once and frees in its stream's order; and the second frees
// everything, at times with its pool, and imports it again by what it was given at first.
//
//   poolmates [--rounds N] [--sleep-us N] [--progress FILE]      80, 0, none
//
// Prints "rules ok" and "digest D", the same in every run with the same numbers. FILE holds the rounds done.
// `--role other` is the second process, which speaks with the first on descriptor 3.
#include "driver.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/wait.h>

static const auto FILES = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
// The large one needs a segment of the pool of its own.
static const int SMALL = 1000, MIDDLE = 40 * 1024, LARGE = 5 * 1024 * 1024, NEW = 3000;
// Kernels use every so-manieth word, to be quick where they are interpreted.
static const int STRIDE = 997;

__global__ void turn(uint64_t *at, int words, uint64_t token) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) * STRIDE;
    if (i < words) {
        at[i] = mix(at[i] + token + (uint64_t)i);
    }
}

static cudaStream_t stream;

static void change(CUdeviceptr at, int words, uint64_t token) {
    turn<<<words / STRIDE / 128 + 1, 128, 0, stream>>>((uint64_t *)at, words, token);
    CHECK(cudaGetLastError());
}

static uint64_t sum(CUdeviceptr at, int words) {
    size_t bytes = (size_t)words * 8;
    uint64_t *host = (uint64_t *)malloc(bytes);
    CHECK(cudaMemcpy(host, (void *)at, bytes, cudaMemcpyDeviceToHost));
    uint64_t result = digest(host, bytes);
    free(host);
    return result;
}

// What the second gets at first.
struct Handles {
    CUmemPoolPtrExportData small, middle, large;
    cudaIpcEventHandle_t turned;
};

// What the first says in each round.
struct Turn {
    uint64_t token;
    bool has_new;
    CUmemPoolPtrExportData fresh;
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

struct Other {
    Handles handles;
    int file;
    CUmemoryPool pool = nullptr;
    CUdeviceptr small = 0, middle = 0, large = 0;

    void open() {
        if (!pool) {
            CU(cuMemPoolImportFromShareableHandle, &pool, (void *)(uintptr_t)file, FILES, 0);
        }
        CU(cuMemPoolImportPointer, &small, pool, &handles.small);
        CU(cuMemPoolImportPointer, &middle, pool, &handles.middle);
        CU(cuMemPoolImportPointer, &large, pool, &handles.large);
    }
    void close(bool with_pool) {
        CU(cuMemFreeAsync, middle, (CUstream)stream);
        if (with_pool) {
            // Its memory is in use.
            FAILS(CUDA_ERROR_INVALID_VALUE, cuMemPoolDestroy, pool);
        }
        CU(cuMemFreeAsync, small, (CUstream)stream);
        CHECK(cudaStreamSynchronize(stream));
        CU(cuMemFree, large);
        FAILS(CUDA_ERROR_INVALID_VALUE, cuMemFree, large);
        if (with_pool) {
            // Not used again: the driver crashes if it is (580, an H200).
            CU(cuMemPoolDestroy, pool);
            pool = nullptr;
        }
    }
};

static int other() {
    const int link = 3;
    Other it;
    it.file = take(link, &it.handles);
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    it.open();
    FAILS(CUDA_ERROR_INVALID_VALUE, cuDeviceSetMemPool, 0, it.pool);
    CUdeviceptr none = 0;
    FAILS(CUDA_ERROR_INVALID_VALUE, cuMemAllocFromPoolAsync, &none, 512, it.pool, (CUstream)stream);
    cudaEvent_t done, turned;
    CHECK(cudaEventCreateWithFlags(&done, cudaEventInterprocess | cudaEventDisableTiming));
    CHECK(cudaIpcOpenEventHandle(&turned, it.handles.turned));
    cudaIpcEventHandle_t handle;
    CHECK(cudaIpcGetEventHandle(&handle, done));
    send(link, &handle, sizeof handle);
    Turn now;
    uint64_t turns = 0;
    while (receive(link, &now, sizeof now)) {
        if (++turns % 16 == 0) {
            it.close(turns % 32 == 0);
            it.open();
        }
        CHECK(cudaStreamWaitEvent(stream, turned, 0));
        change(it.small, SMALL, now.token);
        change(it.middle, MIDDLE, now.token);
        change(it.large, LARGE, now.token);
        if (now.has_new) {
            CUdeviceptr at = 0;
            CU(cuMemPoolImportPointer, &at, it.pool, &now.fresh);
            change(at, NEW, now.token);
            CU(cuMemFreeAsync, at, (CUstream)stream);
        }
        CHECK(cudaEventRecord(done, stream));
        uint64_t answer = mix(now.token + turns);
        send(link, &answer, sizeof answer);
    }
    it.close(true);
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

    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUstream in = (CUstream)stream;
    CUmemPoolProps wanted = {};
    wanted.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.handleTypes = FILES;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemoryPool pool = nullptr;
    CU(cuMemPoolCreate, &pool, &wanted);
    CUdeviceptr small = 0, middle = 0, large = 0, own = 0;
    Handles handles;
    CU(cuMemAllocFromPoolAsync, &small, SMALL * 8, pool, in);
    // Nobody else has it.
    CU(cuMemAllocFromPoolAsync, &own, NEW * 8, pool, in);
    CU(cuMemAllocFromPoolAsync, &middle, MIDDLE * 8, pool, in);
    CU(cuMemAllocFromPoolAsync, &large, (size_t)LARGE * 8, pool, in);
    CU(cuMemsetD8Async, small, 1, SMALL * 8, in);
    CU(cuMemsetD8Async, own, 2, NEW * 8, in);
    CU(cuMemsetD8Async, middle, 3, MIDDLE * 8, in);
    CU(cuMemsetD8Async, large, 4, (size_t)LARGE * 8, in);
    CHECK(cudaStreamSynchronize(stream));
    cudaEvent_t turned, done;
    CHECK(cudaEventCreateWithFlags(&turned, cudaEventInterprocess | cudaEventDisableTiming));
    CHECK(cudaIpcGetEventHandle(&handles.turned, turned));
    int file = -1;
    // Before its memory: otherwise that has no name.
    CU(cuMemPoolExportToShareableHandle, &file, pool, FILES, 0);
    CU(cuMemPoolExportPointer, &handles.small, small);
    CU(cuMemPoolExportPointer, &handles.middle, middle);
    CU(cuMemPoolExportPointer, &handles.large, large);
    pass(link, &handles, file);
    close(file);
    cudaIpcEventHandle_t handle;
    REQUIRE(receive(link, &handle, sizeof handle));
    CHECK(cudaIpcOpenEventHandle(&done, handle));

    uint64_t token = 1;
    for (uint64_t round = 1; round <= rounds; round++) {
        Turn now = {};
        now.token = token;
        now.has_new = round % 3 == 0;
        CUdeviceptr fresh = 0;
        change(small, SMALL, token);
        change(own, NEW, token);
        change(middle, MIDDLE, token);
        change(large, LARGE, token);
        if (now.has_new) {
            CU(cuMemAllocFromPoolAsync, &fresh, NEW * 8, pool, in);
            CU(cuMemsetD8Async, fresh, (unsigned char)round, NEW * 8, in);
            CU(cuMemPoolExportPointer, &now.fresh, fresh);
        }
        CHECK(cudaEventRecord(turned, stream));
        send(link, &now, sizeof now);
        uint64_t answer = 0;
        REQUIRE(receive(link, &answer, sizeof answer));
        CHECK(cudaStreamWaitEvent(stream, done, 0));
        if (now.has_new) {
            uint64_t word = 0;
            CHECK(cudaMemcpyAsync(&word, (void *)(fresh + 8 * STRIDE), 8, cudaMemcpyDeviceToHost, stream));
            CHECK(cudaStreamSynchronize(stream));
            answer ^= word;
            CU(cuMemFreeAsync, fresh, in);
        }
        token = mix(token ^ answer);
        progress(progress_file, round);
        sleep_us(pause_us);
    }
    CHECK(cudaStreamSynchronize(stream));
    close(link);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    uint64_t result = sum(small, SMALL) ^ sum(middle, MIDDLE) ^ sum(large, LARGE) ^ sum(own, NEW) ^ token;
    for (CUdeviceptr at : {small, middle, large, own}) {
        CU(cuMemFreeAsync, at, in);
    }
    CU(cuMemPoolDestroy, pool);
    CHECK(cudaDeviceSynchronize());
    printf("rules ok\ndigest %016llx\n", (unsigned long long)result);
    return 0;
}
