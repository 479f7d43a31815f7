// B7: the driver's own checkpoint of a process that has given back its GPU memory, as a suspended worker would be: what it
// costs, what it gives back, and what the process finds afterwards.
//
//   standby [--kept-mib 0] [--registered-mib 0] [--rounds 2] [--small 0]
//
// The process has a context, code, a variable with content, a reservation of addresses, streams, an event, a graph that is
// instantiated; its physical memory was mapped and given back, except --kept-mib. --registered-mib of host memory are
// registered. It is locked, checkpointed, restored and unlocked --rounds times; then it maps memory at its old addresses
// and uses everything. Free memory is what another process sees; host memory is that of the process. As root.
#include "processes.h"

#include <dirent.h>
#include <sys/mman.h>

static __device__ uint64_t variable;
static __global__ void set_variable(uint64_t to) { variable = to; }
static __global__ void get_variable(uint64_t *out) { *out = variable; }
static __global__ void add_one(uint64_t *at) { *at += 1; }

const uint64_t CONTENT = 0x1234567812345678;

struct Worker {
    Scale scale;
    size_t size, kept_bytes, registered_bytes;
    CUstream stream, second;
    CUdeviceptr at, kept = 0;
    CUevent event;
    uint64_t *pinned, *registered = nullptr;
    cudaGraphExec_t graph;
    void *variable_at = nullptr;

    void map_memory() {
        CUmemGenericAllocationHandle handle = new_piece(size);
        NEED(cuMemMap, at, size, 0, handle, 0);
        NEED(cuMemRelease, handle);
        NEED_ACCESS(at, size);
    }
    void register_memory() {
        int file = memfd_create("registered", MFD_CLOEXEC);
        REQUIRE(file >= 0 && ftruncate(file, (off_t)registered_bytes) == 0);
        registered = (uint64_t *)mmap(nullptr, registered_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
        REQUIRE(registered != MAP_FAILED);
        scale.fill_host(registered, registered_bytes, 3);
        NEED(cuMemHostRegister, registered, registered_bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    }
    void prepare() {
        start_device();
        stream = new_stream();
        second = new_stream();
        pinned = (uint64_t *)new_pinned(4096);
        NEED(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
        at = reserve(8 * size);
        map_memory();
        if (kept_bytes) {
            kept = map_new(new_piece(kept_bytes), kept_bytes);
            scale.start_fill(stream, kept, kept_bytes, 4);
        }
        if (registered_bytes) {
            register_memory();
        }
        scale.start_fill(stream, at, size, 1);
        set_variable<<<1, 1, 0, stream>>>(CONTENT);
        get_variable<<<1, 1, 0, stream>>>(pinned);
        cudaGraph_t captured;
        NEED(cuStreamSynchronize, stream);
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        add_one<<<1, 1, 0, stream>>>((uint64_t *)at);
        CHECK(cudaMemcpyAsync(pinned, (void *)at, 8, cudaMemcpyDefault, stream));
        CHECK(cudaStreamEndCapture(stream, &captured));
        CHECK(cudaGraphInstantiate(&graph, captured, 0));
        CHECK(cudaGraphLaunch(graph, stream));
        NEED(cuStreamSynchronize, stream);
        NEED(cuEventRecord, event, stream);
        NEED(cuCtxSynchronize);
        CHECK(cudaGetSymbolAddress(&variable_at, variable));
    }
    void give_back() { NEED(cuMemUnmap, at, size); }
    // Uses everything, each by itself, so that one failure does not hide the others.
    void use_again() {
        Line line;
        CUmemGenericAllocationHandle handle = 0;
        CUmemAllocationProp wanted = {};
        wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        double start = now_ns();
        line.result("create", ASK(cuMemCreate, &handle, size, &wanted, 0));
        line.result("map_at_old_address", ASK(cuMemMap, at, size, 0, handle, 0));
        line.result("access", set_access(at, size)).number("mapping_ms", (now_ns() - start) / 1e6);
        start = now_ns();
        scale.start_fill(second, at, size, 5);
        line.result("kernel_on_old_stream", ASK(cuStreamSynchronize, second)).number("first_kernel_ms", (now_ns() - start) / 1e6);
        void *now_at = nullptr;
        line.yes("variable_at_same_address", cudaGetSymbolAddress(&now_at, variable) == cudaSuccess && now_at == variable_at);
        *pinned = 0;
        get_variable<<<1, 1, 0, stream>>>(pinned);
        line.result("pinned_and_kernel", ASK(cuStreamSynchronize, stream)).yes("variable_has_content", *pinned == CONTENT);
        NEED(cuMemsetD32, at, 7, 2);
        *pinned = 0;
        cudaError_t launched = cudaGraphLaunch(graph, stream);
        line.number("graph_launch", launched).result("graph_waited", ASK(cuStreamSynchronize, stream));
        line.yes("graph_ran", *pinned == (7 | 7ull << 32) + 1);
        line.result("event_query", ASK(cuEventQuery, event)).result("event_record", ASK(cuEventRecord, event, second));
        if (registered) {
            CUdeviceptr device = 0;
            line.result("registered_device_pointer", ASK(cuMemHostGetDevicePointer, &device, registered, 0));
            line.yes("registered_at_same_address", device == (CUdeviceptr)registered);
            size_t bytes = std::min(size, registered_bytes);
            start = now_ns();
            line.result("copy_from_registered", ASK(cuMemcpyHtoDAsync, at, registered, bytes, stream));
            line.result("copy_waited", ASK(cuStreamSynchronize, stream));
            line.number("copy_gb_per_s", (double)bytes / (now_ns() - start));
            uint64_t found = sum_now(scale, stream, at, bytes, (unsigned long long *)pinned);
            line.yes("registered_has_content", found == scale.sum_filled(bytes, 3));
        }
        if (kept) {
            uint64_t found = sum_now(scale, stream, kept, kept_bytes, (unsigned long long *)pinned);
            line.yes("kept_has_content", found == scale.sum_filled(kept_bytes, 4));
        }
        line.result("context_afterwards", ASK(cuCtxSynchronize)).print();
    }
    void serve(int socket) {
        prepare();
        send_number(socket, 0);
        uint64_t word;
        REQUIRE(receive_number(socket, &word));
        give_back();
        send_number(socket, 0);
        REQUIRE(receive_number(socket, &word));
        use_again();
        send_number(socket, 0);
        _exit(0);
    }
};

// A function of the driver's checkpoint interface, of the version whose arguments none of our calls gives.
static void *checkpoint_function(const char *name) {
    void *entry = nullptr;
    CUdriverProcAddressQueryResult how;
    need(ASK(cuGetProcAddress, name, &entry, 12080, CU_GET_PROC_ADDRESS_DEFAULT, &how), name);
    need(entry ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED, name);
    return entry;
}

// A line of /proc/PID/status, in MiB.
static double host_mib(pid_t pid, const char *name) {
    char path[64], text[4096] = {};
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    if (!file) {
        return -1;
    }
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    const char *line = strstr(text, name);
    double kib = 0;
    for (const char *c = line ? line + strlen(name) : ""; *c && *c != '\n'; c++) {
        if (*c >= '0' && *c <= '9') {
            kib = kib * 10 + (*c - '0');
        }
    }
    return kib / 1024;
}

// How many descriptors of the process are of NVIDIA's devices.
static int device_files(pid_t pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *folder = opendir(path);
    int found = 0;
    for (dirent *entry; folder && (entry = readdir(folder));) {
        char link[400], to[64] = {};
        snprintf(link, sizeof link, "%s/%s", path, entry->d_name);
        found += readlink(link, to, sizeof to - 1) > 0 && strncmp(to, "/dev/nvidia", 11) == 0;
    }
    if (folder) {
        closedir(folder);
    }
    return found;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    Scale scale(options.number("--small", 0));
    Worker worker = {scale, scale.size(2 * GIB, 2 * MIB), options.number("--kept-mib", 0) * MIB,
                     options.number("--registered-mib", 0) * MIB};
    uint64_t rounds = options.number("--rounds", 2);
    options.done();

    Child child([&](int socket) { worker.serve(socket); });
    // This process is the one that checkpoints, and sees free memory.
    start_device();
    auto free_mib = [] {
        size_t free_bytes, total;
        NEED(cuMemGetInfo, &free_bytes, &total);
        return (double)free_bytes / (double)MIB;
    };
    typedef CUresult (*Call)(int, void *);
    Call lock = (Call)checkpoint_function("cuCheckpointProcessLock");
    Call checkpoint = (Call)checkpoint_function("cuCheckpointProcessCheckpoint");
    Call restore = (Call)checkpoint_function("cuCheckpointProcessRestore");
    Call unlock = (Call)checkpoint_function("cuCheckpointProcessUnlock");

    next_number(child);
    Line before;
    before.number("kept_mib", (double)(worker.kept_bytes / MIB)).number("registered_mib", (double)(worker.registered_bytes / MIB));
    before.number("free_mib_with_all", free_mib()).number("host_mib_with_all", host_mib(child.pid, "VmRSS:"));
    send_number(child.socket, 0);
    next_number(child);
    before.number("free_mib_given_back", free_mib()).number("device_files", device_files(child.pid)).print();
    for (uint64_t round = 0; round < rounds; round++) {
        Line line;
        auto call = [&](const char *name, Call function) {
            double start = now_ns();
            CUresult result = function(child.pid, nullptr);
            double ms = (now_ns() - start) / 1e6;
            Line().word("call", name).result("result", result).number("ms", ms).print();
            if (result != CUDA_SUCCESS) {
                kill(child.pid, SIGKILL);
                need(result, name);
            }
            line.number((std::string(name) + "_ms").c_str(), ms);
        };
        call("lock", lock);
        call("checkpoint", checkpoint);
        line.number("free_mib_checkpointed", free_mib()).number("device_files_checkpointed", device_files(child.pid));
        line.number("host_mib_checkpointed", host_mib(child.pid, "VmRSS:"));
        line.number("host_shared_mib_checkpointed", host_mib(child.pid, "RssShmem:"));
        call("restore", restore);
        call("unlock", unlock);
        line.number("free_mib_restored", free_mib()).print();
    }
    send_number(child.socket, 0);
    next_number(child);
    child.must_end_well();
    // The context of the process that has ended goes away beside its end.
    sleep_us(100000);
    Line().number("free_mib_after", free_mib()).print();
    return 0;
}
