// B8: how fast a file reaches the device: threads read pieces into pinned memory, and copy them; the content is hashed on the
// device, on the host, or not.
//
//   feeding --file PATH [--make 1] [--mib 8192] [--threads 16] [--buffers 2] [--kib 4096] [--read call] [--hash none] [--direct 0]
//           [--repeats 2] [--small 0]
//   feeding --link 1
//
// --make     writes the file if it is not there in that size, with eight threads
// --threads, --buffers, --kib, --read, --hash   one or several values with commas between them; each combination is a line
// --buffers  of each thread, at most 4
// --kib      the size of a piece, at most 4096
// --read     call: pread; map: the file is mapped, and the thread copies with vector instructions, whose writes stay in its cache
// --hash     none, device, host
// --direct   1: O_DIRECT, past the page cache
// --mib-each the most MiB that one thread reads in one measurement (1024): few threads need not read all
// --link     what the link takes by itself, from pinned memory: copies of 64 MiB, and of 4 MiB sixteen at a time
#include "facts.h"

#include <cerrno>
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/stat.h>

// What the file is made of, and the largest piece.
static size_t largest = 4 * MIB;

// A hash of about the cost of a good one: multiplications and additions in eight lanes.
static uint64_t host_hash(const void *data, size_t bytes) {
    const auto *at = (const uint64_t *)data;
    uint64_t lanes[8] = {1, 2, 3, 4, 5, 6, 7, 8}, all = 0;
    for (size_t i = 0; i + 8 <= bytes / 8; i += 8) {
        for (size_t lane = 0; lane < 8; lane++) {
            uint64_t x = at[i + lane] ^ (0x9e3779b97f4a7c15ull * (lane + 1));
            lanes[lane] += (x & 0xffffffff) * (x >> 32) + at[i + (lane ^ 1)];
        }
    }
    for (uint64_t lane : lanes) {
        all = mix(all + lane);
    }
    return all;
}

// A pass of the device over what has just arrived.
static __global__ void device_hash(const ulonglong2 *at, uint64_t count, unsigned long long *out) {
    unsigned long long mine = 0;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x) {
        ulonglong2 x = at[i];
        mine += (x.x & 0xffffffff) * (x.x >> 32) + x.y;
    }
    atomicAdd(out, mine);
}

static void whole_io(bool writes, int file, char *at, size_t bytes, off_t from) {
    while (bytes) {
        ssize_t n = writes ? pwrite(file, at, bytes, from) : pread(file, at, bytes, from);
        if (n <= 0) {
            Line().word("failed", writes ? "pwrite" : "pread").word("result", n ? strerror(errno) : "end of file").print();
            _exit(n && errno == EINVAL ? NOT_SUPPORTED : 3);
        }
        at += n;
        bytes -= (size_t)n;
        from += n;
    }
}

static int open_file(const char *path, int flags) {
    int file = open(path, flags | O_CLOEXEC, 0600);
    if (file < 0) {
        Line().word(errno == EINVAL ? "not_supported" : "failed", path).word("result", strerror(errno)).print();
        _exit(errno == EINVAL ? NOT_SUPPORTED : 3);
    }
    return file;
}

// Runs `work(number)` in so many threads, and waits for them.
static void in_threads(size_t count, const std::function<void(size_t)> &work) {
    std::vector<Thread *> threads;
    for (size_t i = 0; i < count; i++) {
        threads.push_back(new Thread([&work, i] { work(i); }));
    }
    for (Thread *thread : threads) {
        delete thread;
    }
}

static void make_file(const char *path, size_t bytes) {
    struct stat about;
    if (stat(path, &about) == 0 && (size_t)about.st_size == bytes) {
        return;
    }
    int file = open_file(path, O_RDWR | O_CREAT | O_TRUNC);
    REQUIRE(ftruncate(file, (off_t)bytes) == 0);
    const size_t threads = 8;
    double start = now_ns();
    in_threads(threads, [&](size_t number) {
        std::vector<char> buffer(largest);
        for (size_t at = number * largest; at < bytes; at += threads * largest) {
            for (size_t i = 0; i < largest / 8; i++) {
                ((uint64_t *)buffer.data())[i] = word_of(i, at);
            }
            whole_io(true, file, buffer.data(), largest, (off_t)at);
        }
    });
    fsync(file);
    close(file);
    Line().number("made_mib", (double)(bytes / MIB)).number("made_gb_per_s", (double)bytes / (now_ns() - start)).print();
}

struct Buffer {
    char *host;
    CUevent free;
    bool used = false;
};

struct Lane {
    CUstream stream;
    Buffer buffers[4];
};

struct Feed {
    CUcontext context;
    int file;
    const char *map; // The file, mapped.
    CUdeviceptr device, hashes;
    std::vector<Lane> lanes;

    void read(bool mapped, char *to, size_t piece, size_t at) const {
        if (!mapped) {
            whole_io(false, file, to, piece, (off_t)at);
            return;
        }
        for (size_t i = 0; i < piece; i += 16) {
            _mm_store_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(map + at + i)));
        }
    }

    // Reads, copies and hashes the first `bytes`; the rate in GB/s.
    double run(size_t threads, size_t buffers, size_t piece, bool mapped, const std::string &hash, size_t bytes) {
        size_t next = 0;
        double start = now_ns();
        in_threads(threads, [&](size_t number) {
            NEED(cuCtxSetCurrent, context);
            Lane &lane = lanes[number];
            for (size_t turn = 0;; turn++) {
                size_t at = __atomic_fetch_add(&next, piece, __ATOMIC_RELAXED);
                if (at >= bytes) {
                    break;
                }
                Buffer &buffer = lane.buffers[turn % buffers];
                if (buffer.used) {
                    NEED(cuEventSynchronize, buffer.free);
                }
                read(mapped, buffer.host, piece, at);
                if (hash == "host") {
                    tell(kept[number], host_hash(buffer.host, piece));
                }
                NEED(cuMemcpyHtoDAsync, device + at, buffer.host, piece, lane.stream);
                NEED(cuEventRecord, buffer.free, lane.stream);
                buffer.used = true;
                if (hash == "device") {
                    device_hash<<<32, 512, 0, lane.stream>>>((const ulonglong2 *)(device + at), piece / 16,
                                                             (unsigned long long *)hashes + at / piece);
                }
            }
            NEED(cuStreamSynchronize, lane.stream);
        });
        return (double)bytes / (now_ns() - start);
    }
    uint64_t kept[64];
};

static void say_link(size_t large, size_t piece) {
    CUstream streams[4];
    CUdeviceptr device;
    char *host = (char *)new_pinned(large);
    NEED(cuMemAlloc, &device, large);
    for (CUstream &stream : streams) {
        stream = new_stream();
    }
    Line line;
    for (size_t count : {1, 4}) {
        for (size_t size : {large, piece}) {
            std::vector<double> rates;
            for (int repeat = 0; repeat < 6; repeat++) {
                double start = now_ns();
                size_t copies = 16 * large / size;
                for (size_t i = 0; i < copies; i++) {
                    size_t at = i * size % large;
                    NEED(cuMemcpyHtoDAsync, device + at, host + at, size, streams[i % count]);
                }
                for (CUstream stream : streams) {
                    NEED(cuStreamSynchronize, stream);
                }
                if (repeat) {
                    rates.push_back((double)(copies * size) / (now_ns() - start));
                }
            }
            std::sort(rates.begin(), rates.end());
            char name[64];
            snprintf(name, sizeof name, "link_%s_%s_gb_per_s", size == large ? "large" : "pieces", count == 1 ? "one_stream" : "four_streams");
            line.number(name, rates[rates.size() / 2]);
        }
    }
    line.print();
}

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

static size_t number_of(const std::string &text) {
    size_t value = 0;
    for (char c : text) {
        REQUIRE(c >= '0' && c <= '9');
        value = value * 10 + (size_t)(c - '0');
    }
    return value;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    Scale scale(options.number("--small", 0));
    const char *path = options.text("--file", nullptr);
    size_t bytes = options.number("--mib", scale.size(8192, 16)) * MIB;
    size_t each = options.number("--mib-each", 1024) * MIB;
    bool make = options.number("--make", 1), direct = options.number("--direct", 0), link = options.number("--link", 0);
    auto threads = parts(options.text("--threads", "16")), buffers = parts(options.text("--buffers", "2"));
    auto hashes = parts(options.text("--hash", "none")), pieces = parts(options.text("--kib", scale.small ? "256" : "4096"));
    auto reads = parts(options.text("--read", "call"));
    uint64_t repeats = options.number("--repeats", 2);
    options.done();
    largest = scale.size(4 * MIB, 256 * KIB);
    if (link) {
        start_device();
        say_link(scale.size(64 * MIB, MIB), largest);
        return 0;
    }
    if (!path || bytes % largest) {
        options.fail("--file");
    }
    if (make) {
        make_file(path, bytes);
    }

    Feed feed = {};
    feed.context = start_device();
    feed.file = open_file(path, O_RDONLY | (direct ? O_DIRECT : 0));
    NEED(cuMemAlloc, &feed.device, bytes);
    const size_t smallest = 4 * KIB;
    NEED(cuMemAlloc, &feed.hashes, bytes / smallest * 8);
    NEED(cuMemsetD32, feed.hashes, 0, bytes / smallest * 2);
    void *mapped = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, feed.file, 0);
    REQUIRE(mapped != MAP_FAILED);
    feed.map = (const char *)mapped;
    size_t most = 0;
    for (const auto &count : threads) {
        most = std::max(most, number_of(count));
    }
    REQUIRE(most <= 64);
    feed.lanes.resize(most);
    for (Lane &lane : feed.lanes) {
        lane.stream = new_stream();
        for (Buffer &buffer : lane.buffers) {
            buffer.host = (char *)new_pinned(largest);
            NEED(cuEventCreate, &buffer.free, CU_EVENT_DISABLE_TIMING);
        }
    }
    // Code is loaded, and the file's pages are in the cache where there is one.
    feed.run(most, 2, largest, false, "device", direct ? std::min(bytes, most * largest) : bytes);
    auto measure = [&](const std::string &hash, size_t n, size_t of, size_t piece, const std::string &how) {
        REQUIRE(of > 0 && of <= 4 && piece >= smallest && piece <= largest && bytes % piece == 0);
        REQUIRE(hash == "none" || hash == "device" || hash == "host");
        REQUIRE(how == "call" || how == "map");
        size_t some = std::min(bytes, n * each);
        std::vector<double> rates;
        for (uint64_t i = 0; i < repeats; i++) {
            rates.push_back(feed.run(n, of, piece, how == "map", hash, some));
        }
        std::sort(rates.begin(), rates.end());
        Line line;
        line.number("threads", (double)n).number("buffers", (double)of).number("kib", (double)(piece / KIB)).word("read", how.c_str());
        line.word("hash", hash.c_str()).yes("direct", direct).number("mib", (double)(some / MIB));
        line.number("gb_per_s", rates[rates.size() / 2]).number("gb_per_s_lowest", rates[0]);
        line.number("gb_per_s_highest", rates.back()).print();
    };
    for (const auto &hash : hashes) {
        for (const auto &kib : pieces) {
            for (const auto &how : reads) {
                for (const auto &count : threads) {
                    for (const auto &room : buffers) {
                        measure(hash, number_of(count), number_of(room), number_of(kib) * KIB, how);
                    }
                }
            }
        }
    }
    // The device has what the file has.
    std::vector<char> from_file(largest), from_device(largest);
    bool whole = true;
    int file = open_file(path, O_RDONLY);
    for (size_t at : {(size_t)0, bytes / largest / 2 * largest, bytes - largest}) {
        whole_io(false, file, from_file.data(), largest, (off_t)at);
        NEED(cuMemcpyDtoH, from_device.data(), feed.device + at, largest);
        whole = whole && memcmp(from_file.data(), from_device.data(), largest) == 0;
    }
    Line().yes("content_is_whole", whole).print();
    _exit(0);
}
