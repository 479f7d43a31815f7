// B2: what does a running kernel see of mappings that change under it? It spins until the host says so, then reads a word
// (or writes one); meanwhile the host maps, gives access, takes it, or unmaps.
//
//   late --case mapped [--limit-ms 4000] [--small 0]
//
// --case  ready      control: access before the launch
//         mapped     mapped without access before the launch, access after it
//         reserved   only reserved before the launch, mapped and access after it
//         neighbour  as mapped, and the kernel has read the piece beside it before it spins
//         upgraded   read-only before the launch, writable after it; the kernel writes
//         graph      as mapped; the kernel is a node of a graph that was instantiated before too
//         never      mapped without access
//         readonly   read-only; the kernel writes
//         revoked    access before the launch, none after it
//         unmapped   mapped with access before the launch, unmapped after it
//
// "changed_ms" is how long the host's calls took while the kernel ran; "ended_after_ms" how long after the host's word the
// stream ended, with "result". If the calls wait for the kernel, "spin_ended_by" is the limit.
#include "spin.h"

// words[0]: go on; words[1]: begun. out[0]: what it read last; out[1]: it has come to its end.
static __global__ void use_later(volatile uint32_t *words, uint64_t *at, const uint64_t *before, int writes,
                                 volatile uint64_t *out) {
    out[2] = before ? *before : 0;
    words[1] = 1;
    while (words[0] == 0) {
    }
    if (writes) {
        *at = 4321;
        out[0] = 4321;
    } else {
        out[0] = *(volatile uint64_t *)at;
    }
    __threadfence_system();
    out[1] = 1;
}

int main(int argc, char **argv) {
    Options options(argc, argv);
    std::string kind = options.text("--case", "mapped");
    Scale scale(options.number("--small", 0));
    double limit_ms = (double)options.number("--limit-ms", 4000);
    options.done();

    start_device();
    CUstream stream = new_stream(), other = new_stream();
    volatile uint32_t *words = new_spin_words();
    uint64_t *out = (uint64_t *)new_pinned(4096);
    const size_t SIZE = 2 * MIB;
    CUmemGenericAllocationHandle handle = new_piece(SIZE), beside = new_piece(SIZE);
    // The content gets there by an alias, as a restore does it.
    CUdeviceptr alias = map_new(handle, SIZE), place = reserve(2 * SIZE), neighbour = place + SIZE;
    NEED(cuMemMap, neighbour, SIZE, 0, beside, 0);
    NEED_ACCESS(neighbour, SIZE);
    scale.warm_up(other, (CUdeviceptr)out);
    NEED(cuMemsetD32, alias, 1234, 4);
    NEED(cuMemsetD32, neighbour, 1, 4);
    uint64_t content = 1234 | 1234ull << 32;
    bool writes = kind == "upgraded" || kind == "readonly";
    // Loads the code.
    words[0] = 1;
    use_later<<<1, 1, 0, stream>>>(words, (uint64_t *)neighbour, (uint64_t *)neighbour, 0, out);
    NEED(cuStreamSynchronize, stream);
    words[0] = words[1] = 0;
    out[0] = out[1] = 0;

    bool open_before = kind == "ready" || kind == "revoked" || kind == "unmapped";
    if (kind != "reserved") {
        NEED(cuMemMap, place, SIZE, 0, handle, 0);
    }
    if (open_before || writes) {
        NEED_ACCESS(place, SIZE, writes ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    }
    const uint64_t *before = kind == "neighbour" ? (const uint64_t *)neighbour : nullptr;
    Line line;
    double changed_ms, said;
    bool bitten;
    {
        Watchdog watchdog(words, limit_ms);
        if (kind == "graph") {
            cudaGraph_t graph;
            cudaGraphExec_t executable;
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
            use_later<<<1, 1, 0, stream>>>(words, (uint64_t *)place, before, writes, out);
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&executable, graph, 0));
            CHECK(cudaGraphLaunch(executable, stream));
        } else {
            use_later<<<1, 1, 0, stream>>>(words, (uint64_t *)place, before, writes, out);
        }
        wait_for_begin(words);
        double start = now_ns();
        if (kind == "reserved") {
            NEED(cuMemMap, place, SIZE, 0, handle, 0);
            NEED_ACCESS(place, SIZE);
        } else if (kind == "revoked") {
            line.result("revoke", set_access(place, SIZE, CU_MEM_ACCESS_FLAGS_PROT_NONE));
        } else if (kind == "unmapped") {
            line.result("unmap", ASK(cuMemUnmap, place, SIZE));
        } else if (kind == "mapped" || kind == "neighbour" || kind == "upgraded" || kind == "graph") {
            NEED_ACCESS(place, SIZE);
        } else {
            REQUIRE(kind == "ready" || kind == "never" || kind == "readonly");
        }
        changed_ms = (now_ns() - start) / 1e6;
        // Work of another stream in between, as an application has it.
        nothing<<<1, 1, 0, other>>>();
        line.result("other_stream", ASK(cuStreamSynchronize, other));
        bitten = watchdog.call_off();
        said = now_ns();
        words[0] = 1;
    }
    CUresult result = ASK(cuStreamSynchronize, stream);
    line.number("ended_after_ms", (now_ns() - said) / 1e6).result("result", result).number("changed_ms", changed_ms);
    line.word("spin_ended_by", bitten ? "limit" : "work").yes("came_to_its_end", out[1]).address("value", out[0]);
    line.yes("value_is_right", out[0] == (writes ? 4321 : content));
    uint64_t now = 0;
    line.result("copy_of_alias_afterwards", ASK(cuMemcpyDtoH, &now, alias, 8));
    line.address("content_afterwards", now).result("context_afterwards", ASK(cuCtxSynchronize));
    line.print();
    _exit(0);
}
