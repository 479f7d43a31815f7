// The heap from which kernels take memory with malloc: where it lies, and copies of it. The driver does not say where it lies, and copies
// nothing from or to it; kernels can do both. What workers do with that is said in ctx-worker/src/resources/kernel_heap.rs.
//
// `build` beside this file makes heap.ptx of it, which workers load.

typedef unsigned int u32;
typedef unsigned long long u64;

// The driver begins a heap at a multiple of PAGE, and maps no less than SMALL_PAGE.
static const u64 PAGE = 2 << 20, SMALL_PAGE = 4096;

static __device__ u64 rounded(u64 bytes, u64 to) { return (bytes + to - 1) / to * to; }

// Writes where the heap begins, and its size; nothing if that cannot be told. Nobody else uses the heap meanwhile. Takes all that malloc has
// and gives it back: the heap lies from a multiple of PAGE to the end of that, or of what the limit says. So nothing is read but what
// malloc has given.
extern "C" __global__ void rekindle_heap_find(u64 *found, u64 limit) {
    u64 *taken = nullptr, low = ~0ull, high = 0;
    for (u64 bytes = limit; bytes >= 32; bytes /= 2) {
        for (u64 *at; (at = (u64 *)malloc(bytes));) {
            *at = (u64)taken;
            taken = at;
            low = (u64)at < low ? (u64)at : low;
            high = (u64)at + bytes > high ? (u64)at + bytes : high;
        }
    }
    while (taken) {
        u64 *next = (u64 *)*taken;
        free(taken);
        taken = next;
    }
    u64 base = low / PAGE * PAGE, used = high - base;
    if (high && used <= rounded(limit, PAGE) && used + PAGE > limit) {
        found[0] = base;
        found[1] = rounded(used > limit ? used : limit, SMALL_PAGE);
    }
}

extern "C" __global__ void rekindle_heap_copy(u64 *to, const u64 *from, u64 words) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}
