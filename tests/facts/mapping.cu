// B1: does mapping memory wait for running kernels, or hold up launches? A kernel spins on one stream; one thread creates,
// maps, fills and moves pieces of memory; another launches empty kernels on a stream of its own all the while.
//
//   mapping [--case each] [--spin 1] [--pieces 416] [--mib 64] [--limit-ms 6000] [--threads 1] [--rounds 1] [--small 0]
//
// --case  each    one piece after the other: created, mapped at an alias, access, copied to, summed on the device, mapped at
//                 its final address, access
//         early   the same, with all pieces created and mapped at their final addresses, without access, before
//         sweep   all created and mapped at aliases, one call gives access to all aliases; then each is copied to, summed and
//                 mapped at its final address; access there for eight at a time
//         register  host memory of a memfd: each piece is registered for the first time, copied from, and unregistered
//         threads  nothing is copied: each piece is created, mapped and given access to, by --threads of them
//         parts   nothing is copied: all pieces are created, then mapped side by side, given access to, unmapped and released,
//                 --rounds times; access and unmapping by one call, releasing by --threads
//         access  nothing is copied: one cuMemSetAccess for all pieces, one for each, one for eight, three times in turn
// --spin  0: no kernel spins
//
// The kernel ends when the work is done, or after --limit-ms: "spin_ended_by" says which. If it is the limit, a call has
// waited for the kernel, and the calls' maxima show which.
#include "spin.h"

#include <memory>
#include <sys/mman.h>
#include <unistd.h>

struct Launches {
    Times enqueue, round_trip;
};

// Launches empty kernels one after the other, each waited for; counts by phase.
struct Launcher {
    enum { ALONE, SPINNING, WORKING, OTHER, PHASES = 8 };
    Launches phases[PHASES];
    int phase = ALONE;
    bool stopped = false;
    Thread thread;

    explicit Launcher(CUcontext context) : thread([this, context] { run(context); }) {}
    void run(CUcontext context) {
        NEED(cuCtxSetCurrent, context);
        CUstream stream = new_stream();
        while (!look(stopped)) {
            Launches &here = phases[look(phase)];
            double start = now_ns();
            nothing<<<1, 1, 0, stream>>>();
            double enqueued = now_ns();
            NEED(cuStreamSynchronize, stream);
            here.round_trip.push_back(now_ns() - start);
            here.enqueue.push_back(enqueued - start);
        }
    }
    void stop() {
        tell(stopped, true);
        thread.join();
    }
    void say(Line &line, int which, const char *name) const {
        line.times((std::string("launch_") + name).c_str(), phases[which].enqueue);
        line.times((std::string("launch_and_wait_") + name).c_str(), phases[which].round_trip);
    }
};

struct Work {
    Scale scale;
    size_t pieces, size;
    CUstream stream;
    CUdeviceptr alias, final;
    void *host;
    unsigned long long *sums;
    std::vector<CUmemGenericAllocationHandle> handles;
    Times create, map_alias, access_alias, copy_and_sum, map_final, access_final, unmap, pinned, unpinned;
    double began, took_ms = 0, loaded_ms = 0;

    Work(const Scale &how, size_t count, size_t bytes) : scale(how), pieces(count), size(bytes), handles(count) {
        stream = new_stream();
        alias = reserve(pieces * size);
        final = reserve(pieces * size);
        host = new_pinned(size);
        scale.fill_host(host, size, 1);
        sums = (unsigned long long *)new_pinned(pieces * 8);
        began = now_ns();
    }
    CUdeviceptr alias_of(size_t i) const { return alias + i * size; }
    CUdeviceptr final_of(size_t i) const { return final + i * size; }
    void make(size_t i) { TIMED(create, handles[i] = new_piece(size)); }
    void map(Times &times, CUdeviceptr at, size_t i) { TIMED(times, NEED(cuMemMap, at, size, 0, handles[i], 0)); }
    void open(Times &times, CUdeviceptr at, size_t count) { TIMED(times, NEED_ACCESS(at, count * size)); }
    // Each piece has a content of its own: its number in its first word.
    void load(size_t i) {
        *(uint64_t *)host = i;
        TIMED(copy_and_sum, {
            NEED(cuMemcpyHtoDAsync, alias_of(i), host, size, stream);
            scale.start_sum(stream, alias_of(i), size, &sums[i]);
            NEED(cuStreamSynchronize, stream);
        });
    }
    void each(bool early) {
        for (size_t i = 0; early && i < pieces; i++) {
            make(i);
            map(map_final, final_of(i), i);
        }
        began = now_ns();
        for (size_t i = 0; i < pieces; i++) {
            if (!early) {
                make(i);
            }
            map(map_alias, alias_of(i), i);
            open(access_alias, alias_of(i), 1);
            load(i);
            if (!early) {
                map(map_final, final_of(i), i);
            }
            open(access_final, final_of(i), 1);
        }
        loaded_ms = (now_ns() - began) / 1e6;
        TIMED(unmap, NEED(cuMemUnmap, alias, pieces * size));
    }
    void sweep() {
        for (size_t i = 0; i < pieces; i++) {
            make(i);
            map(map_alias, alias_of(i), i);
        }
        open(access_alias, alias, pieces);
        for (size_t i = 0; i < pieces; i++) {
            load(i);
            map(map_final, final_of(i), i);
            if ((i + 1) % 8 == 0 || i + 1 == pieces) {
                open(access_final, final_of(i / 8 * 8), i % 8 + 1);
            }
        }
        loaded_ms = (now_ns() - began) / 1e6;
        TIMED(unmap, NEED(cuMemUnmap, alias, pieces * size));
    }
    // The memory of other processes, as a worker registers it.
    void pin() {
        int file = memfd_create("facts", MFD_CLOEXEC);
        REQUIRE(file >= 0 && ftruncate(file, (off_t)(pieces * size)) == 0);
        char *shared = (char *)mmap(nullptr, pieces * size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        REQUIRE(shared != MAP_FAILED);
        CUdeviceptr target;
        NEED(cuMemAlloc, &target, size);
        const unsigned PORTABLE_AND_MAPPED = 3;
        for (size_t i = 0; i < pieces; i++) {
            TIMED(pinned, NEED(cuMemHostRegister, shared + i * size, size, PORTABLE_AND_MAPPED));
            NEED(cuMemcpyHtoDAsync, target, shared + i * size, size, stream);
            NEED(cuStreamSynchronize, stream);
        }
        for (size_t i = 0; i < pieces; i++) {
            TIMED(unpinned, NEED(cuMemHostUnregister, shared + i * size));
        }
    }
    // What is at the final addresses is what was copied to the aliases.
    bool whole() {
        std::vector<uint64_t> loaded(sums, sums + pieces);
        memset(sums, 0, pieces * 8);
        for (size_t i = 0; i < pieces; i++) {
            scale.start_sum(stream, final_of(i), size, &sums[i]);
        }
        NEED(cuStreamSynchronize, stream);
        *(uint64_t *)host = 0;
        uint64_t base = scale.sum_host(host, size);
        bool good = true;
        for (size_t i = 0; i < pieces; i++) {
            good = good && loaded[i] == base + i && sums[i] == base + i;
        }
        return good;
    }
};

static const char *const RUNS[] = {"whole", "each", "eights"};

static void access_in_runs(Work &work, Launcher &launcher, Line &line) {
    const size_t runs[] = {work.pieces, 1, 8};
    Times access[3], unmap[3], map;
    for (size_t i = 0; i < work.pieces; i++) {
        work.make(i);
    }
    for (int round = 0; round < 3; round++) {
        for (int way = 0; way < 3; way++) {
            tell(launcher.phase, Launcher::OTHER + way);
            for (size_t i = 0; i < work.pieces; i++) {
                work.map(map, work.final_of(i), i);
            }
            for (size_t i = 0; i < work.pieces; i += runs[way]) {
                work.open(access[way], work.final_of(i), std::min(runs[way], work.pieces - i));
            }
            TIMED(unmap[way], NEED(cuMemUnmap, work.final, work.pieces * work.size));
        }
    }
    line.times("map", map);
    for (int way = 0; way < 3; way++) {
        line.times((std::string("access_") + RUNS[way]).c_str(), access[way]);
        line.times((std::string("unmap_after_") + RUNS[way]).c_str(), unmap[way]);
    }
}

// Creates and maps pieces by several threads, and returns how long that takes.
static double map_by_threads(CUcontext context, size_t pieces, size_t bytes, size_t threads) {
    size_t next = 0;
    auto work = [&] {
        NEED(cuCtxSetCurrent, context);
        while (__atomic_fetch_add(&next, 1, __ATOMIC_SEQ_CST) < pieces) {
            map_new(new_piece(bytes), bytes);
        }
    };
    double began = now_ns();
    {
        std::vector<std::unique_ptr<Thread>> all;
        for (size_t i = 0; i < threads; i++) {
            all.emplace_back(new Thread(work));
        }
    }
    return (now_ns() - began) / 1e6;
}

// What each part costs of giving a program its memory, and of taking it back.
static void parts(CUcontext context, size_t pieces, size_t bytes, size_t threads) {
    std::vector<CUmemGenericAllocationHandle> all(pieces);
    Times create, map, access, unmap, release;
    CUdeviceptr base = reserve(pieces * bytes);
    TIMED(create, for (auto &piece : all) piece = new_piece(bytes, true));
    TIMED(map, for (size_t i = 0; i < pieces; i++) NEED(cuMemMap, base + i * bytes, bytes, 0, all[i], 0));
    TIMED(access, NEED_ACCESS(base, pieces * bytes));
    TIMED(unmap, NEED(cuMemUnmap, base, pieces * bytes));
    size_t next = 0;
    auto work = [&] {
        NEED(cuCtxSetCurrent, context);
        for (size_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_SEQ_CST)) < pieces;) {
            NEED(cuMemRelease, all[i]);
        }
    };
    TIMED(release, {
        std::vector<std::unique_ptr<Thread>> several;
        for (size_t i = 1; i < threads; i++) {
            several.emplace_back(new Thread(work));
        }
        work();
    });
    NEED(cuMemAddressFree, base, pieces * bytes);
    Line line;
    line.number("pieces", (double)pieces).number("mib", (double)bytes / MIB).number("threads", (double)threads);
    line.number("create_ms", create[0] / 1e6).number("map_ms", map[0] / 1e6).number("access_ms", access[0] / 1e6);
    line.number("unmap_ms", unmap[0] / 1e6).number("release_ms", release[0] / 1e6).print();
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    std::string kind = options.text("--case", "each");
    Scale scale(options.number("--small", 0));
    bool spins = options.number("--spin", 1);
    size_t pieces = options.number("--pieces", scale.size(416, 8)), mib = options.number("--mib", scale.size(64, 2));
    double limit_ms = (double)options.number("--limit-ms", 6000);
    size_t threads = options.number("--threads", 1), rounds = options.number("--rounds", 1);
    options.done();

    CUcontext context = start_device();
    if (kind == "threads") {
        double took_ms = map_by_threads(context, pieces, mib * MIB, threads);
        Line().number("threads", (double)threads).number("work_ms", took_ms).print();
        return 0;
    }
    if (kind == "parts") {
        for (size_t i = 0; i < rounds; i++) {
            parts(context, pieces, mib * MIB, threads);
            sleep_us(scale.small ? 1000 : 700000);
        }
        return 0;
    }
    CUstream spinning = new_stream();
    volatile uint32_t *words = new_spin_words();
    warm_up_spin(spinning, words);
    Work work(scale, pieces, mib * MIB);
    CUdeviceptr scratch = (CUdeviceptr)work.sums;
    scale.warm_up(work.stream, scratch);
    memset(work.sums, 0, pieces * 8);

    Launcher launcher(context);
    sleep_us(scale.small ? 50000 : 300000);
    bool bitten = false;
    Line line;
    {
        Watchdog watchdog(words, limit_ms);
        if (spins) {
            spin_until<<<1, 1, 0, spinning>>>(words);
            wait_for_begin(words);
            tell(launcher.phase, (int)Launcher::SPINNING);
            sleep_us(scale.small ? 50000 : 300000);
        }
        tell(launcher.phase, (int)Launcher::WORKING);
        work.began = now_ns();
        if (kind == "access") {
            access_in_runs(work, launcher, line);
        } else if (kind == "register") {
            work.pin();
        } else if (kind == "sweep") {
            work.sweep();
        } else {
            REQUIRE(kind == "each" || kind == "early");
            work.each(kind == "early");
        }
        work.took_ms = (now_ns() - work.began) / 1e6;
        bitten = watchdog.call_off();
        words[0] = 1;
    }
    launcher.stop();
    NEED(cuStreamSynchronize, spinning);
    line.word("spin_ended_by", !spins ? "none" : bitten ? "limit" : "work").number("work_ms", work.took_ms);
    launcher.say(line, Launcher::ALONE, "alone");
    launcher.say(line, Launcher::SPINNING, "beside_spin");
    for (int way = 0; way < 3 && kind == "access"; way++) {
        launcher.say(line, Launcher::OTHER + way, (std::string("beside_access_") + RUNS[way]).c_str());
    }
    if (kind != "access") {
        launcher.say(line, Launcher::WORKING, "beside_work");
    }
    if (kind == "register") {
        line.times("register", work.pinned).times("unregister", work.unpinned);
    } else if (kind != "access") {
        line.times("create", work.create).times("map_alias", work.map_alias).times("access_alias", work.access_alias);
        line.times("copy_and_sum", work.copy_and_sum).times("map_final", work.map_final);
        line.times("access_final", work.access_final).times("unmap_aliases", work.unmap);
        line.number("load_gb_per_s", (double)(pieces * work.size) / 1e6 / work.loaded_ms).yes("content_is_whole", work.whole());
    }
    line.print();
    return 0;
}
