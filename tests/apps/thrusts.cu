// Thrust, as C++ programs use it: vectors, sort, sort by key, scans, reductions, transforms, unique, partition, gather and
// fancy iterators.
//
//   thrusts [--iterations N] [--sleep-us N] [--progress FILE]      8, 0, none
//
// Prints "digest D".
// build: c++ ptx
#include "rounds.h"

#include <thrust/device_vector.h>
#include <thrust/gather.h>
#include <thrust/host_vector.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/partition.h>
#include <thrust/reduce.h>
#include <thrust/scan.h>
#include <thrust/sort.h>
#include <thrust/transform.h>
#include <thrust/unique.h>

const uint32_t N = 1000;

struct Stir {
    uint64_t round;
    __host__ __device__ uint32_t operator()(uint32_t x, uint32_t i) const { return (uint32_t)mix(x + round * N + i); }
};
struct Hundred {
    __host__ __device__ uint32_t operator()(uint32_t x) const { return x % 100; }
};
struct Odd {
    __host__ __device__ bool operator()(uint32_t x) const { return x & 1; }
};

int main(int argc, char **argv) {
    Rounds rounds(argc, argv, 8);
    thrust::device_vector<uint32_t> keys(N), values(N), sums(N), gathered(N);
    thrust::counting_iterator<uint32_t> numbers(0);
    rounds.run([&](uint64_t round) {
        thrust::transform(keys.begin(), keys.end(), numbers, keys.begin(), Stir{round});
        thrust::copy(numbers, numbers + N, values.begin());
        thrust::sort_by_key(keys.begin(), keys.end(), values.begin());
        thrust::inclusive_scan(keys.begin(), keys.end(), sums.begin());
        thrust::gather(values.begin(), values.end(), sums.begin(), gathered.begin());
        uint64_t sum = thrust::reduce(gathered.begin(), gathered.end(), (uint64_t)0, thrust::plus<uint64_t>());
        thrust::device_vector<uint32_t> some(gathered.begin(), gathered.begin() + 300); // allocated each round
        thrust::transform(some.begin(), some.end(), some.begin(), Hundred());
        thrust::sort(some.begin(), some.end(), thrust::greater<uint32_t>());
        size_t different = (size_t)(thrust::unique(some.begin(), some.end()) - some.begin());
        size_t odd = (size_t)(thrust::stable_partition(gathered.begin(), gathered.end(), Odd()) - gathered.begin());
        uint64_t results[4] = {sum, different, odd, some[different / 2]};
        rounds.take(results, sizeof results);
        thrust::copy(gathered.begin(), gathered.end(), keys.begin());
    });
    thrust::host_vector<uint32_t> host = sums;
    rounds.take(host.data(), N * 4);
    return rounds.end();
}
