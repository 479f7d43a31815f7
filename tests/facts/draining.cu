// How fast memory of the device reaches files: threads copy pieces into pinned memory, and write each into a file of their own.
//
//   draining --file PATH [--mib 8192] [--threads 16] [--buffers 1,2] [--kib 4096] [--wait sleep] [--repeats 3] [--small 0]
//
// --file     the files are made in the folder of this path, and have no name
// --threads, --buffers, --kib, --wait   one or several values with commas between them; each combination is a line
// --kib      the size of a piece
// --wait     how a thread waits for a copy: sleep (20 us between looks, as a worker's lanes do), spin, block
#include "facts.h"

#include <cerrno>
#include <fcntl.h>

struct Buffer {
    char *host;
    CUevent done, blocking;
    size_t at; // of the device's memory; none when it is empty
    bool full = false;
};

struct Lane {
    Buffer buffers[2];
};

struct Drain {
    CUcontext context;
    CUdeviceptr device;
    CUstream stream; // All threads use one, as a worker's lanes do.
    const char *dir;
    std::vector<Lane> lanes;

    static void wait_for(const Buffer &buffer, const std::string &how) {
        if (how == "block") {
            NEED(cuEventSynchronize, buffer.blocking);
            return;
        }
        for (;;) {
            CUresult result = ASK(cuEventQuery, buffer.done);
            if (result == CUDA_SUCCESS) {
                return;
            }
            REQUIRE(result == CUDA_ERROR_NOT_READY);
            if (how == "sleep") {
                usleep(20);
            }
        }
    }

    // Copies and writes the first `bytes` into new files; the rate in GB/s.
    double run(size_t threads, size_t buffers, size_t piece, const std::string &how, size_t bytes) {
        std::vector<int> files;
        for (size_t i = 0; i < threads; i++) {
            int file = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
            REQUIRE(file >= 0);
            files.push_back(file);
        }
        size_t next = 0;
        double start = now_ns();
        std::vector<Thread *> running;
        auto work = [&](size_t number) {
            NEED(cuCtxSetCurrent, context);
            Lane &lane = lanes[number];
            off_t written = 0;
            auto begin = [&](Buffer &buffer) {
                size_t at = __atomic_fetch_add(&next, piece, __ATOMIC_RELAXED);
                buffer.full = at < bytes;
                if (buffer.full) {
                    NEED(cuMemcpyDtoHAsync, buffer.host, device + at, piece, stream);
                    NEED(cuEventRecord, how == "block" ? buffer.blocking : buffer.done, stream);
                }
            };
            for (size_t i = 0; i < buffers; i++) {
                begin(lane.buffers[i]);
            }
            for (size_t turn = 0;; turn++) {
                Buffer &buffer = lane.buffers[turn % buffers];
                if (!buffer.full) {
                    break;
                }
                wait_for(buffer, how);
                for (size_t done = 0; done < piece;) {
                    ssize_t n = pwrite(files[number], buffer.host + done, piece - done, written);
                    REQUIRE(n > 0);
                    done += (size_t)n;
                    written += n;
                }
                begin(buffer);
            }
        };
        for (size_t i = 0; i < threads; i++) {
            running.push_back(new Thread([&work, i] { work(i); }));
        }
        for (Thread *thread : running) {
            delete thread;
        }
        double rate = (double)bytes / (now_ns() - start);
        for (int file : files) {
            close(file);
        }
        return rate;
    }
};

static std::vector<std::string> parts(const char *text) {
    std::vector<std::string> all(1);
    for (; *text; text++) {
        if (*text == ',') {
            all.emplace_back();
        } else {
            all.back() += *text;
        }
    }
    return all;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    Scale scale(options.number("--small", 0));
    const char *path = options.text("--file", nullptr);
    size_t bytes = options.number("--mib", scale.size(8192, 16)) * MIB;
    auto threads = parts(options.text("--threads", "16")), buffers = parts(options.text("--buffers", "1,2"));
    auto pieces = parts(options.text("--kib", "4096")), waits = parts(options.text("--wait", "sleep"));
    uint64_t repeats = options.number("--repeats", 3);
    options.done();
    const char *name = path ? strrchr(path, '/') : nullptr;
    if (!name) {
        options.fail("--file");
    }
    std::string dir(path, (size_t)(name - path));
    const size_t most = 64, largest = 4 * MIB;
    Drain drain = {};
    drain.dir = dir.c_str();
    drain.context = start_device();
    drain.stream = new_stream();
    NEED(cuMemAlloc, &drain.device, bytes);
    NEED(cuMemsetD32, drain.device, 0x5a5a5a5a, bytes / 4);
    size_t count = 0;
    for (const auto &it : threads) {
        count = std::max(count, (size_t)atoi(it.c_str()));
    }
    REQUIRE(count > 0 && count <= most);
    drain.lanes.resize(count);
    for (Lane &lane : drain.lanes) {
        for (Buffer &buffer : lane.buffers) {
            buffer.host = (char *)new_pinned(largest);
            NEED(cuEventCreate, &buffer.done, CU_EVENT_DISABLE_TIMING);
            NEED(cuEventCreate, &buffer.blocking, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
        }
    }
    // The host's memory is touched, and code is loaded.
    drain.run(count, 2, largest, "block", bytes);
    for (const auto &kib : pieces) {
        size_t piece = (size_t)atoi(kib.c_str()) * KIB;
        REQUIRE(piece > 0 && piece <= largest && bytes % piece == 0);
        for (const auto &n : threads) {
            for (const auto &of : buffers) {
                for (const auto &how : waits) {
                    std::vector<double> rates;
                    for (uint64_t i = 0; i < repeats; i++) {
                        rates.push_back(drain.run((size_t)atoi(n.c_str()), (size_t)atoi(of.c_str()), piece, how, bytes));
                    }
                    std::sort(rates.begin(), rates.end());
                    Line line;
                    line.number("threads", atoi(n.c_str())).number("buffers", atoi(of.c_str())).number("kib", (double)(piece / KIB));
                    line.word("wait", how.c_str()).number("gb_per_s", rates[rates.size() / 2]);
                    line.number("gb_per_s_lowest", rates[0]).number("gb_per_s_highest", rates.back()).print();
                }
            }
        }
    }
    _exit(0);
}
