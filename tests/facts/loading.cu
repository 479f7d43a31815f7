// B4: what loading code costs while the link is busy, and whether code and variables come to the same addresses then.
//
//   loading [--how module] [--copies 1] [--ahead 0] [--times 3] [--heap 0] [--small 0]
//
// --how     module: cuModuleLoadData, cuFuncLoad; library: cuLibraryLoadData, cuKernelGetFunction, cuFuncLoad
// --ahead   so many threads load all libraries first, the last ones before the others; their functions are loaded in order as ever
// --heap    so many MiB of the heap are touched before, so that what the driver keeps of a library needs no new pages
// --copies  1: another thread keeps sixteen copies of 4 MiB to the device in flight; 0: that thread does nothing
//
// The images lie beside the program. Address space layout randomisation is off, and the heap grows in one place, so that
// runs differ in nothing but the copies. "addresses" has one line for each image; compare runs.
#include "facts.h"

#include <fcntl.h>
#include <malloc.h>
#include <memory>
#include <sys/personality.h>
#include <sys/resource.h>
#include <sys/stat.h>

struct Image {
    const char *name;
    int kernels;
    std::string data;
};

// Copies that never end, and when each of them was seen to be done.
struct Copier {
    static const int SLOTS = 16;
    const bool busy;
    const size_t size;
    CUstream stream;
    char *host;
    CUevent done[SLOTS];
    Times ends;
    // Its initialisation uses those before.
    CUdeviceptr device;
    bool stopped = false;
    Thread thread;

    Copier(CUcontext context, bool copies, size_t bytes)
        : busy(copies), size(bytes), stream(new_stream()), host((char *)new_pinned(SLOTS * bytes)), device(room(SLOTS * bytes)),
          thread([this, context] { run(context); }) {}
    CUdeviceptr room(size_t bytes) {
        CUdeviceptr at;
        NEED(cuMemAlloc, &at, bytes);
        for (CUevent &event : done) {
            NEED(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
        }
        ends.reserve(1 << 20);
        return at;
    }
    void run(CUcontext context) {
        NEED(cuCtxSetCurrent, context);
        for (uint64_t i = 0; !look(stopped); i++) {
            if (!busy) {
                sleep_us(1000);
                continue;
            }
            int slot = (int)(i % SLOTS);
            if (i >= SLOTS) {
                NEED(cuEventSynchronize, done[slot]);
                ends.push_back(now_ns());
            }
            NEED(cuMemcpyHtoDAsync, device + slot * size, host + slot * size, size, stream);
            NEED(cuEventRecord, done[slot], stream);
        }
        NEED(cuStreamSynchronize, stream);
    }
    double gb_per_s(double from, double to) const {
        size_t n = 0;
        for (double end : ends) {
            n += end >= from && end < to;
        }
        return (double)(n * size) / (to - from);
    }
    // The longest time in which no copy was seen to be done.
    double longest_gap_ms(double from, double to) const {
        double gap = 0, last = from;
        for (double end : ends) {
            if (end >= from && end < to) {
                gap = std::max(gap, end - last);
                last = end;
            }
        }
        return gap / 1e6;
    }
};

struct Addresses {
    CUdeviceptr value, functions;
    uint64_t code[2];
};

struct Loader {
    Times load, find, function_load, global;
    std::vector<CUlibrary> ahead;
    std::vector<CUfunction> where;
    std::vector<Addresses> addresses;

    void by_module(const Image &image) {
        CUmodule module;
        TIMED(load, NEED(cuModuleLoadData, &module, image.data.data()));
        Addresses at = {};
        size_t bytes;
        TIMED(global, NEED(cuModuleGetGlobal, &at.value, &bytes, module, "value"));
        NEED(cuModuleGetGlobal, &at.functions, &bytes, module, "functions");
        auto take = [&](const char *name) {
            CUfunction function;
            TIMED(find, NEED(cuModuleGetFunction, &function, module, name));
            TIMED(function_load, NEED(cuFuncLoad, function));
            return function;
        };
        take_all(image, at, take);
    }
    static CUlibrary load_library(const Image &image) {
        CUlibrary library;
        NEED(cuLibraryLoadData, &library, image.data.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
        return library;
    }
    // Loads libraries by several threads, from the last to the first.
    void load_ahead(const std::vector<const Image *> &images, int threads) {
        ahead.resize(images.size());
        size_t left = images.size();
        auto work = [&] {
            for (size_t i; (i = __atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) - 1) < images.size();) {
                ahead[i] = load_library(*images[i]);
            }
        };
        TIMED(load, {
            std::vector<std::unique_ptr<Thread>> all;
            for (int i = 0; i < threads; i++) {
                all.emplace_back(new Thread(work));
            }
        });
    }
    void by_library(const Image &image) {
        CUlibrary library;
        if (ahead.empty()) {
            TIMED(load, library = load_library(image));
        } else {
            library = ahead[where.size()];
        }
        Addresses at = {};
        size_t bytes;
        TIMED(global, NEED(cuLibraryGetGlobal, &at.value, &bytes, library, "value"));
        NEED(cuLibraryGetGlobal, &at.functions, &bytes, library, "functions");
        auto take = [&](const char *name) {
            CUkernel kernel;
            CUfunction function;
            TIMED(find, {
                NEED(cuLibraryGetKernel, &kernel, library, name);
                NEED(cuKernelGetFunction, &function, kernel);
            });
            TIMED(function_load, NEED(cuFuncLoad, function));
            return function;
        };
        take_all(image, at, take);
    }
    template <class Take> void take_all(const Image &image, const Addresses &at, Take take) {
        for (int i = 0; i < image.kernels; i++) {
            char name[32];
            snprintf(name, sizeof name, "kernel%d", i);
            take(name);
        }
        where.push_back(take("where"));
        addresses.push_back(at);
    }
};

static std::string file_beside(const char *program, const char *name) {
    std::string path = program, data;
    path = path.substr(0, path.rfind('/') + 1) + "image." + name + ".fatbin";
    FILE *file = fopen(path.c_str(), "rb");
    if (!file) {
        fprintf(stderr, "no file %s\n", path.c_str());
        exit(2);
    }
    char buffer[65536];
    for (size_t n; (n = fread(buffer, 1, sizeof buffer, file)) > 0;) {
        data.append(buffer, n);
    }
    fclose(file);
    return data;
}

static long page_faults() {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return use.ru_minflt;
}

int main(int argc, char **argv) {
    int now = personality(0xffffffff);
    if (now != -1 && !(now & ADDR_NO_RANDOMIZE) && personality((unsigned long)now | ADDR_NO_RANDOMIZE) != -1) {
        execv("/proc/self/exe", argv);
    }
    // No mapping of the C library's own between those of the driver.
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    mallopt(M_ARENA_MAX, 1);
    Options options(argc, argv);
    bool library = strcmp(options.text("--how", "module"), "library") == 0, copies = options.number("--copies", 1);
    int threads = (int)options.number("--ahead", 0);
    Scale scale(options.number("--small", 0));
    int times = (int)options.number("--times", scale.size(3, 1));
    size_t heap = options.number("--heap", 0) * MIB;
    options.done();
    REQUIRE(library || threads == 0);
    Image images[] = {{"small", 1, ""}, {"table", 4, ""}, {"many", 96, ""}};
    for (Image &image : images) {
        image.data = file_beside(argv[0], image.name);
    }

    CUcontext context = start_device();
    auto *out = (uint64_t *)new_pinned(4096);
    CUstream stream = new_stream();
    scale.warm_up(stream, (CUdeviceptr)out);
    Copier copier(context, copies, scale.size(4 * MIB, 256 * KIB));
    uint64_t window_us = scale.small ? 50000 : 300000;
    if (heap > 0) {
        void *touched = malloc(heap);
        REQUIRE(touched);
        memset(touched, 1, heap);
        free(touched);
    }
    sleep_us(window_us);
    double before = now_ns();
    sleep_us(window_us);
    long faults = page_faults();
    double start = now_ns();
    Loader loader;
    if (threads > 0) {
        std::vector<const Image *> all;
        for (int i = 0; i < times * 3; i++) {
            all.push_back(&images[i % 3]);
        }
        loader.load_ahead(all, threads);
    }
    for (int round = 0; round < times; round++) {
        for (const Image &image : images) {
            if (library) {
                loader.by_library(image);
            } else {
                loader.by_module(image);
            }
        }
    }
    double loaded = now_ns();
    faults = page_faults() - faults;
    sleep_us(window_us);
    double after = now_ns();
    tell(copier.stopped, true);
    copier.thread.join();
    std::string addresses;
    for (size_t i = 0; i < loader.where.size(); i++) {
        void *parameters[] = {&out};
        NEED(cuLaunchKernel, loader.where[i], 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr);
        NEED(cuStreamSynchronize, stream);
        char text[160];
        Addresses &at = loader.addresses[i];
        snprintf(text, sizeof text, "%s\"%s %llx %llx %llx %llx\"", i ? ", " : "", images[i % 3].name, (unsigned long long)at.value,
                 (unsigned long long)at.functions, (unsigned long long)out[0], (unsigned long long)out[1]);
        addresses += text;
    }
    Line line;
    size_t bytes = 0;
    for (const Image &image : images) {
        bytes += image.data.size();
    }
    line.word("how", library ? "library" : "module").yes("copies", copies).number("image_bytes", (double)bytes * times);
    line.number("loading_ms", (loaded - start) / 1e6).number("page_faults", (double)faults);
    line.times("load", loader.load).times("get_global", loader.global).times("get_function", loader.find);
    line.times("function_load", loader.function_load);
    line.number("link_before_gb_per_s", copier.gb_per_s(before, start)).number("link_while_gb_per_s", copier.gb_per_s(start, loaded));
    line.number("link_after_gb_per_s", copier.gb_per_s(loaded, after));
    line.number("longest_gap_before_ms", copier.longest_gap_ms(before, start));
    line.number("longest_gap_while_ms", copier.longest_gap_ms(start, loaded));
    line.raw("addresses", "[" + addresses + "]").print();
    return 0;
}
