// Memory of a process that is gone: the second process makes it, passes handles of it on and is killed; the first has opened
// them by then, and computes with what it has.
//
//   heirs [--iterations N] [--sleep-us N] [--progress FILE]      60, 0, none
//   heirs --user N          the first becomes that user before it uses CUDA, and the second lives: what opening answers
//
// Prints "digest D", the same in every run with the same numbers, or a line for each call. FILE holds the iterations done.
#include "driver.h"

#include <grp.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

static const size_t GRANULE = 2 << 20;
static const int WORDS = (int)(GRANULE / 8), STRIDE = 61;
static const auto FILES = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

__global__ void fill(uint64_t *at, int words, uint64_t seed) {
    for (int i = threadIdx.x; i < words; i += blockDim.x) {
        at[i] = mix(seed + (uint64_t)i);
    }
}

__global__ void turn(uint64_t *at, const uint64_t *from, int words, uint64_t round) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) * STRIDE;
    if (i < words) {
        at[i] = mix(at[i] ^ (from[i] + round));
    }
}

static CUdeviceptr mapped(CUmemGenericAllocationHandle piece) {
    CUdeviceptr at = 0;
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(cuMemAddressReserve, &at, GRANULE, 0, 0, 0);
    CU(cuMemMap, at, GRANULE, 0, piece, 0);
    CU(cuMemSetAccess, at, GRANULE, &access, 1);
    return at;
}

static void pass(int to, const CUipcMemHandle &handle, int file) {
    iovec part = {(void *)&handle, sizeof handle};
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
    REQUIRE(sendmsg(to, &message, 0) == sizeof handle);
}

static int take(int from, CUipcMemHandle *handle) {
    iovec part = {handle, sizeof *handle};
    char room[CMSG_SPACE(sizeof(int))] = {};
    msghdr message = {};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    REQUIRE(recvmsg(from, &message, MSG_CMSG_CLOEXEC) == sizeof *handle);
    cmsghdr *header = CMSG_FIRSTHDR(&message);
    REQUIRE(header && header->cmsg_type == SCM_RIGHTS);
    int file = -1;
    memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
}

// Whose memory it is at first.
static void testator(int link) {
    void *at;
    CHECK(cudaMalloc(&at, GRANULE));
    fill<<<1, 256>>>((uint64_t *)at, WORDS, 11);
    CUipcMemHandle handle;
    CU(cuIpcGetMemHandle, &handle, (CUdeviceptr)at);
    CUmemAllocationProp wanted = {};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.requestedHandleTypes = FILES;
    CUmemGenericAllocationHandle piece = 0;
    CU(cuMemCreate, &piece, GRANULE, &wanted, 0);
    fill<<<1, 256>>>((uint64_t *)mapped(piece), WORDS, 12);
    CHECK(cudaDeviceSynchronize());
    int file = -1;
    CU(cuMemExportToShareableHandle, &file, piece, FILES, 0);
    pass(link, handle, file);
    // Until it is killed, or the other ends.
    char byte;
    while (read(link, &byte, 1) > 0) {
    }
    _exit(0);
}

static void say(const char *call, CUresult result) {
    const char *name = "?";
    ASK(cuGetErrorName, result, &name);
    printf("%s: %s\n", call, name);
    fflush(stdout);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    uint64_t iterations = options.number("--iterations", 60), pause_us = options.number("--sleep-us", 0);
    uint64_t user = options.number("--user", 0);
    const char *progress_file = options.text("--progress", nullptr);
    options.done();

    // Before there is CUDA in either.
    int pair[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        close(pair[0]);
        testator(pair[1]);
    }
    close(pair[1]);
    CUipcMemHandle handle;
    int file = take(pair[0], &handle);
    if (user) {
        // What this user may not read is open by then.
        driver_function("cuInit");
        REQUIRE(setgroups(0, nullptr) == 0 && setgid((gid_t)user) == 0 && setuid((uid_t)user) == 0);
    }
    CHECK(cudaFree(nullptr));
    CUdeviceptr lent = 0;
    CUmemGenericAllocationHandle piece = 0;
    CUresult opened = ASK(cuIpcOpenMemHandle, &lent, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    CUresult imported = ASK(cuMemImportFromShareableHandle, &piece, (void *)(uintptr_t)file, FILES);
    close(file);
    if (user) {
        say("cuIpcOpenMemHandle", opened);
        say("cuMemImportFromShareableHandle", imported);
        return 0;
    }
    REQUIRE(opened == CUDA_SUCCESS && imported == CUDA_SUCCESS);
    uint64_t *one = (uint64_t *)lent, *two = (uint64_t *)mapped(piece);
    REQUIRE(kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    close(pair[0]);

    uint64_t *host = (uint64_t *)malloc(GRANULE);
    for (uint64_t i = 0; i < iterations; i++) {
        turn<<<WORDS / STRIDE / 128 + 1, 128>>>(one, two, WORDS, i);
        turn<<<WORDS / STRIDE / 128 + 1, 128>>>(two, one, WORDS, i);
        CHECK(cudaDeviceSynchronize());
        progress(progress_file, i + 1);
        sleep_us(pause_us);
    }
    CHECK(cudaMemcpy(host, one, GRANULE, cudaMemcpyDeviceToHost));
    uint64_t result = digest(host, GRANULE);
    CHECK(cudaMemcpy(host, two, GRANULE, cudaMemcpyDeviceToHost));
    printf("digest %016llx\n", (unsigned long long)digest(host, GRANULE, result));
    CU(cuIpcCloseMemHandle, lent);
    free(host);
    return 0;
}
