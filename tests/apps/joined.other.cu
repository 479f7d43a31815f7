// The other file of `joined`.
#include "joined.h"

__managed__ uint32_t folds;
static __managed__ uint32_t hidden = 17;

__device__ uint32_t fold(uint32_t word, uint32_t by) {
    atomicAdd(&folds, 1u);
    return word * 31 + by + hidden;
}
