// Module 1 of firstuse.
#define MODULE 1
#include "firstuse.h"
