// Memory and events that processes share. The other process is a child that was forked before there was CUDA in either.
#include "case.h"

static const size_t GRANULE = 2 << 20, BYTES = 3 << 20;

// Both ends of what the two say to each other.
static int to_other, from_other;

// Runs `body` in another process, which gets descriptors to read from and to write to this one.
static pid_t other(void (*body)(int, int)) {
    int there[2], back[2];
    if (pipe(there) || pipe(back)) exit(4);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(there[1]);
        close(back[0]);
        body(there[0], back[1]);
        _exit(0);
    }
    close(there[0]);
    close(back[1]);
    to_other = there[1];
    from_other = back[0];
    return pid;
}

static void ended(pid_t pid) {
    int status;
    close(to_other);
    if (waitpid(pid, &status, 0) != pid || status) printf("the other process failed\n");
}

// Until the other end is closed.
static void wait_for_end(int from) {
    char byte;
    while (read(from, &byte, 1) > 0) {
    }
}

static void give_memory(int from, int to) {
    with_context();
    CUdeviceptr memory;
    CUipcMemHandle handles[2];
    for (int i = 0; i < 2; i++) {
        // One that shares its block with others, and one that does not.
        SET(cuMemAlloc_v2, &memory, i ? BYTES : 4096);
        SET(cuMemsetD8_v2, memory, (unsigned char)(5 + i), i ? BYTES : 4096);
        SET(cuIpcGetMemHandle, &handles[i], memory);
    }
    SET(cuCtxSynchronize, );
    if (write(to, handles, sizeof handles) != sizeof handles) _exit(4);
    wait_for_end(from);
}

static void give_event(int from, int to) {
    with_module();
    CUevent event;
    CUipcEventHandle handle;
    SET(cuEventCreate, &event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    SET(cuIpcGetEventHandle, &handle, event);
    if (write(to, &handle, sizeof handle) != sizeof handle) _exit(4);
    // Recorded when the other says so, behind what its stream is held up by, and again.
    char byte;
    if (read(from, &byte, 1) != 1) _exit(4);
    struct busy busy = hold(0);
    SET(cuEventRecord, event, 0);
    if (write(to, &byte, 1) != 1 || read(from, &byte, 1) != 1) _exit(4);
    release(&busy);
    SET(cuEventSynchronize, event);
    if (write(to, &byte, 1) != 1) _exit(4);
    wait_for_end(from);
}

GROUP(uninitialised) {
    CUipcEventHandle event;
    memset(&event, 0, sizeof event);
    CUevent opened;
    TRY("before cuInit", cuIpcGetEventHandle, &event, NULL);
    TRY("before cuInit", cuIpcOpenEventHandle, &opened, event);
    CUipcMemHandle handle;
    CUdeviceptr at = 0;
    memset(&handle, 0, sizeof handle);
    TRY("before cuInit", cuIpcGetMemHandle, &handle, 0);
    TRY("before cuInit", cuIpcOpenMemHandle, &at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    TRY("before cuInit", cuIpcOpenMemHandle_v2, &at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    TRY("before cuInit", cuIpcCloseMemHandle, at);
}

GROUP(handles_of_memory) {
    with_context();
    CUdeviceptr memory = 0;
    void *pinned = NULL;
    CUipcMemHandle handle, again;
    SET(cuMemAlloc_v2, &memory, BYTES);
    SET(cuMemHostAlloc, &pinned, 4096, 0);
    TRY("of memory", cuIpcGetMemHandle, &handle, memory);
    TRY("of memory, again", cuIpcGetMemHandle, &again, memory);
    TRY("to null", cuIpcGetMemHandle, NULL, memory);
    TRY("of null", cuIpcGetMemHandle, &handle, 0);
    TRY("of pinned memory", cuIpcGetMemHandle, &handle, (CUdeviceptr)(uintptr_t)pinned);
    SET(cuIpcGetMemHandle, &handle, memory);
    CUdeviceptr at = 0;
    TRY("in the process whose it is", cuIpcOpenMemHandle, &at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    TRY("in the process whose it is", cuIpcOpenMemHandle_v2, &at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    SET(cuMemFree_v2, memory);
    TRY("of freed memory", cuIpcGetMemHandle, &handle, memory);
    no_context();
    TRY("without a context", cuIpcGetMemHandle, &handle, memory);
    TRY("without a context", cuIpcOpenMemHandle_v2, &at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    TRY("without a context", cuIpcCloseMemHandle, at);
}

static int filled_with(CUdeviceptr memory, size_t bytes, unsigned char value) {
    unsigned char *there = malloc(bytes);
    SET(cuMemcpyDtoH_v2, there, memory, bytes);
    int all = 1;
    for (size_t i = 0; i < bytes; i++) all &= there[i] == value;
    free(there);
    return all;
}

GROUP(opened) {
    pid_t pid = other(give_memory);
    CUipcMemHandle handles[2];
    if (read(from_other, handles, sizeof handles) != sizeof handles) exit(4);
    with_context();
    CUdeviceptr small = 0, large = 0, again = 0, own = 0, base = 0;
    size_t bytes = 0;
    TRY("without flags", cuIpcOpenMemHandle_v2, &large, handles[1], 0);
    TRY("to null", cuIpcOpenMemHandle_v2, NULL, handles[1], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    TRY("of another process", cuIpcOpenMemHandle_v2, &large, handles[1], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    TRY("of another process, a small one", cuIpcOpenMemHandle, &small, handles[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    YES(cuIpcOpenMemHandle_v2, "what was written there is here", filled_with(large, BYTES, 6));
    YES(cuIpcOpenMemHandle, "what was written there is here", filled_with(small, 4096, 5));
    TRY("that is open", cuIpcOpenMemHandle_v2, &again, handles[1], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    YES(cuIpcOpenMemHandle_v2, "that is open, is at the same place", again == large);
    TRY("of another process", cuMemGetAddressRange_v2, &base, &bytes, large);
    YES(cuMemGetAddressRange_v2, "of another process, begins where it was opened", base == large);
    TRY("of another process", cuMemFree_v2, large);
    TRY("of another process", cuMemsetD8_v2, large, 9, BYTES);
    YES(cuMemsetD8_v2, "of another process, is done", filled_with(large, BYTES, 9));
    SET(cuMemAlloc_v2, &own, 4096);
    TRY("memory of one's own", cuIpcCloseMemHandle, own);
    TRY("null", cuIpcCloseMemHandle, 0);
    TRY("once", cuIpcCloseMemHandle, large);
    YES(cuIpcCloseMemHandle, "once, of memory opened twice, leaves it", filled_with(large, BYTES, 9));
    TRY("twice", cuIpcCloseMemHandle, large);
    TRY("once too often", cuIpcCloseMemHandle, large);
    TRY("a small one", cuIpcCloseMemHandle, small);
    ended(pid);
}

static CUmemAllocationProp of_device(CUmemAllocationHandleType types) {
    CUmemAllocationProp wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = device;
    wanted.requestedHandleTypes = types;
    return wanted;
}

static CUdeviceptr mapped(CUmemGenericAllocationHandle piece) {
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at = 0;
    SET(cuMemAddressReserve, &at, GRANULE, 0, 0, 0);
    SET(cuMemMap, at, GRANULE, 0, piece, 0);
    SET(cuMemSetAccess, at, GRANULE, &access, 1);
    return at;
}

GROUP(files) {
    const CUmemAllocationHandleType FILES = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle piece = 0, other = 0, plain = 0;
    int file = -1;
    TRY("before cuInit", cuMemExportToShareableHandle, &file, piece, FILES, 0);
    TRY("before cuInit", cuMemImportFromShareableHandle, &piece, (void *)(uintptr_t)file, FILES);
    with_context();
    CUmemAllocationProp wanted = of_device(FILES), not_wanted = of_device(CU_MEM_HANDLE_TYPE_NONE), told;
    SET(cuMemCreate, &piece, GRANULE, &wanted, 0);
    SET(cuMemCreate, &plain, GRANULE, &not_wanted, 0);
    TRY("of a piece", cuMemExportToShareableHandle, &file, piece, FILES, 0);
    YES(cuMemExportToShareableHandle, "of a piece, is a descriptor", file >= 0);
    TRY("of a piece that is for none", cuMemExportToShareableHandle, &file, plain, FILES, 0);
    TRY("to null", cuMemExportToShareableHandle, NULL, piece, FILES, 0);
    TRY("with flags", cuMemExportToShareableHandle, &file, piece, FILES, 1);
    TRY("of no type", cuMemExportToShareableHandle, &file, piece, CU_MEM_HANDLE_TYPE_NONE, 0);
    TRY("from a file", cuMemImportFromShareableHandle, &other, (void *)(uintptr_t)file, FILES);
    TRY("to null", cuMemImportFromShareableHandle, NULL, (void *)(uintptr_t)file, FILES);
    TRY("of no type", cuMemImportFromShareableHandle, &plain, (void *)(uintptr_t)file, CU_MEM_HANDLE_TYPE_NONE);
    close(file);
    SET(cuMemGetAllocationPropertiesFromHandle, &told, other);
    YES(cuMemGetAllocationPropertiesFromHandle, "of what came from a file, has the device", told.location.id == device);
    CUdeviceptr one = mapped(piece), two = mapped(other);
    SET(cuMemsetD8_v2, one, 77, GRANULE);
    YES(cuMemImportFromShareableHandle, "from a file, is the same memory", filled_with(two, GRANULE, 77));
    SET(cuMemUnmap, one, GRANULE);
    SET(cuMemRelease, piece);
    YES(cuMemImportFromShareableHandle, "from a file, stays without the one that it is of", filled_with(two, GRANULE, 77));
    SET(cuMemUnmap, two, GRANULE);
    TRY("what came from a file", cuMemRelease, other);
}

GROUP(events) {
    pid_t pid = other(give_event);
    CUipcEventHandle theirs, handle;
    if (read(from_other, &theirs, sizeof theirs) != sizeof theirs) exit(4);
    with_context();
    CUevent own = NULL, plain = NULL, opened = NULL;
    TRY("for other processes", cuEventCreate, &own, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    SET(cuEventCreate, &plain, CU_EVENT_DISABLE_TIMING);
    TRY("of an event for other processes", cuIpcGetEventHandle, &handle, own);
    TRY("of an event for none", cuIpcGetEventHandle, &handle, plain);
    TRY("to null", cuIpcGetEventHandle, NULL, own);
    TRY("to null", cuIpcOpenEventHandle, NULL, theirs);
    TRY("of another process", cuIpcOpenEventHandle, &opened, theirs);
    TRY("of another process, not recorded", cuEventQuery, opened);
    TRY("of another process, not recorded", cuStreamWaitEvent, 0, opened, 0);
    char byte = 0;
    if (write(to_other, &byte, 1) != 1 || read(from_other, &byte, 1) != 1) exit(4);
    TRY("of another process, recorded there", cuEventQuery, opened);
    TRY("of another process, recorded there", cuStreamWaitEvent, 0, opened, 0);
    TRY("that waits for another process", cuStreamQuery, 0);
    if (write(to_other, &byte, 1) != 1 || read(from_other, &byte, 1) != 1) exit(4);
    TRY("of another process, done there", cuEventQuery, opened);
    TRY("of another process, done there", cuEventSynchronize, opened);
    TRY("that waited for another process", cuStreamSynchronize, 0);
    TRY("of another process, recorded here", cuEventRecord, opened, 0);
    TRY("of another process, recorded here", cuEventSynchronize, opened);
    TRY("of another process", cuEventDestroy_v2, opened);
    no_context();
    TRY("without a context", cuIpcGetEventHandle, &handle, own);
    TRY("without a context", cuIpcOpenEventHandle, &opened, theirs);
    ended(pid);
}
