// B5: physical memory that outlives the process that made it. A process creates, fills and exports pieces and ends; only
// their descriptors are left, in a process without CUDA; another process imports them, maps them read-only and sums them.
//
//   sharing [--mib 64] [--pieces 8] [--killed 0] [--small 0]
//
// --killed  1: the exporter is killed, instead of ending by itself
//
// Free memory is what a third process with a context sees at each moment.
#include "processes.h"

static void export_all(int socket, const Scale &scale, size_t pieces, size_t size) {
    start_device();
    CUstream stream = new_stream();
    Times create, map, exports;
    std::vector<CUmemGenericAllocationHandle> handles(pieces);
    for (size_t i = 0; i < pieces; i++) {
        TIMED(create, handles[i] = new_piece(size, true));
        CUdeviceptr at;
        TIMED(map, at = map_new(handles[i], size));
        scale.start_fill(stream, at, size, i + 1);
    }
    NEED(cuStreamSynchronize, stream);
    for (size_t i = 0; i < pieces; i++) {
        int descriptor;
        TIMED(exports, descriptor = export_piece(handles[i]));
        send_number(socket, i, descriptor);
        close(descriptor);
    }
    Line().times("create", create).times("reserve_map_access", map).times("export", exports).print();
    uint64_t word;
    send_number(socket, 0);
    receive_number(socket, &word);
}

static void import_all(int socket, const Scale &scale, size_t pieces, size_t size) {
    start_device();
    CUstream stream = new_stream();
    auto *sums = (unsigned long long *)new_pinned(4096);
    scale.warm_up(stream, (CUdeviceptr)sums);
    CUdeviceptr range = reserve(pieces * size);
    Times import, map, access, check;
    bool whole = true;
    for (size_t i = 0; i < pieces; i++) {
        uint64_t number;
        int descriptor;
        REQUIRE(receive_number(socket, &number, &descriptor) && number == i);
        CUmemGenericAllocationHandle handle;
        CUdeviceptr at = range + i * size;
        TIMED(import, handle = import_piece(descriptor));
        close(descriptor);
        TIMED(map, NEED(cuMemMap, at, size, 0, handle, 0));
        TIMED(access, NEED_ACCESS(at, size, CU_MEM_ACCESS_FLAGS_PROT_READ));
        uint64_t found;
        TIMED(check, found = sum_now(scale, stream, at, size, sums));
        whole = whole && found == scale.sum_filled(size, i + 1);
    }
    Line().times("import", import).times("map", map).times("access", access).times("sum", check).yes("content_is_whole", whole).print();
    uint64_t word;
    send_number(socket, 0);
    receive_number(socket, &word);
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    Scale scale(options.number("--small", 0));
    size_t size = options.number("--mib", scale.size(64, 2)) * MIB, pieces = options.number("--pieces", scale.size(8, 2));
    bool killed = options.number("--killed", 0);
    options.done();

    Observer observer;
    Line line;
    line.number("pieces", (double)pieces).number("mib", (double)(size / MIB)).yes("exporter_is_killed", killed);
    line.number("free_mib_before", observer.free_mib());
    std::vector<int> descriptors(pieces);
    Child exporter([&](int socket) { export_all(socket, scale, pieces, size); });
    for (size_t i = 0; i < pieces; i++) {
        next_number(exporter, &descriptors[i]);
    }
    next_number(exporter);
    line.number("free_mib_with_exporter", observer.free_mib());
    if (killed) {
        kill(exporter.pid, SIGKILL);
    } else {
        send_number(exporter.socket, 0);
    }
    int status = exporter.end();
    REQUIRE(status == (killed ? 128 + SIGKILL : 0));
    line.number("free_mib_with_descriptors_only", observer.free_mib());
    // Twice: the descriptors still serve after an importer has ended.
    for (const char *when : {"free_mib_with_importer", "free_mib_with_second_importer"}) {
        Child importer([&](int socket) { import_all(socket, scale, pieces, size); });
        for (size_t i = 0; i < pieces; i++) {
            send_number(importer.socket, i, descriptors[i]);
        }
        next_number(importer);
        line.number(when, observer.free_mib());
        send_number(importer.socket, 0);
        importer.must_end_well();
    }
    line.number("free_mib_with_descriptors_again", observer.free_mib());
    Times closing;
    for (int descriptor : descriptors) {
        TIMED(closing, close(descriptor));
    }
    line.number("free_mib_after", observer.free_mib()).times("close", closing).print();
    return 0;
}
