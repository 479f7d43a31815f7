// B6: memory that is mapped read-only: what a write does, whether a process that imports it can make it writable, and what
// reads cost.
//
//   readonly --case write [--gib 4] [--small 0]
//
// --case  write      a kernel writes to the process's own memory, mapped read-only
//         imported   the same to memory of another process
//         upgrade    an importer maps read-only, sets write access, and writes; the exporter looks
//         lowered    the exporter itself has only read access when it exports; the importer sets write access, and writes
//         beside     one piece mapped twice, writable and read-only; written by the one, read by the other
//         bandwidth  reads of memory that is writable, read-only, writable again, in turn
//         bandwidth-imported  the same in an importer
#include "processes.h"

static __global__ void write_one(uint64_t *at, uint64_t value) { *at = value; }

// Writes by a kernel, and says what came of it.
static void say_write(CUdeviceptr at, CUstream stream) {
    double start = now_ns();
    write_one<<<1, 1, 0, stream>>>((uint64_t *)at, 99);
    CUresult result = ASK(cuStreamSynchronize, stream);
    Line line;
    line.result("write", result).number("write_ended_ms", (now_ns() - start) / 1e6);
    line.result("context_afterwards", ASK(cuCtxSynchronize)).print();
}

static void say_bandwidth(const Scale &scale, CUdeviceptr at, size_t size, CUstream stream, bool filled) {
    auto *sums = (unsigned long long *)new_pinned(4096);
    CUdeviceptr out;
    NEED(cuMemAlloc, &out, 4096);
    CUevent began, ended;
    NEED(cuEventCreate, &began, 0);
    NEED(cuEventCreate, &ended, 0);
    if (!filled) {
        scale.start_fill(stream, at, size, 1);
        NEED(cuStreamSynchronize, stream);
    }
    scale.warm_up(stream, (CUdeviceptr)sums);
    std::vector<double> rates[2];
    for (int round = 0; round < 6; round++) {
        bool writable = round % 2;
        NEED_ACCESS(at, size, writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ);
        for (int repeat = 0; repeat < 4; repeat++) {
            float ms = 0;
            NEED(cuEventRecord, began, stream);
            scale.start_sum(stream, at, size, (unsigned long long *)out);
            NEED(cuEventRecord, ended, stream);
            NEED(cuStreamSynchronize, stream);
            NEED(cuEventElapsedTime, &ms, began, ended);
            if (repeat > 0) {
                rates[writable].push_back((double)size / 1e6 / (double)ms);
            }
        }
    }
    for (auto &one : rates) {
        std::sort(one.begin(), one.end());
    }
    Line().number("readonly_gb_per_s", rates[0][rates[0].size() / 2]).number("writable_gb_per_s", rates[1][rates[1].size() / 2]).print();
}

static void own_memory(const std::string &kind, const Scale &scale, size_t size) {
    start_device();
    CUstream stream = new_stream();
    CUmemGenericAllocationHandle handle = new_piece(size);
    CUdeviceptr at = map_new(handle, size);
    if (kind == "bandwidth") {
        say_bandwidth(scale, at, size, stream, false);
        return;
    }
    if (kind == "beside") {
        CUdeviceptr other = reserve(size);
        NEED(cuMemMap, other, size, 0, handle, 0);
        NEED_ACCESS(other, size, CU_MEM_ACCESS_FLAGS_PROT_READ);
        say_write(at, stream);
        uint64_t word = 0;
        CUresult result = ASK(cuMemcpyDtoH, &word, other, 8);
        Line().result("read_of_the_readonly_one", result).yes("sees_the_write", word == 99).print();
        say_write(other, stream);
        _exit(0);
    }
    NEED_ACCESS(at, size, CU_MEM_ACCESS_FLAGS_PROT_READ);
    say_write(at, stream);
    _exit(0);
}

static void importer(int socket, const std::string &kind, const Scale &scale, size_t size) {
    start_device();
    CUstream stream = new_stream();
    uint64_t number;
    int descriptor;
    REQUIRE(receive_number(socket, &number, &descriptor));
    CUmemGenericAllocationHandle handle = import_piece(descriptor);
    CUdeviceptr at = reserve(size);
    NEED(cuMemMap, at, size, 0, handle, 0);
    NEED_ACCESS(at, size, CU_MEM_ACCESS_FLAGS_PROT_READ);
    unsigned long long flags = 0;
    CUmemLocation here = {};
    here.type = CU_MEM_LOCATION_TYPE_DEVICE;
    NEED(cuMemGetAccess, &flags, &here, at);
    Line().number("access_of_importer", (double)flags).print();
    int again = -1;
    CUresult result =
        ASK(cuMemExportToShareableHandle, &again, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    Line().result("export_of_the_import", result).print();
    if (kind == "bandwidth-imported") {
        say_bandwidth(scale, at, size, stream, true);
    } else {
        if (kind != "imported") {
            Line().result("set_write_access", set_access(at, size)).print();
        }
        say_write(at, stream);
    }
    send_number(socket, 0);
    _exit(0);
}

static void exporter(int socket, const std::string &kind, const Scale &scale, size_t size) {
    start_device();
    CUstream stream = new_stream();
    CUmemGenericAllocationHandle handle = new_piece(size, true);
    CUdeviceptr at = map_new(handle, size);
    scale.start_fill(stream, at, size, 1);
    NEED(cuStreamSynchronize, stream);
    if (kind == "lowered") {
        NEED_ACCESS(at, size, CU_MEM_ACCESS_FLAGS_PROT_READ);
    }
    send_number(socket, 0, export_piece(handle));
    uint64_t word;
    receive_number(socket, &word);
    CUresult result = ASK(cuMemcpyDtoH, &word, at, 8);
    Line().result("exporter_reads", result).yes("exporter_sees_the_write", word == 99).print();
    _exit(0);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    std::string kind = options.text("--case", "write");
    Scale scale(options.number("--small", 0));
    bool large = kind.rfind("bandwidth", 0) == 0;
    size_t size = large && !scale.small ? options.number("--gib", 4) * GIB : 2 * MIB;
    options.done();
    if (kind == "write" || kind == "beside" || kind == "bandwidth") {
        own_memory(kind, scale, size);
        return 0;
    }
    REQUIRE(kind == "imported" || kind == "upgrade" || kind == "lowered" || kind == "bandwidth-imported");
    Child exporting([&](int socket) { exporter(socket, kind, scale, size); });
    int descriptor;
    next_number(exporting, &descriptor);
    Child importing([&](int socket) { importer(socket, kind, scale, size); });
    send_number(importing.socket, 0, descriptor);
    next_number(importing);
    importing.must_end_well();
    send_number(exporting.socket, 0);
    exporting.must_end_well();
    return 0;
}
