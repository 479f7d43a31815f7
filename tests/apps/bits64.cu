// Integers of 64 and 128 bits and their bits: products' upper halves, division, modular powers and a test for primes,
// counting, reversing, finding and permuting bits, carries, saturation, and signed and unsigned shifts.
//
//   bits64 [--iterations N] [--sleep-us N] [--progress FILE]      30, 0, none
//
// Prints "digest D", "N primes".
#include "rounds.h"

const uint32_t N = 1024;

__device__ uint64_t multiply(uint64_t a, uint64_t b, uint64_t modulus) {
    return (uint64_t)((unsigned __int128)a * b % modulus);
}

__device__ uint64_t power(uint64_t base, uint32_t exponent, uint64_t modulus) {
    uint64_t result = 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) {
            result = result * base % modulus;
        }
        base = base * base % modulus;
    }
    return result;
}

// Miller and Rabin's test, which is exact for 32 bits with these bases.
__device__ bool prime(uint32_t n) {
    if (n < 64) {
        return 0x28208a20a08a28acull >> n & 1;
    }
    if (n % 2 == 0 || n % 3 == 0 || n % 5 == 0) {
        return false;
    }
    uint32_t twos = (uint32_t)__ffs((int)(n - 1)) - 1;
    const uint32_t bases[3] = {2, 7, 61};
    for (uint32_t k = 0; k < 3; k++) {
        uint64_t x = power(bases[k], n - 1 >> twos, n);
        bool passes = x == 1 || x == n - 1 || bases[k] == n;
        for (uint32_t i = 1; i < twos && !passes; i++) {
            x = x * x % n;
            passes = x == n - 1;
        }
        if (!passes) {
            return false;
        }
    }
    return true;
}

__global__ void tricks(uint64_t *data, uint32_t *primes) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, low;
    uint64_t x = data[i], y = mix(x), z = y | 1;
    uint64_t sum = __umul64hi(x, y) + (uint64_t)__mul64hi((int64_t)x, (int64_t)y) + x / z + (uint64_t)((int64_t)x % (int64_t)(z >> 20));
    sum = mix(sum + (uint64_t)__popcll((long long)x) + (uint64_t)__clzll((long long)(x >> (i & 31))) * 64 + (uint64_t)__ffsll((long long)y));
    sum = mix(sum ^ __brevll(x) ^ (uint64_t)((int64_t)y >> (i & 63)) ^ y << (x & 63));
    unsigned __int128 wide = (unsigned __int128)x * y + sum;
    wide = wide << 13 | wide >> 115;
    sum += (uint64_t)(wide >> 64) ^ (uint64_t)wide;
    sum += multiply(x, y, z);
    low = (uint32_t)sum;
    uint32_t high = (uint32_t)(sum >> 32);
    low = __funnelshift_l(low, high, i & 31) ^ __funnelshift_rc(low, high, i % 40) ^ __byte_perm(low, high, 0x5140 + (i & 7));
    low += __brev(low) + (uint32_t)__popc(high) + (uint32_t)__clz((int)low) + __umulhi(low, high) + (uint32_t)__mulhi((int)low, (int)high);
    low ^= __vadd4(low, high) ^ __vabsdiffu4(low, high) ^ __vminu2(low, high) ^ __uhadd(low, high) ^ __sad((int)low, (int)high, 3);
    low += (uint32_t)__dp4a((int)low, (int)high, 5) + __umul24(low, high);
    // How long until one, halving and tripling.
    uint64_t n = low >> 16 | 1;
    uint32_t length = 0;
    while (n != 1 && length < 40) {
        n = n & 1 ? 3 * n + 1 : n >> 1;
        length++;
    }
    if (prime(low >> 12)) {
        atomicAdd(primes, 1);
    }
    data[i] = mix(sum + low + length);
}

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 30);
    uint64_t *data = randoms<uint64_t>(N, 15);
    uint32_t *primes = zeros<uint32_t>(1), count;
    rounds.run([&](uint64_t) { tricks<<<N / BLOCK, BLOCK>>>(data, primes); });
    rounds.take_from_device(data, N);
    int status = rounds.end();
    CHECK(cudaMemcpy(&count, primes, 4, cudaMemcpyDeviceToHost));
    printf("%u primes\n", count);
    return status;
}
