// Module 2 of firstuse.
#define MODULE 2
#include "firstuse.h"
