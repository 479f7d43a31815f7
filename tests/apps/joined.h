// What the files of `joined` share.
#pragma once

#include "rounds.h"

extern __managed__ uint32_t shared_words[64], folds;

__device__ uint32_t fold(uint32_t word, uint32_t by);
