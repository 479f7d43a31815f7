// Module 3 of firstuse.
#define MODULE 3
#include "firstuse.h"
