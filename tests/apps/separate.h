// What the two files of `separate` know of each other.
#pragma once

#include "app.h"

typedef unsigned (*Choice)(unsigned);

extern __device__ unsigned table[4];
extern __device__ unsigned calls;
extern __device__ unsigned fold(unsigned value, unsigned turn);
extern __device__ Choice chosen(unsigned turn);
