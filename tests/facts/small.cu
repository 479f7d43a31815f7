// B12: what a copy of a few bytes costs, from the call until the bytes have arrived, by the way in which it is made and waited for.
//
//   small [--bytes 4] [--rounds 2000] [--stream legacy]
//
// --bytes    a multiple of 4; words are written one by one
// --stream   legacy: the default stream; own: one that does not wait for it
//
// Each line is a way: median, 99th percentile and maximum of single copies. `issue` is the call alone.
#include "facts.h"

static const size_t MOST = 64 * KIB;

// Until all work of a stream is done, without giving the processor away.
static void poll(CUstream stream) {
    CUresult answer;
    while ((answer = ASK(cuStreamQuery, stream)) == CUDA_ERROR_NOT_READY) {
    }
    need(answer, "cuStreamQuery");
}

struct Small {
    size_t bytes, rounds;
    CUstream stream;
    CUdeviceptr device;
    char *pageable, *pinned;
    CUevent event;
    volatile uint32_t *flag;
    CUdeviceptr flag_on_device;
    uint32_t number = 0;

    void poll_event() {
        NEED(cuEventRecord, event, stream);
        CUresult answer;
        while ((answer = ASK(cuEventQuery, event)) == CUDA_ERROR_NOT_READY) {
        }
        need(answer, "cuEventQuery");
    }
    void write_words() {
        for (size_t i = 0; i < bytes / 4; i++) {
            NEED(cuStreamWriteValue32, stream, device + 4 * i, ((uint32_t *)pageable)[i], CU_STREAM_WRITE_VALUE_DEFAULT);
        }
    }
    void set_words() {
        for (size_t i = 0; i < bytes / 4; i++) {
            NEED(cuMemsetD32Async, device + 4 * i, ((uint32_t *)pageable)[i], 1, stream);
        }
    }
    // The device tells by a word in pinned memory that it has come so far.
    void poll_flag() {
        NEED(cuStreamWriteValue32, stream, flag_on_device, ++number, CU_STREAM_WRITE_VALUE_DEFAULT);
        while (*flag != number) {
        }
    }

    // A way: what makes the copy, and what waits for it.
    template <class Issue, class Wait> void measure(const char *way, Issue issue, Wait wait) {
        Times whole, issued;
        for (size_t round = 0; round < rounds + 50; round++) {
            double began = now_ns();
            issue();
            double done = now_ns();
            wait();
            double end = now_ns();
            if (round >= 50) {
                issued.push_back(done - began);
                whole.push_back(end - began);
            }
        }
        Line().word("way", way).number("bytes", (double)bytes).times("whole", whole).times("issue", issued).print();
    }
};

int main(int argc, char **argv) {
    Options options(argc, argv);
    Small small;
    small.bytes = (size_t)options.number("--bytes", 4);
    small.rounds = (size_t)options.number("--rounds", 2000);
    std::string stream = options.text("--stream", "legacy");
    options.done();
    REQUIRE(small.bytes > 0 && small.bytes % 4 == 0 && small.bytes <= MOST);
    REQUIRE(stream == "legacy" || stream == "own");

    start_device();
    small.stream = stream == "own" ? new_stream() : nullptr;
    NEED(cuMemAlloc, &small.device, MOST);
    small.pageable = (char *)calloc(1, MOST);
    small.pinned = (char *)new_pinned(MOST);
    small.flag = (volatile uint32_t *)new_pinned(4096);
    NEED(cuMemHostGetDevicePointer, &small.flag_on_device, (void *)small.flag, 0);
    NEED(cuEventCreate, &small.event, CU_EVENT_DISABLE_TIMING);

    auto sync = [&] { NEED(cuStreamSynchronize, small.stream); };
    auto query = [&] { poll(small.stream); };
    auto event = [&] { small.poll_event(); };
    auto flag = [&] { small.poll_flag(); };
    auto nothing = [] {};
    auto from_pageable = [&] { NEED(cuMemcpyHtoDAsync, small.device, small.pageable, small.bytes, small.stream); };
    auto from_pinned = [&] { NEED(cuMemcpyHtoDAsync, small.device, small.pinned, small.bytes, small.stream); };
    auto to_pinned = [&] { NEED(cuMemcpyDtoHAsync, small.pinned, small.device, small.bytes, small.stream); };
    auto written = [&] { small.write_words(); };
    auto set = [&] { small.set_words(); };

    small.measure("to the device, synchronous", [&] { NEED(cuMemcpyHtoD, small.device, small.pageable, small.bytes); }, nothing);
    small.measure("pageable, synchronize", from_pageable, sync);
    small.measure("pageable, query", from_pageable, query);
    small.measure("pageable, event", from_pageable, event);
    small.measure("pageable, flag", from_pageable, flag);
    small.measure("pinned, query", from_pinned, query);
    small.measure("pinned, event", from_pinned, event);
    small.measure("pinned, flag", from_pinned, flag);
    if (small.bytes <= 64) {
        small.measure("words set, query", set, query);
        small.measure("words set, flag", set, flag);
        small.measure("words written, query", written, query);
        small.measure("words written, flag", written, flag);
    }
    small.measure("to the host, synchronous", [&] { NEED(cuMemcpyDtoH, small.pageable, small.device, small.bytes); }, nothing);
    small.measure("to pinned memory, query", to_pinned, query);
    small.measure("to pinned memory, event", to_pinned, event);
    small.measure("to pinned memory, flag", to_pinned, flag);
    small.measure("nothing, synchronize", nothing, sync);
    small.measure("nothing, event", nothing, event);
    return 0;
}
