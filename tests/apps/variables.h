// What the files of `variables` share.
#pragma once

#include "rounds.h"

// Of the other file, whose variables are a module of their own.
void other_round(uint32_t round);
uint32_t *other_words(uint32_t *count);
uint32_t other_sum();
