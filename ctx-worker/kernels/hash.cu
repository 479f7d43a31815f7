// The hash of device memory, on the device. What it computes, why, and how likely two contents are to have one hash is
// said in images/src/content/mod.rs, whose host implementation gives the same to the bit.
//
// `build` beside this file makes hash.ptx of it, which workers load.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned __int128 u128;

// As in images/src/content/mod.rs.
enum {
    UNIT = 16,                        // bytes that a thread takes at once
    THREADS = 128,                    // columns of a chunk, each a thread's
    ROUNDS = 32,                      // units of a column
    ROW = UNIT * THREADS,             // bytes between units of a column
    CHUNK = ROW * ROUNDS,             // 64 KiB
    LANES = 4,                        // hashes of 32 bits at each level, together 128
    COLUMN_WORDS = 4 * ROUNDS + 2 * (LANES - 1),
    CHUNK_WORDS = 2 * LANES * THREADS + 2 * (LANES - 1),
    BATCH = 8,                        // units that a thread has under way
    WARPS = THREADS / 32,
    RESIDENT = 8,                     // blocks of a multiprocessor, of which workers start half
};

// The key, spread out; `Schedule::bytes` makes it.
struct Schedule {
    u32 column[COLUMN_WORDS];
    u32 chunk[CHUNK_WORDS];
    u64 powers[THREADS + 4][2];       // of the point: x^(4t+1) for each thread t, then x^(4 THREADS), x, x^2, x^3
};

// The first part of it again, as a parameter: there the compiler finds key words as constants.
struct ColumnKey {
    u32 word[COLUMN_WORDS];
};

// A run of memory with a hash of its own.
struct Piece {
    u64 source;
    u64 target;                       // where rekindle_copy_hash copies it
    u64 length;
    u64 first;                        // how many chunks the pieces before it have
};

__device__ __forceinline__ u64 chunks_of(u64 length) { return (length + CHUNK - 1) / CHUNK; }

// Each byte is read once, so that what is hashed is what is copied: hence volatile.
__device__ __forceinline__ uint4 load_unit(u64 at) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}

__device__ __forceinline__ void store_unit(u64 at, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void absorb(u64 sum[LANES], uint4 v, const u32 *key) {
#pragma unroll
    for (int lane = 0; lane < LANES; lane++) {
        sum[lane] += (u64)(v.x + key[2 * lane]) * (v.y + key[2 * lane + 1]);
        sum[lane] += (u64)(v.z + key[2 * lane + 2]) * (v.w + key[2 * lane + 3]);
    }
}

// A unit at any address, of which `bytes` are there; the others are zeros.
extern "C" __device__ __noinline__ uint4 rekindle_part_of_unit(u64 from, u64 to, u32 bytes) {
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < UNIT; i++) {
        if (i < bytes) {
            u32 byte = *(const volatile unsigned char *)(from + i);
            word[i / 4] |= byte << (8 * (i % 4));
            if (to) *(volatile unsigned char *)(to + i) = (unsigned char)byte;
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

template <bool copies>
__device__ __forceinline__ void hash(const ColumnKey &key, const Schedule *schedule, const Piece *pieces, u32 count,
                                     u64 chunks, u64 *digests) {
    __shared__ u64 gathered[2][WARPS][LANES];
    const u32 thread = threadIdx.x;
    // All blocks are at chunks side by side, which memory likes best; each looks for its first piece once.
    u64 chunk = blockIdx.x;
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        if (pieces[middle].first <= chunk) low = middle;
        else high = middle;
    }
    u32 own[2 * LANES + 2 * (LANES - 1)];
#pragma unroll
    for (int i = 0; i < 2 * LANES + 2 * (LANES - 1); i++) own[i] = schedule->chunk[2 * LANES * thread + i];

    Piece piece = pieces[low];
    u64 behind = piece.first + chunks_of(piece.length);
    for (u32 turn = 0; chunk < chunks; chunk += gridDim.x, turn ^= 1) {
        while (chunk >= behind) {
            piece = pieces[++low];
            behind = piece.first + chunks_of(piece.length);
        }
        const u64 offset = (chunk - piece.first) * CHUNK;
        const u64 rest = piece.length - offset;
        const u64 from = piece.source + offset;
        const u64 to = copies ? piece.target + offset : 0;
        u64 sum[LANES] = {0, 0, 0, 0};
        if (rest >= CHUNK && ((from | to) % UNIT) == 0) {
#pragma unroll
            for (int batch = 0; batch < ROUNDS; batch += BATCH) {
                uint4 v[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) v[i] = load_unit(from + (u64)(batch + i) * ROW + thread * UNIT);
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    if (copies) store_unit(to + (u64)(batch + i) * ROW + thread * UNIT, v[i]);
                    absorb(sum, v[i], key.word + 4 * (batch + i));
                }
            }
        } else {
#pragma unroll 1
            for (u32 round = 0; round < ROUNDS; round++) {
                const u64 at = (u64)round * ROW + thread * UNIT;
                if (at >= rest) break;
                const u32 bytes = rest - at < UNIT ? (u32)(rest - at) : UNIT;
                const uint4 v = rekindle_part_of_unit(from + at, copies ? to + at : 0, bytes);
                absorb(sum, v, schedule->column + 4 * round);
            }
        }
        // The same again over the columns' sums; a column of which nothing is there has no part in it.
        u64 part[LANES] = {0, 0, 0, 0};
        if (thread * UNIT < rest) {
#pragma unroll
            for (int i = 0; i < LANES; i++) {
#pragma unroll
                for (int lane = 0; lane < LANES; lane++) {
                    u32 left = (u32)sum[i] + own[2 * i + 2 * lane];
                    u32 right = (u32)(sum[i] >> 32) + own[2 * i + 2 * lane + 1];
                    part[lane] += (u64)left * right;
                }
            }
        }
        // A warp's parts are added; each eighth of it ends with one of the four sums.
        const bool upper = thread & 16, odd = thread & 8;
        u64 first = upper ? part[2] : part[0], second = upper ? part[3] : part[1];
        first += __shfl_xor_sync(~0u, upper ? part[0] : part[2], 16);
        second += __shfl_xor_sync(~0u, upper ? part[1] : part[3], 16);
        u64 total = odd ? second : first;
        total += __shfl_xor_sync(~0u, odd ? first : second, 8);
        total += __shfl_xor_sync(~0u, total, 4);
        total += __shfl_xor_sync(~0u, total, 2);
        total += __shfl_xor_sync(~0u, total, 1);
        if ((thread & 7) == 0) gathered[turn][thread / 32][(thread & 31) >> 3] = total;
        __syncthreads();
        if (thread < LANES) {
            u64 all = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) all += gathered[turn][warp][thread];
            digests[LANES * chunk + thread] = all;
        }
        // The other half of `gathered` is free: who still reads it has not come to the barrier above.
    }
}

// Writes the digests of all chunks of all pieces: four words each, pieces in order. Any number of blocks of THREADS.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    rekindle_hash(const __grid_constant__ ColumnKey key, const Schedule *schedule, const Piece *pieces, u32 count,
                  u64 chunks, u64 *digests) {
    hash<false>(key, schedule, pieces, count, chunks, digests);
}

// The same, and copies each piece to its target. What is hashed is what was written there.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    rekindle_copy_hash(const __grid_constant__ ColumnKey key, const Schedule *schedule, const Piece *pieces, u32 count,
                       u64 chunks, u64 *digests) {
    hash<true>(key, schedule, pieces, count, chunks, digests);
}

// Arithmetic modulo 2^127 - 1. Values are below it.

__device__ __forceinline__ u128 reduced(u128 x) {
    const u128 prime = ((u128)1 << 127) - 1;
    x = (x & prime) + (x >> 127);
    return x >= prime ? x - prime : x;
}

__device__ __forceinline__ u128 product(u128 a, u128 b) {
    const u64 a0 = (u64)a, a1 = (u64)(a >> 64), b0 = (u64)b, b1 = (u64)(b >> 64);
    const u128 middle = (u128)a0 * b1 + (u128)a1 * b0;
    const u128 bottom = (u128)a0 * b0;
    const u128 low = bottom + (middle << 64);
    const u128 high = (u128)a1 * b1 + (middle >> 64) + (low < bottom);
    return reduced(reduced(low) + (high << 1));
}

__device__ __forceinline__ u128 power(const Schedule *schedule, u32 i) {
    return (u128)schedule->powers[i][1] << 64 | schedule->powers[i][0];
}

// Writes the hash of each piece: a block of THREADS for each.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    rekindle_finish(const Schedule *schedule, const Piece *pieces, const u64 *digests, u64 *hashes) {
    __shared__ u64 sums[THREADS][2];
    const u32 thread = threadIdx.x;
    const Piece piece = pieces[blockIdx.x];
    const u64 chunks = chunks_of(piece.length);
    const u64 *own = digests + LANES * piece.first;
    const u128 step = power(schedule, THREADS);
    const u128 x1 = power(schedule, THREADS + 1), x2 = power(schedule, THREADS + 2), x3 = power(schedule, THREADS + 3);
    u128 sum = 0;
    if (thread < chunks) {
        for (u64 i = (chunks - 1 - thread) / THREADS + 1; i-- > 0;) {
            const u64 *digest = own + LANES * (i * THREADS + thread);
            u128 value = reduced(product(digest[1], x1) + digest[0]);
            value = reduced(value + product(digest[2], x2));
            value = reduced(value + product(digest[3], x3));
            sum = reduced(product(sum, step) + value);
        }
        sum = product(sum, power(schedule, thread));
    }
    sums[thread][0] = (u64)sum;
    sums[thread][1] = (u64)(sum >> 64);
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) {
            sum = reduced(sum + ((u128)sums[thread + half][1] << 64 | sums[thread + half][0]));
            sums[thread][0] = (u64)sum;
            sums[thread][1] = (u64)(sum >> 64);
        }
    }
    if (thread == 0) {
        sum = reduced(sum + piece.length);
        hashes[2 * blockIdx.x] = (u64)sum;
        hashes[2 * blockIdx.x + 1] = (u64)(sum >> 64);
    }
}
