// The heap from which kernels take memory with malloc: where it lies, and copies of it. The driver does not say where it lies, and copies
// nothing from or to it; kernels can do both. What workers do with that is said in ctx-worker/src/resources/kernel_heap.rs.
//
// `build` beside this file makes heap.ptx of it, which workers load.

typedef unsigned int u32;
typedef unsigned long long u64;

// The driver maps memory in pages of this size.
static const u64 PAGE = 2 << 20;

// Where the heap begins, and its size; none if malloc has nothing. It ends behind what malloc gives from a heap that nobody has used, and
// has the size that the limit says. Its first and its last word are read, so that a range that is not the heap's is an error now.
extern "C" __global__ void rekindle_heap_find(u64 *found, u64 limit) {
    const u32 sizes[] = {16, 1 << 10, 16 << 10, 256 << 10};
    void *taken[4];
    u64 last = 0;
    for (int i = 0; i < 4; i++) {
        taken[i] = malloc(sizes[i]);
        u64 end = taken[i] ? (u64)taken[i] + sizes[i] : 0;
        last = end > last ? end : last;
    }
    for (int i = 0; i < 4; i++) {
        free(taken[i]);
    }
    u64 size = (limit + PAGE - 1) / PAGE * PAGE, end = (last + PAGE - 1) / PAGE * PAGE;
    if (last && end > size) {
        found[2] = *(volatile u64 *)(end - size) + *(volatile u64 *)(end - 8);
        found[0] = end - size;
        found[1] = size;
    }
}

extern "C" __global__ void rekindle_heap_copy(u64 *to, const u64 *from, u64 words) {
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x) {
        to[i] = from[i];
    }
}
