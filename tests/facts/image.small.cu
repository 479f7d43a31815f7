// An image with one kernel.
#include "image.h"

KERNEL(0)
