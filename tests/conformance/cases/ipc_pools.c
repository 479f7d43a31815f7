// Pools of stream-ordered allocation that processes share. The other process is a child that was forked before there was CUDA
// in either.
#include "case.h"

#include <sys/socket.h>

static const CUmemAllocationHandleType FILES = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
static const size_t SMALL = 4096, LARGE = 3 << 20;

// What the process that has the pool passes on, beside the pool's file.
struct pointers {
    CUmemPoolPtrExportData small, large;
};

static CUmemoryPool make(CUmemAllocationHandleType types) {
    CUmemPoolProps wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.handleTypes = types;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    CUmemoryPool pool = NULL;
    SET(cuMemPoolCreate, &pool, &wanted);
    return pool;
}

static int filled_with(CUdeviceptr memory, size_t bytes, unsigned char value) {
    unsigned char *there = malloc(bytes);
    SET(cuMemcpyDtoH_v2, there, memory, bytes);
    int all = 1;
    for (size_t i = 0; i < bytes; i++) all &= there[i] == value;
    free(there);
    return all;
}

// One message with a descriptor.
static void pass(int link, const struct pointers *pointers, int file) {
    struct iovec part = {(void *)pointers, sizeof *pointers};
    char room[CMSG_SPACE(sizeof file)];
    memset(room, 0, sizeof room);
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(header), &file, sizeof file);
    if (sendmsg(link, &message, 0) != (ssize_t)sizeof *pointers) _exit(4);
}

static int take(int link, struct pointers *pointers) {
    struct iovec part = {pointers, sizeof *pointers};
    char room[CMSG_SPACE(sizeof(int))];
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    if (recvmsg(link, &message, 0) != (ssize_t)sizeof *pointers) exit(4);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    int file = -1;
    if (header) memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
}

static void lend(int link) {
    with_context();
    CUmemoryPool pool = make(FILES);
    CUdeviceptr small = 0, large = 0;
    struct pointers pointers;
    int file = -1;
    SET(cuMemAllocFromPoolAsync, &small, SMALL, pool, NULL);
    SET(cuMemAllocFromPoolAsync, &large, LARGE, pool, NULL);
    SET(cuMemsetD8_v2, small, 5, SMALL);
    SET(cuMemsetD8_v2, large, 6, LARGE);
    SET(cuCtxSynchronize, );
    SET(cuMemPoolExportToShareableHandle, &file, pool, FILES, 0);
    SET(cuMemPoolExportPointer, &pointers.small, small);
    SET(cuMemPoolExportPointer, &pointers.large, large);
    pass(link, &pointers, file);
    // Until the other has written.
    char byte;
    if (read(link, &byte, 1) != 1 || !filled_with(large, LARGE, 9) || !filled_with(small, SMALL, 5)) _exit(5);
    SET(cuMemFreeAsync, small, NULL);
    SET(cuMemFreeAsync, large, NULL);
    SET(cuCtxSynchronize, );
    SET(cuMemPoolDestroy, pool);
}

GROUP(uninitialised) {
    CUmemoryPool pool = NULL;
    CUmemPoolPtrExportData data;
    CUdeviceptr at = 0;
    int file = -1;
    memset(&data, 0, sizeof data);
    TRY("before cuInit", cuMemPoolExportToShareableHandle, &file, pool, FILES, 0);
    TRY("before cuInit", cuMemPoolImportFromShareableHandle, &pool, (void *)(uintptr_t)file, FILES, 0);
    TRY("before cuInit", cuMemPoolExportPointer, &data, at);
    TRY("before cuInit", cuMemPoolImportPointer, &at, pool, &data);
}

GROUP(exported) {
    with_context();
    int types = 0, file = -1;
    SET(cuDeviceGetAttribute, &types, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, device);
    YES(cuDeviceGetAttribute, "handles of pools may be files", types & FILES);
    CUmemoryPool pool = make(FILES), plain = make(CU_MEM_HANDLE_TYPE_NONE);
    CUdeviceptr early = 0;
    CUmemPoolPtrExportData data;
    SET(cuMemAllocFromPoolAsync, &early, SMALL, pool, NULL);
    TRY("of memory of a pool without a handle", cuMemPoolExportPointer, &data, early);
    TRY("of a pool for files", cuMemPoolExportToShareableHandle, &file, pool, FILES, 0);
    YES(cuMemPoolExportToShareableHandle, "of a pool for files, is a descriptor", file >= 0);
    close(file);
    TRY("of a pool for none", cuMemPoolExportToShareableHandle, &file, plain, FILES, 0);
    TRY("to null", cuMemPoolExportToShareableHandle, NULL, pool, FILES, 0);
    TRY("of null", cuMemPoolExportToShareableHandle, &file, NULL, FILES, 0);
    TRY("with flags", cuMemPoolExportToShareableHandle, &file, pool, FILES, 1);
    TRY("of no type", cuMemPoolExportToShareableHandle, &file, pool, CU_MEM_HANDLE_TYPE_NONE, 0);
    CUdeviceptr memory = 0, other = 0, no_pool = 0;
    uint64_t of = 0;
    SET(cuMemAllocFromPoolAsync, &memory, SMALL, pool, NULL);
    SET(cuMemAllocFromPoolAsync, &other, SMALL, plain, NULL);
    SET(cuMemAlloc_v2, &no_pool, SMALL);
    TRY("of memory", cuMemPoolExportPointer, &data, memory);
    TRY("of memory of a pool for none", cuMemPoolExportPointer, &data, other);
    TRY("of memory of no pool", cuMemPoolExportPointer, &data, no_pool);
    TRY("of null", cuMemPoolExportPointer, &data, 0);
    TRY("to null", cuMemPoolExportPointer, NULL, memory);
    TRY("types of handles", cuPointerGetAttribute, &of, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, memory);
    YES(cuPointerGetAttribute, "types of handles, are the pool's", of == FILES);
    SET(cuMemFreeAsync, memory, NULL);
    SET(cuCtxSynchronize, );
    TRY("of freed memory", cuMemPoolExportPointer, &data, memory);
}

GROUP(imported) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) exit(4);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(pair[0]);
        lend(pair[1]);
        _exit(0);
    }
    close(pair[1]);
    struct pointers pointers;
    int file = take(pair[0], &pointers);
    with_context();
    CUmemoryPool pool = NULL, none = NULL, of = NULL, plain = make(FILES);
    CUdeviceptr small = 0, large = 0, again = 0, at = 0;
    TRY("to null", cuMemPoolImportFromShareableHandle, NULL, (void *)(uintptr_t)file, FILES, 0);
    TRY("with flags", cuMemPoolImportFromShareableHandle, &none, (void *)(uintptr_t)file, FILES, 1);
    TRY("of no type", cuMemPoolImportFromShareableHandle, &none, (void *)(uintptr_t)file, CU_MEM_HANDLE_TYPE_NONE, 0);
    TRY("of another file", cuMemPoolImportFromShareableHandle, &none, (void *)(uintptr_t)pair[0], FILES, 0);
    TRY("of another process", cuMemPoolImportFromShareableHandle, &pool, (void *)(uintptr_t)file, FILES, 0);
    close(file);
    TRY("of another process", cuMemPoolImportPointer, &small, pool, &pointers.small);
    TRY("of another process, a large one", cuMemPoolImportPointer, &large, pool, &pointers.large);
    TRY("to null", cuMemPoolImportPointer, NULL, pool, &pointers.small);
    TRY("of null", cuMemPoolImportPointer, &at, pool, NULL);
    TRY("into a pool of one's own", cuMemPoolImportPointer, &at, plain, &pointers.small);
    YES(cuMemPoolImportPointer, "what was written there is here", filled_with(small, SMALL, 5) && filled_with(large, LARGE, 6));
    TRY("pool", cuPointerGetAttribute, &of, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, large);
    YES(cuPointerGetAttribute, "pool, is the imported one", of == pool);
    uint64_t used = 0;
    TRY("of an imported pool", cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);
    YES(cuMemPoolGetAttribute, "of an imported pool, counts what was imported", used >= SMALL + LARGE);
    int reuse = 0;
    TRY("threshold of an imported pool", cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &used);
    TRY("threshold of an imported pool", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &used);
    TRY("reuse of an imported pool", cuMemPoolGetAttribute, pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse);
    TRY("reuse of an imported pool", cuMemPoolSetAttribute, pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &reuse);
    CUmemAccess_flags access = 0;
    CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    TRY("of an imported pool", cuMemPoolGetAccess, &access, pool, &here);
    TELL(cuMemPoolGetAccess, "of an imported pool", "%d", (int)access);
    CUmemAccessDesc give = {here, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    TRY("of an imported pool", cuMemPoolSetAccess, pool, &give, 1);
    TRY("from an imported pool", cuMemAllocFromPoolAsync, &at, SMALL, pool, NULL);
    TRY("an imported pool", cuDeviceSetMemPool, device, pool);
    TRY("of an imported pool", cuMemPoolTrimTo, pool, 0);
    TRY("of another process", cuMemsetD8_v2, large, 9, LARGE);
    SET(cuCtxSynchronize, );
    TRY("of another process", cuMemFree_v2, small);
    TRY("of another process, again", cuMemFree_v2, small);
    TRY("of another process", cuMemFreeAsync, large, NULL);
    SET(cuCtxSynchronize, );
    TRY("of another process, again", cuMemFree_v2, large);
    TRY("that was freed", cuMemPoolImportPointer, &again, pool, &pointers.large);
    YES(cuMemPoolImportPointer, "that was freed, has the content", filled_with(again, LARGE, 9));
    TRY("an imported one", cuMemPoolDestroy, pool);
    YES(cuMemPoolDestroy, "an imported one, leaves what is in use", filled_with(again, LARGE, 9));
    TRY("into a destroyed pool", cuMemFree_v2, again);
    TRY("an imported one, of which nothing is in use", cuMemPoolDestroy, pool);
    char byte = 0;
    int status = 0;
    if (write(pair[0], &byte, 1) != 1 || waitpid(pid, &status, 0) != pid) exit(4);
    YES(cuMemPoolImportPointer, "what was written here is there", status == 0);
}
